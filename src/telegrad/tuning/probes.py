"""Probes of a network, how a sample of them is timed, and the costs that are fitted to the times.

Probes are messages between pairs of ranks and additions, no collective of many: the same costs predict every one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad.communicator import Communicator
from telegrad.communicator.groups import told_by
from telegrad.cost import Costs

KINDS = ("round", "one_way", "exchange", "addition")

ADDED_BYTES = 16 << 20
"""Of an addition: beyond the caches, as a long vector is."""


@dataclass(frozen=True)
class Probe:
    """One thing whose time is taken, with messages of ``bytes``. All ranks take part at once, so that the machine is as
    busy as in a collective. ``kind``:

    - ``round``: barriers of all ranks;
    - ``one_way``: in each pair of neighbours one sends to the other, message after message;
    - ``exchange``: the two of a pair send to each other at once, and add what they get; from call to call with another
      partner, where the ranks can be divided by four, since links that have to begin anew are slower;
    - ``addition``: every rank adds two vectors of its own.
    """

    kind: str
    bytes: int


def probes(one_way: Iterable[int], exchange: Iterable[int]) -> list[Probe]:
    """All kinds, with messages of these lengths in bytes."""
    return [
        Probe("round", 0),
        *(Probe("one_way", size) for size in one_way),
        *(Probe("exchange", size) for size in exchange),
        Probe("addition", ADDED_BYTES),
    ]


# The calls behind the probes, and how a sample of calls is taken.
# A sample is a barrier, a call that does not count, and then calls one after another; its time per call is the
# slowest rank's, the same number on all ranks: so they may decide by it. The call that does not count spends what a
# shaped link has saved up while it was idle (tbf's burst, 128 KiB of which pass at once): what follows finds the
# links as busy as they stay. Of calls so long that a sample holds few, every one counts: where a rank's call ends
# early, some of the next call's bytes pass while others are still in the first, and of few calls that would be much.

Call = Callable[[], object]
Vector = npt.NDArray[np.float32]

_FEWEST_CALLS, _MOST_CALLS = 3, 500
_SLICE_ELEMENTS = 64 << 10  # of a reduction, as the core cuts it (256 KiB)


class Pairs:
    """This rank's communicators with its partner and, where all ranks have two, with another one. Who has none, as the
    last of an odd number of ranks, only waits for the others."""

    def __init__(self, near: Communicator | None, far: Communicator | None) -> None:
        self._near, self._far = near, far

    def call_of(self, probe: Probe, communicator: Communicator, vector: Vector) -> Call:
        """``vector``: zeros, at least as long as the probe's messages; it stays zeros. Raises ``ValueError`` for a kind
        that does not exist."""
        x = vector[: probe.bytes // 4]
        if probe.kind == "round":
            return communicator.barrier
        if probe.kind == "addition":
            return addition_of(probe.bytes)
        if probe.kind not in ("one_way", "exchange"):
            raise ValueError(f"kind={probe.kind!r} is no probe: use round, one_way, exchange or addition")
        near = self._near
        if near is None:
            return lambda: None
        if probe.kind == "one_way":
            return lambda: near.broadcast(x, 0)
        turns = itertools.cycle((near, self._far or near))
        return lambda: next(turns).all_reduce(x, algorithm="recursive_doubling")


Partners = Callable[[int], int | None]
"""Of a rank the one with whom it is a pair, or nobody."""


LEVELS = ("flat", "within", "between", "alone")


def partners(level: str, distance: int, nodes: Sequence[int]) -> Partners:
    """``nodes``: by rank. ``level``:

    - ``flat``: whose number differs in the bit ``distance``;
    - ``within``: whose place among the ranks of its node does;
    - ``between``: who has the same place in the node whose number does: every rank of a node at once, as in a sum by
      two levels;
    - ``alone``: the same of the first rank of every node alone, as few ranks of a ring send to another node.

    Raises ``ValueError`` for a level that does not exist."""
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is none: use flat, within, between or alone")
    nodes = [0] * len(nodes) if level == "flat" else nodes
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)

    def partner(rank: int) -> int | None:
        node = nodes[rank]
        place = members[node].index(rank)
        if level in ("flat", "within"):
            found, place = members[node], place ^ distance
        else:
            found = members.get(node ^ distance, []) if level == "between" or place == 0 else []
        return found[place] if place < len(found) else None

    return partner


def partners_of(communicator: Communicator, level: str) -> list[Partners]:
    """Near ones and, where all ranks have them, far ones; ``level`` as for ``partners``."""
    both = [partners(level, distance, communicator.nodes) for distance in (1, 2)]
    everybody = all(of(rank) is not None for of in both for rank in range(communicator.world_size))
    return both if everybody else both[:1]


@contextlib.contextmanager
def open_pairs(communicator: Communicator, *, timeout_s: float, level: str = "flat") -> Iterator[Pairs]:
    """All ranks call this. ``level`` as for ``partners_of``."""
    with contextlib.ExitStack() as stack:
        made = [_pair_of(communicator, of, timeout_s) for of in partners_of(communicator, level)]
        opened = [None if one is None else stack.enter_context(one) for one in made]
        yield Pairs(opened[0], opened[1] if len(opened) > 1 else None)


def _pair_of(communicator: Communicator, of: Partners, timeout_s: float) -> Communicator | None:
    """None if this rank has no partner."""
    partner = of(communicator.rank)
    pair = [] if partner is None else sorted((communicator.rank, partner))

    def exchange(mine: bytes) -> list[bytes]:
        return told_by(communicator.all_gather, mine, pair)

    if not pair:
        exchange(b"")
        return None
    return Communicator.from_exchange(
        pair.index(communicator.rank), 2, exchange, timeout_s=timeout_s, interface=communicator.interface, tuning=None
    )


def written_zeros(elements: int) -> Vector:
    """Memory as a program's vectors have it: that of ``numpy.zeros`` is one page for all until it is written, which is
    read faster and sent more slowly. A sum of zeros stays one."""
    return np.full(elements, 0, np.float32)


def addition_of(size: int) -> Call:
    """Adds a vector of ``size`` bytes to another, both this rank's own, in slices as the core does."""
    total, addend = written_zeros(size // 4), written_zeros(size // 4)

    def add() -> None:
        for begin in range(0, total.size, _SLICE_ELEMENTS):
            part = slice(begin, begin + _SLICE_ELEMENTS)
            np.add(total[part], addend[part], out=total[part])

    return add


def calls_of_sample(call_s: float, sample_s: float) -> int:
    """Calls of ``call_s`` seconds that make up a sample of about ``sample_s`` seconds."""
    return int(np.clip(sample_s / max(call_s, 1e-7), _FEWEST_CALLS, _MOST_CALLS))


class Sample(NamedTuple):
    """The slowest rank's, the same numbers on all ranks: seconds per call, and what taking the sample took in all."""

    per_call_s: float
    spent_s: float


def timed_sample(communicator: Communicator, call: Call, count: int, *, warm: bool = True) -> Sample:
    """Without ``warm`` every call counts."""
    start = time.perf_counter()
    communicator.barrier()
    if warm:
        call()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    end = time.perf_counter()
    slowest = communicator.all_gather(np.array([(end - begin) / count, end - start])).max(axis=0)
    return Sample(float(slowest[0]), float(slowest[1]))


# The model's costs from measured times: straight lines that a few outliers do not bend.
# The same costs predict every collective: nothing here knows which one they are for.

_LONG_BYTES = 32 << 10


class Line(NamedTuple):
    """Seconds of a message of b bytes: ``intercept_s + b * slope_s_per_byte``."""

    intercept_s: float
    slope_s_per_byte: float


@dataclass(frozen=True)
class CostFit:
    """``alpha_s``, ``beta_s_per_byte``, ``gamma_s_per_byte`` and, depending on the message's length, ``exchange`` go
    into the model: pairs of bytes and of seconds per byte while two ranks send to each other, by length. Two do not:
    ``message_s``, what a message one way takes beyond its bytes where others follow it at once; and ``round_s``, what a
    round of empty messages takes, on links that had time to rest."""

    alpha_s: float
    beta_s_per_byte: float
    exchange: tuple[tuple[int, float], ...]
    gamma_s_per_byte: float
    message_s: float
    round_s: float

    def plain_costs(self) -> Costs:
        """As the closed forms take them, which know one cost for exchanges of any length: the long ones' median."""
        long = [beta for size, beta in self.exchange if size >= _LONG_BYTES] or [beta for _, beta in self.exchange]
        return Costs(self.alpha_s, self.beta_s_per_byte, statistics.median(long), self.gamma_s_per_byte)

    def seconds(self, probe: Probe) -> float:
        """What the plain costs say that ``probe`` takes; ``nan`` for rounds, which are no part of the fit."""
        costs = self.plain_costs()
        line_of_kind = {
            "one_way": (self.message_s, costs.beta_s_per_byte),
            "exchange": (self.alpha_s, costs.beta_exchange_s_per_byte + costs.gamma_s_per_byte),
            "addition": (0.0, costs.gamma_s_per_byte),
        }
        intercept_s, slope_s_per_byte = line_of_kind.get(probe.kind, (0.0, math.nan))
        return intercept_s + probe.bytes * slope_s_per_byte

    def residual(self, medians: Mapping[Probe, float]) -> float:
        """The median of |fitted / measured − 1| over all messages of ``medians``."""
        return statistics.median(
            abs(self.seconds(probe) / seconds - 1)
            for probe, seconds in medians.items()
            if probe.kind in ("one_way", "exchange")
        )


def line_of(points: Sequence[tuple[int, float]]) -> Line:
    """The line through (bytes, seconds) that does the shortest message's time the same justice as the longest's.

    Theil-Sen on seconds per byte against 1/bytes: the median of all pairs' slopes, so that up to 29 % of the points may
    be anything. Sen, "Estimates of the regression coefficient based on Kendall's tau", J. American Statistical
    Association 63, 1968. Raises ``ValueError`` for less than two lengths, or one of 0 bytes.
    """
    if any(size <= 0 for size, _ in points):
        raise ValueError("points contain a message without bytes: a line needs seconds per byte, so leave it out")
    scaled = sorted((1 / size, seconds / size) for size, seconds in points)
    slopes = [(y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in itertools.combinations(scaled, 2) if x1 > x0]
    if not slopes:
        raise ValueError(f"points={points} are of one length: a line needs two lengths")
    intercept_s = statistics.median(slopes)
    return Line(intercept_s, statistics.median(y - intercept_s * x for x, y in scaled))


def fit_costs(medians: Mapping[Probe, float], ranks: int) -> CostFit:
    """The costs from the median times of probes of all kinds among ``ranks`` ranks.

    β is the slope of one-way messages. α is what an exchange takes beyond its bytes: exchanges wait for each other, as
    the steps of a collective do. β_exchange is the rest of an exchange's time, without its addition, for each length. γ
    is the time of an addition per byte, all ranks at once: with more ranks than cores it is larger by itself. A
    negative α or β, from noise, counts as 0, and a β_exchange below β as β. Raises ``ValueError`` if a kind of probe is
    missing.
    """
    of: dict[str, list[tuple[int, float]]] = {}
    for probe, seconds in medians.items():
        of.setdefault(probe.kind, []).append((probe.bytes, seconds))
    missing = [kind for kind in KINDS if kind not in of]
    if missing:
        raise ValueError(f"medians lack {', '.join(missing)}: fit_costs() needs all that probes() lists")
    gamma = statistics.median(seconds / size for size, seconds in of["addition"])
    alpha = max(0.0, line_of(of["exchange"]).intercept_s)
    one_way = line_of(of["one_way"])
    beta = max(0.0, one_way.slope_s_per_byte)
    return CostFit(
        alpha_s=alpha,
        beta_s_per_byte=beta,
        exchange=tuple((size, max(beta, (seconds - alpha) / size - gamma)) for size, seconds in sorted(of["exchange"])),
        gamma_s_per_byte=gamma,
        message_s=max(0.0, one_way.intercept_s),
        round_s=statistics.median(seconds for _, seconds in of["round"]) / max(1, math.ceil(math.log2(ranks))),
    )
