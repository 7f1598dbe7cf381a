"""What one run measures and what comes out: plain data, which travels to the ranks and back as JSON."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Self

from telegrad.communicator.reductions import DENSE_ALGORITHMS


@dataclass(frozen=True)
class JsonFields:
    """Its fields are what JSON has, and tuples of that."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kib": 1 << 10, "m": 1 << 20, "mib": 1 << 20, "g": 1 << 30, "gib": 1 << 30}


ALGORITHMS = (*(name for name in DENSE_ALGORITHMS if name != "auto"), "auto")
"""Of ours, as ``telegrad bench allreduce`` measures them: the automatic choice last."""

INTERLEAVED = ", interleaved"
"""Behind an algorithm's name: among ranks whose neighbours live on other nodes."""


@dataclass(frozen=True)
class AllreducePlan(JsonFields):
    """``sizes`` in bytes. A contender is measured in ``samples`` samples of at least ``sample_s`` seconds each, fewer
    (but three) where all sizes together would take longer than about ``seconds``."""

    benchmark: str
    network: str
    ranks: int
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    peers: tuple[str, ...] = ()
    samples: int = 31
    sample_s: float = 0.002
    seconds: float = 120.0
    calibrates: bool = False  # first of all, so that the automatic choice knows this network
    watched: bool = True  # with heartbeats and all that looks after peers
    nodes: int = 1  # on which the ranks live, neighbours together
    interleaved: bool = False  # every algorithm also in an order in which neighbours live apart
    wires: tuple[str, ...] = ()  # sums in messages that round, beside the algorithms
    store: str = ""  # a path at which Gloo's processes meet

    @property
    def contenders(self) -> tuple[str, ...]:
        """Ours."""
        dealt = (f"{name}{INTERLEAVED}" for name in self.algorithms if self.interleaved)
        return (*self.algorithms, *dealt, *self.wires)


@dataclass(frozen=True)
class Timing:
    """Seconds per operation; of a sample, the slowest rank's."""

    median_s: float
    min_s: float
    p90_s: float

    @classmethod
    def of(cls, samples: list[float]) -> Self:
        ordered = sorted(samples)
        middle = len(ordered) // 2
        median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        return cls(median, ordered[0], ordered[min(len(ordered) - 1, math.ceil(0.9 * len(ordered)) - 1)])


@dataclass(frozen=True)
class Measured:
    """One contender at one size, as rank 0 reports it. ``contender``: an algorithm of ours, or a peer's name."""

    contender: str
    size: int
    timing: Timing
    wire_bytes: float | None  # sent by a rank per operation, the largest of all; None for a peer: it has no counters
    wrong: int  # values that differ from the right sum, over all ranks
    driver: str
    samples: int = 0
    again: bool = False  # it looked like an outlier, so that more samples were taken at the end
    chosen: str | None = None  # what the automatic choice took; None for any other contender

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "timing": Timing(**fields["timing"])})


def bound_bytes(ranks: int, size: int) -> float:
    """The least that a rank (or, of so many nodes, a node) must send in an allreduce, whatever the algorithm."""
    return 2 * (ranks - 1) / ranks * size


def bus_factor(ranks: int) -> float:
    """Turns an allreduce's bytes per second of the vector into those of a link, as nccl-tests do."""
    return 2 * (ranks - 1) / ranks


def is_slower(seconds: float, than_s: float, *, share: float, slack_s: float = 2e-6) -> bool:
    """Whether ``seconds`` is above ``than_s`` by more than ``share`` of it, and by more than ``slack_s``."""
    return seconds - than_s > max(share * than_s, slack_s)


def is_alternative(contender: str) -> bool:
    """Whether that is another algorithm of ours that the automatic choice could have taken: not one among ranks in
    another order, nor one that rounds."""
    return contender in DENSE_ALGORITHMS and contender != "auto"


def size_of(text: str) -> int:
    """Bytes of ``"4"``, ``"1KiB"``, ``"16 MiB"``. Raises ``ValueError`` for anything else, and below one float (4
    bytes).
    """
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(
            f"size {text!r} is no number of bytes: write it like 4, 64KiB or 16MiB (units: B, KiB, MiB, GiB)"
        )
    size = int(found[1]) * _UNITS[found[2]]
    if size < 4 or size % 4:
        raise ValueError(f"size {text!r} is not a whole number of 4-byte floats: use a multiple of 4 bytes")
    return size


def text_of(size: float) -> str:
    """``1 KiB``, ``16 MiB``; the reverse of ``size_of``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.4g} B"
