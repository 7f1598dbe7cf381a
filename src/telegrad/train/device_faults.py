"""What was not finite in buckets on a device, of which the host hears later."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from telegrad.comm import Communicator
from telegrad.comm.device.late_read import LateRead
from telegrad.train.nonfinite import Fault, error_of
from telegrad.train.stats import DDPStats


class _Look(NamedTuple):
    """At one bucket: by parameter, whether there is something in it that is not finite."""

    names: list[str]
    faulty: LateRead
    step: int
    remembered: bool


class LateFaults:
    """Of the policy ``"raise"``. ``remedy``: what an error advises."""

    def __init__(self, comm: Communicator, stats: DDPStats, remedy: str) -> None:
        self.comm, self._stats, self._remedy = comm, stats, remedy
        self._looks: deque[_Look] = deque()

    def add(self, names: list[str], faulty: torch.Tensor, step: int, *, remembered: bool) -> None:
        """``faulty``: by parameter, on the device. ``remembered``: what waits of it may have overflowed, too."""
        self._looks.append(_Look(names, LateRead(faulty), step, remembered))

    def check(self, *, wait: bool = False) -> None:
        """Raises ``NonFiniteGradient`` for what the host can know by now; ``wait``: for all that was added."""
        while self._looks and (wait or self._looks[0].faulty.is_known):
            names, faulty, step, remembered = self._looks.popleft()
            if (found := faulty.values()).any():
                self._stats.nonfinite_buckets += 1
                name = names[int(found.nonzero()[0])]
                text = f"the gradient of {name!r} has entries that are NaN or infinite"
                if remembered:
                    text += ", or what waits of it has overflowed"
                raise error_of(Fault(name, text), self.comm.rank, step, remedy=self._remedy)

    def forget(self) -> None:
        """What is not yet known is of no account."""
        self._looks.clear()
