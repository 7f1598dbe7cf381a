"""A clock that stands until it is moved."""

from __future__ import annotations


class HandClock:
    """See telegrad.synchronizer.clocks.Clock. ``known_s``: moments after it are not told yet."""

    def __init__(self, now: float = 0.0) -> None:
        self.now, self.known_s = now, float("inf")

    def mark(self) -> float:
        return self.now

    def is_known(self, mark: float) -> bool:
        return mark <= self.known_s

    def between_s(self, before: float, after: float) -> float:
        assert after <= self.known_s, "whoever asks for it waits"
        return after - before
