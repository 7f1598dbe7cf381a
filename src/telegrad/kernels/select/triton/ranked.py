"""Selections by rank: exact top-k and RedSync's threshold search, each one fused pass on most inputs.

A random sample of the sums gives a key that somewhat more entries than are wanted should reach; the fused pass marks
those, and the choice is made among copies of them. Where the sample misled, the choice is made in further passes over
the residual, with the same result.
"""

from __future__ import annotations

import functools
import math
import struct

import numpy as np
import torch

from telegrad.kernels.select import Chosen
from telegrad.kernels.select.triton import cuts, reuse
from telegrad.kernels.select.triton.sources import FusedPass, Moments, Output, Side, Source
from telegrad.kernels.triton import launch, numbers_on, told

SMALL = 1 << 15
"""Below so many elements a sample costs more than it saves."""

_SAMPLE = 1 << 13
_SAMPLE_WARPS = 16


class Candidates:
    """Adds the gradient, and finds at least ``wanted`` entries of the residual if a sample shows how.

    ``source`` is what to rank. ``usable``: int64, one element; 0: the sample misled, and nothing has been ranked or
    moved; ``rank_all`` then makes the residual the source. ``active``: as of a FusedPass; if it is 0, there is nothing
    to rank.
    """

    def __init__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor | None,
        wanted: int,
        side: Side,
        *,
        moments: bool,
        active: torch.Tensor | None = None,
    ) -> None:
        size = residual.numel()
        rank = sample_rank(size, wanted)
        self._residual, self._side, self._active = residual, side, active
        if rank is None:
            made = FusedPass(residual, gradient, side, moments=moments, active=active)
            self._usable: torch.Tensor | None = None
            self.source = Source.whole(residual, side, active)
        else:
            bound = sampled_bound(residual, gradient, side, rank)
            room = room_of(size, wanted)
            made = FusedPass(residual, gradient, side, bound=bound, moments=moments, active=active)
            positions = torch.empty(room, dtype=torch.uint32, device=residual.device)
            values = torch.empty(room, dtype=torch.float32, device=residual.device)
            self._usable = made.copy_if(wanted, Output(positions, values, 0), or_all=not side.is_both)
            self.source = Source(residual, values, self._usable, side, positions)
        self.moments = made.moments

    @property
    def usable(self) -> torch.Tensor:
        return numbers_on(self._residual, 1) if self._usable is None else self._usable

    def rest(self) -> Source | None:
        """Where a sample misled, all of the residual; nothing where it did not. ``None``: no sample was taken. Does not
        wait."""
        if self._usable is None:
            return None
        return Source.whole_unless(self.usable, self._residual, self._side, self._active)

    def rank_all(self) -> None:
        """To rank the whole residual instead."""
        self._usable, self.source = None, Source.whole(self._residual, self._side)


def accumulate_topk(residual: torch.Tensor, gradient: torch.Tensor | None, k: int, side: Side, out: Output) -> Chosen:
    """As the contract says. Waits for the GPU once; twice where the sample misled."""
    candidates = Candidates(residual, gradient, k, side, moments=not side.is_both)
    while True:
        cut = candidates.source.kth(k, cuts_all=True)
        count = candidates.source.move(cut, out)
        usable, moved, key, ties, largest = told(candidates.usable, count, cut, _largest(candidates.moments, cut))
        if usable:
            return _chosen(moved, key, ties, largest, side)
        candidates.rank_all()


