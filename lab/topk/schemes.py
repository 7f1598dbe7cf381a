"""What ranks have selected, summed by one scheme call after call in virtual time: words, bytes, entries, seconds.

Words are the measure of Ok-Topk's paper: an index is one, a value is one, counts and headers are none. Bytes are all
that is sent. All schemes use raw entries (an index of 32 bits, a float32), as the paper's do; Ok-Topk
has fewer bits for the indices of short shares.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.communicator import BoundedTopkState, GTopkState, OkTopkState
from telegrad.communicator.topk import TopkState, TopkSum
from telegrad.cost import fastest_allreduce
from telegrad.sparse_vector import SparseVector
from telegrad.tools.sim import World
from telegrad.tools.sim.measure import Measurement, Network, Point, measure

Counts = npt.NDArray[np.int64]
Streams = Sequence[SparseVector]

_ENTRY_BYTES = 8
_ENTRIES_OF_SUMS_MOST = 1 << 24  # held by all ranks together: 128 MiB; beyond, only sizes travel
_LONGEST_RUN = 256  # ranks of sums that are simulated with values


@dataclass(frozen=True)
class Called:
    """One call of all ranks; arrays are by rank.

    ``bytes_max``: the most that a rank sends or receives, headers and counts included.
    ``given``: the largest number of entries that a rank has given; ``kept``: how many entries the result has.
    ``communication_s``: what the call takes where reduction costs nothing (``None``: not asked for). ``payloads``:
    ``"values"``, or ``"sizes"``: words are counted from the entries, time is of messages of their sizes. ``left``: of
    each rank the entries that have no part in the result, for its residual (``None``: all of them have).
    """

    words_sent: Counts
    words_received: Counts
    bytes_max: int
    given: int
    kept: int
    time_s: float
    communication_s: float | None
    payloads: str
    left: list[SparseVector] | None = None
    result: SparseVector | None = None

    @property
    def words_max(self) -> int:
        return int(max(self.words_sent.max(), self.words_received.max()))


class Scheme(ABC):
    """One scheme among ``ranks`` ranks, for vectors of ``n`` elements of which about ``k`` are to be kept; ``network``
    has one level (``ValueError`` otherwise). ``leaves``: parts of what ranks give may belong back into their residuals.
    """

    leaves = False

    def __init__(self, ranks: int, n: int, k: int, network: Network) -> None:
        if not network.is_plain:
            raise ValueError(f"network {network.about!r} has two levels or noise: schemes are compared on one without")
        self.ranks, self.n, self.k, self.network = ranks, n, k, network

    @property
    def _without_reduction(self) -> Network:
        return replace(self.network, costs=replace(self.network.costs, gamma_s_per_byte=0.0))

    @abstractmethod
    def call(self, streams: Streams, *, split: bool = False) -> Called:
        """The next call, of one stream per rank. ``split``: also says what of the time is communication."""


class Dense(Scheme):
    """The whole vector, by the fastest dense algorithm of the closed forms; the streams are not looked at."""

    def call(self, streams: Streams, *, split: bool = False) -> Called:
        return replace(self._called, communication_s=self._called.communication_s if split else None)

    @functools.cached_property
    def _called(self) -> Called:
        costs = self.network.costs
        algorithm = fastest_allreduce(self.ranks, 4 * self.n, costs)
        point = Point("allreduce", algorithm, self.ranks, 4 * self.n, self.network)
        found = measure(point)
        rest = measure(replace(point, network=self._without_reduction)).finish_s
        sent, received = (np.asarray(one // 4, np.int64) for one in (found.bytes_sent, found.bytes_received))
        return Called(sent, received, _most(found), self.n, self.n, found.finish_s, rest, "sizes")


class TopkA(Scheme):
    """Every rank gets every rank's entries and adds them itself (an allgather; SparCML, Ok-Topk §2)."""

    def call(self, streams: Streams, *, split: bool = False) -> Called:
        counts = np.array([one.nnz for one in streams], np.int64)
        total = int(counts.sum())
        point = Point("allgather", "auto", self.ranks, int(counts.max()) * _ENTRY_BYTES, self._without_reduction)
        found = measure(point) if self.ranks > 1 else None
        gathering_s = found.finish_s if found else 0.0
        adding_s = total * _ENTRY_BYTES * self.network.costs.gamma_s_per_byte
        return Called(
            2 * (total - np.roll(counts, -1)) if self.ranks > 1 else np.zeros(1, np.int64),
            2 * (total - counts),
            _most(found) if found else 0,
            int(counts.max()),
            int(_present(streams, self.n).sum()),
            gathering_s + adding_s,
            gathering_s if split else None,
            "sizes",
        )


