"""The ranks' side of ``telegrad bench sparse``: sums of sparse vectors, ours and the peers', in turn.

A sample is a barrier and then a number of calls one after another; its time is the slowest rank's. All contenders take
their first sample, then all their second, and so on, each time in another order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseStream
from telegrad.bench.gradient_values import largest_of_gradients
from telegrad.bench.peers import Peer, start_peers
from telegrad.bench.sparse_plan import BY_ALGORITHM, DENSE, SparsePlan, indices_of
from telegrad.calibration import calibrate
from telegrad.calibration.pairs import timed_sample
from telegrad.launch import join

Vector = npt.NDArray[np.float32]

_TIMEOUT_S = 300.0
_JOIN_TIMEOUT_S = 120.0
_FEWEST_SAMPLES = 3
_TOLERANCE = {"int8": 0.02, "bf16": 2**-7}
"""Of what is rounded, relative to the largest sum; the others are exact."""


class _Contender(NamedTuple):
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


def _count_wrong(communicator: Communicator, one: _Contender, expected: Vector) -> int | None:
    """Values that the call before got wrong, over all ranks."""
    if one.dense_result is None:
        return None
    off = np.abs(one.dense_result() - expected)
    tolerance = next((share for part, share in _TOLERANCE.items() if part in one.name), 0.0)
    wrong = int(np.count_nonzero(off > tolerance * np.abs(expected).max()))
    return int(communicator.all_gather(np.array([wrong])).sum())


def _contenders(plan: SparsePlan, communicator: Communicator, peers: dict[str, Peer]) -> list[_Contender]:
    indices = indices_of(plan, communicator.rank)
    stream = SparseStream(indices, largest_of_gradients(indices.size, communicator.rank), plan.n)
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
            made.append(_Contender(name, lambda: communicator.all_reduce(dense), True, None))
        elif what == "dense-out":
            made.append(_Contender(name, lambda: communicator.all_reduce(dense, out=other), True, None))
        elif what.endswith("-to-dense"):
            made.append(_into(name, what.removesuffix("-to-dense"), communicator, stream))
        else:
            options = {"algorithm": what, "wire": "packed"} if what in BY_ALGORITHM else {"wire": what}
            made.append(_to_stream(name, options, communicator, stream))
    return made


def _of_peer(name: str, peer: Peer, dense: Vector, stream: SparseStream) -> _Contender:
    if name in DENSE:
        return _Contender(name, lambda: peer.all_reduce(dense), False, None)
    import torch
    import torch.distributed as dist

    where = torch.from_numpy(stream.indices.astype(np.int64))[None]
    values = torch.from_numpy(stream.values)
    mine = torch.sparse_coo_tensor(where, values, (stream.n,), is_coalesced=True, check_invariants=False)
    last: list[Any] = []

    def call() -> None:
        last[:] = [mine.clone()]
        dist.all_reduce(last[0])

    return _Contender(name, call, False, lambda: np.asarray(last[0].to_dense().numpy()))


def _into(name: str, wire: str, communicator: Communicator, stream: SparseStream) -> _Contender:
    out = np.empty(stream.n, np.float32)
    return _Contender(name, lambda: communicator.all_reduce_into(stream, out, wire=wire), True, lambda: out)


def _to_stream(name: str, options: dict[str, str], communicator: Communicator, stream: SparseStream) -> _Contender:
    last: list[SparseStream] = []

    def call() -> None:
        last[:] = [communicator.all_reduce(stream, **options)]  # type: ignore[arg-type]

    return _Contender(name, call, True, lambda: np.asarray(last[0].to_dense()))
