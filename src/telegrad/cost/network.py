"""The plain α-β-γ network and what an operation takes on it. docs/explanation/simulation.md describes the network.

A message of b bytes costs α + bβ (one port out and one port in per rank), work on b bytes costs bγ.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from numbers import Integral

import numpy as np
import numpy.typing as npt

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Costs:
    """The costs of a network, in seconds: α, β and γ.

    - ``alpha_s``: latency of a message. ``beta_s_per_byte``: time of a byte in a port.
    - ``beta_exchange_s_per_byte``: the same while two ranks send to each other at once; 0: no different.
    - ``gamma_s_per_byte``: time of a byte in the processor.

    Raises ``ValueError`` for a cost that is negative, infinite or NaN, and for an exchange faster than one way."""

    alpha_s: float = 1e-6
    beta_s_per_byte: float = 1e-10
    beta_exchange_s_per_byte: float = 0.0
    gamma_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            cost = getattr(self, field.name)
            if not 0 <= cost < math.inf:
                raise ValueError(f"{field.name}={cost} is no cost: give a finite number of seconds, 0 or more")
        if 0 < self.beta_exchange_s_per_byte < self.beta_s_per_byte:
            raise ValueError(
                f"beta_exchange_s_per_byte={self.beta_exchange_s_per_byte} is below beta_s_per_byte="
                f"{self.beta_s_per_byte}: two ways at once are no faster; give at least that, or 0 for the same"
            )

    def with_bytes_times(self, factor: float) -> Costs:
        """The costs if a byte takes ``factor`` times as long, as when ranks share a link."""
        return replace(
            self,
            beta_s_per_byte=self.beta_s_per_byte * factor,
            beta_exchange_s_per_byte=self.beta_exchange_s_per_byte * factor,
        )

    def pair_s_per_byte(self, size: int) -> float:
        """Time of a byte that a rank receives while it sends to the same peer, for messages of ``size`` bytes. Only
        messages longer than the latency overlap."""
        meet = size * self.beta_s_per_byte > self.alpha_s
        return self.beta_exchange_s_per_byte if meet and self.beta_exchange_s_per_byte else self.beta_s_per_byte


@dataclass(frozen=True)
class Cost:
    """The cost of one operation: until the last rank is done, and the most bytes that a rank sends."""

    time_s: float
    bytes_per_rank: int


def copying(size: int, costs: Costs) -> Cost:
    """One rank alone, whose result is its input in another place."""
    return Cost(size * costs.gamma_s_per_byte, 0)


def ceil_div(whole: int, part: int) -> int:
    """whole/part, rounded up."""
    return (whole + part - 1) // part


def ceil_log2(ranks: int) -> int:
    """log2 of ``ranks``, rounded up: how many rounds reach them all."""
    return (ranks - 1).bit_length()


def check(ranks: int, size: int) -> None:
    """Raises ``ValueError`` for less than one rank, ``TypeError`` for what is no whole number of them, and
    ``ValueError`` for bytes that are no floats."""
    if not isinstance(ranks, Integral):
        raise TypeError(f"ranks={ranks!r} is a {type(ranks).__name__}: give a whole number, 1 or more")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    if size < 0 or size % ELEMENT_BYTES:
        raise ValueError(f"size={size} is no vector of 4-byte floats: use a multiple of {ELEMENT_BYTES}, 0 or more")


# Operations without a short formula: one rank, or each rank, is followed from step to step.

CARD_BYTES = 60 << 10  # kCardBytes of pieces.hpp
PIECES_UNDER_WAY = 3  # kPiecesUnderWay
_FOLLOWED = 24  # segments (one more where their number is odd) after which the lanes have found their rhythm


@lru_cache(maxsize=4096)
def two_lanes_s(
    segments: int, steps: int, alpha_s: float, port_s: float, work_s: float, *, passes_on: bool = True
) -> float:
    """Time of ``segments`` rings of 2·``steps`` steps each in two lanes, lane l with segments l, l + 2, …; of half as
    many steps where sums are not passed on.

    All ranks do the same at the same time, so one is followed: a step sends and receives (``port_s`` in each port, the
    head ``alpha_s`` later at the receiver), and in the first half of a segment works for ``work_s`` on what has come.
    Many segments go on in the rhythm of the first.
    """
    if segments > _FOLLOWED + 1:
        even = segments % 2
        early_s, late_s = (
            two_lanes_s(count + even, steps, alpha_s, port_s, work_s, passes_on=passes_on)
            for count in (_FOLLOWED // 2, _FOLLOWED)
        )
        rhythm_s = (late_s - early_s) / (_FOLLOWED - _FOLLOWED // 2)
        return late_s + (segments - _FOLLOWED - even) * rhythm_s
    ready_s = [0.0, 0.0]
    of_segment = 2 * steps if passes_on else steps
    left = [(segments + 1) // 2 * of_segment, segments // 2 * of_segment]
    done = [0, 0]
    out_free_s = in_free_s = work_free_s = 0.0
    while left[0] or left[1]:
        lane = 0 if left[0] and (not left[1] or ready_s[0] <= ready_s[1]) else 1
        start_s = max(ready_s[lane], out_free_s)
        out_free_s = start_s + port_s
        in_free_s = max(start_s + alpha_s, in_free_s) + port_s
        ready_s[lane] = in_free_s
        if done[lane] % of_segment < steps:
            work_free_s = max(in_free_s, work_free_s) + work_s
            ready_s[lane] = work_free_s
        done[lane] += 1
        left[lane] -= 1
    return max(ready_s)


@lru_cache(maxsize=4096)
def folded_rounds_s(
    rounds: int, folded: int, fold_s: float, alpha_s: float, port_s: float, exchange_s: float, work_s: float
) -> float:
    """Until the slowest member that tells another is done with its rounds of recursive doubling; the ``folded`` first
    of 2^``rounds`` members begin ``fold_s`` late.

    A message takes ``port_s`` in the port in, but ``exchange_s`` where, as it comes, the receiver is still sending to
    its sender. Both go on when both have taken what the other sent, and then work for ``work_s``.
    """
    members = np.arange(1 << rounds)
    ready_s = np.where(members < folded, fold_s, 0.0)
    in_free_s = np.zeros(len(members))
    for number in range(rounds):
        partners = members ^ (1 << number)
        head_s = ready_s[partners] + alpha_s
        meets = (ready_s <= head_s) & (head_s < ready_s + port_s)
        in_free_s = np.maximum(head_s, in_free_s) + np.where(meets, exchange_s, port_s)
        taken_s = np.maximum(in_free_s, ready_s)
        ready_s = np.maximum(taken_s, taken_s[partners]) + work_s
    return float(ready_s[:folded].max())


def stream_s(messages: int, under_way: int, alpha_s: float, port_s: float) -> float:
    """From the first of equal messages to the last one's end: the next leaves as soon as the port is free and the one
    ``under_way`` before has arrived."""
    if messages <= 0:
        return 0.0
    full, rest = divmod(messages - 1, under_way)
    return full * max(under_way * port_s, alpha_s + port_s) + rest * port_s + alpha_s + port_s


@lru_cache(maxsize=4096)
def pieces_s(
    pieces: int, alpha_s: float, port_s: float, exchange_s: float, work_s: float = 0.0, copy_s: float = 0.0
) -> float:
    """Time of a message to another rank in pieces, three of them at once, while one of the same length comes.

    All ranks do the same at the same time, so one is followed. It begins with work of ``copy_s``; when it takes a
    piece, it begins another, and then works for ``work_s`` on what it has taken. A piece takes ``port_s`` in a port,
    but ``exchange_s`` in the port in if, as it comes, pieces are still waiting for the port out.
    """
    left_s: list[tuple[float, float]] = []  # when each piece was begun, and when it has left

    def begin(at_s: float) -> None:
        left_s.append((at_s, max(at_s, left_s[-1][1] if left_s else 0.0) + port_s))

    for _ in range(min(pieces, PIECES_UNDER_WAY)):
        begin(0.0)
    in_free_s, ready_s = 0.0, copy_s
    for piece in range(pieces):
        head_s = left_s[piece][1] - port_s + alpha_s
        meets = any(begun_s <= head_s < end_s for begun_s, end_s in left_s[piece:])
        in_free_s = max(head_s, in_free_s) + (exchange_s if meets else port_s)
        ready_s = max(ready_s, in_free_s)
        if len(left_s) < pieces:
            begin(ready_s)
        ready_s += work_s
    return ready_s


@lru_cache(maxsize=4096)
def halving_of_elements_s(
    ranks: int, elements: int, alpha_s: float, port_s: float, exchange_s: float, work_s: float, *, gathers: bool
) -> float:
    """Time of a halving, and if it ``gathers`` of its rounds in reverse, in which blocks differ by one element that
    counts: ``port_s``, ``exchange_s`` and ``work_s`` are those of one element. Messages are whole.

    In a round each rank sends to one and receives from another, works on what came if it is of the halving, and goes on
    when what it sent has been taken too.
    """
    least, larger = divmod(elements, ranks)
    every = np.arange(ranks)
    reaches = [ranks]
    while reaches[-1] > 1:
        reaches.append((reaches[-1] + 1) // 2)
    rounds = [(reach, distance, True) for reach, distance in itertools.pairwise(reaches)]
    if gathers:
        rounds += [(reach, distance, False) for reach, distance, _ in reversed(rounds)]

    def begin(block: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return block // ranks * elements + block % ranks * least + np.minimum(block % ranks, larger)

    ready_s, in_free_s = np.zeros(ranks), np.zeros(ranks)
    for reach, distance, halves in rounds:
        blocks = reach - distance
        ahead, behind = (every + distance) % ranks, (every - distance) % ranks
        to, source = (ahead, behind) if halves else (behind, ahead)
        near, far = (begin(first + blocks) - begin(first) for first in (every, every + distance))
        leaves, comes = (far, near) if halves else (near, far)
        head_s = ready_s[source] + alpha_s
        meets = (2 * distance == ranks) & (ready_s <= head_s) & (head_s < ready_s + leaves * port_s)
        in_free_s = np.maximum(head_s, in_free_s) + comes * np.where(meets, exchange_s, port_s)
        taken_s = np.maximum(in_free_s, ready_s)
        done_s = taken_s
        if halves:
            copies = reach == ranks and blocks < distance
            copied_s = ready_s + (begin(every + blocks + 1) - begin(every + blocks)) * work_s if copies else ready_s
            done_s = np.maximum(taken_s, copied_s) + comes * work_s
        ready_s = np.maximum(done_s, taken_s[to])
    return float(ready_s.max())
