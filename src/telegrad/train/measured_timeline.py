"""When the groups of a Synchronizer were ready, left and were summed: medians over the last backward passes. Does not
know what was predicted, nor how a group is sent."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from telegrad.comm import Work

WINDOW = 50
"""Medians are over so many passes, the last ones."""

NOT_TYPICAL = 2
"""The first passes are left out: memory is touched for the first time."""


@dataclass(frozen=True)
class MeasuredGroup:
    """``size``: bytes of gradients. Seconds from the start of the backward pass: the last gradient is there, the group
    is given to the communicator, its sum is over on this rank."""

    size: int
    ready_s: float
    launched_s: float
    finish_s: float


@dataclass(frozen=True)
class MeasuredPass:
    """Medians over ``passes`` backward passes of this rank; each number is a median of its own.

    ``backward_s``: until the last gradient, ``exposed_s``: from there until all sums are over, ``network_s``: time in
    which a sum was under way, ``step_s``: from the end of one pass to that of the next, with forward pass and
    optimiser; 0 where no two passes followed each other.
    """

    passes: int
    groups: tuple[MeasuredGroup, ...]
    backward_s: float
    exposed_s: float
    network_s: float
    step_s: float

    @property
    def finish_s(self) -> float:
        """From the start of the backward pass until all gradients are summed."""
        return self.backward_s + self.exposed_s


@dataclass(slots=True)
class _Pass:
    """Moments of the clock, by group."""

    first: float
    ready: list[float]
    launched: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    backward_over: float = 0.0
    over: float = 0.0
    step_s: float | None = None


class MeasuredTimeline:
    """Of groups that stay as they are; a few looks at the clock in each pass.

    ``sizes``: bytes of each group. ``clock``: that of the ends that ``close`` is given. ``before_first_s``: what a
    backward pass takes until its first gradient, which is the first thing that is seen of it; 0 until it is set.
    """

    def __init__(self, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._sizes, self._clock = tuple(sizes), clock
        self.before_first_s = 0.0
        self._kept: deque[_Pass] = deque(maxlen=WINDOW)
        self._to_skip = NOT_TYPICAL
        self._open: _Pass | None = None
        self._last_over: float | None = None

    def begin(self) -> None:
        """The first gradient of a pass is there; a pass that is still open is forgotten."""
        if self._open is not None:
            self._last_over = None
        now = self._clock()
        self._open = _Pass(now, [0.0] * len(self._sizes))

    def ready(self, group: int) -> None:
        """Its last gradient is there."""
        if self._open is not None:
            self._open.ready[group] = self._clock()

    def launched(self) -> None:
        """The next group leaves."""
        if self._open is not None:
            now = self._clock()
            group = len(self._open.launched)
            self._open.launched.append(now)
            self._open.ready[group] = self._open.ready[group] or now  # some of its gradients did not come

    def backward_over(self) -> None:
        """Also the last gradient is there."""
        if self._open is not None:
            self._open.backward_over = self._clock()

    def close(self, ended: Sequence[float], *, elsewhere_s: float = 0.0) -> None:
        """The pass is over; ``ended``: when the sum of each group was. ``elsewhere_s``: seconds since the end of the
        backward pass in which the program went on and did not wait for sums."""
        one, self._open = self._open, None
        if one is None:
            return
        one.over = self._clock() - elsewhere_s
        one.ended = [max(pair) for pair in zip(ended, one.launched, strict=True)]
        if self._last_over is not None:
            one.step_s = one.over - self._last_over
        self._last_over = one.over
        if self._to_skip:
            self._to_skip -= 1
        else:
            self._kept.append(one)

    @property
    def passes(self) -> int:
        """Over how many passes ``medians()`` would be."""
        return len(self._kept)

    def totals(self, last: int) -> tuple[float, float] | None:
        """Medians over the last so many passes: ``backward_s`` and ``network_s``, as ``medians()`` has them."""
        kept = [*self._kept][-last:]
        if not kept:
            return None
        backward_s = statistics.median(one.backward_over - one.first for one in kept)
        return self.before_first_s + backward_s, statistics.median(map(_network_s, kept))

    def mean_step_s(self) -> float | None:
        """Seconds from the end of one pass to that of the next, on average: where ranks share processors a rank that
        was early in one step waits in the next, so single steps say less. ``None`` where no two passes followed each
        other."""
        steps = [one.step_s for one in self._kept if one.step_s is not None]
        return statistics.fmean(steps) if steps else None

    def restart(self) -> None:
        """What was measured is forgotten, and the next two passes are left out as the first two were."""
        self._kept.clear()
        self._to_skip, self._last_over, self._open = NOT_TYPICAL, None, None

    def medians(self) -> MeasuredPass | None:
        """``None`` until a pass has been measured: the first two are left out."""
        kept = [*self._kept]
        if not kept:
            return None
        lead = self.before_first_s

        def middle(of: Callable[[_Pass], float]) -> float:
            return statistics.median(of(one) for one in kept)

        groups = tuple(
            MeasuredGroup(
                size,
                lead + middle(lambda one, group=group: one.ready[group] - one.first),  # type: ignore[misc]
                lead + middle(lambda one, group=group: one.launched[group] - one.first),  # type: ignore[misc]
                lead + middle(lambda one, group=group: one.ended[group] - one.first),  # type: ignore[misc]
            )
            for group, size in enumerate(self._sizes)
        )
        steps = [one.step_s for one in kept if one.step_s is not None]
        return MeasuredPass(
            len(kept),
            groups,
            lead + middle(lambda one: one.backward_over - one.first),
            middle(lambda one: one.over - one.backward_over),
            middle(_network_s),
            statistics.median(steps) if steps else 0.0,
        )


def _network_s(one: _Pass) -> float:
    """Time in which a sum was under way: groups leave in order, and may overlap."""
    total, free = 0.0, one.first
    for launched, ended in zip(one.launched, one.ended, strict=True):
        total += max(0.0, ended - max(launched, free))
        free = max(free, ended)
    return total


def end_of(works: Sequence[Work]) -> float:
    """When the last one of a group was over, by the clock of ``time.perf_counter()``."""
    return max((span[1] for work in works if (span := work.span_s()) is not None), default=0.0)
