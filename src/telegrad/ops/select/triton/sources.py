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

PASS_BLOCK = 512
"""Entries of one program of a fused pass, which is one warp: its lanes count without waiting for others. Measured on an
H200 (benchmarks/gpu/blocks.py): with 256 the programs are too many, the more so as each adds to one counter; with more
each holds too many registers."""

PASS_WARPS = 1

GROUP = 64
"""Blocks whose packed entries one program orders."""

_TILE_WARPS = 4  # of such a program: it has 16 entries of each block at a time

PROGRAMS = 512  # of a histogram: more of them than a GPU runs at once add no speed, but each adds all its bins
# Bits of each, and those below. A histogram in registers takes as long as it has bins: 2,048 of them are many times as
# long as one more reading of the entries.
DIGITS = ((8, 23), (8, 15), (8, 7), (7, 0))
HISTOGRAM = (1 << max(width for width, _ in DIGITS)) + 1
"""Numbers of one: those of its bins, and how many programs have counted."""

MOST_ADDED = 1024
"""Blocks whose counts each program of a move adds up itself, as that takes less time than launching a sum of them."""


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
    """residual += gradient, on its way packing and clearing what reaches ``bound`` (a key: int64, one element, or the
    number).

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
        bound: torch.Tensor | int | None = None,
        room: int = 0,
        moments: bool = False,
        active: torch.Tensor | None = None,
        reached: torch.Tensor | None = None,
    ) -> None:
        size = residual.numel()
        blocks = self._blocks = blocks_of(size, PASS_BLOCK)
        groups = self._groups = -(-blocks // GROUP)
        select, device = bound is not None, residual.device
        # Allocations and launches cost what small kernels do: counters are zeroed by one, what is not used is not made.
        counters = groups if select and groups > 1 else 0
        if reached is None:
            make = torch.zeros if select else torch.empty
            zeroed = make(1 + counters, dtype=torch.int64, device=device)
            reached = zeroed[:1] if counters else zeroed
            self._totals = zeroed[1:] if counters else zeroed
        else:
            self._totals = torch.zeros(counters, dtype=torch.int64, device=device) if counters else reached
        self._residual, self._room, self._bound, self.reached = residual, room, bound, reached
        self._indices = self._values = self._starts = self._counts = reached
        if select:
            self._indices = torch.empty(room, dtype=torch.uint32, device=device)
            self._values = torch.empty(room, dtype=torch.float32, device=device)
            self._starts = torch.empty(blocks, dtype=torch.int64, device=device)
            self._counts = torch.empty(blocks, dtype=torch.int32, device=device)
        sums = sides = tops = largest = reached
        if moments:
            sums = torch.empty(blocks, dtype=torch.float64, device=device)
            sides, tops, largest = (torch.empty(blocks, dtype=torch.int32, device=device) for _ in range(3))
        launch_over(
            size,
            passes.fused_pass,
            residual,
            residual if gradient is None else gradient,
            size,
            reached if bound is None else bound,
            room,
            *(self._indices, self._values, reached, self._starts, self._counts, self._totals),
            *(sums, sides, tops, largest),
            reached if active is None else active,
            FLIP=side.flip,
            MASK=side.mask,
            HELD=active is not None,
            ADD=gradient is not None,
            SELECT=select,
            MOMENTS=moments,
            KNOWN=isinstance(bound, int),
            GROUP=GROUP if counters else 0,
            block=PASS_BLOCK,
            warps=PASS_WARPS,
        )
        self.moments: Moments | None = None
        if moments:
            count = numbers_on(residual, size) if side.is_both else sides.sum().reshape(1)
            self.moments = Moments(sums.sum().reshape(1), count, _highest(tops), _highest(largest))

    def order(self, usable: torch.Tensor, out: Output) -> None:
        """Copies what was packed into ``out``, ascending. ``usable``: int64, one element; 0: does nothing."""
        self._order(usable, 0, out, DECIDE=False, FEWER=False)

    def order_if(self, least: int, out: Output, *, or_all: bool = False) -> torch.Tensor:
        """Does so where at least so many entries reach the bound, and all had room; returns how many, int64, one
        element, or 0. ``or_all``: fewer do where the bound is 1: they are all of their side."""
        usable = torch.empty(1, dtype=torch.int64, device=self._residual.device)
        self._order(usable, least, out, DECIDE=True, FEWER=or_all)
        return usable

    def _order(self, usable: torch.Tensor, least: int, out: Output, **how: Any) -> None:
        packed = (self._indices, self._values, self._starts, self._counts, self._totals, self._blocks)
        bound = self._bound if how["FEWER"] else self.reached
        decided = (self.reached, bound, usable, least, self._room)
        taken = (out.indices, out.values, out.offset)
        launch(passes.order_blocks, self._groups, *packed, *decided, *taken, **how, GROUP=GROUP, warps=_TILE_WARPS)

    def restore(self, usable: torch.Tensor) -> None:
        """What was packed is in the residual again. ``usable``: int64, one element; unless it is 0, does nothing."""
        packed = (self._indices, self._values, self._starts, self._counts, self._blocks)
        given = (self._residual, self._room, *packed, usable)
        launch(passes.restore_blocks, self._groups, *given, GROUP=GROUP, warps=_TILE_WARPS)


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
        histograms = zeroed_histograms(1, self.values)[0]
        programs = min(blocks, PROGRAMS)
        for number, ((width, shift), histogram) in enumerate(zip(DIGITS, histograms, strict=True)):
            digit: dict[str, Any] = {**keys, "SHIFT": shift, "WIDTH": width, "FIRST": number == 0, "BLOCK": BLOCK}
            is_cut = cuts_all and number == len(DIGITS) - 1
            launch(cuts.count_digits, programs, self.values, self.length, found, histogram, k, **digit, CUT=is_cut)
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
        tallies, are_ends = cut, blocks > MOST_ADDED
        if blocks > 1:
            tallies = torch.empty(2 * blocks, dtype=torch.int64, device=self.values.device)
            launch_over(most, cuts.count_cut, self.values, self.length, cut, tallies, **sides)
            if are_ends:  # as one row: of two torch sums up each by a block of threads, of one by as many as there are
                tallies = tallies.cumsum(0)
        launch_over(
            most,
            cuts.move_cut,
            self.residual,
            out.indices if self.positions is None else self.positions,
            *(self.values, self.length, cut, tallies),
            *(out.indices.numel(), out.indices, out.values, total, out.offset),
            LISTED=self.positions is not None,
            ALONE=blocks == 1,
            ENDS=are_ends,
            **sides,
        )
        return total


def _highest(keys: torch.Tensor) -> torch.Tensor:
    return keys.max().to(torch.int64).clamp(min=0).reshape(1)


def zeroed_histograms(parts: int, x: torch.Tensor) -> torch.Tensor:
    """On the device of ``x``, for each part and digit: how many entries have each, and how many programs have counted;
    int64, of shape (parts, digits, HISTOGRAM)."""
    return torch.zeros(parts, len(DIGITS), HISTOGRAM, dtype=torch.int64, device=x.device)
