"""Ranks many residuals by as many launches as one takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from telegrad.ops.select.triton import cuts, sources
from telegrad.ops.triton import launch


def is_long(residual: torch.Tensor) -> bool:
    """Whether it is ranked together with others: one program ranks what is not."""
    return sources.blocks_of(residual.numel()) > 1


def rank_table(residuals: Sequence[torch.Tensor], ks: Sequence[int]) -> torch.Tensor:
    """What ``rank_long`` reads of them, of which one at least is long: int64, in host memory, to be copied to the
    device. It holds as long as the residuals stay where they are."""
    long = [number for number, one in enumerate(residuals) if is_long(one)]
    rows = [
        [0, *accumulate(_programs_of(residuals[number]) for number in long)],
        [*(residuals[number].data_ptr() for number in long), 0],
        [*(ks[number] for number in long), 0],
        [*long, 0],
    ]
    return torch.tensor(rows, dtype=torch.int64).view(-1)


def rank_long(
    residuals: Sequence[torch.Tensor],
    table: torch.Tensor,
    lengths: torch.Tensor,
    found: torch.Tensor,
    side: sources.Side,
) -> None:
    """Into ``found`` (int64, of shape (residuals, 2)), for those that are long, what ``Source.kth`` finds with
    ``cuts_all``: of the first ``lengths`` (int64, by residual) elements of each."""
    long = [one for one in residuals if is_long(one)]
    parts, programs = len(long), sum(map(_programs_of, long))
    keys: dict[str, Any] = {"FLIP": side.flip, "MASK": side.mask, "LOWEST": side.lowest}
    histograms = sources.zeroed_histograms(parts, found)
    stride = histograms.stride(0)
    for number, (width, shift) in enumerate(sources.DIGITS):
        is_first, is_last = number == 0, number == len(sources.DIGITS) - 1
        digit: dict[str, Any] = {**keys, "STRIDE": stride, "SHIFT": shift, "WIDTH": width, "BLOCK": sources.BLOCK}
        digit |= {"FIRST": is_first, "CUT": is_last}
        counted = (table, parts, parts.bit_length(), lengths, found, histograms[0, number])
        launch(cuts.count_digits_of_many, programs, *counted, **digit)


def _programs_of(residual: torch.Tensor) -> int:
    return min(sources.blocks_of(residual.numel()), sources.PROGRAMS)
