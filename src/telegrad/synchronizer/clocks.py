"""By which moments of a training step are told apart: a process's clock, or events in a device's streams."""

from __future__ import annotations

import time
from typing import Any, Protocol

from telegrad.communicator.cuda.runtime import runtime_of

Mark = Any
"""A moment, of the clock that has marked it."""


class Clock(Protocol):
    """Marks moments, and says later how far apart two of them were."""

    def mark(self) -> Mark:
        """Now."""

    def is_known(self, mark: Mark) -> bool:
        """Whether ``between_s`` would not wait for it."""

    def between_s(self, before: Mark, after: Mark) -> float:
        """Seconds; waits until both moments are there."""


class WallClock:
    """Of this process: for models on the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def is_known(self, mark: float) -> bool:
        return True

    def between_s(self, before: float, after: float) -> float:
        return after - before


class PausedClock(WallClock):
    """A wall clock without the seconds that it is told to leave out."""

    def __init__(self) -> None:
        self._left_out_s = 0.0

    def mark(self) -> float:
        return super().mark() - self._left_out_s

    def leave_out(self, seconds: float) -> None:
        """Have just passed, and are not the model's."""
        self._left_out_s += seconds


class DeviceClock:
    """Events in the current stream of a device, a ``torch.device``. Whoever asks for times of events that the stream
    has not come to waits; ``mark`` and ``is_known`` do not."""

    def __init__(self, device: Any) -> None:
        self._device, self._runtime = device, runtime_of(device.type)

    def mark(self) -> Mark:
        return self._runtime.record_timed(self._runtime.current_stream(self._device))

    def is_known(self, mark: Mark) -> bool:
        return self._runtime.passed(mark)

    def between_s(self, before: Mark, after: Mark) -> float:
        for mark in (before, after):
            if not self._runtime.passed(mark):
                self._runtime.wait_on_host(mark)
        return self._runtime.seconds_between(before, after)
