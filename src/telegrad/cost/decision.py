"""Which allreduce algorithm is the fastest, by the closed forms or by measured times: for one size, or as a table."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from telegrad.cost.closed_forms import (
    MEMORY_MESSAGE_BYTES,
    PART_BYTES,
    Levels,
    allreduce,
    allreduce_on_levels,
    allreduce_ring,
)
from telegrad.cost.network import CARD_BYTES, ELEMENT_BYTES, Costs

# Where they take equally long, the first is chosen: it sends fewer messages.
ALLREDUCE_ALGORITHMS = ("recursive_doubling", "rabenseifner", "ring")
TWO_LEVEL = "two_level"
"""Where ranks live on nodes, it is one more."""
MPI = "mpi"
"""MPI's own collective, where the driver has it: it has no closed form, so only measurements choose it."""
TABLE_ALGORITHMS = (*ALLREDUCE_ALGORITHMS, TWO_LEVEL, MPI)

MOST_BYTES = 1 << 30
LONGEST_BYTES = (1 << 63) - 1
_STEPS_PER_DOUBLING = 4


def fastest_allreduce(ranks: int, size: int, costs: Costs, levels: Levels | None = None) -> str:
    """The algorithm that sums ``size`` bytes over ``ranks`` ranks in the least time. With ``levels`` also
    ``two_level``, and ``costs`` are those between nodes.

    Raises ``ValueError`` for less than one rank, for sizes that are no whole number of 4-byte floats, and for levels of
    another number of ranks.
    """
    return _fastest(_times_of(ranks, size, costs, levels))


def _fastest(times_s: dict[str, float]) -> str:
    return min(times_s, key=times_s.__getitem__)


def _times_of(
    ranks: int, size: int, costs: Costs, levels: Levels | None, message_bytes: int = CARD_BYTES
) -> dict[str, float]:
    if levels is None:
        ring_s = allreduce_ring(ranks, size, costs, message_bytes=message_bytes).time_s
        others = (name for name in ALLREDUCE_ALGORITHMS if name != "ring")
        return {**{name: allreduce(name, ranks, size, costs).time_s for name in others}, "ring": ring_s}
    if len(levels.nodes) != ranks:
        raise ValueError(f"levels are of {len(levels.nodes)} ranks, not of ranks={ranks}: give every rank a node")
    return {name: allreduce_on_levels(name, levels, size, costs).time_s for name in TABLE_ALGORITHMS if name != MPI}


@dataclass(frozen=True)
class TableEntry:
    """``algorithm`` from ``from_bytes`` up to the next choice."""

    from_bytes: int
    algorithm: str

    def __str__(self) -> str:
        return f"  from {self.from_bytes:>13,} bytes  {self.algorithm}"


@dataclass(frozen=True)
class DecisionTable:
    """The algorithm among ``ranks`` ranks for a vector of any size. ``choices`` ascend from 0 bytes.

    Raises ``ValueError`` for choices that are empty, do not ascend, or name an algorithm that does not exist."""

    ranks: int
    choices: tuple[TableEntry, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks={self.ranks} must be at least 1")
        begins = [choice.from_bytes for choice in self.choices]
        if not begins or begins[0] != 0 or any(a >= b for a, b in itertools.pairwise(begins)):
            raise ValueError(f"choices begin at {begins} bytes: let the first begin at 0, and the others ascend")
        if begins[-1] > LONGEST_BYTES:
            raise ValueError(f"a choice begins at {begins[-1]} bytes: no vector is longer than {LONGEST_BYTES}")
        for choice in self.choices:
            if choice.algorithm not in TABLE_ALGORITHMS:
                known = ", ".join(TABLE_ALGORITHMS)
                raise ValueError(f"algorithm {choice.algorithm!r} does not exist: use {known}")

    def algorithm(self, size: int) -> str:
        """The algorithm for a vector of ``size`` bytes. Raises ``ValueError`` below 0."""
        if size < 0:
            raise ValueError(f"size={size} must be 0 bytes or more")
        return self.choices[bisect.bisect_right([choice.from_bytes for choice in self.choices], size) - 1].algorithm

    @classmethod
    def from_data(cls, found: Any) -> Self:
        """The reverse of ``asdict``. Raises ``ValueError`` for what is no table."""
        try:
            choices = tuple(TableEntry(_whole(one, "from_bytes"), str(one["algorithm"])) for one in found["choices"])
            return cls(_whole(found, "ranks"), choices)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{str(found)[:80]!r} is no decision table: give what to_json() returned") from error

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of ``to_json``. Raises ``ValueError`` for text that is no table."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{text[:80]!r} is no decision table: give what to_json() returned") from error
        return cls.from_data(found)

    def __str__(self) -> str:
        return "\n".join([f"allreduce, {self.ranks} ranks", *map(str, self.choices)])


