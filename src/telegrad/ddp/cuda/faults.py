"""What was not finite in buckets on a device, of which the host hears later."""

from __future__ import annotations

from typing import NamedTuple

import torch

from telegrad.communicator import Communicator
from telegrad.ddp.cuda.gathered_reads import GatheredReads
from telegrad.ddp.exchange import Fault, error_of
from telegrad.ddp.telemetry import DDPStats


class _Look(NamedTuple):
    """At one bucket."""

    names: list[str]
    step: int
    remembered: bool


class LateFaults:
    """Of the policy ``"raise"``. ``remedy``: what an error advises."""

    def __init__(self, comm: Communicator, stats: DDPStats, remedy: str) -> None:
        self.comm, self._stats, self._remedy = comm, stats, remedy
        self._looks: GatheredReads[_Look] = GatheredReads()

    def add(self, names: list[str], faulty: torch.Tensor, step: int, *, remembered: bool) -> None:
        """``faulty``: by parameter, on the device, whether there is something in it that is not finite. ``remembered``:
        what waits of it may have overflowed, too."""
        self._looks.add(_Look(names, step, remembered), faulty)

    def close(self) -> None:
        """The host reads what was added, which changes from here on."""
        self._looks.close()

    def check(self, *, wait: bool = False) -> None:
        """Raises ``NonFiniteGradient`` for what the host can know by now; ``wait``: for all that was closed."""
        for (names, step, remembered), found in self._looks.known(wait=wait):
            if found.any():
                self._stats.nonfinite_buckets += 1
                name = names[int(found.nonzero()[0])]
                text = f"the gradient of {name!r} has entries that are NaN or infinite"
                if remembered:
                    text += ", or what waits of it has overflowed"
                raise error_of(Fault(name, text), self.comm.rank, step, remedy=self._remedy)

    def forget(self) -> None:
        """What is not yet known is of no account."""
        self._looks.forget()
