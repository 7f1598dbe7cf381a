"""Selections that nobody waits for: how many entries they moved is written where the entries are.

So they can stand in a stream between the kernels that make a gradient and a sum of ``DeviceEntries``. Further passes
over the residual, for where a sample misled, are queued as well; in all other cases their kernels find that nothing is
to be done, and read no entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from telegrad.ops.select import TINY, Sign
from telegrad.ops.select.arguments import check_arguments
from telegrad.ops.select.triton import reuse
from telegrad.ops.select.triton.many import is_long, rank_long, rank_table
from telegrad.ops.select.triton.ranked import (
    Candidates,
    key_of,
    room_of,
    sample_rank,
    sample_words,
    sampled_bound,
)
from telegrad.ops.select.triton.sources import FusedPass, Output, Source, launch_over, side_of

__all__ = ["Kept", "is_long", "prepare", "queue_all", "queue_reused", "queue_select", "queue_topk", "rank_table"]


def prepare(x: torch.Tensor) -> None:
    """Copies to the device of ``x`` what ``queue_topk`` needs there. Waits for it the first time."""
    sample_words(x.device)


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
    check_arguments(residual, gradient, indices, values, len(indices))
    side = side_of(sign)
    made = FusedPass(residual, gradient, side, bound=key_of(threshold, side))
    made.take(Output(indices, values, offset))
    count.copy_(made.reached.clamp(max=indices.numel()).view(count.shape))


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

    That is k, or of one sign all there are. ``active``: int64, one element, 0 or 1; if it is 0, the residual stays as
    it is and nothing is moved. Does not wait, but for a copy of 64 KiB when a device meets its first long residual,
    unless ``prepare`` has made that.
    """
    check_arguments(residual, gradient, indices, values, k, k)
    out = Output(indices[:k], values[:k], offset)
    candidates = Candidates(residual, gradient, k, side_of(sign), moments=False, active=active)
    moved = candidates.source.move(candidates.source.kth(k, cuts_all=True), out, count.view(1))
    rest = candidates.rest()
    if rest is not None:
        moved.add_(rest.move(rest.kth(k, cuts_all=True), out))


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
    check_arguments(residual, gradient, indices, values, size)
    positions = torch.arange(offset, offset + size, dtype=torch.int64, device=residual.device)
    indices[:size].view(torch.int32).copy_(positions)  # the bits of uint32, which torch does little with
    torch.add(residual, gradient, out=values[:size])
    if active is None:
        residual.zero_()
        count.fill_(size)
    else:
        residual.masked_fill_(active > 0, 0.0)
        count.copy_(((active > 0) * size).view(count.shape))


