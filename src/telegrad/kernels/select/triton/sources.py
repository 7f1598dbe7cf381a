"""Launches the kernels: fused passes, and the sources that a selection by rank looks at.

Nothing here waits for the GPU: counts and keys stay on the device until ``told`` asks for all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from telegrad.kernels.select import Sign
from telegrad.kernels.select.triton import cuts, passes
from telegrad.kernels.triton import launch, numbers_on

BLOCK = 4096
"""Entries of one program, where nothing else is said; and of the longest source that one program ranks."""

PASS_BLOCK = 512
"""Entries of one program of a fused pass, a multiple of 32."""

PASS_WARPS = 1

GROUP = 1024
"""Words of marks, of 32 entries each, that one program takes entries by."""

GROUP_WARPS = 8

PROGRAMS = 512  # of what ranks and cuts: more than a GPU runs at once add no speed, and mostly have nothing to do
# Bits of each, and those below. A histogram in registers takes as long as it has bins: 2,048 of them are many times as
# long as one more reading of the entries.
DIGITS = ((8, 23), (8, 15), (8, 7), (7, 0))
HISTOGRAM = (1 << max(width for width, _ in DIGITS)) + 1
"""Numbers of one: those of its bins, and how many programs have counted."""

MOST_ADDED = 4096
"""Blocks or groups whose counts each program that needs what lies before it adds up itself: launching a sum of them
would take longer."""


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
    """residual += gradient, on its way marking what reaches ``bound`` (a key: int64, one element, or the number).

    ``bound=None``: nothing is marked. ``reached``: how many entries are, int64, one element; it may be given. Until
    they are taken they stay in the residual. ``moments``: whether to take them. ``active``: int64, one element; 0:
    nothing is read, added or marked.
    """

    def __init__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor | None,
        side: Side,
        *,
        bound: torch.Tensor | int | None = None,
        moments: bool = False,
        active: torch.Tensor | None = None,
        reached: torch.Tensor | None = None,
    ) -> None:
        size, select, device = residual.numel(), bound is not None, residual.device
        blocks = blocks_of(size, PASS_BLOCK)
        # Allocations and launches cost what small kernels do: what is not used is not made.
        if reached is None:
            # Its kernels write it, of which there are none where there are no elements.
            make = torch.empty if size else torch.zeros
            reached = make(1, dtype=torch.int64, device=device)
        self.reached = reached
        self._residual, self._bound = residual, bound
        self._words = words = blocks * (PASS_BLOCK // 32)
        self._groups = groups = -(-words // GROUP)
        marks = torch.empty(words, dtype=torch.uint32, device=device) if select else reached
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
            *(marks, reached, sums, sides, tops, largest),
            reached if active is None else active,
            FLIP=side.flip,
            MASK=side.mask,
            HELD=active is not None,
            ADD=gradient is not None,
            SELECT=select,
            MOMENTS=moments,
            KNOWN=isinstance(bound, int),
            block=PASS_BLOCK,
            warps=PASS_WARPS,
        )
        if select:
            self._marks, self._are_ends = marks, groups > MOST_ADDED
            totals = torch.empty(groups, dtype=torch.int64, device=device)
            launch(passes.count_marks, groups, marks, words, totals, reached, GROUP=GROUP, warps=GROUP_WARPS)
            self._totals = totals.cumsum(0) if self._are_ends else totals
        self.moments: Moments | None = None
        if moments:
            count = numbers_on(residual, size) if side.is_both else sides.sum().reshape(1)
            self.moments = Moments(sums.sum().reshape(1), count, _highest(tops), _highest(largest))

    def take(self, out: Output, usable: torch.Tensor | None = None) -> None:
        """What was marked leaves the residual: the first entries, as many as ``out`` holds, ascending. ``usable``:
        int64, one element; 0: does nothing."""
        self._take(out, self.reached if usable is None else usable, 0, DECIDE=False, FEWER=False, CLEAR=True)

    def copy(self, out: Output, usable: torch.Tensor) -> None:
        """Copies it, and nothing leaves the residual."""
        self._take(out, usable, 0, DECIDE=False, FEWER=False, CLEAR=False)

    def copy_if(self, least: int, out: Output, *, or_all: bool = False) -> torch.Tensor:
        """Copies what was marked, ascending, where that are at least so many entries, and ``out`` holds all of them;
        returns how many, int64, one element, or 0. ``or_all``: fewer do where the bound is 1: they are all of their
        side."""
        usable = torch.empty(1, dtype=torch.int64, device=self._residual.device)
        self._take(out, usable, least, DECIDE=True, FEWER=or_all, CLEAR=False)
        return usable

    def _take(self, out: Output, usable: torch.Tensor, least: int, **how: Any) -> None:
        marked = (self._residual, self._marks, self._words, self._totals, self.reached)
        bound = self._bound if how["FEWER"] else self.reached
        written = (out.indices, out.values, out.offset)
        given = (*marked, bound, usable, least, out.indices.numel(), *written)
        options = {**how, "ENDS": self._are_ends, "GROUP": GROUP, "warps": GROUP_WARPS}
        launch(passes.take_marked, self._groups, *given, **options)


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
            given = (self.values, self.length, cut, tallies, blocks)
            launch(cuts.count_cut, min(blocks, PROGRAMS), *given, **sides, BLOCK=BLOCK)
            if are_ends:  # as one row: of two torch sums up each by a block of threads, of one by as many as there are
                tallies = tallies.cumsum(0)
        launch(
            cuts.move_cut,
            min(blocks, PROGRAMS),
            self.residual,
            out.indices if self.positions is None else self.positions,
            *(self.values, self.length, cut, tallies, blocks),
            *(out.indices.numel(), out.indices, out.values, total, out.offset),
            LISTED=self.positions is not None,
            ALONE=blocks == 1,
            ENDS=are_ends,
            BLOCK=BLOCK,
            **sides,
        )
        return total


def _highest(keys: torch.Tensor) -> torch.Tensor:
    return keys.max().to(torch.int64).clamp(min=0).reshape(1)


def zeroed_histograms(parts: int, x: torch.Tensor) -> torch.Tensor:
    """On the device of ``x``, for each part and digit: how many entries have each, and how many programs have counted;
    int64, of shape (parts, digits, HISTOGRAM)."""
    return torch.zeros(parts, len(DIGITS), HISTOGRAM, dtype=torch.int64, device=x.device)
