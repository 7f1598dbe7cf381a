"""Schemes in virtual time on recorded gradients and on patterns: a row for each call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lab.topk.recording import Recording
from lab.topk.schemes import SCHEMES, Called, Scheme, least_words, most_bytes, most_words, paper_words
from lab.topk.streams import SelectingRank, pattern_stream, streams_of, wanted
from telegrad.cost import Costs
from telegrad.sparse_vector import SparseVector
from telegrad.tools.sim.measure import Network

Row = dict[str, object]

RECORDED = "recorded"
_FEW_RANKS = 256  # above them a call takes seconds: fewer calls
_CALLS_OF_MANY = 2
_PATTERN_N, _PATTERN_K = 1_000_000, 300
_PATTERN_CALLS = 3
_PATTERN_PUBLISHED_MOST = 64
PUBLISHED = "oktopk-published"
# Ranks. As published all sums are gathered, so many times; bounded messages go to all, also where they are empty.
_MOST_RANKS = {PUBLISHED: 256, "oktopk-bounded": 512}
PATTERN_RANKS = (2, 8, 64, 256, 1024)
PATTERN_SCHEMES = ("oktopk", PUBLISHED)

ARIES = Network(
    Costs(alpha_s=1.5e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=1e-10),
    "aries: assumes α 1.5 µs, 10 GB/s into and out of a node, γ 0.1 ns per byte",
)
SELECTION_BYTES = {"reused": 12, "gaussian": 24}
"""Of memory traffic for each element: a gradient and a residual are read, a residual is written; to fit a normal
distribution the sums are first read on their own, and written."""
SELECTION_S_PER_BYTE = 2e-12
"""500 GB/s: two thirds of a P100's memory bandwidth."""


@dataclass(frozen=True)
class SimulatedPlan:
    """``calls``: of each scheme among up to 256 ranks; among more, two at most, and the last one only where a call
    leaves nothing to the next. ``patterns``: names of ``PATTERNS``. ``factor``: how many times larger the model is that
    recorded gradients stand for: a byte costs as many times more."""

    ranks: tuple[int, ...]
    density: float
    calls: int
    schemes: tuple[str, ...]
    patterns: tuple[str, ...]
    network: Network = ARIES
    factor: float = 1.0

    def calls_among(self, ranks: int) -> int:
        return self.calls if ranks <= _FEW_RANKS else min(self.calls, _CALLS_OF_MANY)

    def parts(self) -> list[Part]:
        """What can be simulated by itself, the longest first."""
        sums = [name for name in self.schemes if not SCHEMES[name].leaves]
        alike: dict[str, list[str]] = {}
        for name in sums:
            alike.setdefault(SCHEMES[name].selection, []).append(name)
        found = [Part(RECORDED, tuple(names), self.ranks) for names in alike.values()]
        for name in self.schemes:
            if name in sums:
                continue
            most = min(max(self.ranks), _MOST_RANKS.get(name, max(self.ranks)))
            found += [Part(RECORDED, (name,), (ranks,)) for ranks in self.ranks if ranks <= most]
            most = min(most, _PATTERN_PUBLISHED_MOST) if name == PUBLISHED else most
            if name in PATTERN_SCHEMES:
                found += [
                    Part(pattern, (name,), (ranks,))
                    for pattern in self.patterns
                    for ranks in PATTERN_RANKS
                    if ranks <= most
                ]
        return sorted(found, key=lambda part: -max(part.ranks))


@dataclass(frozen=True)
class Part:
    """``gradients``: ``"recorded"`` or a pattern. All calls of a scheme follow one another."""

    gradients: str
    schemes: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def about(self) -> str:
        ranks = f"{self.ranks[0]:,}" if len(self.ranks) == 1 else f"{self.ranks[0]:,} to {self.ranks[-1]:,}"
        return f"{', '.join(self.schemes)}: {ranks} ranks, {self.gradients}"


def simulate(plan: SimulatedPlan, part: Part, recording: Recording) -> list[Row]:
    """A row for each scheme, number of ranks and call of ``part``."""
    most = max(part.ranks)
    selected: dict[str, list[list[SparseVector]]] = {}
    rows: list[Row] = []
    for name in part.schemes:
        entry = SCHEMES[name]
        if part.gradients == RECORDED and not entry.leaves and entry.selection not in selected:
            selected[entry.selection] = streams_of(
                recording,
                plan.density,
                entry.selection,
                lambda rank: plan.calls if rank < _FEW_RANKS else plan.calls_among(most),
                most,
            )
        for ranks in part.ranks:
            found: Iterator[tuple[int, Called]]
            if part.gradients == RECORDED:
                k, network = wanted(recording, plan.density), scaled(plan.network, plan.factor)
                scheme = entry.make(ranks, recording.elements, k, network)
                calls = plan.calls_among(ranks)
                found = (
                    _with_feedback(scheme, entry.selection, recording, plan.density, calls)
                    if scheme.leaves
                    else _as_selected(scheme, selected[entry.selection][:calls])
                )
            else:
                scheme = entry.make(ranks, _PATTERN_N, _PATTERN_K, plan.network)
                calls = _PATTERN_CALLS if ranks <= _FEW_RANKS else 1 + (part.gradients == "gone-stale")
                found = _on_pattern(scheme, part.gradients, calls)
            selection = entry.selection if name != "dense" else None
            factor = plan.factor if part.gradients == RECORDED else 1.0
            rows += [_row(part.gradients, name, scheme, call, one, selection, factor) for call, one in found]
    return rows


