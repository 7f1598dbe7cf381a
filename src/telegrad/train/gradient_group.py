"""Gradients that travel together: flat memory of which they are views. Does not know when a group leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from telegrad.comm import Communicator, Work

PASS_NUMBERS = 251
"""Passes are counted modulo this: a number that every float holds exactly, and so its average."""


@dataclass(slots=True)
class Flat:
    """The gradients of one dtype; after them one number for each, 1 where this rank has that gradient; and last the
    number of the pass."""

    parameters: list[nn.Parameter]
    buffer: Tensor

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
        self._views: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(one.dtype for one in self.parameters):
            members = [one for one in self.parameters if one.dtype == dtype]
            buffer = torch.zeros(sum(one.numel() for one in members) + len(members) + 1, dtype=dtype)
            start = 0
            for one in members:
                # Fused optimisers walk through a parameter and its gradient side by side, in the order of memory.
                strides = torch.empty_like(one, device="meta").stride()
                self._views[id(one)] = torch.as_strided(buffer, one.size(), strides, start)
                start += one.numel()
            self._flats.append(Flat(members, buffer))

    @property
    def bytes(self) -> int:
        """Of the gradients."""
        return sum(one.numel() * one.element_size() for one in self.parameters)

    def take(self, parameter: nn.Parameter) -> None:
        """Makes the gradient that this parameter has a view. Raises ``TypeError`` for one that is sparse, and
        ``RuntimeError`` for one that can be differentiated itself."""
        gradient, view = parameter.grad, self._views[id(parameter)]
        assert gradient is not None
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

    def launch(self, comm: Communicator, present: set[int], number: int) -> list[Work]:
        """Begins to average. ``present``: the ids of the parameters whose gradients this rank has; those of the others
        count as zero unless they hold something. ``number``: of the pass, modulo ``PASS_NUMBERS``."""
        for one in self.parameters:
            if one.grad is None:
                self._views[id(one)].zero_()
            else:
                self.take(one)
        works = []
        for flat in self._flats:
            flags = [float(id(one) in present) for one in flat.parameters]
            flat.flags.copy_(torch.tensor(flags))
            flat.buffer[-1] = number
            works += self._begin(flat, comm, present)
        return works

    def _begin(self, flat: Flat, comm: Communicator, present: set[int]) -> list[Work]:
        """The sums of one dtype."""
        work = comm.all_reduce(flat.buffer, "avg", async_op=True)
        assert work is not None
        return [work]

    def receive(self) -> None:
        """After the works, before anything else: the averages are in the group's memory."""

    def is_of(self, number: int) -> bool:
        """After the works: whether all ranks were in this pass."""
        return all(flat.buffer[-1].item() == number for flat in self._flats)

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
