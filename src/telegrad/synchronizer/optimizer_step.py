"""Averages that a step of an optimizer, the next forward pass or the next backward pass waits for, instead of the
backward pass that they are of: what stands in for gradients and weights until then, and the hooks. Does not know how
averages are made."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from telegrad.communicator import Work
from telegrad.synchronizer.forward_hooks import ForwardHooks

WAITS = ("backward", "step", "forward")
"""What ``wait_in=`` can be."""


@dataclass
class PendingPass:
    """A backward pass whose averages nobody has waited for: the ``works`` of each group, its ``number``, what stands in
    for gradients by group, and when it ended, by ``time.perf_counter()``. ``left``: the groups that are still to be
    received; ``waited_s``: seconds spent in that."""

    works: list[list[Work]]
    number: int
    hidden: list[HiddenGradients]
    since: float
    left: set[int]
    waited_s: float = 0.0


class StepWait:
    """Calls ``wait`` before each step of one of the ``optimizers``, and before a forward pass of ``model`` with
    gradients, as a second backward pass may follow it.

    ``receive``: steps are put off, and before one of a step's parameters is used, ``receive(parameter)`` is called,
    which calls ``step`` for it. ``hidden`` gives what stands in for gradients now, by group. Raises ``ValueError`` as
    ``ForwardHooks``."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        model: nn.Module,
        wait: Callable[[], None],
        *,
        receive: Callable[[nn.Parameter], None] | None = None,
        hidden: Callable[[], Sequence[HiddenGradients]] = tuple,
    ) -> None:
        self._wait, self._receive, self._hidden = wait, receive, hidden
        self._steps = 0
        self._due: dict[int, tuple[nn.Parameter, _Step]] = {}  # parameters whose steps were put off, by id
        self._left: list[tuple[dict[str, Any], list[nn.Parameter]]] = []  # groups of a step that is being made
        self._sees_no_layers = any(map(_sees_no_layers, model.modules()))
        self._model = weakref.ref(model)
        self._hooks = ForwardHooks(model, before=self._before_forward)
        self._handles: list[Any] = []
        try:
            for one in optimizers:
                self._handles.append(one.register_step_pre_hook(self._before))
                self._handles.append(one.register_step_post_hook(self._after))
                if receive is not None:
                    self._handles.append(one.register_state_dict_pre_hook(self._receive_all))
                    self._handles.append(one.register_load_state_dict_pre_hook(self._receive_all))
        except BaseException:
            self.close()
            raise

    @property
    def is_inside(self) -> bool:
        """Whether a step is being made: a backward pass in its closure must end with the averages."""
        return self._steps > 0

    @property
    def due(self) -> set[int]:
        """The parameters whose steps were put off, by id."""
        return {*self._due}

    def close(self) -> None:
        """Removes the hooks; steps that were put off are not made."""
        self._hooks.close()
        while self._handles:
            self._handles.pop().remove()
        for one, _ in self._due.values():
            _is_there(one)
        self._due = {}

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Makes the steps that were put off of these alone, whose gradients are there. Wherever it is called, it
        computes as between two passes."""
        due: dict[int, tuple[_Step, list[nn.Parameter]]] = {}
        for one in parameters:
            _is_there(one)
            if (found := self._due.pop(id(one), None)) is not None:
                due.setdefault(id(found[1]), (found[1], []))[1].append(one)
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for step, chosen in due.values():
                step.make(chosen)

    @_disable_dynamo
    def _receive_all(self, *_: object) -> None:
        assert self._receive is not None
        for one in [due[0] for due in self._due.values()]:
            if id(one) in self._due:
                self._receive(one)

    def _before_forward(self) -> None:
        if self._receive is None or not self._due:
            if torch.is_grad_enabled():
                self._wait()
        elif torch.is_grad_enabled() and any(
            id(one) not in self._due for of in self._hidden() for one in of.parameters
        ):
            self._wait()  # somebody has not stepped: this pass adds to gradients
        elif torch.compiler.is_compiling() or self._sees_no_layers or _is_compiled(self._model()):
            self._receive_all()

    def _before(self, optimizer: torch.optim.Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = [one for of in self._hidden() for one in of.parameters]
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}.intersection(map(id, hidden))
        is_plain = all(one is None for one in (*given[1:], *named.values()))  # without a closure
        is_last = [*optimizer._optimizer_step_pre_hooks.values()][-1] == self._before
        untouched = own.isdisjoint(self._due) and all(one.is_untouched(own) for one in self._hidden())
        if self._receive is None or not (is_plain and is_last and untouched):
            self._wait()
            self._steps = 1
            return
        step = _Step(optimizer)
        for one in hidden:
            if id(one) in own:
                self._due[id(one)] = one, step
                _is_awaited(one, self._receive)
        for group in optimizer.param_groups:  # the step that follows makes none of these
            self._left.append((group, group["params"]))
            group["params"] = [one for one in group["params"] if id(one) not in own]

    def _after(self, *_: object) -> None:
        self._steps = 0
        while self._left:
            group, parameters = self._left.pop()
            group["params"] = parameters


class _Step:
    """Of ``optimizer`` with the options that it has now, which a scheduler may change before the step is made. Without
    the hooks on steps: those are called when the program steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            {name: one.clone() if isinstance(one, Tensor) else one for name, one in group.items()}
            for group in optimizer.param_groups
        ]

    def make(self, chosen: Sequence[nn.Parameter]) -> None:
        """Of these parameters alone."""
        ids = {*map(id, chosen)}
        stand_in = object.__new__(type(self._optimizer))
        vars(stand_in).update(vars(self._optimizer))
        stand_in.param_groups = [
            {**group, "params": [one for one in group["params"] if id(one) in ids]} for group in self._groups
        ]
        type(self._optimizer).step.__wrapped__(stand_in)  # type: ignore[attr-defined]


