"""Gradients that travel together: flat memory of which they are views. Does not know when a group leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from telegrad import _core
from telegrad.communicator import Communicator, Work
from telegrad.ddp.backward_watch import before_gradient
from telegrad.ddp.rank_state import MemoryOrder
from telegrad.synchronizer.clocks import Mark

_LINE = 64
_HUGE_PAGE = 2 << 20


def zeros(count: int, dtype: torch.dtype) -> Tensor:
    """``count`` zeros. They are numpy's memory, which asks for huge pages from 4 MiB on: ranks of one host copy from
    each other page by page, and PyTorch's memory has small ones. Their storage cannot be resized."""
    size = max(count, 1) * dtype.itemsize  # PyTorch sees no other dtype in no bytes
    boundary = _LINE if size < _HUGE_PAGE else _HUGE_PAGE
    room = np.zeros(size + boundary, np.uint8)
    begin = -room.ctypes.data % boundary
    return torch.from_numpy(room[begin : begin + size]).view(dtype)[:count]


version_of: Callable[[Tensor], int] = vars(torch._C.TensorBase)["_version"].__get__
"""How often a tensor has been changed in place; quick with ``map``."""

AT_ONCE = 2
"""Sums in turns that are under way: more than one, so that the network does not pause between two."""

_PLACES = 4096

PASS_NUMBERS = 4
"""Passes are counted modulo this, and the number travels as a power of two: sums of up to ``EXACT_RANKS`` equal ones,
and so their averages, are exact."""

EXACT_RANKS = {
    torch.bfloat16: 1 << 8,
    torch.float16: 1 << 11,
    torch.float32: 1 << 24,
    torch.float64: 1 << 53,
    torch.complex64: 1 << 24,
    torch.complex128: 1 << 53,
}
"""With more ranks nothing follows from the average of the passes' numbers."""

_gradient_of: Callable[[nn.Parameter], Tensor | None] = vars(torch._C.TensorBase)["grad"].__get__  # quick with map

_RUN_BYTES = 1 << 18
"""Gradients are taken together up to so many: few calls for small ones, and what is copied is still in a cache."""


@dataclass(slots=True)
class Flat:
    """The gradients of one dtype; after them one number for each, 1 where this rank has that gradient; and last the
    number of the pass."""

    parameters: list[nn.Parameter]
    buffer: Tensor
    starts: dict[int, int]  # of each parameter's gradient, by its id, in elements
    tails: list[Tensor]  # by the number of the pass: what follows the gradients if all are there

    @property
    def flags(self) -> Tensor:
        return self.buffer[-len(self.parameters) - 1 : -1]

    @property
    def tail(self) -> Tensor:
        return self.buffer[-len(self.parameters) - 1 :]


class Turns:
    """Dense sums that follow each other, ``AT_ONCE`` at a time, in the order of the calls: if all began at once, they
    would share the network, and end together. ``sums``: how many one backward pass has at most."""

    def __init__(self, sums: int) -> None:
        self._words = np.zeros(_PLACES + 4 * sums, np.uint32)  # by place: how many sums have ended there
        self._begun = 0

    def average(self, comm: Communicator, x: Tensor) -> Work:
        """Of all ranks, in place, in its turn."""
        again, place = divmod(self._begun, self._words.size)
        done = self._words.ctypes.data + 4 * place
        before = done - 4 * AT_ONCE if place >= AT_ONCE else 0  # the first places wait for nobody, each time
        work = comm._average_in_turn(x, _core.Gate(before, done, again + 1, 0, 0), self._words)
        self._begun += 1
        return work


