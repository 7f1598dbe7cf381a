"""What is kept of a calibration for later jobs: one that looks like noise does not take an earlier one's place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from telegrad.comm.tuning_cache import file_of, store
from telegrad.plan import Tuning

# There are three algorithms; where nothing disturbs they cross a few times, also where a network's protocol changes.
_MOST_STEPS = 8
# Algorithms cross below it on most networks: a sweep that ends before has not seen what long vectors take.
_LONG_BYTES = 256 << 10


class NoisyCalibration(RuntimeError):  # noqa: N818
    """What was found is not kept; the text says why, and what to do."""


def doubts_about(tuning: Tuning) -> tuple[str, ...]:
    """Why its table may be noise."""
    steps = len(tuning.allreduce.choices)
    if steps <= _MOST_STEPS:
        return ()
    return (f"the table has {steps} steps, more than {_MOST_STEPS}",)


def doubts_about_sizes(sizes: Iterable[int]) -> tuple[str, ...]:
    """The same, of the sizes in bytes at which algorithms were timed: time may have been up before long vectors."""
    longest = max(sizes)
    if longest >= _LONG_BYTES:
        return ()
    return (f"nothing longer than {longest:,} bytes was measured: give more --seconds (seconds=)",)


def doubts_about_load(machines: Sequence[tuple[float, int]]) -> tuple[str, ...]:
    """The same, of each rank's load and cores as they were before: the one that was the busiest."""
    rank, (load, cores) = max(enumerate(machines), key=lambda of: of[1][0] / of[1][1])
    if load <= cores:
        return ()
    return (f"the machine of rank {rank} was busy before (load {load:.1f} on {cores} cores)",)


def store_unless_noisy(tuning: Tuning, doubts: Sequence[str]) -> Path:
    """Keeps ``tuning`` for later jobs, and returns the file; one with ``doubts`` only where none is kept yet. Raises
    ``NoisyCalibration`` if one is, ``OSError`` if it cannot be written."""
    path = file_of(tuning.place)
    if doubts and path.exists():
        raise NoisyCalibration(
            f"{'; '.join(doubts)}; {path} stays as it is: calibrate again on a quiet machine, or delete that file first"
        )
    return store(tuning)
