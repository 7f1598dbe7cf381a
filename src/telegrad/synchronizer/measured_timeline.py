"""When the groups of a Synchronizer were ready, left and were summed: medians over the last backward passes. Does not
know what was predicted, nor how a group is sent."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from telegrad.synchronizer.clocks import Clock, Mark, WallClock

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
    optimizer; 0 where no two passes followed each other.
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


class _End(NamedTuple):
    """Of a pass: the moment, and the seconds before it in which the program went on."""

    over: Mark
    elsewhere_s: float


@dataclass(slots=True)
class _Marks:
    """Moments of the clock, by group. ``before``: the end of the pass before it, if that followed."""

    first: Mark
    ready: list[Mark]
    launched: list[Mark]
    ended: Sequence[Mark] = ()
    backward_over: Mark = None
    end: _End | None = None
    before: _End | None = None

    def of_pass(self) -> Iterator[Mark]:
        """All, those that come last first."""
        marks = (self.backward_over, *self.ended, *self.launched, *self.ready, self.first)
        return iter(marks if self.end is None else (self.end.over, *marks))


@dataclass(frozen=True, slots=True)
class _TimedPass:
    """Seconds from its first gradient, by group."""

    ready: list[float]
    launched: list[float]
    ended: list[float]
    backward_over: float
    over: float
    step_s: float | None


class MeasuredTimeline:
    """Of groups that stay as they are; a few looks at the clock in each pass.

    ``sizes``: bytes of each group. ``clock``: whose marks ``close`` is given, too; ``None``: that of
    ``time.perf_counter()``. Where it tells times later than it marks them, as a device's does, a pass counts once all
    of it is known. ``before_first_s``: what a backward pass takes until its first gradient, which is the first thing
    that is seen of it; 0 until it is set.
    """

    def __init__(self, sizes: Sequence[int], clock: Clock | None = None) -> None:
        self._sizes, self._clock = tuple(sizes), clock or WallClock()
        self.before_first_s = 0.0
        self._unknown: deque[_Marks] = deque(maxlen=WINDOW)  # of passes that are over for the host
        self._kept: deque[_TimedPass] = deque(maxlen=WINDOW)
        self._to_skip = NOT_TYPICAL
        self._open: _Marks | None = None
        self._last: _End | None = None

    def begin(self) -> None:
        """The first gradient of a pass is there; a pass that is still open is forgotten."""
        if self._open is not None:
            self._last = None
        self._open = _Marks(self._clock.mark(), [None] * len(self._sizes), [None] * len(self._sizes))

    def ready(self, group: int) -> None:
        """Its last gradient is there."""
        if self._open is not None:
            self._open.ready[group] = self._clock.mark()

    def launched(self, group: int) -> None:
        """It leaves."""
        if self._open is not None:
            now = self._open.launched[group] = self._clock.mark()
            if self._open.ready[group] is None:  # some of its gradients did not come
                self._open.ready[group] = now

    def backward_over(self) -> None:
        """Also the last gradient is there."""
        if self._open is not None:
            self._open.backward_over = self._clock.mark()

    def close(self, ended: Sequence[Mark], *, elsewhere_s: float = 0.0) -> None:
        """The pass is over; ``ended``: when the sum of each group was. ``elsewhere_s``: seconds since the end of the
        backward pass in which the program went on and did not wait for sums."""
        one, self._open = self._open, None
        if one is None:
            return
        one.ended, one.before = ended, self._last
        one.end = self._last = _End(self._clock.mark(), elsewhere_s)
        self._unknown.append(one)
        self._look()

    def _look(self) -> None:
        """Takes over what is known by now."""
        while self._unknown and all(map(self._clock.is_known, self._unknown[0].of_pass())):
            one = self._seconds_of(self._unknown.popleft())
            if self._to_skip:
                self._to_skip -= 1
            else:
                self._kept.append(one)

    def _seconds_of(self, one: _Marks) -> _TimedPass:
        def since_first(mark: Mark) -> float:
            return self._clock.between_s(one.first, mark)

        assert one.end is not None
        launched = [*map(since_first, one.launched)]
        step_s = None
        if one.before is not None:
            paused_s = one.end.elsewhere_s - one.before.elsewhere_s
            step_s = self._clock.between_s(one.before.over, one.end.over) - paused_s
        return _TimedPass(
            [*map(since_first, one.ready)],
            launched,
            [max(since_first(end), at) for end, at in zip(one.ended, launched, strict=True)],
            since_first(one.backward_over),
            since_first(one.end.over) - one.end.elsewhere_s,
            step_s,
        )

    @property
    def passes(self) -> int:
        """Over how many passes ``medians()`` would be."""
        self._look()
        return len(self._kept)

    def totals(self, last: int) -> tuple[float, float] | None:
        """Medians over the last so many passes: ``backward_s`` and ``network_s``, as ``medians()`` has them."""
        self._look()
        kept = [*self._kept][-last:]
        if not kept:
            return None
        backward_s = statistics.median(one.backward_over for one in kept)
        return self.before_first_s + backward_s, statistics.median(map(_network_s, kept))

    def mean_step_s(self) -> float | None:
        """Seconds from the end of one pass to that of the next, on average: where ranks share processors a rank that
        was early in one step waits in the next, so single steps say less. ``None`` where no two passes followed each
        other."""
        self._look()
        steps = [one.step_s for one in self._kept if one.step_s is not None]
        return statistics.fmean(steps) if steps else None

    def restart(self) -> None:
        """What was measured is forgotten, and the next two passes are left out as the first two were."""
        self._unknown.clear()
        self._kept.clear()
        self._to_skip, self._last, self._open = NOT_TYPICAL, None, None

    def medians(self) -> MeasuredPass | None:
        """``None`` until a pass has been measured: the first two are left out."""
        self._look()
        kept = [*self._kept]
        if not kept:
            return None
        lead = self.before_first_s

        def middle(of: Callable[[_TimedPass], float]) -> float:
            return statistics.median(of(one) for one in kept)

        groups = tuple(
            MeasuredGroup(
                size,
                lead + middle(lambda one, group=group: one.ready[group]),  # type: ignore[misc]
                lead + middle(lambda one, group=group: one.launched[group]),  # type: ignore[misc]
                lead + middle(lambda one, group=group: one.ended[group]),  # type: ignore[misc]
            )
            for group, size in enumerate(self._sizes)
        )
        steps = [one.step_s for one in kept if one.step_s is not None]
        return MeasuredPass(
            len(kept),
            groups,
            lead + middle(lambda one: one.backward_over),
            middle(lambda one: one.over - one.backward_over),
            middle(_network_s),
            statistics.median(steps) if steps else 0.0,
        )


def _network_s(one: _TimedPass) -> float:
    """Time in which a sum was under way: groups may overlap."""
    total, free = 0.0, 0.0
    for launched, ended in sorted(zip(one.launched, one.ended, strict=True)):
        total += max(0.0, ended - max(launched, free))
        free = max(free, ended)
    return total
