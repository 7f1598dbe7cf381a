"""Refuses optimisers that step inside the backward pass: they would apply this rank's own gradient instead of the
average, and ranks would end with different weights without an error. Averages nothing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from telegrad.ddp.gradient_hooks import before_gradient

REMEDY = "call step() after backward(), when the gradient is the average of all ranks"

_watches: weakref.WeakSet[BackwardSteps] = weakref.WeakSet()
_lock = threading.Lock()
_handles: list[Any] = []


def check_no_optimizer_in_backward(parameters: Mapping[str, Tensor], owner: str) -> None:
    """Raises ``ValueError`` for a parameter that ``torch.distributed.optim._apply_optimizer_in_backward`` has given an
    optimizer."""
    for name, one in parameters.items():
        if getattr(one, "_in_backward_optimizers", None):
            raise ValueError(
                f"parameter {name!r} has an optimizer that steps inside the backward pass "
                f"(_apply_optimizer_in_backward), before {owner} has averaged its gradient: make the optimizer without "
                f"it, and {REMEDY}"
            )


def changed_error(name: str, owner: str) -> RuntimeError:
    """For a parameter that was written to between its gradient and its average."""
    return RuntimeError(
        f"parameter {name!r} was changed in place inside the backward pass, after its gradient was computed and before "
        f"{owner} has averaged it, such as by a hook that steps: ranks would end with different weights; {REMEDY}, and "
        "go on from a checkpoint"
    )


class BackwardSteps:
    """Until ``close()`` an optimizer's ``step()`` inside a backward pass raises ``RuntimeError`` before it changes
    anything, if it trains one of the ``parameters``.

    ``owner``: who averages them. ``fail``: is told of the error before it is raised, so that other ranks do not wait
    for this one. ``is_averaged``: whether a parameter's gradient of this pass is the average already, so that it may be
    used. Updates that do not go through ``torch.optim.Optimizer.step`` are not seen.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        owner: str,
        fail: Callable[[Exception], None],
        is_averaged: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._names = {id(one): name for name, one in parameters.items()}
        self._kept = [*parameters.values()]  # alive, so that their ids stay theirs
        self._owner, self._is_averaged = owner, is_averaged
        method = weakref.WeakMethod(fail)
        self._fail: Callable[[Exception], None] = lambda error: found(error) if (found := method()) else None
        with _lock:
            if not _handles:
                _handles.append(register_optimizer_step_pre_hook(_before_step))
            _watches.add(self)

    def close(self) -> None:
        """Lets go of the parameters."""
        with _lock:
            _watches.discard(self)
        self._names, self._kept = {}, []

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Inside a backward pass, before a step."""
        for one in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = self._names.get(id(one))
            if name is None or (self._is_averaged is not None and self._is_averaged(one)):
                continue
            error = RuntimeError(
                f"{type(optimizer).__name__} steps inside the backward pass, before {self._owner} has averaged the "
                f"gradient of {name!r}: ranks would end with different weights; {REMEDY}"
            )
            self._fail(error)
            raise error


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return
    with _lock:
        watches = [*_watches]
    for one in watches:
        one.check(optimizer)


class HookedParameters:
    """Of ``parameters``, by name, those whose gradients somebody else's hooks get before DistributedDataParallel does:
    such a hook may change the parameter by itself. Others cost one look for each backward pass."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._versions: dict[int, int] = {}
        self._handles: dict[int, Any] = {}
        self.look()

    def look(self) -> None:
        """In each backward pass, before ``changed``. Hooks that are found now are followed from the next pass on."""
        for one in self._parameters.values():
            if one._post_accumulate_grad_hooks and id(one) not in self._handles and one.requires_grad:
                self._handles[id(one)] = before_gradient(one, _noting(self._versions, one))

    def changed(self, parameters: Iterable[Tensor]) -> Tensor | None:
        """The first of these that was changed since its gradient began to come in this pass."""
        versions = self._versions
        if not versions:
            return None
        return next((one for one in parameters if versions.pop(id(one), one._version) != one._version), None)


def _noting(versions: dict[int, int], parameter: Tensor) -> Callable[[Tensor], None]:
    name, found = id(parameter), weakref.ref(parameter)

    def note(_: Tensor) -> None:
        one = found()
        if one is not None:
            versions[name] = one._version

    return note
