"""Launches the selection kernels, for one residual or for many at once.

Fused passes, and the sources that a selection by rank looks at, come first. They do not wait for the GPU: counts and
keys stay on the device until ``told`` asks for all of them at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from telegrad.kernels.select import TINY, Chosen, Sign, check_arguments
from telegrad.kernels.select.triton import passes, passes_of_many
from telegrad.kernels.triton import by_parts, launch, numbers_on, table_of, told

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
            launch_over(1, passes.find_kth_of_few, self.values, self.length, k, found, **keys, CUT=cuts_all)
            return found
        histograms = zeroed_histograms(1, self.values)[0]
        programs = min(blocks, PROGRAMS)
        for number, ((width, shift), histogram) in enumerate(zip(DIGITS, histograms, strict=True)):
            digit: dict[str, Any] = {**keys, "SHIFT": shift, "WIDTH": width, "FIRST": number == 0, "BLOCK": BLOCK}
            is_cut = cuts_all and number == len(DIGITS) - 1
            launch(passes.count_digits, programs, self.values, self.length, found, histogram, k, **digit, CUT=is_cut)
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
            launch(passes.count_cut, min(blocks, PROGRAMS), *given, **sides, BLOCK=BLOCK)
            if are_ends:  # as one row: of two torch sums up each by a block of threads, of one by as many as there are
                tallies = tallies.cumsum(0)
        launch(
            passes.move_cut,
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


# Selections by rank: exact top-k and RedSync's threshold search, each one fused pass on most inputs.
# A random sample of the sums gives a key that somewhat more entries than are wanted should reach; the fused pass
# marks those, and the choice is made among copies of them. Where the sample misled, the choice is made in further
# passes over the residual, with the same result.

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


Cut = Callable[..., torch.Tensor]
"""Makes of a Source the cut of what leaves, without a wait; maybe in a tensor that is given, too."""


def largest_cut(k: int) -> Cut:
    """That of the k largest."""
    return lambda source, out=None: source.kth(k, out, cuts_all=True)


def search_cut(k: int, tolerance: float, moments: Moments | None) -> Cut:
    """That of a search for a threshold; ``moments``: of all that is ranked, which there are."""
    assert moments is not None

    def cut_of(source: Source, out: torch.Tensor | None = None) -> torch.Tensor:
        cut = torch.empty(2, dtype=torch.int64, device=source.values.device) if out is None else out
        ranks = source.kth(k), source.kth(2 * k + 1)
        halvings = max(0, math.ceil(-math.log2(tolerance)))
        found = (*ranks, moments.total, moments.count, moments.top, cut, halvings)
        launch(passes.search_cut, 1, *found, LOWEST=source.side.lowest, warps=1)
        return cut

    return cut_of


def normal_cut(k: int, sums: torch.Tensor, lowered_by: float, lowered_most: int) -> Cut:
    """That of a normal distribution; ``sums``: see ``passes.normal_cut``."""

    def cut_of(source: Source) -> torch.Tensor:
        cut = torch.empty(2, dtype=torch.int64, device=sums.device)
        ranks = source.kth(k), source.kth(2 * k + 1), source.kth((3 * k + 3) // 4)
        launch(passes.normal_cut, 1, *ranks, sums, cut, LOWERED_BY=lowered_by, LOWERED_MOST=lowered_most, warps=1)
        return cut

    return cut_of


def accumulate_cut(candidates: Candidates, cut_of: Cut, out: Output) -> Chosen:
    """What the cut cuts off leaves. Waits for the GPU once; twice where the sample misled."""
    while True:
        source, moments = candidates.source, candidates.moments
        cut = cut_of(source)
        highest = cut[:1] if moments is None else moments.largest
        usable, moved, key, ties, largest = told(candidates.usable, source.move(cut, out), cut, highest)
        if usable:
            threshold = value_of(key if ties else key + 1)
            return Chosen(moved, threshold, value_of(max(key, 0) if source.side.is_both else largest))
        candidates.rank_all()


def queue_cut(candidates: Candidates, cut_of: Cut, out: Output, count: torch.Tensor) -> list[torch.Tensor]:
    """What the cut cuts off leaves; ``count`` becomes how many entries. Returns its key, the highest of these int64."""
    source, rest = candidates.source, candidates.rest()
    cut = cut_of(source)
    moved = source.move(cut, out, count.view(1))
    if rest is None:
        return [cut[:1]]
    other = cut_of(rest)  # of the two one has nothing to rank, and cuts at 0
    moved.add_(rest.move(other, out))
    return [cut[:1], other[:1]]


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
        passes.sample_bound,
        1,
        residual,
        residual if gradient is None else gradient,
        *(residual.numel(), words, rank, bound),
        ADD=gradient is not None,
        FLIP=side.flip,
        MASK=side.mask,
        SAMPLE=_SAMPLE,
        UNLESS=passes_of_many.BEYOND if is_given else None,
        warps=_SAMPLE_WARPS,
    )
    return bound


@functools.cache
def sample_words(device: torch.device) -> torch.Tensor:
    """Random numbers of 31 bits, always the same ones. No stride: it could follow the columns of a matrix. Waits when
    a device is first met: every stream may then read them."""
    words = np.random.default_rng(0).integers(0, 1 << 31, _SAMPLE)
    return torch.from_numpy(words).to(device)


# Launches of `passes_of_many`: many residuals take as many launches as one.
# A residual of `ALONE` elements or more has no programs in them: its passes take longer than to launch them, and
# there are better ways for it.

ALONE = 1 << 25


class Reusing(NamedTuple):
    """One of the residuals that ``queue_reused`` chooses from: its elements, and how many entries are wanted of it.

    ``threshold`` (float64, at most 0 for none) and ``calls`` (int64, since it was found) are what is kept from call to
    call, one element each, on its device. ``start``: where the room of its entries begins, 2k or all there are;
    ``offset``: where its gradient begins among all, and what is added to its positions; ``place``: its own in
    ``active``.
    """

    residual: torch.Tensor
    k: int
    threshold: torch.Tensor
    calls: torch.Tensor
    start: int
    offset: int
    place: int

    @property
    def room(self) -> int:
        """The most entries that leave."""
        return min(2 * self.k, self.residual.numel())

    @property
    def is_alone(self) -> bool:
        """Whether it has no programs in launches for many."""
        return self.residual.numel() >= ALONE


def reuse_table(parts: Sequence[Reusing]) -> torch.Tensor:
    """What kernels read of them: int64, in host memory, to be copied to the device. It holds as long as all tensors
    stay where they are, and all numbers what they are. Its rows are those of ``passes_of_many``."""
    return table_of(
        [[*map(_passes, parts)], [*map(_groups, parts)], _cuts(parts), [*map(_tallies, parts)]],
        [one.residual.data_ptr() for one in parts],
        [one.residual.numel() for one in parts],
        [one.k for one in parts],
        [one.start for one in parts],
        [one.offset for one in parts],
        [one.place for one in parts],
        [one.threshold.data_ptr() for one in parts],
        [one.calls.data_ptr() for one in parts],
    )


class Passes:
    """Over the residuals of ``parts`` that are not alone, ``table``, on their device, being theirs: gradients are
    added, and what reaches each one's bound is marked, as by a ``FusedPass``. ``bounds``, ``reached``: int64, by part;
    ``active``: int64, by place."""

    def __init__(
        self,
        parts: Sequence[Reusing],
        table: torch.Tensor,
        gradient: torch.Tensor | None,
        side: Side,
        bounds: torch.Tensor,
        reached: torch.Tensor,
        active: torch.Tensor | None,
    ) -> None:
        self._parts, self._side = parts, side
        self._given = by_parts(table, parts)
        self._block = PASS_BLOCK
        blocks, self._groups = sum(map(_passes, parts)), sum(map(_groups, parts))
        words = self._block // 32
        self._marks = torch.empty(blocks * words, dtype=torch.uint32, device=table.device)
        self._totals = torch.empty(self._groups, dtype=torch.int64, device=table.device)
        self._grouped: dict[str, Any] = {"WORDS": words, "GROUP": GROUP, "warps": GROUP_WARPS}
        launch(
            passes_of_many.fused_pass_of_many,
            blocks,
            *self._given,
            table if gradient is None else gradient,
            *(bounds, self._marks, reached),
            table if active is None else active,
            FLIP=side.flip,
            MASK=side.mask,
            HELD=active is not None,
            ADD=gradient is not None,
            BLOCK=self._block,
            warps=PASS_WARPS,
        )
        counted = self._marks, self._totals, reached
        launch(passes_of_many.count_marks_of_many, self._groups, *self._given, *counted, **self._grouped)

    def take(self, usable: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
        """What was marked leaves for each part's room, but where ``usable`` (int64, by part) is 0."""
        given = (*self._given, self._marks, self._totals, usable, indices, values)
        launch(passes_of_many.take_marked_of_many, self._groups, *given, **self._grouped)

    def move_largest(
        self,
        lengths: torch.Tensor,
        cuts: torch.Tensor,
        indices: torch.Tensor,
        values: torch.Tensor,
        moved: torch.Tensor,
    ) -> None:
        """Of the first ``lengths`` (int64, by part) elements the k largest leave. ``cuts`` (int64, of shape (parts, 2))
        becomes what ``Source.kth`` finds, ``moved`` (int64) how many they were."""
        side, programs = self._side, sum(_cuts(self._parts))
        keys: dict[str, Any] = {"FLIP": side.flip, "MASK": side.mask, "BLOCK": BLOCK}
        histograms = zeroed_histograms(len(self._parts), cuts)
        stride = histograms.stride(0)
        for number, (width, shift) in enumerate(DIGITS):
            is_first, is_last = number == 0, number == len(DIGITS) - 1
            digit: dict[str, Any] = {**keys, "LOWEST": side.lowest, "STRIDE": stride, "SHIFT": shift, "WIDTH": width}
            digit |= {"FIRST": is_first, "CUT": is_last}
            counted = (*self._given, lengths, cuts, histograms[0, number])
            launch(passes_of_many.count_digits_of_many, programs, *counted, **digit)
        tallies = torch.empty(2 * sum(map(_tallies, self._parts)), dtype=torch.int64, device=cuts.device)
        given = (*self._given, lengths, cuts, tallies)
        launch(passes_of_many.count_cut_of_many, programs, *given, **keys)
        launch(passes_of_many.move_cut_of_many, programs, *given, indices, values, moved, **keys)


