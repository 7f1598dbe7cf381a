"""Sums of sparse vectors, ours and the peers', in turn: ``telegrad bench sparse``.

A sample is a barrier and then a number of calls one after another; its time is the slowest rank's. All contenders take
their first sample, then all their second, and so on, each time in another order. The values are such that messages
which pack values get as long as those of gradients do: that depends on how exponents lie.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseVector
from telegrad.launch import join
from telegrad.tools.bench.plan import JsonFields, Peer, Timing, payload_bytes_per_s, peers_store, run_job, start_peers
from telegrad.tuning import calibrate
from telegrad.tuning.probes import timed_sample

_RANDOM_SEED = 1_000_003
_PARETO_EXPONENT = 3
_LARGEST = 64.0


def largest_of_gradients(count: int, rank: int) -> npt.NDArray[np.float32]:
    """``count`` float32 like gradients of which the largest were selected: of a Pareto distribution with exponent 3, of
    both signs, up to 64 times the least magnitude. They have 7 significant bits, so that sums are the same in any
    order."""
    draw = np.random.default_rng((rank, _RANDOM_SEED))
    magnitude = np.minimum((1 - draw.random(count)) ** (-1 / _PARETO_EXPONENT), _LARGEST)
    fraction, exponent = np.frexp(magnitude)
    rounded = np.ldexp(np.floor(fraction * 128) / 128, exponent)
    return np.asarray(rounded * draw.choice([-1, 1], count), np.float32)


def exponent_bits() -> float:
    """The entropy of their exponents: an octave has the same part of what the ones below have left."""
    stays = 1 - 2.0**-_PARETO_EXPONENT
    return -math.log2(stays) - (1 - stays) / stays * math.log2(1 - stays)


PATTERNS = ("uniform", "clustered", "identical")
_RUN = 64  # consecutive indices of a cluster
_VALUE_BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8 + 32 / 256}

DENSE = ("gloo-dense", "mpich-dense", "telegrad-dense", "telegrad-dense-out")
WIRES = ("raw-f32", "indices-f32", "packed-f32", "indices-bf16", "packed-bf16", "packed-int8")
TO_DENSE = ("raw-f32", "packed-f32", "packed-bf16")
BY_ALGORITHM = ("split_allgather", "recursive_doubling", "ring", "split_dense_allgather", "two_level")
NAMES = (
    *DENSE,
    "gloo-coo",
    *(f"telegrad-{wire}" for wire in WIRES),
    *(f"telegrad-{wire}-to-dense" for wire in TO_DENSE),
    *(f"telegrad-{algorithm}" for algorithm in BY_ALGORITHM),
)
"""Everything that can be measured. ``-dense``: in place; ``-dense-out``: into another vector. ``telegrad-WIRE``: the
automatic choice, with a stream as the result; ``-to-dense``: into a dense vector; ``telegrad-ALGORITHM``: that one,
with packed indices and float32 values."""


SWEEPS: dict[str, tuple[str, tuple[float, ...]]] = {
    "density": ("density", (1e-5, 1e-4, 1e-3, 0.0078125, 0.03125, 0.125, 0.5)),
    "length": ("n", (1 << 16, 1 << 20, 1 << 24, 1 << 26)),
    "ranks": ("ranks", (2, 4, 8)),
}
"""What can be swept: the field of a plan, and its values."""


@dataclass(frozen=True)
class SparsePlan(JsonFields):
    """A vector of ``n`` float32, of which every rank has the part ``density``, at indices that follow ``pattern``."""

    network: str
    ranks: int
    n: int
    density: float
    pattern: str
    names: tuple[str, ...]
    samples: int = 9
    sample_s: float = 0.05
    seconds: float = 60.0
    calibrates: bool = False  # first of all, so that the automatic choice knows this network
    nodes: int = 1  # on which the ranks live, neighbours together
    store: str = ""  # a path at which Gloo's processes meet

    @property
    def nnz(self) -> int:
        """Entries of each rank."""
        return max(1, round(self.n * self.density))

    @property
    def peers(self) -> tuple[str, ...]:
        """Of which libraries something is measured."""
        return tuple(peer for peer in ("gloo", "mpich") if any(name.startswith(f"{peer}-") for name in self.names))


def swept(plans: Sequence[SparsePlan], what: Sequence[str]) -> list[SparsePlan]:
    """``plans`` with every value of each of ``what`` (see ``SWEEPS``) besides their own, one thing varied at a time;
    each plan once."""
    found = [
        replace(plan, **{name: value})
        for name, values in (SWEEPS[one] for one in what)
        for plan in plans
        for value in sorted({*values, getattr(plan, name)})
    ]
    return list(dict.fromkeys(found or plans))


def indices_of(plan: SparsePlan, rank: int) -> npt.NDArray[np.uint32]:
    """Ascending. ``uniform``: anywhere, independent of other ranks'; ``clustered``: in runs of 64, the same way;
    ``identical``: anywhere, the same on all ranks."""
    draw = np.random.default_rng(_RANDOM_SEED if plan.pattern == "identical" else rank)
    if plan.pattern != "clustered":
        return np.sort(draw.choice(plan.n, plan.nnz, replace=False, shuffle=False)).astype(np.uint32)
    runs = math.ceil(plan.nnz / _RUN)
    starts = np.sort(draw.choice(max(plan.n // _RUN, runs), runs, replace=False, shuffle=False)) * _RUN
    return (starts[:, None] + np.arange(_RUN, dtype=np.uint32)).reshape(-1)[: plan.nnz].astype(np.uint32)


def value_bits(encoding: str, *, packed: bool) -> float:
    """Bits of a value as ``largest_of_gradients`` draws them; packed, with the entropy of its exponent."""
    bits = _VALUE_BITS[encoding]
    return bits - 8 + exponent_bits() if packed and encoding in ("f32", "bf16") else bits


def entropy_bits(density: float) -> float:
    """Bits per index of a set that holds each index with this probability: H(d)/d."""
    if not 0 < density < 1:
        return 0.0
    rest = 1 - density
    return -(density * math.log2(density) + rest * math.log2(rest)) / density


Vector = npt.NDArray[np.float32]

_TIMEOUT_S = 300.0
_JOIN_TIMEOUT_S = 120.0
_FEWEST_SAMPLES = 3
_TOLERANCE = {"int8": 0.02, "bf16": 2**-7}
"""Of what is rounded, relative to the largest sum; the others are exact."""


class _SparseContender(NamedTuple):
    name: str
    call: Callable[[], object]
    ours: bool
    dense_result: Callable[[], Vector] | None  # of the last call; None for what sums zeros


def main(plan_json: str) -> None:
    """One rank. Rank 0 prints ``{"name", "seconds"}`` for each sample, ``{"name", "wrong", "wire_bytes"}`` for each
    contender, and ``{"result_nnz"}``; a rank on which a peer does not start prints ``{"missing", "why"}``."""
    plan = SparsePlan.from_json(plan_json)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        if plan.calibrates:
            calibrate(communicator, keep=False)
        peers = start_peers(plan, communicator)
        _measure(plan, communicator, {peer.name: peer for peer in peers})
        for peer in peers:
            communicator.barrier()
            peer.close()


def _measure(plan: SparsePlan, communicator: Communicator, peers: dict[str, Peer]) -> None:
    contenders = _contenders(plan, communicator, peers)
    expected = np.zeros(plan.n, np.float32)
    for rank in range(plan.ranks):
        expected[indices_of(plan, rank)] += largest_of_gradients(plan.nnz, rank)
    _say(communicator, result_nnz=int(np.count_nonzero(expected)))
    calls: dict[str, int] = {}
    left_s = plan.seconds
    for one in contenders:
        sent = communicator.stats()["bytes_sent"]
        first = timed_sample(communicator, one.call, 1, warm=False)
        sent = communicator.stats()["bytes_sent"] - sent
        most_sent = communicator.all_gather(np.array([sent])).max()
        wrong = _count_wrong(communicator, one, expected)
        _say(communicator, name=one.name, wrong=wrong, wire_bytes=int(most_sent) if one.ours else None)
        calls[one.name] = int(np.clip(plan.sample_s / max(first.per_call_s, 1e-6), 1, 200))
        left_s -= first.spent_s
    del expected
    spent = {one.name: [] for one in contenders}  # type: dict[str, list[float]]
    for number in range(plan.samples):
        for index in map(int, np.random.default_rng(number).permutation(len(contenders))):  # alike on all ranks
            one = contenders[index]
            enough = len(spent[one.name]) >= _FEWEST_SAMPLES or sum(spent[one.name]) > plan.seconds / 4
            if enough and sum(spent[one.name]) > left_s / len(contenders):
                continue
            taken = timed_sample(communicator, one.call, calls[one.name])
            spent[one.name].append(taken.spent_s)
            _say(communicator, name=one.name, seconds=taken.per_call_s)


def _say(communicator: Communicator, **what: Any) -> None:
    if communicator.rank == 0:
        print(json.dumps(what), flush=True)


def _count_wrong(communicator: Communicator, one: _SparseContender, expected: Vector) -> int | None:
    """Values that the call before got wrong, over all ranks."""
    if one.dense_result is None:
        return None
    off = np.abs(one.dense_result() - expected)
    tolerance = next((share for part, share in _TOLERANCE.items() if part in one.name), 0.0)
    wrong = int(np.count_nonzero(off > tolerance * np.abs(expected).max()))
    return int(communicator.all_gather(np.array([wrong])).sum())


def _contenders(plan: SparsePlan, communicator: Communicator, peers: dict[str, Peer]) -> list[_SparseContender]:
    indices = indices_of(plan, communicator.rank)
    stream = SparseVector(indices, largest_of_gradients(indices.size, communicator.rank), plan.n)
    dense, other = (np.empty(plan.n, np.float32) for _ in range(2))  # no memory until somebody writes there
    if any(name in DENSE for name in plan.names):
        dense.fill(0.0)  # pages of memory: those that nobody has written are all the same one
    made = []
    for name in plan.names:
        library, _, what = name.partition("-")
        if library != "telegrad":
            if library in peers:
                made.append(_of_peer(name, peers[library], dense, stream))
        elif what == "dense":
            made.append(_SparseContender(name, lambda: communicator.all_reduce(dense), True, None))
        elif what == "dense-out":
            made.append(_SparseContender(name, lambda: communicator.all_reduce(dense, out=other), True, None))
        elif what.endswith("-to-dense"):
            made.append(_into(name, what.removesuffix("-to-dense"), communicator, stream))
        else:
            options = {"algorithm": what, "wire": "packed"} if what in BY_ALGORITHM else {"wire": what}
            made.append(_to_stream(name, options, communicator, stream))
    return made


def _of_peer(name: str, peer: Peer, dense: Vector, stream: SparseVector) -> _SparseContender:
    if name in DENSE:
        return _SparseContender(name, lambda: peer.all_reduce(dense), False, None)
    import torch
    import torch.distributed as dist

    where = torch.from_numpy(stream.indices.astype(np.int64))[None]
    values = torch.from_numpy(stream.values)
    mine = torch.sparse_coo_tensor(where, values, (stream.n,), is_coalesced=True, check_invariants=False)
    last: list[Any] = []

    def call() -> None:
        last[:] = [mine.clone()]
        dist.all_reduce(last[0])

    return _SparseContender(name, call, False, lambda: np.asarray(last[0].to_dense().numpy()))


def _into(name: str, wire: str, communicator: Communicator, stream: SparseVector) -> _SparseContender:
    out = np.empty(stream.n, np.float32)
    return _SparseContender(name, lambda: communicator.all_reduce_into(stream, out, wire=wire), True, lambda: out)


def _to_stream(
    name: str, options: dict[str, str], communicator: Communicator, stream: SparseVector
) -> _SparseContender:
    last: list[SparseVector] = []

    def call() -> None:
        last[:] = [communicator.all_reduce(stream, **options)]  # type: ignore[arg-type]

    return _SparseContender(name, call, True, lambda: np.asarray(last[0].to_dense()))


Row = dict[str, object]

_TARGET = "telegrad.tools.bench.sparse:main"

BOUND = (
    "What a rank must receive, at the rate of its link: of a dense sum 2(P-1)/P*n values; of a sparse one the K-k "
    "entries of the sum that it does not have, each with its value (packed: with the entropy of its exponent) and "
    "H(K/n)/(K/n) bits of index; null where links have no rate, or ranks share them"
)
"""What ``bound_s`` means in result files."""


@dataclass
class SparseOutcome:
    """By contender: seconds per call of each sample, wrong values (``None``: not looked at) and bytes sent by the rank
    that sent most (``None``: a peer's). ``missing``: why a peer did not start. ``result_nnz``: K."""

    times: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int | None] = field(default_factory=dict)
    wire_bytes: dict[str, int | None] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    result_nnz: int = 0