def scaled(network: Network, factor: float) -> Network:
    """A byte costs ``factor`` times as much."""
    costs = network.costs
    return replace(
        network,
        costs=replace(costs.with_bytes_times(factor), gamma_s_per_byte=costs.gamma_s_per_byte * factor),
    )


def _as_selected(scheme: Scheme, selected: Sequence[Sequence[SparseVector]]) -> Iterator[tuple[int, Called]]:
    first = 0 if scheme.ranks <= _FEW_RANKS else len(selected) - 1
    for call in range(first, len(selected)):
        yield call, scheme.call(selected[call][: scheme.ranks], split=call == len(selected) - 1)


def _with_feedback(
    scheme: Scheme, selection: str, recording: Recording, density: float, calls: int
) -> Iterator[tuple[int, Called]]:
    ranks = [SelectingRank(recording, density, selection) for _ in range(scheme.ranks)]
    for call in range(calls):
        streams = [one.select(recording.gradient(rank, call)) for rank, one in enumerate(ranks)]
        called = scheme.call(streams, split=call == calls - 1)
        for one, left in zip(ranks, called.left or (), strict=True):
            one.take_back(left)
        yield call, called


def _on_pattern(scheme: Scheme, pattern: str, calls: int) -> Iterator[tuple[int, Called]]:
    for call in range(calls):
        streams = [
            pattern_stream(pattern, rank, scheme.ranks, call, scheme.n, scheme.k) for rank in range(scheme.ranks)
        ]
        yield call, scheme.call(streams, split=call == calls - 1 and scheme.ranks <= _FEW_RANKS)


def _row(
    gradients: str, name: str, scheme: Scheme, call: int, found: Called, selection: str | None, factor: float
) -> Row:
    ranks, k_of_call = scheme.ranks, max(found.given, found.kept)
    selection_s = selection_seconds(scheme.n * factor, selection)
    communication_s = found.communication_s
    return {
        "gradients": gradients,
        "scheme": name,
        "ranks": ranks,
        "n": scheme.n,
        "k": scheme.k,
        "factor": factor,
        "call": call,
        "selected": found.given,
        "kept": found.kept,
        "fill_in": found.kept / scheme.k,
        "words_max": found.words_max,
        "words_sent_max": int(found.words_sent.max()),
        "words_received_max": int(found.words_received.max()),
        "bound_words": most_words(k_of_call, ranks),
        "of_bound": found.words_max / most_words(k_of_call, ranks),
        "bytes_max": found.bytes_max,
        "bound_bytes": most_bytes(k_of_call, scheme.k, ranks, scheme.n),
        "bytes_of_bound": found.bytes_max / most_bytes(k_of_call, scheme.k, ranks, scheme.n),
        "paper_words": paper_words(scheme.k, ranks),
        "least_words": least_words(scheme.k, ranks),
        "time_s": selection_s + found.time_s,
        "selection_s": selection_s,
        "communication_s": communication_s,
        "reduction_s": None if communication_s is None else max(0.0, found.time_s - communication_s),
        "payloads": found.payloads,
    }


def selection_seconds(n: float, selection: str | None) -> float:
    """An assumption, see ``SELECTION_BYTES``. ``None``: nothing is selected."""
    return 0.0 if selection is None else n * SELECTION_BYTES[selection] * SELECTION_S_PER_BYTE


ABOUT = {
    "words_max": "largest over ranks of max(sent, received): an index is a word, a value is one; counts and headers "
    "are none",
    "bound_words": "6k' + 2E, k' the larger of selected and kept, E the larger of P and 6 sqrt(k'); it binds oktopk",
    "bytes_max": "largest over ranks of max(sent, received), everything counted: entries, headers and counts",
    "bound_bytes": "what oktopk sends or receives at most in bytes, everything counted",
    "factor": "n and k are those of the model that the gradients stand for, divided by it; beta and gamma are "
    "multiplied by it, and so headers and counts weigh as many times more",
    "selected": "largest number of entries that a rank gives",
    "kept": "entries of the result",
    "time_s": "virtual: selection_s + communication_s + reduction_s, the slowest rank's",
    "selection_s": "assumed: 12 bytes of memory traffic an element (gaussiank 24) at 500 GB/s",
    "communication_s": "of the same call where reduction takes no time; null: not simulated for this call",
    "reduction_s": "what the call takes longer with it",
    "payloads": "sizes: words are counted from the ranks' entries, and messages of their sizes are simulated",
}
"""What the fields of a row mean, for result files."""
