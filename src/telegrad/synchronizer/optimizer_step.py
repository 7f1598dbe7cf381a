"""Averages that a step of an optimiser waits for, instead of the backward pass: what stands in for gradients until
then, and the hooks. Does not know how averages are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from telegrad.communicator import Work
from telegrad.synchronizer.forward_hooks import ForwardHooks


class PendingPass(NamedTuple):
    """A backward pass whose averages nobody has waited for: the ``works`` of each group, its ``number``, and when it
    ended, by ``time.perf_counter()``."""

    works: list[list[Work]]
    number: int
    hidden: HiddenGradients
    since: float


class StepWait:
    """Calls ``wait`` before each step of one of the ``optimizers``, and before a forward pass of ``model`` with
    gradients, as a second backward pass may follow it. Raises ``ValueError`` as ``ForwardHooks``."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._steps = 0
        self._hooks = ForwardHooks(model, before=self._before_forward)
        self._handles: list[Any] = []
        try:
            for one in optimizers:
                self._handles.append(one.register_step_pre_hook(self._before))
                self._handles.append(one.register_step_post_hook(self._after))
        except BaseException:
            self.close()
            raise

    @property
    def is_inside(self) -> bool:
        """Whether a step is being made: a backward pass in its closure must end with the averages."""
        return self._steps > 0

    def close(self) -> None:
        """Removes the hooks."""
        self._hooks.close()
        while self._handles:
            self._handles.pop().remove()

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():
            self._wait()

    def _before(self, *_: object) -> None:
        self._wait()
        self._steps = 1

    def _after(self, *_: object) -> None:
        self._steps = 0


class HiddenGradients:
    """The gradients of ``parameters`` until ``put_back``; meanwhile each parameter has one of nothing but NaN, all of
    one element, to which torch writes a single value or nothing: what uses it too early does not go unnoticed."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._held: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []
        for one in parameters:
            shown = torch.full((), math.nan, dtype=one.dtype).expand(one.shape)
            self._held.append((one, one.grad, shown))
            one.grad = shown

    def put_back(self) -> Callable[[], None]:
        """The gradients are there again. What this returns is to be called when they are averages: it gives those
        that were set to something else meanwhile what they were set to, such as ``None``, or zeros by ``zero_grad()``.
        """
        changed = [(one, one.grad) for one, _, shown in self._held if one.grad is not shown]
        filled = [(one, shown) for one, _, shown in self._held if one.grad is shown and _was_written(shown)]
        for one, gradient, _ in self._held:
            one.grad = gradient

        def restore() -> None:
            for one, gradient in changed:
                one.grad = gradient
            for one, shown in filled:
                if one.grad is not None:
                    one.grad.copy_(shown)

        return restore


def _was_written(shown: Tensor) -> bool:
    return shown.numel() > 0 and not shown.as_strided((), ()).isnan().item()


def checked_optimizers(given: Any, parameters: Mapping[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    """None, one or several. Raises ``TypeError`` for what is no optimiser, and ``ValueError`` where one of the
    ``parameters`` is in none of them: whoever trains it would not wait, and take NaN for its gradient."""
    found = () if given is None else (given,) if not isinstance(given, (list, tuple)) else tuple(given)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"wait_in has a {type(one).__name__}: give the torch.optim.Optimizer whose step() waits")
    trained = {id(one) for optimizer in found for group in optimizer.param_groups for one in group["params"]}
    if found and (left := [name for name, one in parameters.items() if id(one) not in trained]):
        raise ValueError(
            f"wait_in has no optimizer that trains {left[0]!r}, of model: give all that do (a parameter that none "
            "trains: requires_grad_(False))"
        )
    return found