def run(plan: SparsePlan, *, timeout_s: float, on_sample: Callable[[str], None] = lambda _: None) -> SparseOutcome:
    """Measures all that ``plan`` asks for; ``on_sample`` is called as each sample comes. Raises ``RankFailed``,
    ``RanksTimedOut`` and ``NetlabError``."""
    outcome = SparseOutcome()

    def take(rank: int, line: str) -> None:
        if line.startswith('{"missing"'):
            said = json.loads(line)
            outcome.missing.setdefault(said["missing"], f"rank {rank}: {said['why']}")
        elif rank == 0 and line.startswith("{"):
            said = json.loads(line)
            if "result_nnz" in said:
                outcome.result_nnz = said["result_nnz"]
            elif "seconds" in said:
                outcome.times.setdefault(said["name"], []).append(said["seconds"])
                on_sample(said["name"])
            else:
                outcome.wrong[said["name"]], outcome.wire_bytes[said["name"]] = said["wrong"], said["wire_bytes"]

    with peers_store() as store:
        run_job(
            _TARGET,
            dataclasses.replace(plan, store=store),
            take,
            timeout_s=timeout_s,
            mpich="mpich" in plan.peers,
            nodes=plan.nodes,
        )
    return outcome


def bound_bytes(plan: SparsePlan, name: str, result_nnz: int) -> float:
    """What a rank must receive at least, see ``BOUND``."""
    if name in DENSE:
        return 2 * (plan.ranks - 1) / plan.ranks * plan.n * 4
    encoding = next((part for part in ("bf16", "int8") if part in name), "f32")
    packed = "packed" in name or name.removeprefix("telegrad-") in BY_ALGORITHM
    bits = value_bits(encoding, packed=packed) + entropy_bits(result_nnz / plan.n)
    return (result_nnz - plan.nnz) * bits / 8


