"""How indices are cut into blocks, and what each takes: with torch's functions, as vectors over all possible blocks.

A leaf is 64 indices; a block is 1, 2, 4, 8 or 16 of them, of one chunk of 1,024. A block is halved where its halves,
cut as well as they can be, take fewer bytes. Nothing here waits for the GPU: torch.where would, of a number that it is
given, as that is copied there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from telegrad.kernels.pack import BLOCK_LEAST, BLOCK_MOST, RUN_LEAST

_HEADER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Of every leaf the block that begins there, int64; a count of 0: none does."""

    counts: torch.Tensor
    breaks: torch.Tensor  # indices that do not follow the one before
    widths: torch.Tensor
    runs: torch.Tensor  # 1: it holds runs, 0: gaps
    payloads: torch.Tensor  # bytes
    ends: torch.Tensor  # bytes of it and of all blocks before


@dataclass(frozen=True, slots=True)
class _Blocks:
    """All possible blocks of one size."""

    exist: torch.Tensor
    fields: tuple[torch.Tensor, ...]  # counts, breaks, widths, runs, payloads

    @property
    def bytes(self) -> torch.Tensor:
        return (self.fields[-1] + _HEADER_BYTES).masked_fill(~self.exist, 0)


def plan_of(indices: torch.Tensor) -> Plan:
    """Of strictly increasing indices, int64, at least one. Moves some 150 bytes of every index."""
    size = indices.numel()
    chunks = -(-size // BLOCK_MOST)
    breaks_before = torch.zeros(size, dtype=torch.int64, device=indices.device)
    torch.cumsum(indices[1:] - indices[:-1] != 1, 0, out=breaks_before[1:])
    levels = []
    leaves = 1
    while leaves * BLOCK_LEAST <= BLOCK_MOST:
        levels.append(_blocks_of(indices, breaks_before, leaves, chunks))
        leaves *= 2
    cuts = [torch.zeros_like(levels[0].exist)]
    best = levels[0].bytes
    for blocks in levels[1:]:
        halves = best.view(-1, 2).sum(1)
        cuts.append((blocks.fields[-1] > _HEADER_BYTES) & (halves < blocks.bytes))
        best = torch.where(cuts[-1], halves, blocks.bytes)
    grid = tuple(torch.zeros_like(field) for field in levels[0].fields)
    reached = levels[-1].exist
    for blocks, cut in zip(reversed(levels), reversed(cuts), strict=True):
        chosen = reached & ~cut
        step = grid[0].numel() // chosen.numel()
        for field, of_leaf in zip(blocks.fields, grid, strict=True):
            of_leaf[::step] = torch.where(chosen, field, of_leaf[::step])
        reached = (reached & cut).repeat_interleave(2)
        if step > 1:
            reached &= levels[step.bit_length() - 2].exist
    counts, breaks, widths, runs, counted = grid
    payloads = _payloads(indices, counts, widths, runs, counted)
    ends = (payloads + _HEADER_BYTES).masked_fill(counts == 0, 0).cumsum(0)
    return Plan(counts, breaks, widths, runs, payloads, ends)


def _payloads(
    indices: torch.Tensor, counts: torch.Tensor, widths: torch.Tensor, runs: torch.Tensor, counted: torch.Tensor
) -> torch.Tensor:
    """Blocks are cut as if gaps took what Elias-Fano code takes; those of gaps take less."""
    size, leaves = indices.numel(), counts.numel()
    places = torch.arange(size, device=indices.device)
    leaf = torch.arange(leaves, device=indices.device)
    block = leaf.masked_fill(counts == 0, 0).cummax(0).values  # to which each leaf belongs
    begins = leaf * BLOCK_LEAST
    of_place = block[places // BLOCK_LEAST]
    gaps = indices - torch.roll(indices, 1) - 1
    unary = (gaps >> widths[of_place]).masked_fill(places == begins[of_place], 0)
    before = torch.zeros(size + 1, dtype=torch.int64, device=indices.device)
    torch.cumsum(unary, 0, out=before[1:])
    first = begins.clamp(max=size)
    unary_of = before[(first + counts).clamp(max=size)] - before[first]
    as_gaps = _lows(counts - 1, widths) + ((counts - 1 + unary_of + 7) >> 3)
    return torch.where((runs == 0) & (counted > 0), as_gaps, counted)


def _blocks_of(indices: torch.Tensor, breaks_before: torch.Tensor, leaves: int, chunks: int) -> _Blocks:
    size, most = indices.numel(), leaves * BLOCK_LEAST
    begins = torch.arange(0, chunks * BLOCK_MOST, most, device=indices.device)
    lasts = (begins + most).clamp(max=size) - 1
    exist = begins < size
    begins = begins.clamp(max=size - 1)
    counts = (lasts + 1 - begins).masked_fill(~exist, 1)
    breaks = breaks_before[lasts] - breaks_before[begins]
    missing = indices[lasts] - indices[begins] - (counts - 1)
    breaks, missing = breaks.clamp(min=0), missing.clamp(min=0)  # of blocks that do not exist
    widths = _width(counts - 1, missing)
    payloads = (_lows(counts - 1, widths) + _highs(counts - 1, missing, widths)).masked_fill(missing == 0, 0)
    run_widths = _width(breaks, missing - breaks)
    held = counts - 1 - breaks
    present_widths = _width(breaks, held)
    run_bytes = 2 + _lows(breaks, run_widths) + _highs(breaks, missing - breaks, run_widths)
    run_bytes += _lows(breaks, present_widths) + _highs(breaks, held, present_widths)
    runs = (missing > 0) & ((breaks + 1) * RUN_LEAST <= counts) & (run_bytes < payloads)
    fields = (counts, breaks, torch.where(runs, run_widths, widths), runs.to(torch.int64))
    return _Blocks(exist, (*fields, torch.where(runs, run_bytes, payloads)))


def _width(count: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """floor(log2(spread / count)); 0 where that is less."""
    share = torch.div(spread, count.clamp(min=1), rounding_mode="floor")
    length = torch.frexp(share.to(torch.float64)).exponent.to(torch.int64)  # in bits: exact below 2^53
    return (length - 1).masked_fill((count <= 0) | (spread < count), 0)


def _lows(count: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    return (count * width + 7) >> 3


def _highs(count: torch.Tensor, spread: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    return ((count + (spread >> width) + 7) >> 3).masked_fill(count <= 0, 0)
