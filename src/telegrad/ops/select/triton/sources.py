"""Launches the kernels: fused passes, and the sources that a selection by rank looks at.

Nothing here waits for the GPU: counts and keys stay on the device until ``told`` asks for all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from telegrad.ops.select import Sign
from telegrad.ops.select.triton import cuts, passes
from telegrad.ops.triton import launch, numbers_on

BLOCK = 4096
"""Entries of one program, where nothing else is said; and of the longest source that one program ranks."""

PASS_BLOCK = 2048
"""Entries of one program of a fused pass. With 4,096 each of its 256 threads has so many registers (163 as Triton 3.6
compiles it for sm_90, 128 as 3.7 does) that a multiprocessor holds one program or two, whose loads wait for each other;
with 2,048 (80 and 76) it holds three. With fewer the additions to the counter that all programs share would count."""

PROGRAMS = 512  # of a histogram: more of them than a GPU runs at once add no speed, but each adds all its bins
# Bits of each, and those below. A histogram in registers takes as long as it has bins: 2,048 of them are many times as
# long as one more reading of the entries.
DIGITS = ((8, 23), (8, 15), (8, 7), (7, 0))
MOST_BINS = 1 << max(width for width, _ in DIGITS)


@dataclass(frozen=True, slots=True)
class Side:
    """Which entries can be chosen, as kernels take it: (bits ^ flip) & mask is the key, ``lowest`` the first to do."""

    flip: int
    mask: int
    lowest: int

    @property
    def is_both(self) -> bool:
        """Whether entries of both signs can be chosen."""
        return self.lowest == 0


_SIDES = {0: Side(0, 0x7FFFFFFF, 0), 1: Side(0, -1, 1), -1: Side(-0x80000000, -1, 1)}


def side_of(sign: Sign) -> Side:
    """The side of that sign."""
    return _SIDES[sign]


@dataclass(frozen=True, slots=True)
class Output:
    """Where chosen entries go: uint32 (position + ``offset``) and float32."""

    indices: torch.Tensor
    values: torch.Tensor
    offset: int


@dataclass(frozen=True, slots=True)
class Moments:
    """What sums are like, before any is cleared, on the device. Each has one element."""

    total: torch.Tensor  # of the side's magnitudes, float64; its bits are the same in every run on one kind of GPU
    count: torch.Tensor  # how many entries those are, int64
    top: torch.Tensor  # the side's highest key, int64
    largest: torch.Tensor  # the highest key of both sides, int64


def launch_over(
    entries: int, kernel: Any, x: torch.Tensor, *arguments: Any, block: int | None = None, **options: Any
) -> None:
    """Runs a program of ``kernel`` for every ``block`` (by default BLOCK) of so many entries."""
    launch(kernel, blocks_of(entries, block), x, *arguments, **options, BLOCK=block or BLOCK)


def blocks_of(entries: int, block: int | None = None) -> int:
    """Programs for so many entries."""
    return -(-entries // (block or BLOCK))


class FusedPass:
    """residual += gradient, on its way packing and clearing what reaches ``bound`` (a key, int64, one element).

    ``bound=None``: nothing is packed. ``room``: the most entries that can be; ``reached`` is how many there are.
    ``moments``: whether to take them. ``active``: int64, one element; 0: nothing is read, added or packed. ``reached``
    may be given, an int64 zero of one element.
    """

    def __init__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor | None,
        side: Side,
        *,
        bound: torch.Tensor | None = None,
        room: int = 0,
        moments: bool = False,
        active: torch.Tensor | None = None,
        reached: torch.Tensor | None = None,
    ) -> None:
        size = residual.numel()
        blocks = self._blocks = blocks_of(size, PASS_BLOCK)

        def per_block(dtype: torch.dtype, wanted: bool) -> torch.Tensor:
            return torch.empty(blocks if wanted else 1, dtype=dtype, device=residual.device)

        select = bound is not None
        self._residual, self._room = residual, room
        if reached is None:  # which is written where something is packed
            zeros = torch.zeros if select else torch.empty
            reached = zeros(1, dtype=torch.int64, device=residual.device)
        self.reached = reached
        self._indices = torch.empty(room, dtype=torch.uint32, device=residual.device)
        self._values = torch.empty(room, dtype=torch.float32, device=residual.device)
        self._starts, self._counts = per_block(torch.int64, select), per_block(torch.int32, select)
        sums, sides = per_block(torch.float64, moments), per_block(torch.int32, moments)
        tops, largest = per_block(torch.int32, moments), per_block(torch.int32, moments)
        launch_over(
            size,
            passes.fused_pass,
            residual,
            residual if gradient is None else gradient,
            size,
            self.reached if bound is None else bound,
            room,
            *(self._indices, self._values, self.reached, self._starts, self._counts),
            *(sums, sides, tops, largest),
            self.reached if active is None else active,
            FLIP=side.flip,
            MASK=side.mask,
            HELD=active is not None,
            ADD=gradient is not None,
            SELECT=select,
            MOMENTS=moments,
            block=PASS_BLOCK,
        )
        self.moments: Moments | None = None
        if moments:
            count = numbers_on(residual, size) if side.is_both else sides.sum().reshape(1)
            self.moments = Moments(sums.sum().reshape(1), count, _highest(tops), _highest(largest))

    def order(self, usable: torch.Tensor, out: Output) -> None:
        """Copies what was packed into ``out``, ascending. ``usable``: int64, one element; 0: does nothing."""
        ends = self._counts.cumsum(0)
        packed = (self._indices, self._values, self._starts, self._counts)
        taken = (ends, usable, out.indices, out.values, out.offset)
        launch(passes.order_blocks, self._blocks, *packed, *taken)

    def restore(self, usable: torch.Tensor) -> None:
        """What was packed is in the residual again. ``usable``: int64, one element; unless it is 0, does nothing."""
        packed = (self._indices, self._values, self._starts, self._counts)
        launch(passes.restore_blocks, self._blocks, self._residual, self._room, *packed, usable)


@dataclass(frozen=True, slots=True)
class Source:
    """What is ranked: a residual, or entries that have left it (``positions``), ascending.

    ``length``: how many they are, int64, one element, at most ``values.numel()``.
    """

    residual: torch.Tensor
    values: torch.Tensor
    length: torch.Tensor
    side: Side
    positions: torch.Tensor | None = None

    @classmethod
    def whole(cls, residual: torch.Tensor, side: Side, active: torch.Tensor | None = None) -> Source:
        """All of a residual; nothing if ``active`` (int64, one element, 0 or 1) is 0."""
        size = residual.numel()
        return cls(residual, residual, numbers_on(residual, size) if active is None else active * size, side)

    @classmethod
    def whole_unless(
        cls, usable: torch.Tensor, residual: torch.Tensor, side: Side, active: torch.Tensor | None = None
    ) -> Source:
        """As ``whole`` if ``usable`` (int64, one element) is 0, else nothing: its kernels then read nothing."""
        whole = cls.whole(residual, side, active)
        whole.length.masked_fill_(usable > 0, 0)
        return whole

    def kth(self, k: int, out: torch.Tensor | None = None, *, cuts_all: bool = False) -> torch.Tensor:
        """The k-th largest key, and its rank among those that equal it: two int64, also written to ``out``; (-1, …):
        there are fewer than k; with ``cuts_all`` zeros: as a cut that is behind all of them.

        Reads 4 bytes of every entry four times; of no more than a block's, once.
        """
        blocks, side = blocks_of(self.values.numel()), self.side
        keys: dict[str, Any] = {"FLIP": side.flip, "MASK": side.mask, "LOWEST": side.lowest}
        found = torch.empty(2, dtype=torch.int64, device=self.values.device) if out is None else out
        if blocks == 1:
            launch_over(1, cuts.find_kth_of_few, self.values, self.length, k, found, **keys, CUT=cuts_all)
            return found
        histograms = torch.zeros(len(DIGITS), MOST_BINS, dtype=torch.int64, device=self.values.device)
        programs = min(blocks, PROGRAMS)
        for number, ((width, shift), histogram) in enumerate(zip(DIGITS, histograms, strict=True)):
            is_first, is_last = number == 0, number == len(DIGITS) - 1
            digit: dict[str, Any] = {**keys, "SHIFT": shift, "WIDTH": width, "FIRST": is_first, "BLOCK": BLOCK}
            launch(cuts.count_digits, programs, self.values, self.length, found, histogram, **digit)
            launch(cuts.find_digit, 1, histogram, found, k, WIDTH=width, FIRST=is_first, CUT=cuts_all and is_last)
        return found

    def move(self, cut: torch.Tensor, out: Output, total: torch.Tensor | None = None) -> torch.Tensor:
        """Moves, in order, all entries whose key is greater than ``cut[0]``, and the first ``cut[1]`` that equal it.

        As many as ``out`` holds; returns how many there are, int64, one element, or ``total``, which then has it. Reads
        4 bytes of every entry twice; of no more than a block's, once.
        """
        most, side = self.values.numel(), self.side
        blocks = blocks_of(most)
        sides: dict[str, Any] = {"FLIP": side.flip, "MASK": side.mask}
        if total is None:
            total = torch.empty(1, dtype=torch.int64, device=self.values.device)
        if blocks == 1:
            greater_ends = equal_ends = cut
        else:
            counts = torch.empty(2, blocks, dtype=torch.int64, device=self.values.device)
            launch_over(most, cuts.count_cut, self.values, self.length, cut, *counts, **sides)
            # As one row: of two torch sums up each by a block of threads, of one by as many as there are.
            greater_ends, equal_ends = counts.view(-1).cumsum(0).view(2, blocks)
        launch_over(
            most,
            cuts.move_cut,
            self.residual,
            out.indices if self.positions is None else self.positions,
            *(self.values, self.length, cut, greater_ends, equal_ends),
            *(out.indices.numel(), out.indices, out.values, total, out.offset),
            LISTED=self.positions is not None,
            ALONE=blocks == 1,
            **sides,
        )
        return total


def _highest(keys: torch.Tensor) -> torch.Tensor:
    return keys.max().to(torch.int64).clamp(min=0).reshape(1)
