"""Groups of gradients on a device: averaged in streams, densely, or by a TopK or a Quantised, of single ranks and of
nodes; and which kind of group parameters go in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from telegrad.communicator import Communicator, Work
from telegrad.communicator.cuda.runtime import LateRead
from telegrad.communicator.cuda.transfers import DeviceWork
from telegrad.communicator.operands import on_device
from telegrad.compress import PlacedResidual
from telegrad.cost.send_method import GroupCost
from telegrad.ddp.bucket import BucketLayout
from telegrad.ddp.cuda.exchange import CudaExchange
from telegrad.ddp.cuda.faults import LateFaults
from telegrad.ddp.cuda.selection import check_selections
from telegrad.ddp.cuda.telemetry import DeviceTelemetry
from telegrad.ddp.node_ranks import NodeRanks
from telegrad.ddp.options import QUANTISED, Cheapest, Compress, LowRank, TopK
from telegrad.ddp.pass_use import Revertible
from telegrad.synchronizer.clocks import Mark
from telegrad.synchronizer.compression import CompressedGroup, GroupCompression, NodeGroup
from telegrad.synchronizer.gradient_group import EXACT_RANKS, Flat, GradientGroup, number_of
from telegrad.synchronizer.group_planning import TIMED
from telegrad.tuning.group_cost import measured_device_cost


class _Late(NamedTuple):
    """What the averages of a pass say of its number."""

    tail: LateRead
    number: int


class DeviceGroup(GradientGroup):
    """As a GradientGroup. The host waits for the device only where a gradient of this rank has not come: whether
    another rank has it decides what a parameter's gradient is."""

    def __init__(self, parameters: Sequence[nn.Parameter], *compression: Any, **options: Any) -> None:
        super().__init__(parameters, *compression, **options)
        self._late: deque[_Late] = deque()
        self._end: Mark = None

    def _begin(self, flat: Flat, comm: Communicator, present: Set[int]) -> list[Work]:
        return self._timed(super()._begin(flat, comm, present))

    def _timed(self, works: list[Work]) -> list[Work]:
        """Of one dtype, the last of which is the last of all."""
        last = works[-1]
        assert isinstance(last, DeviceWork)
        self._end = last.timed_end()
        return works

    def ended(self, works: Sequence[Work]) -> Mark:
        """When the last one is over, by a DeviceClock."""
        return self._end

    def apart(self, number: int, ranks: int) -> int | None:
        """As a GradientGroup's, the first of this pass and those before as far as the host can see their averages by
        now; never for a sum that failed, of which the next call says so."""
        for flat in self._flats:
            if ranks <= EXACT_RANKS[flat.buffer.dtype]:
                self._late.append(_Late(LateRead(flat.buffer[-1:]), number))
        while self._late and self._late[0].tail.is_known:
            tail, seen = self._late.popleft()
            found = float(tail.values()[0])
            if found != number_of(seen) and not math.isnan(found):
                return seen
        return None

    def _flags_of(self, flat: Any) -> list[float]:
        return [float(flag) for flag in LateRead(flat.flags).values()]


