"""The model's costs from measured times: straight lines that a few outliers do not bend.

The same costs predict every collective: nothing here knows which one they are for.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from telegrad.cost import Costs
from telegrad.tuning.probes import KINDS, Probe

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

    def beta_exchange_s_per_byte(self, message_bytes: int) -> float:
        """Between measured lengths on a straight line over the logarithm of the length; beyond them as at the ends."""
        sizes, betas = zip(*self.exchange, strict=True)
        return float(np.interp(math.log(max(1, message_bytes)), [math.log(size) for size in sizes], betas))

    def costs(self, message_bytes: int) -> dict[str, float]:
        """As the simulator takes them. ``message_bytes``: of messages that two ranks send to each other at once. That a
        cost per byte depends on the length is what parameterised LogP adds to LogP: Kielmann, Bal, Verstoep, "Fast
        measurement of LogP parameters for message passing platforms", IPDPS workshops 2000, §2.
        """
        return {
            "alpha_s": self.alpha_s,
            "beta_s_per_byte": self.beta_s_per_byte,
            "beta_exchange_s_per_byte": self.beta_exchange_s_per_byte(message_bytes),
            "gamma_s_per_byte": self.gamma_s_per_byte,
        }

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
