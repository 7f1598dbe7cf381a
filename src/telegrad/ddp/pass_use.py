"""Whether the gradients of a backward pass were used: error feedback and momentum correction may only remember those
that an optimizer step has applied.

Programs throw gradients away: a GAN's generator loss leaves some in the discriminator, adversarial examples need those
of the input alone, SAM looks at a first gradient and steps with a second one, and steps are skipped. Such a pass has
changed residuals and velocities nevertheless, since its gradients were compressed. So every change can be undone until
it is decided, for each parameter:

- an optimizer that has the parameter has stepped: the changes stay;
- the gradient was cleared (``None``, or all zero) without such a step: the changes are undone;
- the gradient is still there, to be added to: nothing is decided yet.
"""

from __future__ import annotations

import collections
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from telegrad.communicator.cuda.runtime import LateRead
from telegrad.communicator.operands import on_device
from telegrad.compress import Compressor
from telegrad.ddp.backward_watch import before_gradient
from telegrad.ddp.choices import program_level
from telegrad.ddp.telemetry import DDPStats

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MANY = 20  # reverted passes in a row of a parameter that no optimizer steps: then one warning


class Revertible(Protocol):
    """What remembers something of parameters, by their names, from pass to pass."""

    def record(self, on: bool) -> None:
        """Whether what changes from now on can be undone."""

    def unconfirmed(self) -> list[str]:
        """The parameters of which something would be undone."""

    def confirm(self, names: Sequence[str]) -> None:
        """What is remembered of these parameters stays."""

    def revert(self, names: Sequence[str]) -> None:
        """What is remembered of these parameters is as when last confirmed."""


