"""Gradients that travel together: flat memory of which they are views. Does not know when a group leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from telegrad.comm import Communicator, Work

PASS_NUMBERS = 4
"""Passes are counted modulo this, and the number travels as a power of two: sums of up to ``_EXACT_RANKS`` equal ones,
and so their averages, are exact."""

_EXACT_RANKS = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24, torch.float64: 1 << 53}
"""With more ranks nothing follows from the average of the passes' numbers."""


@dataclass(slots=True)
class Flat:
    """The gradients of one dtype; after them one number for each, 1 where this rank has that gradient; and last the
    number of the pass."""

    parameters: list[nn.Parameter]
    buffer: Tensor
    starts: dict[int, int]  # of each parameter's gradient, by its id, in elements

    @property
    def flags(self) -> Tensor:
        return self.buffer[-len(self.parameters) - 1 : -1]


class GradientGroup:
    """``parameters``: in the order in which their gradients come; on the CPU, dense. A gradient that has come is a view
    of this group's memory, laid out as its parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [*parameters]
        self._flats: list[Flat] = []
        self._flat_of: dict[int, Flat] = {}
        self._views: dict[int, Tensor] = {}
        self._places: dict[int, int] = {}  # of views, as addresses
        self._strides: dict[int, tuple[int, ...]] = {}  # of parameters, when their views were made
        for dtype in dict.fromkeys(one.dtype for one in self.parameters):
            members = [one for one in self.parameters if one.dtype == dtype]
            buffer = torch.zeros(sum(one.numel() for one in members) + len(members) + 1, dtype=dtype)
            ends = [*accumulate(one.numel() for one in members)]
            starts = {id(one): end - one.numel() for one, end in zip(members, ends, strict=True)}
            flat = Flat(members, buffer, starts)
            self._flats.append(flat)
            for one in members:
                self._flat_of[id(one)] = flat
                self._make_view(one)

    @property
    def bytes(self) -> int:
        """Of the gradients."""
        return sum(one.numel() * one.element_size() for one in self.parameters)

    def _make_view(self, parameter: nn.Parameter) -> Tensor:
        # Fused optimisers walk through a parameter and its gradient side by side, in the order of memory.
        strides = torch.empty_like(parameter, device="meta").stride()
        flat = self._flat_of[id(parameter)]
        view = torch.as_strided(flat.buffer, parameter.size(), strides, flat.starts[id(parameter)])
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
                f"of shape {tuple(view.shape)} when its Synchronizer was made: close() that one, and make another one "
                "after the model has changed"
            )
        is_here = view.data_ptr() == self._places[id(parameter)] and view.dtype == parameter.dtype
        return view if is_here and self._strides[id(parameter)] == parameter.stride() else self._make_view(parameter)

    def take(self, parameter: nn.Parameter) -> None:
        """Makes the gradient that this parameter has a view. Raises ``TypeError`` for one that is sparse, and
        ``RuntimeError`` for one that can be differentiated itself, and for a parameter of another dtype or shape than
        it had."""
        gradient, view = parameter.grad, self._views[id(parameter)]
        assert gradient is not None
        if gradient is view and view.data_ptr() == self._places[id(parameter)] and view.dtype == parameter.dtype:
            return  # as at every launch: looking closer costs a pass with many gradients a millisecond
        view = self._view(parameter)
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

    def launch(self, comm: Communicator, present: set[int], number: int) -> list[Work]:
        """Begins to average. ``present``: the ids of the parameters whose gradients this rank has; those of the others
        count as zero unless they hold something. ``number``: of the pass, modulo ``PASS_NUMBERS``."""
        for one in self.parameters:
            if one.grad is None:
                self._view(one).zero_()
            else:
                self.take(one)
        works = []
        for flat in self._flats:
            flags = [float(id(one) in present) for one in flat.parameters]
            flat.flags.copy_(torch.tensor(flags))
            flat.buffer[-1] = 2.0**number
            works += self._begin(flat, comm, present)
        return works

    def _begin(self, flat: Flat, comm: Communicator, present: set[int]) -> list[Work]:
        """The sums of one dtype."""
        work = comm.all_reduce(flat.buffer, "avg", async_op=True)
        assert work is not None
        return [work]

    def receive(self) -> None:
        """After the works, before anything else: the averages are in the group's memory."""

    def is_of(self, number: int, ranks: int) -> bool:
        """After the works: whether all ``ranks`` were in this pass, as far as can be told."""
        return all(
            flat.buffer[-1].item() == 2.0**number for flat in self._flats if ranks <= _EXACT_RANKS[flat.buffer.dtype]
        )

    def finish(self) -> None:
        """After the works: every parameter that some rank has a gradient for gets the average. One that no rank has a
        gradient for keeps what it had, ``None`` too."""
        for flat in self._flats:
            for one, flag in zip(flat.parameters, flat.flags.tolist(), strict=True):
                if flag != 0:
                    one.grad = self._views[id(one)]

    def holds(self, present: set[int]) -> bool:
        """Whether none of these gradients has been set to ``None`` since it came."""
        return all(one.grad is not None for one in self.parameters if id(one) in present)

    def give_back(self) -> None:
        """Gradients have memory of their own."""
        for one in self.parameters:
            if one.grad is not None:
                one.grad = one.grad.clone()