def is_on_device(parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether gradients are a device's. Raises ``ValueError`` unless all of the parameters are in one place."""
    places = {one.device: name for name, one in parameters.items()}
    if len(places) > 1:
        (first, one), (second, other), *_ = places.items()
        raise ValueError(
            f"parameter {one!r} is on {first} and {other!r} on {second}: a Synchronizer takes those of one device; use "
            "DistributedDataParallel for others"
        )
    return any(map(on_device, parameters.values()))


def dense_cost(comm: Communicator, parameters: Mapping[str, nn.Parameter]) -> GroupCost:
    """Seconds by bytes of a sum on the device of ``parameters``: as calibration has found for such devices, or else of
    some sums that are timed here, for which the host waits. The same on all ranks, which all call this."""
    one = next(iter(parameters.values()))
    known = comm.sum_cost(one.device)
    if known is not None:
        return known
    most = sum(other.numel() * other.element_size() for other in parameters.values())
    return measured_device_cost(comm, one.detach().new_empty(0, dtype=torch.float32), most_bytes=max(most, 1))


def check_plan_on_device(plan: Any, waits_elsewhere: bool, compress: object) -> None:
    """Raises ``ValueError``, with the remedy, for arguments of a Synchronizer that work on the host alone."""
    if compress is not None and plan in TIMED and plan != "auto":
        raise ValueError(
            f"plan={plan!r} needs to know what compressed sums cost, which is not measured on a device: use 'auto' "
            "(groups of DDP's sizes), 'fixed', 'single', 'wfbp', or name the groups"
        )
    if waits_elsewhere:
        raise ValueError(
            "wait_in and delay are for parameters on the host: where they are on a device backward() waits for "
            "nothing; leave them out"
        )


# What a Synchronizer of parameters on a device compresses, and the groups that do: in streams, of a TopK or a
# Quantised; and which kind of group parameters go in.

_REMEDY = (
    "the averages of that pass were NaN or infinite on all ranks, and the optimizer may have had them: go on from a "
    "state of before, and lower the learning rate or clip, or choose nonfinite='send' (the optimizer sees it)"
)


class CudaGroupCompression(GroupCompression):
    """As GroupCompression, but of no Cheapest. What is wrong with a gradient is raised as soon as the host knows, in a
    later pass or by ``state_dict``. Raises ``TypeError``, too, for options that streams cannot do."""

    def __init__(
        self, compress: Compress | None, comm: Communicator, parameters: Mapping[str, nn.Parameter], **options: Any
    ) -> None:
        super().__init__(compress, comm, parameters, **options)
        if isinstance(compress, Cheapest):
            raise TypeError(
                "compress=Cheapest() chooses by the host's clock, and the parameters are on a device: use TopK, "
                "LowRank or Quantised, or model.cpu()"
            )
        if isinstance(compress, (TopK, LowRank)):
            check_selections(self.compressor)
            self.device.prepare(parameters.values())

    def _memory_for(self, comm: Communicator) -> Revertible:
        how = self.values, self.encoding, self.combine, self._exchange.topk_states
        unobserved = DeviceTelemetry(None, comm, self.stats)
        self.device = CudaExchange(comm, self.compressor, *how, self.stats, self._low_rank, unobserved)
        self._faults = LateFaults(self._comm, self.stats, _REMEDY, self._among)
        return self.device.feedback

    def open_pass(self) -> None:
        """As Compression's. Raises ``NonFiniteGradient`` for what the host knows by now of passes before, and ends the
        communicator."""
        self._close_reads()  # of a pass that was broken off
        self._look(wait=False)
        self.device.settle()
        super().open_pass()
        self.device.feedback.apply_reverts()
        self.device.open_pass()

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
        self.synchronize()
        self._close_reads()  # of a pass that was broken off
        self._look(wait=True)
        self.device.settle()
        self.decide()
        self.device.save()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As Compression's."""
        super().load_state_dict(state)
        self.device.forget()
        self._faults.forget()

    def synchronize(self) -> None:
        """The host waits for all that was begun. Raises ``TransportError``."""
        for comm in {self._comm, self.device.comm}:
            comm.synchronize()

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


class CudaCompressedGroup(DeviceGroup, CompressedGroup):
    """As a DeviceGroup, with parameters that ``compression`` compresses; see CompressedGroup."""

    _compression: CudaGroupCompression

    def _begin(self, flat: Flat, comm: Communicator, present: Set[int]) -> list[Work]:
        return CompressedGroup._begin(self, flat, comm, present)

    def _start(self, flat: Flat, memory: torch.Tensor) -> list[Work]:
        return self._timed([self._compression.start_in_stream(self._layout_of(flat), memory, way=self.way)])

    def _elements(self, flat: Flat, memory: torch.Tensor) -> torch.Tensor:
        return memory

    def _copied(self, own: torch.Tensor) -> torch.Tensor:
        return own.clone()

    def _has_something(self, values: torch.Tensor) -> bool:
        """The host has waited for this pass already, to know of which parameters others have gradients."""
        return bool(LateRead(values.count_nonzero().view(1)).values()[0] > 0)

    def _keep(self, part: PlacedResidual, values: torch.Tensor) -> None:
        self._compression.device.keep(part, values.float().nan_to_num(posinf=0.0, neginf=0.0))


class CudaNodeGroup(NodeGroup, CudaCompressedGroup):
    """As a NodeGroup, whose sums inside the node are torch's: streams wait for them, and the host does not."""


def group_of(
    parameters: Sequence[nn.Parameter],
    compression: GroupCompression | None,
    nodes: NodeRanks | None = None,
    *,
    way: str,
    on_device: bool,
) -> GradientGroup:
    """Of ``parameters`` that are all on a device, or all in host memory. ``way``: see ``GroupCompression.ways``."""
    if nodes is not None and compression is not None:
        return (CudaNodeGroup if on_device else NodeGroup)(parameters, compression, nodes, way=way)
    if compression is None:
        return DeviceGroup(parameters) if on_device else GradientGroup(parameters)
    if isinstance(compression, CudaGroupCompression):
        return CudaCompressedGroup(parameters, compression, way=way)
    return CompressedGroup(parameters, compression, way=way)