class PassUse:
    """Confirms or reverts what ``memory`` has taken up in backward passes, of those ``averaged`` parameters, by name,
    of which ``compressor`` remembers something. ``optimizer``: of which it is known that it steps them, or ``None``.
    ``stats`` count passes that are reverted.

    Its owner calls ``open`` when a pass begins to change the memory, and ``close`` when the pass is over. Optimizers
    tell it of their steps by torch's global hooks. For a parameter that none of them has ever stepped, such as one that
    the program updates by hand, a pass counts as used if the parameter was written to since; a warning says so once,
    and another one if ``_MANY`` passes in a row were reverted. A pass outside of autograd, where the owner is called by
    hand, is confirmed at once.

    ``keeps_all``: whether sums keep all entries that ranks send. Where they keep a part, the average of a parameter may
    be all zero, and only ``None`` counts as cleared.

    ``explicit``: each pass is one call of the user's after a backward pass, whose beginning nobody sees. A gradient
    counts as cleared then if it is another tensor than after the last call."""

    def __init__(
        self,
        averaged: Mapping[str, torch.nn.Parameter],
        compressor: Compressor,
        memory: Revertible,
        stats: DDPStats,
        optimizer: torch.optim.Optimizer | None,
        *,
        explicit: bool = False,
        keeps_all: bool = True,
    ) -> None:
        parameters = {name: one for name, one in averaged.items() if compressor.remembers(name)}
        self._parameters, self._memory, self._stats, self._explicit = parameters, memory, stats, explicit
        self._keeps_all = keeps_all
        self._names = {id(one): name for name, one in parameters.items()}
        self._stepped: set[str] = set()  # of which a step of an optimizer was seen, or is known to come
        self._marks: dict[str, tuple[int, torch.Tensor]] = {}  # of the others: what they were after the last pass
        self._is_open = False
        self._is_by_hand = False
        self._used_inside: list[str] = []  # by a step within the open pass
        self._cleared: list[str] = []  # while a pass was open, by the beginning of another one
        self._graph_task = -1
        self._has_warned_of_writes = self._has_warned_of_reverts = False
        self._reverted_in_a_row: collections.Counter[str] = collections.Counter()  # of parameters that none steps
        self._scaled: list[tuple[list[str], LateRead]] = []  # stepped where the second is 0, which a device says later
        self._gradients: dict[str, weakref.ref[torch.Tensor]] = {}  # if explicit: after the last call
        if optimizer is not None:
            self._stepped.update(self._names_of(_parameters_of(optimizer)))
        seen = weakref.ref(self)
        for one in parameters.values() if not explicit else ():
            handle = before_gradient(one, _begin_of(seen))
            weakref.finalize(self, handle.remove)
        if parameters:
            _follow_steps(self)

    def open(self) -> None:
        """A pass begins to change the memory, and no earlier one does any more."""
        if not self._parameters:
            return
        task = torch._C._current_graph_task_id()
        by_hand = self._is_by_hand = not self._explicit and task == -1
        if self._explicit:
            self.decide()
        elif task != self._graph_task and not by_hand:  # only gradients of other parameters have come so far
            self._graph_task = task
            self.begin_backward()
        if by_hand:
            if undecided := self._memory.unconfirmed():
                self._memory.confirm(undecided)
        elif self._cleared:
            self._revert(self._cleared)
        self._memory.record(not by_hand)
        self._is_open, self._cleared, self._used_inside = True, [], []

    def close(self) -> None:
        """The pass is over. If its gradients are still summed, optimizers and backward passes wait for that."""
        self._is_open = False
        used, self._used_inside = self._used_inside, []
        if used:
            self._memory.confirm(used)
        for name, parameter in self._parameters.items() if not self._is_by_hand else ():
            if name not in self._stepped:
                self._marks[name] = parameter._version, _sum_of(parameter)
            if self._explicit:
                self._gradients.pop(name, None)
                if parameter.grad is not None:
                    self._gradients[name] = weakref.ref(parameter.grad)

    def decide(self) -> None:
        """Confirms or reverts what can be decided by now."""
        if self._is_open:
            return
        self._settle_scaled()
        undecided = self._memory.unconfirmed()
        unknown = [name for name in undecided if name not in self._stepped]
        written = next(filter(self._was_written, unknown), None)
        if written is not None:  # an update by hand; where an average was zero it changes nothing
            self._warn_of_write(written)
            self._memory.confirm(unknown)
            for name in unknown:
                self._reverted_in_a_row.pop(name, None)
        self._revert(self._cleared_of(self._memory.unconfirmed()))

    def begin_backward(self) -> None:
        """A backward pass begins to come to the parameters, and has added to no gradient."""
        if self._is_open:  # an exception has ended that pass, or this one is within it, or it is still summed
            self._cleared = [name for name in self._memory.unconfirmed() if self._parameters[name].grad is None]
        else:
            self.decide()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that finds no gradient does not use what was there before."""
        if not self._is_open:
            self._settle_scaled()
            undecided = {*self._memory.unconfirmed()}
            names = [name for name in self._names_of(_parameters_of(optimizer)) if name in undecided]
            self._revert(self._cleared_of(names, waits=False))

    def after_step(self, parameters: Iterable[torch.Tensor], found_inf: torch.Tensor | None = None) -> None:
        """It has used the gradients of these, unless ``found_inf`` is above 0."""
        names = self._names_of(parameters)
        self._stepped.update(names)
        for name in names:
            self._marks.pop(name, None)
        if found_inf is not None and on_device(found_inf) and not self._is_open:
            self._scaled.append((names, LateRead(found_inf.reshape(1))))
        elif found_inf is None or _read(found_inf) == 0:
            self._use(names)

    def _settle_scaled(self) -> None:
        """Takes in what fused optimizers have told of the gradients that a GradScaler gave them. The host waits for it,
        where the step is not over on its device."""
        scaled, self._scaled = self._scaled, []
        for names, found_inf in scaled:
            if int(found_inf.values()[0]) == 0:
                self._use(names)

    def _use(self, names: list[str]) -> None:
        if self._is_open:  # such as of a callback on a bucket's future, which has the average
            self._used_inside += names
        else:
            self._memory.confirm(names)

    def _revert(self, names: Iterable[str]) -> None:
        undecided = {*self._memory.unconfirmed()}
        found = [name for name in names if name in undecided]
        if found:
            self._stats.discarded_passes += 1
            self._memory.revert(found)
            self._reverted_in_a_row.update(name for name in found if name not in self._stepped)
            self._warn_of_reverts(found)

    def _warn_of_reverts(self, names: Iterable[str]) -> None:
        name = next((one for one in names if self._reverted_in_a_row[one] >= _MANY), None)
        if name is not None and not self._has_warned_of_reverts:
            self._has_warned_of_reverts = True
            _warn_of(
                f"telegrad has discarded the gradients of {_MANY} backward passes in a row of parameter {name!r}, so "
                "it trains without error feedback: no torch.optim.Optimizer has stepped it, and each gradient was "
                "cleared before its value changed. If the program uses these gradients, such as for float32 master "
                "weights, call telegrad.ddp.gradients_used() before it clears them (docs/how-to/several-losses.md)"
            )

    def _cleared_of(self, names: Sequence[str], *, waits: bool = True) -> list[str]:
        if not self._explicit:
            given = {name: self._parameters[name] for name in names}
            return cleared_of(given, zeros=self._keeps_all, waits=waits)
        found = []
        for name in names:
            gradient, before = self._parameters[name].grad, self._gradients.get(name)
            if gradient is None or before is None or before() is not gradient:
                found.append(name)
        return found

    def _names_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        return [self._names[one] for one in map(id, parameters) if one in self._names]

    def _was_written(self, name: str) -> bool:
        if name not in self._marks:
            return False
        parameter, (version, before) = self._parameters[name], self._marks[name]
        return parameter._version != version or _read(before) != _read(_sum_of(parameter))

    def _warn_of_write(self, name: str) -> None:
        if not self._has_warned_of_writes:
            self._has_warned_of_writes = True
            _warn_of(
                f"no torch.optim.Optimizer has stepped parameter {name!r} yet, but it was written to since its "
                "last backward pass: telegrad takes that pass as used. Give optimizer= if one will step it, or call "
                "telegrad.ddp.gradients_used() after each update by hand (docs/how-to/several-losses.md)"
            )


def gradients_used(parameters: Iterable[torch.Tensor]) -> None:
    """Says that the program has used the gradients of ``parameters``, as a step of an optimizer would: residuals and
    velocities keep what the last backward pass added.

    For programs that update parameters by hand, or that take gradients away to combine them later. Without it telegrad
    takes a gradient that is cleared before a step as thrown away. ``parameters``: as ``model.parameters()``; those that
    no hook or Synchronizer compresses are passed over. Raises ``TypeError`` for anything but tensors."""
    if isinstance(parameters, (torch.nn.Module, torch.Tensor)) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters is a {type(parameters).__name__}: give several, as model.parameters()")
    given = [*parameters]
    for one in given:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"parameters has a {type(one).__name__}: give tensors, as model.parameters()")
    for use in _all():
        use.after_step(given)


def cleared_of(parameters: Mapping[str, torch.Tensor], *, zeros: bool = True, waits: bool = True) -> list[str]:
    """Whose gradients hold nothing: ``None``, or with ``zeros`` all zero, as ``zero_grad(set_to_none=False)`` leaves
    them. The host waits for a device only where there is a gradient; without ``waits`` it takes such a one for full."""
    cleared: list[str] = []
    there: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, one in parameters.items():
        gradient = one.grad
        if gradient is None or (zeros and not on_device(gradient) and _is_zero(gradient.detach())):
            cleared.append(name)
        elif zeros and waits and on_device(gradient):
            there.setdefault(gradient.device, {})[name] = gradient.detach()
    with torch.no_grad():
        counts = {device: torch.stack([one.count_nonzero() for one in of.values()]) for device, of in there.items()}
        for device, of_device in there.items():
            for name, count in zip(of_device, LateRead(counts[device]).values().tolist(), strict=True):
                if count == 0:
                    cleared.append(name)
    return cleared


def _warn_of(message: str) -> None:
    """At the line of the program that led here, such as that of its ``backward()``."""
    warnings.warn(message, RuntimeWarning, stacklevel=program_level())


_FIRST_LOOK, _LOOK = 64, 1 << 14  # entries per look for one that is not zero: the first look finds one, as a rule


def _is_zero(x: torch.Tensor) -> bool:
    flat = x.reshape(-1)
    looks = (flat[start : start + _LOOK] for start in range(0, flat.numel(), _LOOK))
    return not bool(flat[:_FIRST_LOOK].any()) and not any(bool(one.any()) for one in looks)


def _begin_of(seen: weakref.ref[PassUse]) -> Any:
    """What is called with the first gradient of each backward pass that comes to a parameter, and with all others."""
    task_id = torch._C._current_graph_task_id

    def begin(_: torch.Tensor) -> None:
        use = seen()
        if use is not None and use._graph_task != (task := task_id()):
            use._graph_task = task
            use.begin_backward()

    return begin


_following: weakref.WeakSet[PassUse] = weakref.WeakSet()
_lock = threading.Lock()


def _follow_steps(use: PassUse) -> None:
    """From now on it hears of the steps of all optimizers."""
    with _lock:
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before_step))
            _handles.append(register_optimizer_step_post_hook(_after_step))
        _following.add(use)


_handles: list[Any] = []


def _all() -> list[PassUse]:
    with _lock:
        return [*_following]


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for one in _all():
        one.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    parameters = _parameters_of(optimizer)
    found_inf = getattr(optimizer, "found_inf", None)  # of a GradScaler, which has fused optimizers skip the step
    for one in _all():
        one.after_step(parameters, found_inf if isinstance(found_inf, torch.Tensor) else None)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _sum_of(parameter: torch.Tensor) -> torch.Tensor:
    """Of the bits of all values: almost surely another one when any of them has changed. A version number alone would
    not do: neither ``.data`` nor torch's fused optimizers raise it. Nor would this alone: a bfloat16 parameter may keep
    its value when float32 master weights are copied to it."""
    with torch.no_grad():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return local.detach().view(_INTEGERS[local.element_size()]).sum(dtype=torch.int64)


def _read(x: torch.Tensor) -> int:
    return int(LateRead(x.view(1)).values()[0]) if on_device(x) else int(x)


class Memories:
    """Several as one: of the host and of a device."""

    def __init__(self, memories: Sequence[Revertible]) -> None:
        self._memories = [*memories]

    def add(self, memory: Revertible) -> None:
        """One more."""
        self._memories.append(memory)

    def record(self, on: bool) -> None:
        for one in self._memories:
            one.record(on)

    def unconfirmed(self) -> list[str]:
        return [*dict.fromkeys(name for one in self._memories for name in one.unconfirmed())]

    def confirm(self, names: Sequence[str]) -> None:
        for one in self._memories:
            one.confirm(names)

    def revert(self, names: Sequence[str]) -> None:
        for one in self._memories:
            one.revert(names)
