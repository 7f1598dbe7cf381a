"""The plain α-β-γ network and what an operation takes on it. docs/simulation.md describes the network.

A message of b bytes costs α + bβ (one port out and one port in per rank), work on b bytes costs bγ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from numbers import Integral

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Costs:
    """The plain network. ``alpha_s``: latency of a message; ``beta_s_per_byte``: time of a byte in a port;
    ``beta_exchange_s_per_byte``: the same while two ranks send to each other at once, 0 if it is no different;
    ``gamma_s_per_byte``: time of a byte in the processor.

    Raises ``ValueError`` for a cost that is negative, infinite or no number, and for an exchange that is faster than
    one way.
    """

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
        """Where a byte takes so many times as long, as where ranks share a link."""
        return replace(
            self,
            beta_s_per_byte=self.beta_s_per_byte * factor,
            beta_exchange_s_per_byte=self.beta_exchange_s_per_byte * factor,
        )

    def pair_s_per_byte(self, size: int) -> float:
        """Time of a byte in the port in of a rank whose port out is, as a message of ``size`` bytes comes, still busy
        with one for the same peer: only messages longer than the latency meet."""
        meet = size * self.beta_s_per_byte > self.alpha_s
        return self.beta_exchange_s_per_byte if meet and self.beta_exchange_s_per_byte else self.beta_s_per_byte


@dataclass(frozen=True)
class Cost:
    """Of one operation: until the last rank is done, and what the rank that sends most does send."""

    time_s: float
    messages_per_rank: int
    bytes_per_rank: int


def copying(size: int, costs: Costs) -> Cost:
    """One rank alone, whose result is its input in another place."""
    return Cost(size * costs.gamma_s_per_byte, 0, 0)


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
