"""Gradients that travel together: flat memory of which they are views. Does not know when a group leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from telegrad.comm import Communicator, Work


@dataclass(slots=True)
class _Flat:
    """The gradients of one dtype, and after them one number for each: 1 where this rank has that gradient."""

    parameters: list[nn.Parameter]
    buffer: Tensor


class GradientGroup:
    """``parameters``: in the order in which their gradients come; on the CPU, dense. While ``lend`` has made a
    gradient a view of this group's memory, the backward pass adds to it in place.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [*parameters]
        self._flats: list[_Flat] = []
        self._views: dict[int, Tensor] = {}
        self._lent: set[int] = set()  # gradients that were None, and that nothing has come to since
        for dtype in dict.fromkeys(one.dtype for one in self.parameters):
            members = [one for one in self.parameters if one.dtype == dtype]
            sizes = [one.numel() for one in members]
            buffer = torch.zeros(sum(sizes) + len(members), dtype=dtype)
            for one, values in zip(members, torch.split(buffer[: sum(sizes)], sizes), strict=True):
                self._views[id(one)] = values.view(one.shape)
            self._flats.append(_Flat(members, buffer))

    @property
    def bytes(self) -> int:
        """Of the gradients."""
        return sum(one.numel() * one.element_size() for one in self.parameters)

    def lend(self) -> None:
        """Before a pass: gradients that are None, or that lie elsewhere, become views."""
        for one in self.parameters:
            if one.grad is None:
                view = self._views[id(one)]
                one.grad = view.zero_()
                self._lent.add(id(one))
            else:
                self._take(one)

    def arrived(self, parameter: nn.Parameter) -> None:
        """The pass has added to this gradient, or made a new one. Raises ``TypeError`` for one that is sparse."""
        self._take(parameter)
        self._lent.discard(id(parameter))

    def launch(self, comm: Communicator, present: set[int]) -> list[Work]:
        """Begins to average; ``present``: the ids of the parameters whose gradients this rank has. Those of the others
        count as zero unless they hold something."""
        for one in self.parameters:
            if one.grad is None:
                self._views[id(one)].zero_()
            else:
                self._take(one)
        works = []
        for flat in self._flats:
            flags = [float(id(one) in present) for one in flat.parameters]
            flat.buffer[-len(flags) :] = torch.tensor(flags, dtype=flat.buffer.dtype)
            work = comm.all_reduce(flat.buffer, "avg", async_op=True)
            assert work is not None
            works.append(work)
        return works

    def finish(self) -> None:
        """After the works: every parameter that some rank has a gradient for gets the average. One that no rank has a
        gradient for keeps what it had before the pass, ``None`` too."""
        for flat in self._flats:
            flags = flat.buffer[-len(flat.parameters) :].tolist()
            for one, flag in zip(flat.parameters, flags, strict=True):
                if flag != 0:
                    one.grad = self._views[id(one)]
                elif id(one) in self._lent:
                    one.grad = None
        self._lent.clear()

    def give_back(self) -> None:
        """Gradients that were lent and not filled are None again, and the others have memory of their own."""
        for one in self.parameters:
            if id(one) in self._lent:
                one.grad = None
            elif one.grad is not None:
                one.grad = one.grad.clone()
        self._lent.clear()

    def _take(self, parameter: nn.Parameter) -> None:
        gradient, view = parameter.grad, self._views[id(parameter)]
        assert gradient is not None
        if gradient is view:
            return
        if gradient.layout != torch.strided:
            raise TypeError(
                f"a gradient of shape {tuple(gradient.shape)} is sparse: make its layer with sparse=False, or sum it "
                "with Communicator.all_reduce"
            )
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
        parameter.grad = view