class Run:
    """Neighbours in a group's memory, whose gradients become views when the last of them has come. ``came``: by
    position, 1 for a gradient of this pass, always the same object; ``left``: how many have not come. ``versions``: of
    the parameters, when their gradients came; ``early``: 1 where a hook before that takes it. ``views``: see
    ``set_views``."""

    __slots__ = ("_places", "_views", "came", "early", "left", "parameters", "versions")

    def __init__(self, parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
        self.parameters = [*parameters]
        self.came, self.early = bytearray(len(self.parameters)), bytearray(len(self.parameters))
        self.versions = [0] * len(self.parameters)
        self.set_views(views)
        self.open_pass()

    def open_pass(self) -> None:
        """No gradient has come."""
        self.left = len(self.parameters)
        self.came[:] = bytes(self.left)

    def set_views(self, views: Sequence[Tensor]) -> None:
        """What gradients become, of the group's memory."""
        self._views = [*views]
        self._places = self._addresses()

    def _addresses(self) -> list[int]:
        return [one.data_ptr() for one in (*self._views, *self.parameters)]

    def take(self) -> bool:
        """Makes the gradients views; ``False``, and does nothing, where each must be looked at by itself: where it, or
        its parameter, may be of another kind than it was, or some are views already."""
        if torch.is_grad_enabled() or self._addresses() != self._places:
            return False
        views, gradients = self._views, self._gradients()
        if all(map(is_, gradients, views)):
            return True
        if any(map(is_, gradients, views)):
            return False
        try:
            torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
        except (RuntimeError, TypeError):  # not all are dense, or there: who looks at each of them says which
            return False
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view
        return True

    def put(self) -> None:
        """Gradients are the views, whatever they were."""
        if not all(map(is_, self._gradients(), self._views)):
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view

    def _gradients(self) -> list[Tensor | None]:
        return [*map(_gradient_of, self.parameters)]


class GradientGroup:
    """``parameters``: in the order in which their gradients come; in one place, dense. A gradient that has been taken
    is a view of this group's memory, laid out as its parameter. ``runs``: the parameters, by what is taken at once.
    ``turns``: whose sums these are part of, if of any."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [*parameters]
        self.runs: list[Run] = []
        self.turns: Turns | None = None
        self._ids = frozenset(map(id, self.parameters))
        self._flats: list[Flat] = []
        self._flat_of: dict[int, Flat] = {}
        self._views: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # of views, as addresses
        self._strides: dict[int, tuple[int, ...]] = {}  # of parameters, when their views were made
        for dtype in dict.fromkeys(one.dtype for one in self.parameters):
            members = [one for one in self.parameters if one.dtype == dtype]
            count = len(members)
            size = sum(one.numel() for one in members) + count + 1
            on_host = members[0].device.type == "cpu"
            buffer = zeros(size, dtype) if on_host else members[0].detach().new_zeros(size)
            ends = [*accumulate(one.numel() for one in members)]
            starts = {id(one): end - one.numel() for one, end in zip(members, ends, strict=True)}
            tails = [_tail(buffer, count, number_of(number)) for number in range(PASS_NUMBERS)]
            flat = Flat(members, buffer, starts, tails)
            self._flats.append(flat)
            for one in members:
                self._flat_of[id(one)] = flat
                self._make_view(one)
            self.runs += [Run(run, [self._views[id(one)] for one in run]) for run in _runs(members)]
        self._runs_left = len(self.runs)

    @property
    def bytes(self) -> int:
        """Of the gradients."""
        return sum(one.numel() * one.element_size() for one in self.parameters)

    @property
    def is_whole(self) -> bool:
        """Whether all gradients have been taken in this pass."""
        return not self._runs_left

    def open_pass(self) -> None:
        """No gradient has come."""
        self._runs_left = len(self.runs)
        for run in self.runs:
            run.open_pass()

    def came(self) -> set[int]:
        """The ids of the parameters whose gradients have come in this pass."""
        return {id(one) for run in self.runs for one, came in zip(run.parameters, run.came, strict=True) if came}

    def _make_view(self, parameter: nn.Parameter) -> Tensor:
        order, flat = MemoryOrder.of_gradient(parameter), self._flat_of[id(parameter)]
        view = torch.as_strided(flat.buffer, order.shape, order.strides, flat.starts[id(parameter)])
        self._views[id(parameter)], self._places[id(parameter)] = view, view.data_ptr()
        self._strides[id(parameter)] = parameter.stride()
        return view

    def _view(self, parameter: nn.Parameter) -> Tensor:
        """Of the group's memory, even after ``gradient.data`` was assigned, as ``Module.to`` does. Raises
        ``RuntimeError`` for a parameter that has another dtype or shape than it had."""
        flat, view = self._flat_of[id(parameter)], self._views[id(parameter)]
        if parameter.dtype != flat.buffer.dtype or parameter.numel() != view.numel():
            raise RuntimeError(
                f"a parameter is {parameter.dtype} of shape {tuple(parameter.shape)} now, and was {flat.buffer.dtype} "
                f"of shape {tuple(view.shape)} when its Synchronizer was made: close() it, and make another one"
            )
        is_here = view.data_ptr() == self._places[id(parameter)] and view.dtype == parameter.dtype
        return view if is_here and self._strides[id(parameter)] == parameter.stride() else self._make_view(parameter)

    def take_run(self, run: Run) -> None:
        """All gradients of this run have come. Errors as of ``_take``."""
        if not run.take():
            self._take_all(run.parameters)
            run.set_views([self._views[id(one)] for one in run.parameters])
        self._runs_left -= 1

    def _take_all(self, parameters: Sequence[nn.Parameter]) -> None:
        for one in parameters:
            if one.grad is None:
                self._view(one).zero_()
            else:
                self._take(one, one.grad)

    def _take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Makes the gradient that this parameter has a view. Raises ``TypeError`` for one that is sparse, and
        ``RuntimeError`` for one that can be differentiated itself, and for a parameter of another dtype or shape than
        it had."""
        view = self._view(parameter)
        if gradient is view:
            return
        if gradient.layout != torch.strided:
            raise TypeError(
                f"a gradient of shape {tuple(gradient.shape)} is sparse: make its layer with sparse=False, or sum it "
                "with Communicator.all_reduce"
            )
        if gradient.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) makes gradients that a Synchronizer cannot hold: use "
                "torch.autograd.grad(…, create_graph=True) for what is differentiated twice"
            )
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
        parameter.grad = view

    def launch(self, comm: Communicator, earlier: set[int], number: int) -> list[Work]:
        """Begins to average. ``earlier``: the ids of the parameters whose gradients came in passes before this one and
        were not averaged; those that have not come at all count as zero unless they hold something. ``number``: of the
        pass. Errors as of ``_take``."""
        present: Set[int] = self._ids
        if not self.is_whole:
            self._take_all(self.parameters)
            for run in self.runs:
                run.set_views([self._views[id(one)] for one in run.parameters])
            present = self.came() | earlier
        works = []
        for flat in self._flats:
            flat.tail.copy_(flat.tails[number % PASS_NUMBERS])
            if not self.is_whole:
                flags = torch.tensor([float(id(one) in present) for one in flat.parameters], dtype=flat.buffer.dtype)
                flat.flags.copy_(flags, non_blocking=True)
            works += self._begin(flat, comm, present)
        return works

    def _begin(self, flat: Flat, comm: Communicator, present: Set[int]) -> list[Work]:
        """The sums of one dtype."""
        buffer = torch.view_as_real(flat.buffer) if flat.buffer.is_complex() else flat.buffer
        if self.turns is not None:
            return [self.turns.average(comm, buffer)]
        work = comm.all_reduce(buffer, "avg", async_op=True)
        assert work is not None
        return [work]

    def go_on(self, *, waits: bool) -> bool:
        """Begins what follows sums inside a node, in the order of ``launch``. ``False``: these are not over."""
        return True

    def launch_second(self) -> list[Work]:
        """Begins what must wait for the first works of the pass, in the order of groups on all ranks."""
        return []

    def ended(self, works: Sequence[Work]) -> Mark:
        """After the works: when the last one was over, by the clock of ``time.perf_counter()``."""
        return max((span[1] for work in works if (span := work.span_s()) is not None), default=0.0)

    def receive(self) -> None:
        """After the works, before anything else: the averages are in the group's memory."""

    def apart(self, number: int, ranks: int) -> int | None:
        """After the works of pass ``number``: it, if not all ``ranks`` were in it, as far as can be told."""
        expected = number_of(number)
        checked = (flat.buffer[-1] for flat in self._flats if ranks <= EXACT_RANKS[flat.buffer.dtype])
        return None if all(tail.item() == expected for tail in checked) else number

    def finish(self) -> None:
        """After the works: every parameter that some rank has a gradient for gets the average. One that no rank has a
        gradient for keeps what it had, ``None`` too."""
        if self.is_whole:
            for run in self.runs:
                run.put()
            return
        for flat in self._flats:
            for one, flag in zip(flat.parameters, self._flags_of(flat), strict=True):
                if flag != 0:
                    one.grad = self._views[id(one)]

    def averages(self) -> dict[int, Tensor]:
        """After the works, in place of ``finish``: copies of what gradients would become, by the parameters' ids."""
        held = [one.grad for one in self.parameters]
        for one in self.parameters:
            one.grad = None
        self.finish()
        found = {id(one): one.grad.clone() for one in self.parameters if one.grad is not None}
        for one, gradient in zip(self.parameters, held, strict=True):
            one.grad = gradient
        return found

    def _flags_of(self, flat: Flat) -> list[float]:
        """After the works: by parameter, above 0 where some rank had its gradient."""
        return flat.flags.tolist()

    def holds(self, earlier: set[int]) -> bool:
        """Whether none of these gradients has been set to ``None`` since it came."""
        present = self.came() | earlier
        return all(one.grad is not None for one in self.parameters if id(one) in present)

    def give_back(self) -> None:
        """Gradients have memory of their own."""
        for one in self.parameters:
            if one.grad is not None:
                one.grad = one.grad.clone()


