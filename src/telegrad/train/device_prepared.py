"""What is to be done with a bucket on a device, what a stream finds in it, and what it makes of it before anything is
communicated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from telegrad.comm import DeviceEntries
from telegrad.compress import Part
from telegrad.train.bucket import BucketLayout, Member


class Plan(NamedTuple):
    """``filled``: members that are not empty; ``parts``: those that are compressed now; ``dense``: members that are
    not; ``waiting``: parts that are among these, and take along what waits."""

    layout: BucketLayout
    filled: Sequence[Member]
    parts: tuple[Part, ...]
    dense: tuple[Member, ...]
    waiting: tuple[Part, ...]
    looks: bool

    @property
    def has_work(self) -> bool:
        """Whether there is something to be done but with velocities."""
        return bool(self.parts or self.waiting or self.looks)


class Leaving(NamedTuple):
    """The entries of all parts, one behind the other; ``ends``: int64, where those of each end."""

    entries: DeviceEntries
    ends: torch.Tensor


class Made(NamedTuple):
    """``faulty``: by filled member, if anybody looks. ``dense``: what is sent beside entries that leave, if there is
    any."""

    faulty: torch.Tensor | None
    leaving: Leaving | None = None
    dense: torch.Tensor | None = None


class Found:
    """What a bucket's gradients are like, on the device. ``places``: by name, those of one element each in ``active``
    (int64: there is something in the gradient, and all of it is finite), and in ``faults`` (int32, zeros at first).
    ``broken``: by parameter, whether its gradient is not finite."""

    def __init__(self, filled: Sequence[Member], buffer: torch.Tensor) -> None:
        """``filled``: at least one."""
        gradients = [buffer[one.offset : one.offset + one.size] for one in filled]
        # The largest magnitude is NaN or infinite where an entry is, and cannot overflow as a sum can.
        most = torch.stack([*torch._foreach_norm(gradients, math.inf)])
        finite = most < math.inf  # which no NaN is
        self.places = {one.name: slice(number, number + 1) for number, one in enumerate(filled)}
        self.broken = finite.logical_not()
        self.active = ((most > 0) & finite).to(torch.int64)
        self.faults = most.new_zeros(len(filled), dtype=torch.int32)


def filled_of(layout: BucketLayout) -> list[Member]:
    """Members that are not empty."""
    return [one for one in layout.members if one.size]


def name_of(layout: BucketLayout) -> str:
    """No two buckets that there are at a time have the same."""
    return layout.members[0].name
