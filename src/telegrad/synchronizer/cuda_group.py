"""Groups of gradients on a device, which a Synchronizer averages in streams, and what it can do there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from telegrad.communicator import Communicator, Work
from telegrad.communicator.cuda.runtime import LateRead
from telegrad.communicator.cuda.transfers import DeviceWork
from telegrad.communicator.operands import on_device
from telegrad.cost.send_method import GroupCost
from telegrad.synchronizer.clocks import Mark
from telegrad.synchronizer.gradient_group import EXACT_RANKS, GradientGroup, number_of
from telegrad.synchronizer.group_planning import TIMED
from telegrad.tuning.group_cost import measured_device_cost


class _Late(NamedTuple):
    """What the averages of a pass say of its number."""

    tail: LateRead
    number: int


class DeviceGroup(GradientGroup):
    """As a GradientGroup. The host waits for the device only where a gradient of this rank has not come: whether
    another rank has it decides what a parameter's gradient is."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._late: deque[_Late] = deque()
        self._end: Mark = None

    def launch(self, comm: Communicator, earlier: set[int], number: int) -> list[Work]:
        """As a GradientGroup's."""
        works = super().launch(comm, earlier, number)
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


def check_fits_device(plan: Any, wait_in: Any, compress: object) -> None:
    """Raises ``ValueError``, with the remedy, for arguments of a Synchronizer that work on the host alone."""
    if compress is not None and plan in TIMED and plan != "auto":
        raise ValueError(
            f"plan={plan!r} needs to know what compressed sums cost, which is not measured on a device: use 'auto' "
            "(groups of DDP's sizes), 'fixed', 'single', 'wfbp', or name the groups"
        )
    if wait_in is not None:
        raise ValueError(
            "wait_in is for parameters on the host: where they are on a device backward() waits for nothing; leave "
            "it out"
        )