def _whole(found: Any, name: str) -> int:
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be a whole number: give what to_json() returned")
    return value


def allreduce_table(
    ranks: int, costs: Costs, *, tolerance: float = 0.01, levels: Levels | None = None, shares_memory: bool = False
) -> DecisionTable:
    """The table of the closed forms for every size; above ``MOST_BYTES`` it is as there. ``levels``: see
    ``fastest_allreduce``.

    ``shares_memory``: all ranks live on one host, where a ring's messages are longer. An algorithm is kept while it
    takes at most ``tolerance`` longer than the fastest, so that near ties do not fill the table. Raises ``ValueError``
    for less than one rank, or for a ``tolerance`` below 0."""
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} must be 0 or more: the share by which a choice may be slower")

    message_bytes = MEMORY_MESSAGE_BYTES if shares_memory else CARD_BYTES

    def times_s(size: int) -> dict[str, float]:
        return _times_of(ranks, size, costs, levels, message_bytes)

    def still_good(name: str, size: int) -> bool:
        here_s = times_s(size)
        return here_s[name] <= (1 + tolerance) * min(here_s.values())

    choices = [TableEntry(0, _fastest(times_s(0)))]
    good_at = 0
    for size in _probes(ranks, levels, message_bytes):
        while not still_good(choices[-1].algorithm, size):
            least, most = good_at // ELEMENT_BYTES, size // ELEMENT_BYTES  # good at least, not at most
            while most - least > 1:
                middle = (least + most) // 2
                if still_good(choices[-1].algorithm, middle * ELEMENT_BYTES):
                    least = middle
                else:
                    most = middle
            good_at = most * ELEMENT_BYTES
            choices.append(TableEntry(good_at, _fastest(times_s(good_at))))
        good_at = size
    return DecisionTable(ranks, tuple(choices))


