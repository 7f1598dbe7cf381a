"""A random subset: the first different positions of a counter-based random sequence, the same ones as on a CPU."""

from __future__ import annotations

import math

import torch

from telegrad.kernels.select.triton import draws
from telegrad.kernels.select.triton.sources import launch_over


def random_subset(draw: tuple[int, int, int, int], size: int, k: int, device: torch.device) -> torch.Tensor:
    """``k`` of the positions below ``size``, ascending, int64. Waits for the GPU once or twice.

    Of more than half of all, those that stay are drawn.
    """
    stays = k > size // 2
    drawn = _first_different(draw, size, size - k if stays else k, device)
    if not stays:
        return drawn
    left = torch.ones(size, dtype=torch.bool, device=device)
    left[drawn] = False
    return left.nonzero()[:, 0]


def _first_different(draw: tuple[int, int, int, int], size: int, wanted: int, device: torch.device) -> torch.Tensor:
    """The first ``wanted`` different positions of the sequence, ascending."""
    seed, call, rank, stream = draw
    count = _draws(size, wanted)
    while True:
        positions = torch.empty(count, dtype=torch.int64, device=device)
        key = (seed & 0xFFFFFFFF, seed >> 32)
        launch_over(count, draws.draw_positions, positions, count, size, call, rank, stream, *key)
        ascending, order = positions.sort(stable=True)  # of equal positions the first draw comes first
        is_new = torch.ones_like(ascending, dtype=torch.bool)
        is_new[1:] = ascending[1:] != ascending[:-1]
        by_draw = torch.empty_like(ascending)
        by_draw[order] = is_new.to(torch.int64)
        chosen = ascending[is_new & (by_draw.cumsum(0)[order] <= wanted)]
        if chosen.numel() == wanted:
            return chosen
        count *= 2


def _draws(size: int, wanted: int) -> int:
    """How many draws have so many different positions among them, almost surely."""
    expected = -size * math.log1p(-wanted / size)
    return math.ceil(expected + 6 * math.sqrt(expected)) + 32
