"""One collective of all ranks in virtual time, on a named network, or many such points over all cores."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.communicator.operands import Formats, formats_named, name_of_formats
from telegrad.cost import Cost, Costs, closed_forms, fastest_allreduce
from telegrad.cost.closed_forms import Levels, allreduce_on_levels, layout_that_pays
from telegrad.cost.decision import TWO_LEVEL
from telegrad.cost.network import CARD_BYTES, ceil_log2
from telegrad.launch.joining import die_with

# Networks by name: the cost of a message, a byte and a byte of work, with the sources of the figures.
# The figures are assumptions for planning, not measurements: a rate is what its standard says, less the frames'
# headers; latencies are what such networks have between two idle machines at one switch. Give your own where you know
# them.

# One core adding float32 vectors that lie in memory: 10 GB of received bytes a second.
GAMMA_S_PER_BYTE = 1e-10

_RATE = re.compile(r"(\d+(?:\.\d+)?)(mbit|gbit)")
_BITS = {"mbit": 1e6, "gbit": 1e9}
_RDMA_FROM_BITS = 100e9
# Of each Ethernet frame on the wire with a payload of 1,500 bytes (preamble and gap included), TCP's user gets 1,448 of
# 1,538 bytes; of RDMA over it with an MTU of 4,096, 4,096 of 4,178.
_TCP_SHARE = 1448 / 1538
_RDMA_SHARE = 4096 / 4178
_TCP_ALPHA_S = 20e-6
_RDMA_ALPHA_S = 2e-6

NAMED = ("1gbit", "10gbit", "25gbit", "40gbit", "100gbit", "200gbit", "400gbit")


@dataclass(frozen=True)
class Network:
    """The simulator's costs. core/drivers/sim/sim_costs.hpp and docs/explanation/simulation.md say what each means.

    ``about`` says where ``costs`` come from. Raises ``ValueError`` for figures that make no sense.
    """

    costs: Costs
    about: str = "costs as given"
    jitter: float = 0.0
    compute_noise: float = 0.0
    start_noise_s: float = 0.0
    ranks_per_node: int = 0
    node_alpha_s: float = 0.0
    node_beta_s_per_byte: float = 0.0
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        for name in ("jitter", "compute_noise", "start_noise_s", "node_alpha_s", "node_beta_s_per_byte"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} must be a finite number, 0 or more")
        if self.ranks_per_node < 0:
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must be 0 (one level) or more")
        if not 1 <= self.oversubscription < float("inf"):
            raise ValueError(
                f"oversubscription={self.oversubscription} must be 1 (an uplink carries all ports of its node) or more"
            )

    @property
    def is_plain(self) -> bool:
        """One level and no noise: what the closed forms are for."""
        noisy = self.jitter or self.compute_noise or self.start_noise_s
        return not noisy and self.ranks_per_node <= 1

    def fields_of_core(self) -> dict[str, float]:
        """The fields of the core's SimCosts by name."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("costs", "about")}
        return own | {field.name: getattr(self.costs, field.name) for field in fields(Costs)}


def network_of(name: str) -> Network:
    """``100gbit`` or any other rate in mbit or gbit. Below 100gbit: TCP through the kernel, from there on RDMA.

    Raises ``ValueError`` for anything else.
    """
    found = _RATE.fullmatch(name.strip().lower())
    if found is None or float(found[1]) == 0:
        raise ValueError(
            f"network {name!r} is not known: use {', '.join(NAMED)} or any other rate above 0 in mbit or gbit, such as "
            "2.5gbit (10 GB/s are 80gbit)"
        )
    bits = float(found[1]) * _BITS[found[2]]
    rdma = bits >= _RDMA_FROM_BITS
    kind, alpha_s, share = ("RDMA", _RDMA_ALPHA_S, _RDMA_SHARE) if rdma else ("TCP", _TCP_ALPHA_S, _TCP_SHARE)
    costs = Costs(alpha_s=alpha_s, beta_s_per_byte=8 / (bits * share), gamma_s_per_byte=GAMMA_S_PER_BYTE)
    about = (
        f"{name.strip().lower()}: assumes {kind}, α {alpha_s * 1e6:g} µs, {share:.1%} of the rate for payload, "
        f"γ {GAMMA_S_PER_BYTE * 1e9:g} ns per byte"
    )
    return Network(costs, about)