class TopkDSA(Scheme):
    """Slices are summed by their owners, which send them round, densely where that is shorter (SparCML §5.3.2)."""

    def call(self, streams: Streams, *, split: bool = False) -> Called:
        counts, present = _counts_per_slice(streams, self.n, self.ranks), _present(streams, self.n)
        ends = _slice_ends(self.n, self.ranks)
        entries = np.diff(np.concatenate([[0], np.cumsum(present)])[np.concatenate([[0], ends])])
        lengths = np.diff(np.concatenate([[0], ends]))
        words = np.minimum(2 * entries, lengths)
        own = np.diagonal(counts)
        kept = int(entries.sum())
        has_values = self.ranks <= _LONGEST_RUN and self.ranks * kept <= _ENTRIES_OF_SUMS_MOST
        run = self._with_values if has_values else self._with_sizes
        time_s, bytes_max = run(streams, kept, self.network)
        return Called(
            2 * (counts.sum(axis=1) - own) + words.sum() - np.roll(words, -1),
            2 * (counts.sum(axis=0) - own) + words.sum() - words,
            bytes_max,
            max(one.nnz for one in streams),
            kept,
            time_s,
            run(streams, kept, self._without_reduction)[0] if split else None,
            "values" if has_values else "sizes",
        )

    def _with_values(self, streams: Streams, kept: int, network: Network) -> tuple[float, int]:
        world = _world(self.ranks, network)
        try:
            works = [
                comm.all_reduce(one, algorithm="split_allgather", wire="raw", async_op=True)
                for comm, one in zip(world.communicators, streams, strict=True)
            ]
            for work in works:
                work.wait()
            moved = [one.stats() for one in world.communicators]
            return world.now_s, max(max(one["bytes_sent"], one["bytes_received"]) for one in moved)
        finally:
            world.close()

    def _with_sizes(self, streams: Streams, kept: int, network: Network) -> tuple[float, int]:
        nnz = round(sum(one.nnz for one in streams) / self.ranks)
        point = Point(
            "sparse_allreduce",
            "split_allgather",
            self.ranks,
            4 * self.n,
            network,
            nnz=nnz,
            overlap=overlap_of(self.n, nnz, self.ranks, kept),
            wire="raw",
        )
        found = measure(point)
        return found.finish_s, _most(found)


class KeepingLargest(Scheme):
    """Sums of which about k entries are kept, by the algorithm that the states name; real entries in every call."""

    leaves = True

    def __init__(self, ranks: int, n: int, k: int, network: Network, state: Callable[[int], TopkState]) -> None:
        super().__init__(ranks, n, k, network)
        self._state = state
        self._states = self._new_states()

    def _new_states(self) -> list[TopkState]:
        return [self._state(self.k) for _ in range(self.ranks)]

    def call(self, streams: Streams, *, split: bool = False) -> Called:
        rest = None
        if split:
            states = self._new_states()
            for state, own in zip(states, self._states, strict=True):
                state.load_state_dict(own.state_dict())
            rest = self.sums(streams, states, self._without_reduction)[1]
        sums, time_s = self.sums(streams, self._states, self.network)
        reports = [one.report for one in sums]
        return Called(
            np.array([one.words_sent for one in reports], np.int64),
            np.array([one.words_received for one in reports], np.int64),
            max(max(one.bytes_sent, one.bytes_received) for one in reports),
            max(one.nnz for one in streams),
            reports[0].selected,
            time_s,
            rest,
            "values",
            [one.left for one in sums],
            sums[0].sum,
        )

    def sums(self, streams: Streams, states: Sequence[TopkState], network: Network) -> tuple[list[TopkSum], float]:
        """Of one call that begins with ``states``, one per rank, by rank; and its seconds."""
        world = _world(self.ranks, network)
        try:
            works = [
                comm.all_reduce_topk(one, state, wire="raw", async_op=True)
                for comm, one, state in zip(world.communicators, streams, states, strict=True)
            ]
            for work in works:
                work.wait()
            return [work.result() for work in works], world.now_s
        finally:
            world.close()


