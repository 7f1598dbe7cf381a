"""What a Synchronizer of parameters on a device compresses, and the groups that do: in streams, of a TopK or
a Quantised; and which kind of group parameters go in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from telegrad.communicator import Communicator, Work
from telegrad.communicator.cuda.transfers import DeviceWork
from telegrad.compress import PlacedResidual
from telegrad.ddp.bucket import BucketLayout, ParameterSpan, has_current_density, layout_of_members
from telegrad.ddp.cuda.compression import DeviceCompression, check_fits_device
from telegrad.ddp.cuda.faults import LateFaults
from telegrad.ddp.options import QUANTISED, Cheapest, Compress, TopK
from telegrad.ddp.pass_use import Revertible
from telegrad.synchronizer.compressed_group import CompressedGroup
from telegrad.synchronizer.compression import Compression
from telegrad.synchronizer.cuda_group import DeviceGroup
from telegrad.synchronizer.gradient_group import Flat, GradientGroup

_REMEDY = (
    "the averages of that pass were NaN or infinite on all ranks, and the optimiser may have had them: go on from a "
    "state of before, and lower the learning rate or clip, or choose nonfinite='send' (the optimiser sees it)"
)


class CompressionOnDevice(Compression):
    """As Compression, of a TopK or a Quantised. What is wrong with a gradient is raised as soon as the host knows, in a
    later pass or by ``state_dict``. Raises ``TypeError``, too, for options that streams cannot do."""

    def __init__(
        self, compress: Compress, comm: Communicator, parameters: Mapping[str, nn.Parameter], **options: Any
    ) -> None:
        super().__init__(compress, comm, parameters, **options)
        if isinstance(compress, Cheapest):
            raise TypeError(
                "compress=Cheapest() chooses by the host's clock, and the parameters are on a device: use TopK or "
                "Quantised, or model.cpu()"
            )
        if isinstance(compress, TopK):
            check_fits_device(self.compressor, self.combine)
            self.device.prepare(parameters.values())

    def move_to(self, comm: Communicator) -> None:
        """As Compression's; before anything has been summed."""
        self.device = DeviceCompression(comm, self.compressor, self.values, self.encoding, self.stats)
        self._faults = LateFaults(comm, self.stats, _REMEDY)
        super().move_to(comm)

    @property
    def _memory(self) -> Revertible:
        return self.device.feedback

    def open_pass(self) -> None:
        """As Compression's. Raises ``NonFiniteGradient`` for what the host knows by now of passes before, and ends the
        communicator."""
        self._close_reads()  # of a pass that was broken off
        self._look(wait=False)
        self.device.settle()
        super().open_pass()
        self.device.feedback.apply_reverts()

    def close_pass(self) -> None:
        """As Compression's."""
        super().close_pass()
        self._close_reads()

    def start_in_stream(self, layout: BucketLayout, buffer: torch.Tensor, *, way: str) -> DeviceWork:
        """As ``start``, of a group's memory on the device."""
        compresses = bool(layout.parts) and not self._warmup.is_dense(self.step)
        sparse, wire = compresses and way == "sparse", way if compresses and way in QUANTISED else None
        looks = self._nonfinite == "raise"
        started = self.device.start(layout, buffer, sparse=sparse, looks=looks, releases=True, wire=wire)
        if started.faulty is not None and looks:
            self._faults.add(started.names, started.faulty, self.step, remembered=True)
        return started.work

    def state_dict(self) -> dict[str, Any]:
        """As Compression's; waits for the device. Raises what has gone wrong, ``NonFiniteGradient`` and
        ``TransportError``."""
        self._comm.synchronize()
        self._close_reads()  # of a pass that was broken off
        self._look(wait=True)
        self.device.settle()
        self.decide()
        self.device.feedback.save()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As Compression's."""
        super().load_state_dict(state)
        self.device.forget()
        self._faults.forget()

    def _close_reads(self) -> None:
        self.device.close_pass()
        self._faults.close()

    def _look(self, *, wait: bool) -> None:
        self.device.take_counts(wait=wait)
        try:
            self._faults.check(wait=wait)
        except Exception as error:
            self._comm.abort(f"{type(error).__name__}: {error}")  # the others must not wait for this rank
            raise