def with_costs(network: Network, **given: float | None) -> Network:
    """``network`` with the costs that are not None, by the names of ``Costs``."""
    changed = {name: value for name, value in given.items() if value is not None}
    if not changed:
        return network
    what = ", ".join(f"{name}={value:g}" for name, value in changed.items())
    return replace(network, costs=replace(network.costs, **changed), about=f"{network.about}; given: {what}")


Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.uint32]

# Of each operation; ``by_length``: the core chooses by the number of ranks and bytes, and has no name for it.
ALGORITHMS = {
    "allreduce": ("ring", "recursive_doubling", "rabenseifner"),
    "sparse_allreduce": ("split_allgather", "split_dense_allgather", "recursive_doubling", "ring"),
    "allgather": ("by_length",),
    "gather": ("by_length",),
    "scatter": ("by_length",),
    "all_to_all": ("by_length",),
    "broadcast": ("by_length",),
    "reduce": ("by_length",),
    "reduce_scatter": ("by_length",),
    "barrier": ("dissemination",),
    "sparse_allgather": ("by_length",),
    "sparse_reduce_scatter": ("split",),
    "allreduce_topk": ("oktopk",),
}
SPARSE = ("sparse_allreduce", "sparse_allgather", "sparse_reduce_scatter", "allreduce_topk")
"""Operations on streams. All but the first have real entries, which it may have."""
LEVELLED = ("allreduce", "sparse_allreduce")
"""Operations that may also go by ``two_level``, where the network has nodes."""
_UNNAMED = {*ALGORITHMS} - {"allreduce", "sparse_allreduce"}