@dataclass(frozen=True)
class SchemeEntry:
    """``summing``: of schemes whose result has all entries; ``state``: of those that keep about k, what all_reduce_topk
    is called with. ``selection``: how ranks choose what they give (``telegrad.compress``)."""

    about: str
    summing: type[Scheme] | None = None
    state: Callable[[int], TopkState] | None = None
    selection: str = "reused"

    @property
    def leaves(self) -> bool:
        """Parts of what ranks give may belong back into their residuals."""
        return self.state is not None

    def make(self, ranks: int, n: int, k: int, network: Network) -> Scheme:
        """The scheme, before its first call."""
        if self.state is not None:
            return KeepingLargest(ranks, n, k, network, self.state)
        assert self.summing is not None
        return self.summing(ranks, n, k, network)


SCHEMES = {
    "dense": SchemeEntry("dense allreduce", Dense),
    "topka": SchemeEntry("allgather of entries (TopkA)", TopkA),
    "topkdsa": SchemeEntry("split and allgather, dense where shorter (TopkDSA)", TopkDSA),
    "gtopk": SchemeEntry("a tree of sums of at most k entries (gTopk)", state=GTopkState),
    "gaussiank": SchemeEntry("normal fit for the threshold, allgather of entries (Gaussiank)", TopkA, None, "gaussian"),
    "oktopk": SchemeEntry("Ok-Topk with pooled boundaries and counts", state=OkTopkState),
    "oktopk-bounded": SchemeEntry("Ok-Topk in messages of fixed sizes", state=BoundedTopkState),
    "oktopk-published": SchemeEntry(
        "Ok-Topk as published: boundaries averaged and kept, all sums gathered for the threshold, shares doubled",
        state=functools.partial(OkTopkState, as_published=True),
    ),
}
"""By name: what can be compared."""


def least_words(k: int, ranks: int) -> float:
    """What a rank must move at least so that all ranks get k entries: 2k(P-1)/P. Source: Ok-Topk, Theorem 3.1."""
    return 2 * k * (ranks - 1) / ranks


def paper_words(k: int, ranks: int) -> float:
    """What the paper says that a rank moves at most: 6k(P-1)/P. Source: Ok-Topk, Equation 3."""
    return 6 * k * (ranks - 1) / ranks


def most_words(k: int, ranks: int) -> int:
    """What a rank moves at most here: 6k + 2E, with k the larger of the local and the global count of the call.

    E is the larger of P and 6 sqrt(k)."""
    return _core.OkTopkState.words_most(k, ranks)


def most_bytes(
    most: int, k: int, ranks: int, n: int, *, cut: bool = True, exact: bool = True, balanced: bool = True
) -> int:
    """The most bytes that a rank sends or receives, counts and headers included. ``most``: the larger count of entries.

    Of a call that cuts slices, finds the threshold or makes shares alike, as its report says."""
    return _core.OkTopkState.bytes_most(most, k, ranks, n, cut, exact, balanced)


def _most(found: Measurement) -> int:
    return int(max(found.bytes_sent.max(), found.bytes_received.max()))


def overlap_of(n: int, nnz: int, ranks: int, entries: int) -> float:
    """The share of each rank's ``nnz`` entries at indices common to all, with which sums of ``ranks`` otherwise
    independent vectors have ``entries`` entries, as near as it can be."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        common = middle * nnz
        rest = max(n - common, 1.0)
        expected = common + rest * (1 - (1 - min((nnz - common) / rest, 1.0)) ** ranks)
        low, high = (middle, high) if expected > entries else (low, middle)
    return (low + high) / 2


def _world(ranks: int, network: Network) -> World:
    costs = network.costs
    return World(
        ranks,
        alpha_s=costs.alpha_s,
        beta_s_per_byte=costs.beta_s_per_byte,
        gamma_s_per_byte=costs.gamma_s_per_byte,
    )


def _present(streams: Streams, n: int) -> npt.NDArray[np.bool_]:
    present = np.zeros(n, np.bool_)
    for one in streams:
        present[one.raw_indices] = True
    return present


def _slice_ends(n: int, ranks: int) -> Counts:
    """As core/collectives/support/partition.hpp cuts: the first n mod P slices have one element more."""
    lengths = np.full(ranks, n // ranks, np.int64)
    lengths[: n % ranks] += 1
    return np.cumsum(lengths)


def _counts_per_slice(streams: Streams, n: int, ranks: int) -> Counts:
    """By rank and owner."""
    edges = np.concatenate([[0], _slice_ends(n, ranks)])
    return np.array([np.diff(np.searchsorted(one.raw_indices, edges)) for one in streams], np.int64)