def _passes(part: Reusing) -> int:
    """Programs that mark."""
    return 0 if part.is_alone else blocks_of(part.residual.numel(), PASS_BLOCK)


def _groups(part: Reusing) -> int:
    """Programs that take what is marked."""
    return -(-_passes(part) * PASS_BLOCK // (32 * GROUP))


def _tallies(part: Reusing) -> int:
    """Blocks that are cut."""
    return 0 if part.is_alone else blocks_of(part.residual.numel())


def _cuts(parts: Sequence[Reusing]) -> list[int]:
    """Programs that rank and cut, by part: together about as many as of one. Mostly they have nothing to do."""
    tallies = [_tallies(part) for part in parts]
    total = max(1, sum(tallies))
    return [min(own, -(-PROGRAMS * own // total)) for own in tallies]


# The policy "reused" for many residuals, their thresholds and how often these were used on the device.

_PARTS = 128  # residuals that one program decides for


def queue_reused(
    parts: Sequence[Reusing],
    table: torch.Tensor,
    gradient: torch.Tensor | None,
    indices: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    *,
    interval: int,
    gain: float,
    tolerance: float | None = None,
    active: torch.Tensor | None = None,
) -> None:
    """Of each residual all entries at or above its threshold, if these are k/2 to 2k; otherwise, and at every
    ``interval``-th call, as ``queue_topk``, and the threshold is the lowest magnitude moved. In between it follows the
    count: threshold *= (count / k) ** ``gain``.

    ``table``: ``reuse_table`` of the parts, on their device, so that all of them go by as many launches as one does,
    but for those that are alone. ``gradient``: of all parts, each from its offset on; ``None``: nothing is added.
    ``indices`` and ``values``: of all parts, each in its room; ``counts``: int64, by part; ``active``: int64, by place:
    where it is 0, the residual and what is kept stay as they are, and nothing is moved. ``tolerance``: thresholds are
    those of ``accumulate_search``, and used again if k to 2k entries reach them; each residual then has launches of its
    own. Does not wait. Source: RedSync §2.1; the entries are those of ``ReusedThreshold`` on a CPU, or of
    ``SampledThreshold``. Raises as ``check_arguments``, of the part that ends
    last, and of k.
    """
    if not parts:
        return
    _check(parts, gradient, indices, values)
    side, number = side_of(0), len(parts)
    rows = torch.empty(6, number + number % 2, dtype=torch.int64, device=table.device)  # rows at multiples of 16 bytes
    bounds, reuses, reached, usable, listed, lengths = rows
    takes_part, held = reached if active is None else active, {"HELD": active is not None}

    def decide(kernel: Any, *tensors: Any, **options: Any) -> None:
        launch_over(number, kernel, table, number, *tensors, **options, block=_PARTS, warps=1)

    decide(passes_of_many.set_bounds, bounds, reuses, interval, BEYOND=passes_of_many.BEYOND)
    together = None
    searches = tolerance is not None
    alone = {
        place: _Alone(one, gradient, bounds[place : place + 1], tolerance)
        for place, one in enumerate(parts)
        if one.is_alone or searches
    }
    if len(alone) < number:
        together = Passes(parts, table, gradient, side, bounds, reached, active)
    for place, by_itself in alone.items():
        by_itself.mark(reached[place : place + 1], active)
    found = (reuses, reached, takes_part, usable, listed, lengths)
    decide(passes_of_many.decide_reuse, *found, SEARCHES=searches, **held)
    cuts = torch.empty(number, 2, dtype=torch.int64, device=table.device)
    if together is not None:
        together.take(usable, indices, values)
        together.move_largest(lengths, cuts, indices, values, counts)
    for place, by_itself in alone.items():
        own = slice(place, place + 1)
        by_itself.take(indices, values, usable[own])
        by_itself.move_largest(lengths[own], listed[own], cuts[place], counts[own])
    decide(passes_of_many.follow_reuse, usable, cuts, takes_part, counts, GAIN=gain, TINY=TINY, **held)


class _Alone:
    """One of so many elements that its passes take longer than to launch them. A threshold is found anew among entries
    that reach a bound of a sample, if one is taken: to rank all of 2**26 elements, in every eighth call, takes 2 ms on
    an H200."""

    def __init__(
        self, part: Reusing, gradient: torch.Tensor | None, bound: torch.Tensor, tolerance: float | None
    ) -> None:
        size = part.residual.numel()
        self._tolerance, self._wanted = tolerance, part.k if tolerance is None else 2 * part.k + 1
        self._part, self._bound, self._side = part, bound, side_of(0)
        self._gradient = None if gradient is None else gradient[part.offset : part.offset + size]
        rank = sample_rank(size, self._wanted)
        self._samples = rank is not None
        if rank is not None:
            sampled_bound(part.residual, self._gradient, self._side, rank, bound)

    def mark(self, reached: torch.Tensor, active: torch.Tensor | None) -> None:
        """Adds the gradient."""
        place = self._part.place
        self._made = FusedPass(
            self._part.residual,
            self._gradient,
            self._side,
            bound=self._bound,
            moments=self._tolerance is not None,
            active=None if active is None else active[place : place + 1],
            reached=reached,
        )

    def take(self, indices: torch.Tensor, values: torch.Tensor, usable: torch.Tensor) -> None:
        """What was marked leaves, unless ``usable`` is 0."""
        room = slice(self._part.start, self._part.start + self._part.room)
        self._out = Output(indices[room], values[room], self._part.offset)
        self._made.take(self._out, usable)

    def move_largest(self, length: torch.Tensor, listed: torch.Tensor, cut: torch.Tensor, moved: torch.Tensor) -> None:
        """As ``Passes.move_largest``, of ``length`` elements, or of as many marked entries as ``listed`` says."""
        residual = self._part.residual
        source = Source(residual, residual, length, self._side)
        source.move(self._cut(source, cut), self._out, moved)
        if self._samples:  # where one of the two has nothing to rank, it cuts and moves 0
            cut_of_listed, of_listed = self._rank_listed(listed)
            cut.add_(cut_of_listed)
            moved.add_(of_listed)

    def _rank_listed(self, listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual = self._part.residual
        room, device = room_of(residual.numel(), self._wanted), residual.device
        positions = torch.empty(room, dtype=torch.uint32, device=device)
        values = torch.empty(room, dtype=torch.float32, device=device)
        self._made.copy(Output(positions, values, 0), listed)
        source = Source(residual, values, listed, self._side, positions)
        cut = self._cut(source)
        return cut, source.move(cut, self._out)

    def _cut(self, source: Source, out: torch.Tensor | None = None) -> torch.Tensor:
        k, moments = self._part.k, self._made.moments
        cut_of = largest_cut(k) if self._tolerance is None else search_cut(k, self._tolerance, moments)
        return cut_of(source, out)


def _check(
    parts: Sequence[Reusing], gradient: torch.Tensor | None, indices: torch.Tensor, values: torch.Tensor
) -> None:
    room = max(one.start + one.room for one in parts)
    for one in parts:
        check_arguments(one.residual, None, indices, values, room, one.k)
    if gradient is not None:
        last = max(parts, key=lambda one: one.offset + one.residual.numel())
        size = last.residual.numel()
        check_arguments(last.residual, gradient[last.offset : last.offset + size], indices, values, room)