class _EarlierAverageOnDevice(NamedTuple):
    """What a parameter still has from an earlier pass, and no gradient of this one has joined; it may be nothing."""

    flat: Flat
    number: int  # of its flag
    part: PlacedResidual
    place: torch.Tensor  # in the group's memory
    values: torch.Tensor


class DeviceCompressedGroup(DeviceGroup):
    """As a DeviceGroup, with parameters that ``compression`` compresses; see CompressedGroup."""

    def __init__(self, parameters: Sequence[nn.Parameter], compression: CompressionOnDevice, *, way: str) -> None:
        self._compression = compression  # first: the group's views ask
        super().__init__(parameters)
        self.way = way
        self._layouts: dict[int, BucketLayout] = {}
        self._held: list[_EarlierAverageOnDevice] = []

    def _make_view(self, parameter: nn.Parameter) -> torch.Tensor:
        self._compression.check_order(parameter)
        return super()._make_view(parameter)

    def launch(self, comm: Communicator, earlier: set[int], number: int) -> list[Work]:
        """As a GradientGroup's."""
        self._held = []
        return super().launch(comm, earlier, number)

    def finish(self) -> None:
        """As a DeviceGroup's."""
        super().finish()
        held, self._held = self._held, []
        flags = {id(one.flat): self._flags_of(one.flat) for one in held}
        with torch.no_grad():
            for one in held:
                if flags[id(one.flat)][one.number] == 0:
                    one.place.copy_(one.values)
                else:  # others have sent theirs: this rank's share follows
                    share = one.values.float().nan_to_num(posinf=0.0, neginf=0.0)
                    self._compression.device.keep(PlacedResidual(one.part.entry, 0), share)

    def _begin(self, flat: Flat, comm: Communicator, present: Set[int]) -> list[Work]:
        layout = self._layout_of(flat)
        self._set_aside(flat, layout, present)
        return [self._compression.start_in_stream(layout, flat.buffer, way=self.way)]

    def _set_aside(self, flat: Flat, layout: BucketLayout, present: Set[int]) -> None:
        """What is compressed, or sent with what waits, cannot be had back if no rank has a gradient for it."""
        parts = {part.entry.name: part for part in layout.parts}
        for number, one in enumerate(flat.parameters):
            part = parts.get(self._compression.names[id(one)])
            if part is not None and id(one) not in present:
                own = flat.buffer[part.offset : part.offset + part.entry.size]
                self._held.append(_EarlierAverageOnDevice(flat, number, part, own, own.clone()))
                own.zero_()

    def _layout_of(self, flat: Flat) -> BucketLayout:
        layout = self._layouts.get(id(flat))
        if layout is None or not has_current_density(layout):
            names = self._compression.names
            members = [ParameterSpan(names[id(one)], flat.starts[id(one)], one.numel()) for one in flat.parameters]
            tail, compressor = len(flat.parameters) + 1, self._compression.compressor
            layout = layout_of_members(members, flat.buffer.numel(), compressor, tail=tail)
            self._layouts[id(flat)] = layout
        return layout


def group_of(
    parameters: Sequence[nn.Parameter], compression: Compression | None, *, way: str, on_device: bool
) -> GradientGroup:
    """Of ``parameters`` that are all on a device, or all in host memory. ``way``: see ``Compression.ways``."""
    if compression is None:
        return DeviceGroup(parameters) if on_device else GradientGroup(parameters)
    if isinstance(compression, CompressionOnDevice):
        return DeviceCompressedGroup(parameters, compression, way=way)
    return CompressedGroup(parameters, compression, way=way)
