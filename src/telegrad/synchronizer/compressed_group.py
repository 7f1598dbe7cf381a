"""Gradients that travel together, those of large parameters as their largest entries with error feedback."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from telegrad.communicator import Communicator, Work
from telegrad.compress import PlacedResidual
from telegrad.ddp.bucket import Bits, BucketLayout, ParameterSpan, bits_of, has_current_density, layout_of_members
from telegrad.ddp.exchange import Sending
from telegrad.kernels.nonfinite import as_float32
from telegrad.synchronizer.compression import Compression
from telegrad.synchronizer.gradient_group import Flat, GradientGroup


class _EarlierAverage(NamedTuple):
    """An average that a parameter still has from an earlier pass, and that no gradient of this one has joined."""

    flat: Flat
    number: int  # of its flag
    part: PlacedResidual
    bits: Bits  # in the group's memory
    values: Bits


class CompressedGroup(GradientGroup):
    """As a GradientGroup. ``way``: how parameters that ``compression`` compresses are sent, see ``Compression.start``.
    Flags, the number of the pass, and parameters that are not compressed always go densely.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], compression: Compression, *, way: str) -> None:
        self._compression = compression  # first: the group's views ask
        super().__init__(parameters)
        self.way = way
        self._layouts: dict[int, BucketLayout] = {}
        self._sendings: list[Sending] = []
        self._held: list[_EarlierAverage] = []

    def _make_view(self, parameter: nn.Parameter) -> Tensor:
        self._compression.check_order(parameter)
        return super()._make_view(parameter)

    def launch(self, comm: Communicator, earlier: set[int], number: int) -> list[Work]:
        """As a GradientGroup's. Raises ``NonFiniteGradient`` as ``Compression.start``."""
        self._sendings, self._held = [], []
        return super().launch(comm, earlier, number)

    def _begin(self, flat: Flat, comm: Communicator, present: Set[int]) -> list[Work]:
        bits = bits_of(flat.buffer, self._compression.names[id(flat.parameters[0])])
        layout = self._layout_of(flat)
        self._set_aside(flat, layout, bits, present)
        sending = self._compression.start(layout, bits, way=self.way)
        self._sendings.append(sending)
        return sending.works

    def receive(self) -> None:
        """After the works: what the network did not write is written, and what it lost goes back to the residuals."""
        sendings, self._sendings = self._sendings, []
        for sending in sendings:
            sending.keep()
            sending.write()

    def finish(self) -> None:
        """As a GradientGroup's."""
        super().finish()
        held, self._held = self._held, []
        for one in held:
            if one.flat.flags[one.number] == 0:
                one.bits[:] = one.values
            else:  # others have sent theirs: this rank's share follows
                values = np.nan_to_num(as_float32(one.values), posinf=0, neginf=0)
                self._compression.compressor.keep_all((PlacedResidual(one.part.entry, 0),), values)

    def _set_aside(self, flat: Flat, layout: BucketLayout, bits: Bits, present: Set[int]) -> None:
        """What is compressed, or sent with what waits, cannot be had back if no rank has a gradient for it."""
        parts = {part.entry.name: part for part in layout.parts}
        for number, one in enumerate(flat.parameters):
            part = parts.get(self._compression.names[id(one)])
            if part is None or id(one) in present:
                continue
            own = bits[part.offset : part.offset + part.entry.values.size]
            if own.any():
                self._held.append(_EarlierAverage(flat, number, part, own, own.copy()))
                own[:] = 0

    def _layout_of(self, flat: Flat) -> BucketLayout:
        layout = self._layouts.get(id(flat))
        if layout is None or not has_current_density(layout):
            parts = 2 if flat.buffer.is_complex() else 1  # of an element
            names, starts = self._compression.names, flat.starts
            members = [
                ParameterSpan(names[id(one)], starts[id(one)] * parts, one.numel() * parts) for one in flat.parameters
            ]
            tail = (len(flat.parameters) + 1) * parts
            layout = layout_of_members(members, flat.buffer.numel() * parts, self._compression.compressor, tail=tail)
            self._layouts[id(flat)] = layout
        return layout
