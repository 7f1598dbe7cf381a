"""Selections that nobody waits for: how many entries they moved is written where the entries are.

So they can stand in a stream between the kernels that make a gradient and a sum of ``DeviceEntries``. Where a sample
misled, or more entries reach a threshold than there is room for, the further passes over the residual are queued as
well; in all other cases their kernels find that nothing is to be done, and read no entry.
"""

from __future__ import annotations

import torch

from telegrad.ops.select import Sign, check_room
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
) -> None:
    """As ``cpu.accumulate_topk``, but ``count`` (int32 or int64, one element) becomes the number of entries moved.

    That is k, or of one sign all there are. Does not wait, but for a copy of 64 KiB when a device meets its first long
    residual.
    """
    check_room(indices, values, k)
    out = Output(indices[:k], values[:k], offset)
    candidates = Candidates(residual, gradient, k, side_of(sign), moments=False)
    moved = candidates.source.move(cut_of(candidates.source.kth(k)), out)
    rest = candidates.rest()
    if rest is not None:
        moved = moved + rest.move(cut_of(rest.kth(k)), out)
    count.copy_(moved.view(count.shape))
