"""Rounds of DiLoCo: how long an exchange takes on a network, and with which options it takes little of the time."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from telegrad.cost.closed_forms import allgather
from telegrad.tools.advise.sending import BUCKET, Cluster, dense, qsgd
from telegrad.tools.advise.step import planned, simulate
from telegrad.tools.advise.workload import ELEMENT_BYTES, Workload

MOST_SHARE = 0.05
"""Of the time that exchanges are to take."""
USUAL_EVERY, MOST_EVERY = 30, 500
"""Inner steps in a round: what studies find harmless, and what the paper has at most."""
FORMATS = {"float32": "", "qsgd4": ', compress=telegrad.Quantised("qsgd4")', "sparse": ""}
"""Of pseudo-gradients, from the one that loses least to the one that sends least; options of DiLoCo."""
_SPARSE_SHARE, _SPARSE_BITS = 64 / 4096, 9.62  # of packed-codebook2, measured
_LAYERS_OF_FRAGMENT = 3


@dataclass(frozen=True)
class OuterLoop:
    """Replicas, one at each rank of ``cluster``, and what each of them computes. ``step_s``: seconds of an inner step;
    ``elements``: of the model; ``layers``: which fragments are made of."""

    cluster: Cluster
    step_s: float
    elements: int
    layers: int

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, inside: Cluster | None = None) -> OuterLoop:
        """``inside``: the ranks of a replica, which sum gradients in each step. Raises ``ValueError`` for less than two
        replicas, and for steps that take no time."""
        if cluster.ranks < 2:
            raise ValueError(f"{cluster.ranks} replica exchanges nothing: give at least 2")
        trace = workload.trace
        step_s = trace.compute_s
        if inside is not None and inside.ranks > 1:
            step_s = simulate(trace, planned(trace, "fixed", dense(inside))).step_s
        layers = {re.match(r"\D*\d+|[^.]*", name)[0] for name in trace.names}  # type: ignore[index]
        step_s += (workload.accumulate - 1) * trace.compute_s
        if not step_s:
            raise ValueError("a step takes no time: give its milliseconds")
        return cls(cluster, step_s, trace.bytes // ELEMENT_BYTES, len(layers))

    def exchange_s(self, kind: str, elements: int) -> float:
        """Of so many entries in that format."""
        size = elements * ELEMENT_BYTES
        if kind != "sparse":
            return (dense(self.cluster) if kind == "float32" else qsgd(self.cluster, 4)).cost(size)
        return allgather(self.cluster.ranks, self._message_bytes(elements), self.cluster.ring_costs).time_s

    def sent_bytes(self, kind: str) -> float:
        """By a replica, in a round."""
        others = self.cluster.ranks - 1
        if kind == "sparse":
            return others * self._message_bytes(self.elements)
        each = ELEMENT_BYTES if kind == "float32" else 0.5 + ELEMENT_BYTES / BUCKET
        return 2 * others / self.cluster.ranks * each * self.elements

    def round_of(self, kind: str, every: int, *, streams: bool) -> Round:
        """A round of so many inner steps."""
        fragments = max(1, min(every, math.ceil(self.layers / _LAYERS_OF_FRAGMENT))) if streams else 1
        one_s = self.exchange_s(kind, math.ceil(self.elements / fragments))
        delay = min(every - 1, math.ceil(one_s / self.step_s)) if streams else 0
        compute_s = every * self.step_s
        waits_s = fragments * max(0.0, one_s - delay * self.step_s)
        exposed_s = max(waits_s, fragments * one_s - compute_s if streams else 0.0)
        return Round(kind, every, fragments, delay, self.sent_bytes(kind), fragments * one_s, compute_s, exposed_s)

    def least(self, kind: str, *, streams: bool) -> Round:
        """The shortest round in which exchanges take no more than ``MOST_SHARE``."""

        def is_enough(every: int) -> bool:
            return self.round_of(kind, every, streams=streams).share <= MOST_SHARE

        return self.round_of(kind, 1 + bisect_left(range(1, 1 << 40), True, key=is_enough), streams=streams)

    def rounds(self, every: int | None) -> Iterator[Round]:
        """Of that many steps, or the least, in all formats, with and without streaming."""
        for kind in FORMATS:
            for streams in (False, True) if every != 1 else (False,):  # which no fragments divide
                yield (
                    self.least(kind, streams=streams) if every is None else self.round_of(kind, every, streams=streams)
                )

    def recommended(self) -> Round:
        """The format that loses least with a round of at most ``USUAL_EVERY`` steps, without streaming if that does;
        else of at most ``MOST_EVERY``; else the shortest round."""
        found = [*self.rounds(None)]
        for most in (USUAL_EVERY, MOST_EVERY):
            fitting = [one for one in found if one.every <= most]
            if fitting:
                every, streams = max(fitting[0].every, USUAL_EVERY), fitting[0].streams
                return self.round_of(fitting[0].kind, every, streams=streams)
        return min(found, key=lambda one: one.every)

    def _message_bytes(self, elements: int) -> int:
        return math.ceil(elements * _SPARSE_SHARE * _SPARSE_BITS / 8 / ELEMENT_BYTES) * ELEMENT_BYTES


@dataclass(frozen=True)
class Round:
    """``exchange_s``: what the network is busy in a round; ``exposed_s``: how long training waits for it."""

    kind: str
    every: int
    fragments: int
    delay: int
    bytes: float
    exchange_s: float
    compute_s: float
    exposed_s: float

    @property
    def share(self) -> float:
        """Of the time, that training waits."""
        return self.exposed_s / (self.compute_s + self.exposed_s)

    @property
    def streams(self) -> bool:
        """Whether training goes on during an exchange."""
        return self.fragments > 1 or self.delay > 0

    @property
    def line(self) -> str:
        """The line of code."""
        options = f"every={self.every}{FORMATS[self.kind]}"
        if self.streams:
            if self.kind == "sparse":
                options += ", compress=telegrad.TopK(64 / 4096, telegrad.compress.BucketTopK(4096, 64), "
                options += 'values="packed-codebook2", combine="allgather"), decay=0.95'
            options += f", fragments={self.fragments}, delay={self.delay}"
        name = "DiLoCo.streaming" if self.streams else "DiLoCo.sparse" if self.kind == "sparse" else "DiLoCo"
        return f"diloco = telegrad.{name}(model, comm, optimizer, {options})"

    def for_json(self) -> dict[str, Any]:
        """All of it; seconds, and bytes that a replica sends."""
        return {**asdict(self), "streams": self.streams, "share": self.share, "line": self.line}
