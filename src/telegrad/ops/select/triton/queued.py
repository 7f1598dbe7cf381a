"""Selections that nobody waits for: how many entries they moved is written where the entries are.

So they can stand in a stream between the kernels that make a gradient and a sum of ``DeviceEntries``. Where a sample
misled, or more entries reach a threshold than there is room for, the further passes over the residual are queued as
well; in all other cases their kernels find that nothing is to be done, and read no entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from telegrad.ops.select import TINY, Sign, check_room
from telegrad.ops.select.triton.ranked import Candidates, key_of
from telegrad.ops.select.triton.sources import FusedPass, Output, Source, cut_of, side_of
from telegrad.ops.triton import numbers_on


def queue_select(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    threshold: float,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    sign: Sign = 0,
) -> None:
    """As ``cpu.accumulate_select``, but ``count`` (int32 or int64, one element) becomes the number of entries moved.

    Of more entries than the outputs hold the first ones are moved, and the others stay in the residual. Does not wait.
    """
    side, room, size = side_of(sign), indices.numel(), residual.numel()
    check_room(indices, values, room)
    key = key_of(threshold, side)
    made = FusedPass(residual, gradient, side, bound=numbers_on(residual, key), room=room)
    out = Output(indices, values, offset)
    usable = (made.reached <= room).to(torch.int64)
    made.order(usable, out)
    if room < size:
        made.restore(usable)
        Source.whole_unless(usable, residual, side).move(numbers_on(residual, key - 1, 0), out)
    count.copy_(made.reached.clamp(max=room).view(count.shape))


def queue_topk(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    sign: Sign = 0,
    active: torch.Tensor | None = None,
) -> None:
    """As ``cpu.accumulate_topk``, but ``count`` (int32 or int64, one element) becomes the number of entries moved.

    That is k, or of one sign all there are. ``active``: int64, one element; if it is 0, the residual stays as it is and
    nothing is moved. Does not wait, but for a copy of 64 KiB when a device meets its first long residual.
    """
    check_room(indices, values, k)
    out = Output(indices[:k], values[:k], offset)
    candidates = Candidates(residual, gradient, k, side_of(sign), moments=False, active=active)
    moved = candidates.source.move(cut_of(candidates.source.kth(k)), out)
    rest = candidates.rest()
    if rest is not None:
        moved = moved + rest.move(cut_of(rest.kth(k)), out)
    count.copy_(moved.view(count.shape))


def queue_all(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    active: torch.Tensor | None = None,
) -> None:
    """As ``cpu.accumulate_all``, with ``count`` and ``active`` as of ``queue_topk``. Does not wait."""
    size = residual.numel()
    check_room(indices, values, size)
    positions = torch.arange(offset, offset + size, dtype=torch.int64, device=residual.device)
    indices[:size].view(torch.int32).copy_(positions)  # the bits of uint32, which torch does little with
    torch.add(residual, gradient, out=values[:size])
    if active is None:
        residual.zero_()
        count.fill_(size)
    else:
        residual.masked_fill_(active > 0, 0.0)
        count.copy_(torch.where(active > 0, size, 0).view(count.shape))


def queue_reused(
    residual: torch.Tensor,
    gradient: torch.Tensor | None,
    k: int,
    kept: Kept,
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    offset: int,
    active: torch.Tensor | None = None,
) -> None:
    """All entries at or above the threshold of ``kept``, if these are k/2 to 2k; otherwise, and at every
    ``kept.interval``-th call, as ``queue_topk``, and the threshold is the lowest magnitude moved. In between it follows
    the count: threshold *= (count / k) ** ``kept.gain``.

    ``indices`` and ``values`` have room for 2k entries, or all there are. ``count`` and ``active`` as of
    ``queue_topk``; if the latter is 0 ``kept`` stays, too. Does not wait. Source: RedSync §3.2; the entries are those
    of ``ReusedThreshold`` on a CPU.
    """
    most = min(2 * k, residual.numel())
    check_room(indices, values, most)
    side, out = side_of(0), Output(indices[:most], values[:most], offset)
    wanted = (kept.threshold > 0) & (kept.calls < kept.interval)
    bound = kept.threshold.to(torch.float32).view(torch.int32).to(torch.int64)
    made = FusedPass(
        residual,
        gradient,
        side,
        bound=torch.where(wanted, bound, numbers_on(residual, _BEYOND)),
        room=most,
        active=active,
    )
    enough = wanted & (2 * made.reached >= k) & (made.reached <= most)
    usable = torch.where(enough, made.reached, torch.zeros_like(made.reached))
    made.order(usable, out)
    made.restore(usable)
    source = Source.whole_unless(usable, residual, side, active)
    cut = cut_of(source.kth(k))
    moved = usable + source.move(cut, out)
    count.copy_(moved.view(count.shape))
    kept.follow(k, enough, made.reached, cut, active)


@dataclass(frozen=True)
class Kept:
    """What ``queue_reused`` remembers of a residual, on its device. ``threshold``: float64, one element, at most 0 for
    none; ``calls``: int64, one element: since it was found. ``interval``, ``gain``: see ``ReusedThreshold``."""

    threshold: torch.Tensor
    calls: torch.Tensor
    interval: int
    gain: float

    def follow(
        self, k: int, reused: torch.Tensor, reached: torch.Tensor, cut: torch.Tensor, active: torch.Tensor | None
    ) -> None:
        """After a call: corrected by the count where it was ``reused``, else where the cut was."""
        corrected = (self.threshold * (reached.to(torch.float64) / k) ** self.gain).clamp(min=TINY)
        lowest = torch.where(cut[1:] > 0, cut[:1], cut[:1] + 1).to(torch.int32).view(torch.float32).to(torch.float64)
        found = torch.where(lowest.isfinite(), lowest.clamp(min=TINY), torch.zeros_like(lowest))
        threshold = torch.where(reused, corrected, found)
        calls = torch.where(reused, self.calls + 1, torch.ones_like(self.calls))
        if active is not None:
            threshold = torch.where(active > 0, threshold, self.threshold)
            calls = torch.where(active > 0, calls, self.calls)
        self.threshold.copy_(threshold)
        self.calls.copy_(calls)


_BEYOND = 1 << 31
"""A key that no entry reaches."""