def accumulate_search(
    residual: torch.Tensor, gradient: torch.Tensor | None, k: int, tolerance: float, side: Side, out: Output
) -> Chosen:
    """As the contract says. Waits for the GPU twice; three times where the sample misled.

    The bisection runs on the CPU and counts nothing: k entries reach a bound if the k-th largest key does, and more
    than 2k if the next one after 2k does.
    """
    candidates = Candidates(residual, gradient, 2 * k + 1, side, moments=True)
    moments = candidates.moments
    assert moments is not None
    while True:
        at_k, beyond = candidates.source.kth(k), candidates.source.kth(2 * k + 1)
        usable, bits, count, top, largest, *keys = told(
            *(candidates.usable, moments.total.view(torch.int64), moments.count, moments.top, moments.largest),
            *(at_k, beyond),
        )
        if usable:
            break
        candidates.rank_all()
    total = struct.unpack("d", struct.pack("q", bits))[0]
    bound = _searched_bound(total / count if count else 0.0, value_of(top), tolerance, keys[0], keys[2], side)
    cut = at_k.masked_fill(at_k[:1] < 0, 0)
    if bound is not None:
        cut = numbers_on(residual, bound - 1, 0)
    moved, key, ties = told(candidates.source.move(cut, out), cut)
    return _chosen(moved, key, ties, largest, side)


def room_of(size: int, wanted: int) -> int:
    """The most entries that a bound of a sample may let pass, so that they are ranked, and not all."""
    return min(size, max(2 * wanted, size // 64))


def key_of(threshold: float, side: Side) -> int:
    """The key that entries of that magnitude have."""
    with np.errstate(over="ignore"):  # above the largest float32 nothing but infinity and NaN reaches it
        return max(side.lowest, int(np.float32(max(threshold, 0.0)).view(np.int32)))


def value_of(key: int) -> float:
    """The magnitude that has this key."""
    return float(np.int32(key).view(np.float32))


def _searched_bound(mean: float, top: float, tolerance: float, kth: int, beyond: int, side: Side) -> int | None:
    if not (math.isfinite(mean) and math.isfinite(top)):
        return None  # they say nothing about the others
    low, high = 0.0, 1.0
    while high - low > tolerance:
        ratio = low + (high - low) / 2
        bound = key_of(mean + ratio * (top - mean), side)
        if bound > kth:
            high = ratio
        elif bound <= beyond:
            low = ratio
        else:
            return bound
    return None


def _chosen(moved: int, key: int, ties: int, largest: int, side: Side) -> Chosen:
    threshold = value_of(key if ties else key + 1)
    return Chosen(moved, threshold, value_of(max(key, 0) if side.is_both else largest))


def _largest(moments: Moments | None, cut: torch.Tensor) -> torch.Tensor:
    return cut[:1] if moments is None else moments.largest


def sample_rank(size: int, wanted: int) -> int | None:
    """Where in a sample, from the top, the key stands that ``wanted`` entries should reach; ``None``: take no sample.

    Four standard deviations beyond the expected rank, and some for luck: a miss costs more passes.
    """
    expected = wanted / size * _SAMPLE
    rank = int(expected + 4 * math.sqrt(expected) + 8)
    return rank if size >= SMALL and rank <= _SAMPLE // 2 else None


def sampled_bound(
    residual: torch.Tensor, gradient: torch.Tensor | None, side: Side, rank: int, bound: torch.Tensor | None = None
) -> torch.Tensor:
    """About the key of that rank among the sampled sums, at least 1; int64, one element. ``bound`` keeps what it has
    unless that is BEYOND."""
    is_given = bound is not None
    if bound is None:
        bound = torch.empty(1, dtype=torch.int64, device=residual.device)
    words = sample_words(residual.device)
    launch(
        cuts.sample_bound,
        1,
        residual,
        residual if gradient is None else gradient,
        *(residual.numel(), words, rank, bound),
        ADD=gradient is not None,
        FLIP=side.flip,
        MASK=side.mask,
        SAMPLE=_SAMPLE,
        UNLESS=reuse.BEYOND if is_given else None,
        warps=_SAMPLE_WARPS,
    )
    return bound


@functools.cache
def sample_words(device: torch.device) -> torch.Tensor:
    """Random numbers of 31 bits, always the same ones. No stride: it could follow the columns of a matrix. Waits when
    a device is first met: every stream may then read them."""
    words = np.random.default_rng(0).integers(0, 1 << 31, _SAMPLE)
    return torch.from_numpy(words).to(device)