def _probes(ranks: int, levels: Levels | None, message_bytes: int) -> Iterator[int]:
    """Ascending sizes, close enough that the times hardly cross twice in between: the ring's and two_level's times jump
    where another segment begins."""
    lengths = [message_bytes * ranks, *([PART_BYTES * levels.slices] if levels else [])]
    probes = set()
    size, factor = float(ELEMENT_BYTES), 2 ** (1 / _STEPS_PER_DOUBLING)
    while size < MOST_BYTES:
        probes.add(int(size) // ELEMENT_BYTES * ELEMENT_BYTES)
        size *= factor
    for segment in lengths:
        for segments in range(1, min(16, MOST_BYTES // segment) + 1):
            probes |= {segments * segment, segments * segment + ELEMENT_BYTES}
    probes.add(MOST_BYTES)
    yield from sorted(probes)


# A decision table from measured times: the formulas say where to look, the measurements decide.

MOST_SLOWER = 0.03
MOST_SLOWER_S = 1e-6
"""A choice may be slower than the best by the one or by the other."""

_SWITCH = 0.02  # what a further row of the table must save, as a share of the time at one size

Samples = Mapping[int, Mapping[str, Sequence[float]]]
"""Seconds by size in bytes and by algorithm; one that is hopeless at a size may be left out there."""


def measured_allreduce_table(ranks: int, samples: Samples, predicted: DecisionTable) -> DecisionTable:
    """The table with the least loss and few rows, from measured times. A row counts as much as a loss of 2 % at one
    size.

    Its choice at each measured size is, by the medians of ``samples``, at most 3 % or 1 µs slower than the best there,
    or by less than the samples scatter. Between two sizes the choice changes where the logarithms of the times, taken
    as straight lines, cross. Beyond the largest size ``predicted`` decides from where both agree. From twice that size
    the choice is that of ``predicted`` for the longest vectors, because caches no longer matter there.

    Raises ``ValueError`` without samples, for sizes below 4 bytes, for times that are not above 0 and finite, and for
    unknown algorithms."""
    sizes = sorted(samples)
    if (
        not sizes
        or sizes[0] < ELEMENT_BYTES
        or not all(samples[size] and all(samples[size].values()) for size in sizes)
    ):
        raise ValueError(
            f"samples of sizes {sizes}: give one size or more, from {ELEMENT_BYTES} bytes up, each with some"
        )
    for name in {name for size in sizes for name in samples[size]}:
        if name not in TABLE_ALGORITHMS:
            raise ValueError(f"algorithm {name!r} does not exist: use {', '.join(TABLE_ALGORITHMS)}")
    for name, time_s in ((name, one) for of in samples.values() for name, times in of.items() for one in times):
        if not 0 < time_s < math.inf:
            raise ValueError(f"a sample of {name} is {time_s} s: give times above 0, and finite")
    chosen = _least_loss([_losses(samples[size]) for size in sizes])
    choices = [TableEntry(0, chosen[0])]
    for (below, before), (above, after) in itertools.pairwise(zip(sizes, chosen, strict=True)):
        if before != after:
            choices.append(TableEntry(_crossing(below, above, before, after, samples), after))
    for later in predicted.choices:
        if later.from_bytes > sizes[-1] and predicted.algorithm(later.from_bytes - 1) == choices[-1].algorithm:
            choices.append(later)
    longest = predicted.choices[-1]
    if choices[-1].algorithm != longest.algorithm:
        choices.append(TableEntry(max(2 * sizes[-1], longest.from_bytes), longest.algorithm))
    return DecisionTable(ranks, tuple(choices))


def _losses(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """How much slower than the best, as a logarithm, of those that are good enough."""
    medians = {name: statistics.median(samples[name]) for name in TABLE_ALGORITHMS if name in samples}
    best = min(medians, key=medians.__getitem__)
    losses = {}
    for name, median_s in medians.items():
        loss = math.log(median_s / medians[best])
        doubt = 2 * math.hypot(_error(samples[name]), _error(samples[best])) if name != best else 0.0
        if loss <= max(math.log(1 + MOST_SLOWER), doubt) or median_s <= medians[best] + MOST_SLOWER_S:
            losses[name] = loss
    return losses


def _error(samples: Sequence[float]) -> float:
    """Standard error of the median's logarithm, from the median absolute deviation (for normal scatter)."""
    logs = [math.log(one) for one in samples]
    middle = statistics.median(logs)
    return 1.253 * 1.483 * statistics.median(abs(one - middle) for one in logs) / math.sqrt(len(logs))


def _least_loss(losses: list[dict[str, float]]) -> list[str]:
    """One name for each size, by dynamic programming (Viterbi's)."""
    ways: dict[str, tuple[float, list[str]]] = {name: (loss, [name]) for name, loss in losses[0].items()}
    for here in losses[1:]:
        ways = {
            name: min(
                ((total + loss + (_SWITCH if way[-1] != name else 0.0), [*way, name]) for total, way in ways.values()),
                key=lambda one: one[0],
            )
            for name, loss in here.items()
        }
    return min(ways.values(), key=lambda one: one[0])[1]


def _crossing(below: int, above: int, before: str, after: str, samples: Samples) -> int:
    """In (below, above]: from how many bytes ``after`` is chosen. Half way, where not both are known at both."""
    part = 0.5
    if all(name in samples[size] for name in (before, after) for size in (below, above)):
        # How much longer ``after`` takes, as a logarithm: it falls from the one size to the other.
        first, last = (
            math.log(statistics.median(samples[size][after]) / statistics.median(samples[size][before]))
            for size in (below, above)
        )
        if first <= 0:
            part = 0.0
        elif last <= 0:
            part = first / (first - last)
    size = math.exp(math.log(below) + part * math.log(above / below))
    return min(above, max(below + ELEMENT_BYTES, round(size / ELEMENT_BYTES) * ELEMENT_BYTES))