@dataclass(frozen=True)
class Point:
    """What to measure. ``algorithm``: one of ``ALGORITHMS``, or ``auto``: the fastest by the closed forms; of sparse
    sums what the ranks come to.

    ``size``: bytes of one rank's vector (allgather, gather, scatter, all_to_all: of one block; sparse: 4 times the
    dimension), ``nnz``: a sparse vector's entries, ``overlap``: the share of them that all ranks have in common,
    ``wire``: how messages hold them, as for ``Communicator.all_reduce``; ``auto``: as a communicator takes it that is
    calibrated on this network. ``keep``: how many entries an allreduce_topk keeps of the sum, 0 as many as a rank has;
    ``calls`` of it follow each other with one state, each with entries of its own. ``payloads``: real values, and the
    result is checked; without, only sizes travel, but where all that is sent depends on entries. Raises ``ValueError``
    for an operation, algorithm or wire that does not exist.
    """

    operation: str
    algorithm: str
    ranks: int
    size: int
    network: Network
    nnz: int = 0
    overlap: float = 0.0
    wire: str = "auto"
    root: int = 0
    payloads: bool = False
    seed: int = 0
    keep: int = 0
    calls: int = 1

    def __post_init__(self) -> None:
        if self.operation not in ALGORITHMS:
            raise ValueError(f"operation {self.operation!r} does not exist: use {', '.join(ALGORITHMS)}")
        known = (*ALGORITHMS[self.operation], *([TWO_LEVEL] if self.operation in LEVELLED else []), "auto")
        if self.algorithm not in known:
            raise ValueError(f"{self.operation} has no algorithm {self.algorithm!r}: use {', '.join(known)}")
        try:
            self._formats()
        except TypeError as error:
            raise ValueError(str(error)) from error

    def _formats(self) -> Formats:
        density = self.nnz / (self.size // 4) if self.size >= 4 else 0.0
        costs, _ = costs_on_levels(self.network, self.ranks)
        return formats_named(self.wire, "f32", layout=layout_that_pays(costs.beta_s_per_byte, density))

    @property
    def formats(self) -> dict[str, Any]:
        """Those of indices and values on the wire, as the core takes them; none where the operation is dense."""
        if self.operation not in SPARSE:
            return {}
        return self._formats()._asdict()

    @property
    def wire_format(self) -> str:
        """``wire`` with both parts named, such as ``packed-f32``; "" where the operation is dense."""
        return name_of_formats(self._formats(), "f32") if self.operation in SPARSE else ""

    @property
    def has_entries(self) -> bool:
        """Real ones, whatever ``payloads`` says."""
        return self.operation in SPARSE[1:]

    @property
    def chosen(self) -> str:
        """The algorithm's name, also where ``auto`` was asked for; but ``auto`` of a sparse sum, which has no other. Of
        ranks that are all on one node ``two_level`` is ``auto``."""
        if self.algorithm not in ("auto", TWO_LEVEL):
            return self.algorithm
        if self.operation not in LEVELLED:
            return ALGORITHMS[self.operation][0]
        costs, levels = costs_on_levels(self.network, self.ranks)
        if self.algorithm == TWO_LEVEL and (levels is not None or self.network.ranks_per_node <= 1):
            return TWO_LEVEL
        return "auto" if self.operation != "allreduce" else fastest_allreduce(self.ranks, self.size, costs, levels)

    @property
    def messages(self) -> int:
        """About how many messages all ranks send."""
        rounds = ceil_log2(self.ranks)
        doubles = self.chosen in ("recursive_doubling", TWO_LEVEL, "dissemination")
        least = rounds if doubles else 2 * rounds if self.chosen == "rabenseifner" else 2 * (self.ranks - 1)
        pieces = _form_of(self).bytes_per_rank // CARD_BYTES if self.operation == "allreduce" else 0
        return self.ranks * max(least, pieces)


def costs_on_levels(network: Network, ranks: int) -> tuple[Costs, Levels | None]:
    """The costs between nodes while all ranks of one share its uplink, and the nodes; of one level, its costs: inside
    of the node that holds all ranks, or the plain ones."""
    per_node = network.ranks_per_node
    within = Costs(network.node_alpha_s, network.node_beta_s_per_byte, gamma_s_per_byte=network.costs.gamma_s_per_byte)
    if per_node >= ranks > 1:
        return within, None
    if per_node <= 1 or ranks == 1:
        return network.costs, None
    between = network.costs.with_bytes_times(network.oversubscription)
    return between, Levels(tuple(rank // per_node for rank in range(ranks)), within, network.costs)


@dataclass(frozen=True)
class Measurement:
    """What ``point`` took, in virtual seconds; arrays are by rank. ``algorithm`` is ``auto`` of sparse sums only."""

    point: Point
    algorithm: str
    finish_s: float
    finish_by_rank_s: Floats
    messages_sent: Counts
    messages_received: Counts
    bytes_sent: Counts
    bytes_received: Counts
    events: int
    result_nnz: int | None = None  # sparse: entries of the sum, or of what rank 0 has gathered
    words_sent: Counts | None = None  # allreduce_topk, its last call: an index and a value are a word each
    words_received: Counts | None = None


def measure(point: Point) -> Measurement:
    """Runs ``point`` in virtual time; other threads go on meanwhile.

    Raises ``ValueError`` for sizes and costs that make no sense, ``RuntimeError`` if the operation could not end or its
    result was wrong, ``MemoryError``.
    """
    found = simulated(point)
    return Measurement(
        point=point,
        algorithm=point.chosen,
        result_nnz=found["result_nnz"] if point.operation in SPARSE else None,
        **{name: found[name] for name in _FOUND},
        **{name: found[name] for name in _WORDS if point.operation == "allreduce_topk"},
    )


def simulated(point: Point, *, links: bool = False, timeline: bool = False) -> dict[str, Any]:
    """What the core found, messages by link and all activities included if asked for. Raises as ``measure``."""
    algorithm = point.chosen
    return _core.measure(
        operation=point.operation,
        algorithm="" if point.operation in _UNNAMED or algorithm == "auto" else algorithm,
        ranks=point.ranks,
        bytes=point.size,
        nnz=point.nnz,
        overlap=point.overlap,
        **point.formats,
        root=point.root,
        payloads=point.payloads or point.has_entries,
        seed=point.seed,
        keep=point.keep,
        calls=point.calls,
        costs=point.network.fields_of_core(),
        links=links,
        timeline=timeline,
    )


_WORDS = ("words_sent", "words_received")
_FOUND = (
    "finish_s",
    "finish_by_rank_s",
    "messages_sent",
    "messages_received",
    "bytes_sent",
    "bytes_received",
    "events",
)


def closed_form(point: Point) -> Cost | None:
    """What theory says, where it has a formula that holds: dense allreduces on a network with one level and without
    noise. No formula follows messages of several steps that wait for one port: that is where there is no latency, and
    where an exchange costs much more than a message one way. Of streams none knows how many entries meet."""
    holds = point.operation == "allreduce" and forms_hold(point.network, _EXCHANGE_MOST)
    return _form_of(point) if holds else None


_EXCHANGE_MOST = 2.0  # times β; then some forms are more than 1 % off


def forms_hold(network: Network, most: float) -> bool:
    """Whether ``network`` is one that closed forms are for, and an exchange costs at most ``most`` times β."""
    costs = network.costs
    return network.is_plain and costs.alpha_s > 0 and costs.beta_exchange_s_per_byte <= most * costs.beta_s_per_byte


def _form_of(point: Point) -> Cost:
    costs, levels = costs_on_levels(point.network, point.ranks)
    if levels is not None:
        return allreduce_on_levels(point.chosen, levels, point.size, costs)
    return closed_forms.allreduce(point.chosen, point.ranks, point.size, costs)


# Many points, over all cores. Each point is simulated by itself, so how many processes there are changes no result.
# Ctrl-C, an error or the end of this process ends the other processes at once.

Item = TypeVar("Item")
Result = TypeVar("Result")


def call_in_processes(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    keep: Callable[[Item, Result], None],
    *,
    prepare: Callable[[], None] | None = None,
) -> None:
    """``keep(item, work(item))`` for each item as it comes, in any order. ``work``, ``prepare``, which each process
    calls at first, items and results are pickled. Raises what ``work`` and ``keep`` raise."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(), prepare))
    try:
        waiting: dict[Future[Result], Item] = {pool.submit(work, item): item for item in items}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                keep(waiting.pop(future), future.result())
    except BaseException:
        # A call may take minutes more, and nobody wants its result.
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        raise
    pool.shutdown()


def _begin(parent: int, prepare: Callable[[], None] | None) -> None:
    """A terminal sends Ctrl-C to all processes; the first ends the others. Where it is killed, nobody does: they wait
    for work under a lock that one of them holds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)
    if prepare is not None:
        prepare()


# What stays below both takes about a second at most.
_LONG_EVENTS = 2_000_000
_EVENTS_PER_MESSAGE = 3
_LONG_BYTES = 256 << 20  # of all ranks' payloads


def sweep(
    points: Sequence[Point], *, processes: int | None = None, on_measured: Callable[[Measurement], None] | None = None
) -> list[Measurement]:
    """Every point's measurement, in the order of ``points``; points that come to the same are simulated once.

    ``processes``: how many to use (default: one per core, and no more than there are points); with 1, short points are
    simulated in this one. ``on_measured`` is called for each as it comes, in any order. Raises ``ValueError`` for less
    than one process, and what ``measure`` raises; then, and on Ctrl-C, the other processes are ended.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes={processes} must be at least 1")
    # auto is the algorithm that it chooses.
    same: dict[Point, list[int]] = {}
    for index, point in enumerate(points):
        same.setdefault(replace(point, algorithm=point.chosen), []).append(index)
    results: dict[int, Measurement] = {}

    def keep(found: Measurement) -> None:
        for index in same[found.point]:
            results[index] = replace(found, point=points[index])
            if on_measured is not None:
                on_measured(results[index])

    longest_first = sorted(same, key=lambda point: -point.messages)
    processes = min(processes or cores(), len(longest_first))
    if processes <= 1 and not any(_is_long(point) for point in longest_first):
        for point in longest_first:
            keep(measure(point))
    else:
        call_in_processes(measure, longest_first, processes, lambda _, found: keep(found))
    return [results[index] for index in range(len(points))]


def _is_long(point: Point) -> bool:
    """The core does not hear Ctrl-C until it has its result."""
    events = point.messages * _EVENTS_PER_MESSAGE
    return events > _LONG_EVENTS or (point.payloads and point.ranks * point.size > _LONG_BYTES)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
