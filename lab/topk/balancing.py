"""What balancing spares Ok-Topk, in virtual time (its paper's Figure 7): slices with as many entries of each rank, and
shares of the sum that are made alike before they are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.topk.recording import Recording
from lab.topk.schemes import KeepingLargest
from lab.topk.simulated import ARIES, Row, scaled
from lab.topk.streams import side_by_side
from lab.topk.weak_scaling import MODELS, Model
from telegrad.communicator import OkTopkState
from telegrad.communicator.topk import TopkSum
from telegrad.sparse_vector import SparseVector
from telegrad.tools.sim.measure import Network

RANKS = (16, 32, 64)

_MODEL = next(model for model in MODELS if model.name == "BERT")
_BLOCKS = 2
_BOUNDARIES_EVERY = 64
_NEVER = 10**9
_ABOVE_ALL = 1e30  # of sums: none is kept, so nothing is gathered
_ALWAYS = 1.0

ABOUT = (
    f"{_MODEL.name} of the weak scaling, {_BLOCKS} recorded gradients side by side. All by the published variant, "
    "which keeps the slices and the threshold that it is given. slices: even, as long as each other; averaged, where "
    "the published variant has cut in an earlier call; pooled, where Ok-Topk here has. reduce_s: of a call whose "
    "threshold no sum reaches, so that nothing is gathered; words_max: of that. cut_s: what a call that cuts takes "
    f"longer; one in {_BOUNDARIES_EVERY} does (0: even). gather_s and balanced_gather_s: what a call takes longer that "
    "keeps kept sums, without and with shares made alike first; triggered: by the default, a largest share above 4 "
    "times the mean"
)
"""What the rows are of, for result files."""


@dataclass(frozen=True)
class Balancing:
    """Of a call among ``ranks`` ranks."""

    ranks: int

    @property
    def about(self) -> str:
        return f"balancing: {self.ranks} ranks"


def balancing_rows(
    ranks: int, recording: Recording, network: Network = ARIES, model: Model = _MODEL, blocks: int = _BLOCKS
) -> list[Row]:
    """A row for each way to cut slices: ``"even"``, ``"averaged"``, ``"pooled"``."""
    earlier, streams = side_by_side(recording, model.density, "reused", 2, ranks, blocks)
    n = streams[0].n
    k, factor = max(1, round(model.density * n)), model.parameters / n
    calls = _Calls(ranks, n, k, scaled(network, factor))
    cuts = {published: calls.past_of_first(published, earlier) for published in (True, False)}
    threshold = cuts[False]["threshold"]
    even = [n // ranks + (rank < n % ranks) for rank in range(ranks)]
    rows: list[Row] = []
    for name, slices in (("even", even), ("averaged", cuts[True]["slices"]), ("pooled", cuts[False]["slices"])):
        reduced, reduce_s = calls.time(streams, slices, _ABOVE_ALL)
        direct, direct_s = calls.time(streams, slices, threshold, balance_factor=_ABOVE_ALL)
        _, alike_s = calls.time(streams, slices, threshold, balance_factor=_ALWAYS)
        rows.append(
            {
                "ranks": ranks,
                "n": model.parameters,
                "k": round(model.density * model.parameters),
                "factor": factor,
                "slices": name,
                "reduce_s": reduce_s,
                "words_max": max(max(one.report.words_sent, one.report.words_received) for one in reduced) * factor,
                "cut_s": 0.0 if name == "even" else calls.cut_s(streams, name == "averaged"),
                "cut_every": _BOUNDARIES_EVERY,
                "gather_s": direct_s - reduce_s,
                "balanced_gather_s": alike_s - reduce_s,
                "kept": direct[0].report.selected * factor,
                "triggered": calls.time(streams, slices, threshold)[0][0].report.balanced,
            }
        )
    return rows


class _Calls:
    """Calls of Ok-Topk that begin with a past of one's choice."""

    def __init__(self, ranks: int, n: int, k: int, network: Network) -> None:
        self._ranks, self._n, self._k, self._network = ranks, n, k, network

    def past_of_first(self, published: bool, streams: Sequence[SparseVector]) -> dict[str, Any]:
        """What a first call leaves."""
        states = self._states(published)
        self._call(streams, states)
        return states[0].state_dict()

    def time(
        self, streams: Sequence[SparseVector], slices: Sequence[int], threshold: float, balance_factor: float = 4.0
    ) -> tuple[list[TopkSum], float]:
        """A call of the published variant, which cuts nothing: it is the second."""
        past = {"calls": 1, "threshold": threshold, "slices": slices}
        return self._call(streams, self._states(True, past, balance_factor))

    def cut_s(self, streams: Sequence[SparseVector], published: bool) -> float:
        """What a call takes longer that has no slices yet, than one that finds slices that fit."""
        past = {**self.past_of_first(published, streams), "calls": 1}
        cutting = self._call(streams, self._states(published, {**past, "slices": []}))[1]
        return cutting - self._call(streams, self._states(published, past))[1]

    def _states(
        self, published: bool, past: dict[str, Any] | None = None, balance_factor: float = 4.0
    ) -> list[OkTopkState]:
        states = [
            OkTopkState(
                self._k,
                as_published=published,
                boundaries_every=_BOUNDARIES_EVERY,
                threshold_every=_NEVER,
                balance_factor=balance_factor,
            )
            for _ in range(self._ranks)
        ]
        for state in states:
            state.load_state_dict({**state.state_dict(), **(past or {})})
        return states

    def _call(self, streams: Sequence[SparseVector], states: list[OkTopkState]) -> tuple[list[TopkSum], float]:
        scheme = KeepingLargest(self._ranks, self._n, self._k, self._network, OkTopkState)
        return scheme.sums(streams, states, self._network)
