"""What a program may do in a backward pass: whether DistributedDataParallel hands its hook all that is trained, and
whether nobody steps before gradients are averaged. Else each rank would train alone, and replicas would drift apart
without an error. Averages nothing."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from telegrad.ddp.bucket import GradBucket


def on_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """As ``register_post_accumulate_grad_hook``, also of a parameter that is frozen for now: torch refuses the hook
    then, but keeps that of one that is frozen later. Gives the handle, whose ``remove()`` takes the hook away."""
    return _while_trained(parameter, lambda: parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]


def before_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """As ``on_gradient``, by ``register_hook``, which is called before the gradient is accumulated."""
    return _while_trained(parameter, lambda: parameter.register_hook(hook))  # type: ignore[no-untyped-call]


def _while_trained(parameter: torch.Tensor, register: Callable[[], Any]) -> Any:
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return register()
    finally:
        parameter.requires_grad_(is_trained)


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
    used. Updates that do not go through ``torch.optim.Optimizer.step`` are not seen."""

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


def _noting(versions: dict[int, int], parameter: Tensor) -> Callable[[Tensor], None]:
    name, found = id(parameter), weakref.ref(parameter)

    def note(_: Tensor) -> None:
        one = found()
        if one is not None:
            versions[name] = one._version

    return note


_OWNER = "the DDP hook"
_UNFROZEN = "set requires_grad before DistributedDataParallel(model), or wrap the model and make its DDPState again"

_SHADOW = "_match_all_reduce_for_bwd_pass"
"""The method of DistributedDataParallel that calls the hook with zeros on a rank that has joined."""

_MOST_FRAMES = 16

Future = torch.futures.Future[torch.Tensor]


class BucketWatch:
    """``parameters``: those that the hook averages, by name; ``frozen``: the others of the model. ``fail``: is told of
    an error inside the backward pass before it is raised."""

    def __init__(
        self, parameters: Mapping[str, Tensor], frozen: Mapping[str, Tensor], fail: Callable[[Exception], None]
    ) -> None:
        self._parameters = parameters
        self._names = {id(one): name for name, one in parameters.items()}
        self._frozen = [(name, weakref.ref(one)) for name, one in frozen.items()]
        # Of parameters whose gradients somebody else's hooks get before DistributedDataParallel does, which may change
        # the parameter: the handles of our hooks, and the versions when their gradients began to come.
        self._handles: dict[int, Any] = {}
        self._versions: dict[int, int] = {}
        self._follow_hooked()
        self._steps = BackwardSteps(parameters, _OWNER, fail, self._is_averaged)
        self._seen: set[int] = set()  # of the pass that is under way
        self._task = -1  # autograd's number of it
        self._outcomes: list[tuple[frozenset[int], Future]] = []

    def look(self, bucket: GradBucket) -> None:
        """Before a bucket is averaged. Raises ``RuntimeError``, alike on all ranks whose programs do the same,
        ``TypeError`` for what is no bucket, and ``ValueError`` on a rank that has joined, where averages would be of
        the others alone."""
        if isinstance(bucket, tuple):
            raise TypeError(
                "torch._dynamo.config.optimize_ddp='python_reducer' gives hooks single gradients, and drops the "
                "averages that they return: leave it at its default (True), or use a telegrad.Synchronizer"
            )
        if bucket.index() == 0:
            self._seen, self._outcomes, self._task = set(), [], torch._C._current_graph_task_id()
            if self._task == -1:
                _check_divisor()
            if self._frozen:
                self._check_frozen()
            self._follow_hooked()
        members = bucket.parameters()
        self._seen.update(map(id, members))
        if self._versions and self._task != -1:  # by hand there is no gradient to wait for
            for one in members:
                if self._versions.pop(id(one), one._version) != one._version:
                    raise changed_error(self._names[id(one)], _OWNER)
        if bucket.is_last() and len(self._seen) < len(self._names):
            self._check_all_seen()

    def started(self, bucket: GradBucket, outcome: Future) -> None:
        """A bucket will be the average when ``outcome`` is done."""
        self._outcomes.append((frozenset(map(id, bucket.parameters())), outcome))

    def _follow_hooked(self) -> None:
        """In each backward pass: hooks that are found now are followed from the next one on."""
        for one in self._parameters.values():
            if one._post_accumulate_grad_hooks and id(one) not in self._handles and one.requires_grad:
                self._handles[id(one)] = before_gradient(one, _noting(self._versions, one))

    def _check_frozen(self) -> None:
        for name, found in self._frozen:
            one = found()
            if one is not None and one.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was unfrozen after its DDPState was made, and DistributedDataParallel does "
                    f"not average it: {_UNFROZEN}"
                )

    def _check_all_seen(self) -> None:
        for name, one in self._parameters.items():
            if id(one) not in self._seen and one.requires_grad and not getattr(one, "_ddp_ignored", False):
                raise RuntimeError(
                    f"parameter {name!r} is in no bucket of DistributedDataParallel, which does not average it, such "
                    f"as one that was unfrozen after the model was wrapped: {_UNFROZEN}; or leave it out of "
                    "named_parameters, if something else averages it"
                )

    def _is_averaged(self, parameter: Tensor) -> bool:
        """As where somebody's callback on a bucket's future steps."""
        if self._task != torch._C._current_graph_task_id():
            return False
        return any(id(parameter) in members and outcome.done() for members, outcome in self._outcomes)


def _check_divisor() -> None:
    """Outside a backward pass. DDP tells its hook nothing of ``Join``, but calls it from a method of its own."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name == _SHADOW:
            ddp = frame.f_locals.get("self")
            if getattr(ddp, "_divide_by_initial_world_size", True) is False:
                raise ValueError(
                    "divide_by_initial_world_size=False has no effect with telegrad's hook, which divides by the "
                    "number of all ranks, also when some have no more batches: leave it out of join()"
                )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