def queue_reused(
    residuals: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    ks: Sequence[int],
    kept: Kept,
    indices: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    offsets: Sequence[int],
    active: Sequence[torch.Tensor] | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """Of each residual all entries at or above its threshold in ``kept``, if these are k/2 to 2k; otherwise, and at
    every ``kept.interval``-th call, as ``queue_topk``, and the threshold is the lowest magnitude moved. In between it
    follows the count: threshold *= (count / k) ** ``kept.gain``.

    One of each for every residual: ``ks`` are those of ``kept.limits``; ``indices`` and ``values`` have room for 2k
    entries, or all there are; ``counts`` and ``active`` as of ``queue_topk``, and where the latter is 0 what is kept
    stays, too. What is decided, is decided for all residuals at once: to launch it for each would take longer than the
    passes over small ones; with ``table``, ``rank_table`` of these on their device, long residuals are ranked at once,
    too. Does not wait. Source: RedSync §3.2; the entries are those of ``ReusedThreshold`` on a CPU.
    """
    side, numbers = side_of(0), range(len(residuals))
    outputs = []
    for number in numbers:
        residual, wanted_of_it = residuals[number], ks[number]
        most = min(2 * wanted_of_it, residual.numel())
        check_arguments(residual, gradients[number], indices[number], values[number], most, wanted_of_it)
        outputs.append(Output(indices[number][:most], values[number][:most], offsets[number]))
    parts, device = len(residuals), kept.threshold.device
    rows = torch.empty(7, parts, dtype=torch.int64, device=device)
    bounds, reuses, reached, usable, listed, lengths, moved = rows
    takes_part, held = reached if active is None else torch.cat([*active]), {"HELD": active is not None}

    def decide(kernel: Any, *tensors: Any, **options: Any) -> None:
        launch_over(parts, kernel, *tensors, **options, block=_PARTS, warps=1)

    decide(reuse.set_bounds, kept.threshold, kept.calls, bounds, reuses, parts, kept.interval, BEYOND=reuse.BEYOND)
    ranks = [_sampled_at(residual, k) for residual, k in zip(residuals, ks, strict=True)]
    sampled = [(number, rank) for number, rank in enumerate(ranks) if rank is not None]
    for number, rank in sampled:
        sampled_bound(residuals[number], gradients[number], side, rank, bounds[number : number + 1])
    made = [
        FusedPass(
            residuals[number],
            gradients[number],
            side,
            bound=bounds[number : number + 1],
            active=None if active is None else active[number],
            reached=reached[number : number + 1],
        )
        for number in numbers
    ]
    found = (reuses, reached, kept.limits, takes_part)
    decide(reuse.decide_reuse, *found, usable, listed, lengths, parts, **held)
    sources = []
    for number in numbers:
        own = slice(number, number + 1)
        made[number].take(outputs[number], usable[own])
        sources.append(Source(residuals[number], residuals[number], lengths[own], side))
    cuts = torch.empty(parts, 2, dtype=torch.int64, device=device)
    if table is not None:
        rank_long(residuals, table, lengths, cuts, side)
    for number, source in enumerate(sources):
        if table is None or not is_long(residuals[number]):
            source.kth(ks[number], cuts[number], cuts_all=True)
        source.move(cuts[number], outputs[number], moved[number : number + 1])
    for number, _ in sampled:  # where one of the two has nothing to rank, it cuts and moves 0
        own = slice(number, number + 1)
        cut, count = _rank_listed(made[number], residuals[number], ks[number], listed[own], outputs[number])
        cuts[number].add_(cut)
        moved[own].add_(count)
    state = (kept.threshold, kept.calls, kept.limits, usable, cuts, moved, takes_part)
    decide(reuse.follow_reuse, *state, parts, GAIN=kept.gain, TINY=TINY, **held)
    torch._foreach_copy_([count.view(1) for count in counts], [*moved.split(1)])


@dataclass(frozen=True)
class Kept:
    """What ``queue_reused`` remembers of residuals, on their device, contiguous. ``threshold``: float64, at most 0 for
    none; ``calls``: int64, since it was found; ``limits``: int64, for each residual k, the most entries that may reach
    the threshold (2k, or its size), and its size. ``interval``, ``gain``: see ``ReusedThreshold``."""

    threshold: torch.Tensor
    calls: torch.Tensor
    limits: torch.Tensor
    interval: int
    gain: float


_PARTS = 128  # residuals that one program decides for

SAMPLED = 1 << 25
"""From so many elements on a threshold is found anew among entries that reach a bound of a sample. That takes a dozen
launches in each call; to rank all of 2**26 elements, in every eighth, takes 2 ms on an H200."""


def _sampled_at(residual: torch.Tensor, k: int) -> int | None:
    """See ``sample_rank``."""
    return sample_rank(residual.numel(), k) if residual.numel() >= SAMPLED else None


def _rank_listed(
    made: FusedPass, residual: torch.Tensor, k: int, listed: torch.Tensor, out: Output
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves the k largest of the marked entries, of which ``listed`` are to be ranked; returns the cut, and how many
    were moved."""
    room, device = room_of(residual.numel(), k), residual.device
    positions = torch.empty(room, dtype=torch.uint32, device=device)
    values = torch.empty(room, dtype=torch.float32, device=device)
    made.copy(Output(positions, values, 0), listed)
    source = Source(residual, values, listed, side_of(0), positions)
    cut = source.kth(k, cuts_all=True)
    return cut, source.move(cut, out)
