"""A decision table from measured times: the formulas say where to look, the measurements decide."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from telegrad.cost.cost import ELEMENT_BYTES
from telegrad.cost.decision import TABLE_ALGORITHMS, Choice, DecisionTable

MOST_SLOWER = 0.03
MOST_SLOWER_S = 1e-6
"""A choice may be slower than the best by the one or by the other."""

_SWITCH = 0.02  # what a further row of the table must save, as a share of the time at one size

Samples = Mapping[int, Mapping[str, Sequence[float]]]
"""Seconds by size in bytes and by algorithm; one that is hopeless at a size may be left out there."""


def measured_allreduce_table(ranks: int, samples: Samples, predicted: DecisionTable) -> DecisionTable:
    """Of all tables whose choice at each measured size is, by the medians of ``samples``, at most 3 % or 1 µs slower
    than the best there, or by less than the samples' scatter can tell, the one with the least loss. A row counts as
    much as a loss of 2 % at one size: noise does not fill the table.

    Between two sizes the choice changes where the logarithms of the times, taken as straight lines, cross. Beyond the
    largest size it is that of ``predicted`` from where both agree, and from twice that size what ``predicted`` has for
    the longest vectors: what a cache still holds there says little of them. Raises ``ValueError`` without samples, for
    sizes below 4 bytes, for times that are not above 0 and finite, and for algorithms that do not exist.
    """
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
    choices = [Choice(0, chosen[0])]
    for (below, before), (above, after) in itertools.pairwise(zip(sizes, chosen, strict=True)):
        if before != after:
            choices.append(Choice(_crossing(below, above, before, after, samples), after))
    for later in predicted.choices:
        if later.from_bytes > sizes[-1] and predicted.algorithm(later.from_bytes - 1) == choices[-1].algorithm:
            choices.append(later)
    longest = predicted.choices[-1]
    if choices[-1].algorithm != longest.algorithm:
        choices.append(Choice(max(2 * sizes[-1], longest.from_bytes), longest.algorithm))
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