def rows_of(plan: SparsePlan, outcome: SparseOutcome, missing: Mapping[str, str] | None = None) -> list[Row]:
    """A row for each contender; one that did not run has null times, and says why."""
    absent = {**(missing or {}), **outcome.missing}
    rate = payload_bytes_per_s(plan.network)
    medians = {name: Timing.of(times).median_s for name, times in outcome.times.items()}
    best_dense = min((medians[name] for name in DENSE if name in medians), default=0.0)
    rows: list[Row] = []
    for name in plan.names:
        timing = Timing.of(outcome.times[name]) if name in outcome.times else None
        least = bound_bytes(plan, name, outcome.result_nnz)
        rows.append(
            {
                "name": name,
                "network": plan.network,
                "ranks": plan.ranks,
                "nodes": plan.nodes,
                "n": plan.n,
                "density": plan.density,
                "pattern": plan.pattern,
                "nnz": plan.nnz,
                "result_nnz": outcome.result_nnz,
                "median_s": timing and timing.median_s,
                "min_s": timing and timing.min_s,
                "p90_s": timing and timing.p90_s,
                "samples": len(outcome.times.get(name, [])),
                "wire_bytes": outcome.wire_bytes.get(name),
                "bound_bytes": least,
                "bound_s": least / rate if rate and plan.nodes == 1 else None,
                "wrong": outcome.wrong.get(name),
                **{
                    f"times_faster_than_{peer.replace('-', '_')}": medians[peer] / timing.median_s
                    if timing and peer in medians
                    else None
                    for peer in ("gloo-dense", "gloo-coo", "mpich-dense")
                },
                "times_faster_than_best_dense": best_dense / timing.median_s if timing and best_dense else None,
                "missing": None if timing else absent.get(name.partition("-")[0], "not asked for"),
            }
        )
    return rows