def present_in(
    parameters: Iterable[nn.Parameter], groups: Iterable[GradientGroup], earlier: Set[int]
) -> list[nn.Parameter]:
    """Those whose gradients have come, in this pass or, by their ids, in ``earlier`` ones."""
    present = {*earlier}.union(*(group.came() for group in groups))
    return [one for one in parameters if id(one) in present]


def number_of(number: int) -> float:
    """How the number of a pass travels."""
    return 2.0 ** (number % PASS_NUMBERS)


def _tail(like: Tensor, flags: int, number: float) -> Tensor:
    """So many flags that are set, and the number of a pass."""
    tail = like.new_ones(flags + 1)
    tail[-1:].fill_(number)
    return tail


def _runs(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbours, together no larger than ``_RUN_BYTES`` where that can be."""
    found: list[list[nn.Parameter]] = []
    held = 0
    for one in parameters:
        size = one.numel() * one.element_size()
        if not found or held + size > _RUN_BYTES:
            found.append([])
            held = 0
        found[-1].append(one)
        held += size
    return found


def note_before_others(runs: Iterable[Run]) -> list[Any]:
    """Hooks on parameters of a Synchronizer's groups that somebody else's hooks are called for before its own, which
    must note ``versions`` before these. Gives their handles."""
    handles = []
    for run in runs:
        for position, one in enumerate(run.parameters):
            run.early[position] = len(one._post_accumulate_grad_hooks) > 1
            if run.early[position]:
                handles.append(before_gradient(one, functools.partial(_note, run, position)))
    return handles


def _note(run: Run, position: int, _: Tensor) -> None:
    run.versions[position] = run.parameters[position]._version


def first_changed(runs: Iterable[Run]) -> Tensor | None:
    """The first parameter that was changed since its gradient came in this pass."""
    for run in runs:
        if [*map(version_of, run.parameters)] != run.versions:
            for one, version, came in zip(run.parameters, run.versions, run.came, strict=True):
                if came and one._version != version:
                    return one
    return None
