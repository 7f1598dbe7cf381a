"""Selections that nobody waits for: how many entries they moved is written where the entries are.

So they can stand in a stream between the kernels that make a gradient and a sum of ``DeviceEntries``. Further passes
over the residual, for where a sample misled, are queued as well; in all other cases their kernels find that nothing is
to be done, and read no entry.
"""

from __future__ import annotations

import torch

from telegrad.kernels.select import Sign
from telegrad.kernels.select.arguments import check_arguments
from telegrad.kernels.select.triton.launches import (
    Candidates,
    FusedPass,
    Output,
    Reusing,
    key_of,
    queue_reused,
    reuse_table,
    sample_words,
    side_of,
)

__all__ = ["Reusing", "prepare", "queue_all", "queue_reused", "queue_select", "queue_topk", "reuse_table"]


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