class HiddenGradients:
    """The gradients of ``parameters`` until ``put_back``; meanwhile each parameter has one of nothing but NaN, all of
    one element, to which torch writes a single value or nothing: what uses it too early does not go unnoticed."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._held: list[tuple[nn.Parameter, Tensor | None, Tensor]] = []
        for one in parameters:
            shown = torch.full((), math.nan, dtype=one.dtype).expand(one.shape)
            self._held.append((one, one.grad, shown))
            one.grad = shown

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients these are."""
        return [one for one, _, _ in self._held]

    def is_untouched(self, chosen: Collection[int]) -> bool:
        """Whether nobody has set or written what stands in for the gradients of those with these ids."""
        return all(one.grad is shown and not _was_written(shown) for one, _, shown in self._held if id(one) in chosen)

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
    """None, one or several. Raises ``TypeError`` for what is no optimizer, and ``ValueError`` where one of the
    ``parameters`` is in none of them: whoever trains it would not wait, and take NaN for its gradient."""
    found = () if given is None else (given,) if not isinstance(given, (list, tuple)) else tuple(given)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(f"optimizer has a {type(one).__name__}: give the torch.optim.Optimizer whose step() waits")
    trained = {id(one) for optimizer in found for group in optimizer.param_groups for one in group["params"]}
    if left := [name for name, one in parameters.items() if id(one) not in trained]:
        raise ValueError(
            f"wait_in needs optimizer=, and none is given that trains {left[0]!r}, of model: give all that do (a "
            "parameter that none trains: requires_grad_(False))"
        )
    return found


_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)


def check_steps_alone(optimizer: torch.optim.Optimizer) -> None:
    """Raises ``ValueError`` unless it is known that steps by parameter give the bits of one step of all."""
    if type(optimizer) not in _ELEMENTWISE:
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, and wait_in='forward' steps each parameter by itself: use "
            f"wait_in='step', or torch.optim's {', '.join(kind.__name__ for kind in _ELEMENTWISE)}"
        )


# Parameters whose step was put off.

_awaited: dict[int, tuple[nn.Parameter, Callable[[nn.Parameter], None]]] = {}  # and who receives it, by id

_VALUELESS: set[Any] = {
    getattr(torch.Tensor, name).__get__
    for name in (
        *("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "ndim", "layout", "grad_fn", "is_sparse"),
        *("is_cpu", "is_cuda", "is_meta", "_backward_hooks", "_post_accumulate_grad_hooks", "nbytes", "itemsize"),
    )
} | {
    vars(torch._C.TensorBase)["grad"].__set__,
    vars(torch._C.TensorBase)["grad"].__delete__,
    *(getattr(torch.Tensor, name) for name in ("size", "numel", "dim", "stride", "nelement", "element_size")),
    *(getattr(torch.Tensor, name) for name in ("is_contiguous", "is_floating_point", "is_complex", "__hash__")),
}
"""A program may call these for a parameter whose values are not there yet: they do not read them."""


class AwaitedParameter(nn.Parameter):
    """The class of a parameter from the step of its optimizer until that is made: whatever uses its values in Python
    makes the step first, and goes on with the parameter as it was."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _VALUELESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for one in [*_awaited_in((args, kwargs))] or [one for one, _ in _awaited.values()]:
            _receive_awaited(one)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        _receive_awaited(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _receive_awaited(self)
        return self.__reduce_ex__(protocol)


def _awaited_in(given: Any) -> Iterable[nn.Parameter]:
    if isinstance(given, (list, tuple)):
        for one in given:
            yield from _awaited_in(one)
    elif isinstance(given, dict):
        yield from _awaited_in([*given.values()])
    elif type(given) is AwaitedParameter:
        yield given


def _is_awaited(one: nn.Parameter, receive: Callable[[nn.Parameter], None]) -> None:
    _awaited[id(one)] = one, receive
    one.__class__ = AwaitedParameter


def _is_there(one: nn.Parameter) -> None:
    if _awaited.pop(id(one), None) is not None:
        one.__class__ = nn.Parameter


def _receive_awaited(one: nn.Parameter) -> None:
    if id(one) in _awaited:
        _awaited[id(one)][1](one)


def _is_compiled(model: nn.Module | None) -> bool:
    return model is not None and model._compiled_call_impl is not None


def _sees_no_layers(module: nn.Module) -> bool:
    """Whether it uses its parameters other than in Python."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
