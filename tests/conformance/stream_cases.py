"""Cases of the operations that give ranks sparse streams other than the whole sum. Their values are integers.

Of a gather the outcome is all streams, densely; of a slice, and of the largest entries, the whole right sum, with what
the rank got in its place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from cases import MOST_OF_ALL, PATTERNS, Array, Case, Group, dense_bits, from_bf16, input_stream

from telegrad import Communicator, OkTopkState, SparseStream, Work
from telegrad.comm import TopkSum

GATHER, SCATTER, SCATTER_V, TOPK, TOPK_STALE = OPERATIONS = (
    "sparse_all_gather",
    "sparse_reduce_scatter",
    "sparse_reduce_scatter_v",
    "sparse_topk",
    "sparse_topk_stale",  # with slices and a threshold that fit other entries
)


def stream_groups(size: int) -> list[Group]:
    """One case each, and all kinds in flight together."""
    cases = [
        Case(operation, 1000, dtype, pattern=pattern, blocking=dtype == "f32")
        for operation in OPERATIONS
        for pattern in PATTERNS
        for dtype in ("f32", "bf16")
        if dtype == "f32" or pattern in ("uniform", "crowded")
    ]
    cases += [Case(operation, count) for operation in OPERATIONS for count in (0, 1, 7, 63)]
    cases += [Case(operation, 1000, dtype, pattern="crowded") for operation in OPERATIONS for dtype in ("f64", "f16")]
    if size <= MOST_OF_ALL:
        cases += [
            Case(operation, 200_003, pattern=pattern)
            for operation in OPERATIONS
            for pattern in ("uniform", "one_slice", "crowded")
        ]
    mixed = tuple(Case(operation, 1000 + number) for number, operation in enumerate(OPERATIONS * 3))
    return [
        *(Group(case.operation, (case,)) for case in cases),
        *(Group("in_flight", mixed, staggered=staggered) for staggered in (False, True)),
    ]


def begin_streams(case: Case, communicator: Communicator, *, blocking: bool) -> tuple[Work | None, Callable[[], Array]]:
    """The work, if it does not block, and what gives the outcome once it is done."""
    rank, size = communicator.rank, communicator.world_size
    stream = input_stream(case, rank, size)
    if case.operation == GATHER:
        begun = communicator.all_gather(stream, async_op=not blocking)
    elif case.operation in (TOPK, TOPK_STALE):
        begun = communicator.all_reduce_topk(stream, _state(case, size), async_op=not blocking)
    else:
        counts = _counts(case, size)
        begun = communicator.reduce_scatter(stream, counts=counts, async_op=not blocking)

    def outcome() -> Array:
        found = begun if blocking else begun.result()
        if case.operation == GATHER:
            return np.stack([_values(one) for one in found])
        if case.operation in (TOPK, TOPK_STALE):
            return _whole_of_largest(case, found, stream, size)
        return _whole(case, found, rank, size)

    return None if blocking else begun, outcome


def _state(case: Case, size: int) -> OkTopkState:
    state = OkTopkState(max(1, case.count // 50))
    if case.operation == TOPK_STALE:
        slices = [case.count // size + (r < case.count % size) for r in range(size)]
        state.load_state_dict({**state.state_dict(), "calls": 1, "threshold": 0.0, "slices": slices})
    return state


def _whole_of_largest(case: Case, found: TopkSum, stream: SparseStream, size: int) -> Array:
    inputs = [input_stream(case, other, size) for other in range(size)]
    whole: npt.NDArray[np.float64] = np.sum([_values(one) for one in inputs], axis=0)
    held = np.unique(np.concatenate([one.raw_indices for one in inputs]))
    k = max(1, case.count // 50)
    least = np.sort(np.abs(whole[held]))[-k] if held.size >= k else 0.0
    right = held[np.abs(whole[held]) >= least]
    near = case.operation == TOPK_STALE and k <= held.size <= k + k // 4  # the threshold may stay, and keeps all
    if not np.array_equal(found.sum.raw_indices, held if near else right):
        raise AssertionError(f"{case}: the sum keeps other entries than the {k} largest")
    stays = ~np.isin(stream.raw_indices, found.sum.raw_indices)
    if not np.array_equal(found.left.raw_indices, stream.raw_indices[stays]):
        raise AssertionError(f"{case}: other entries are left than have no part in the sum")
    if max(found.report.words_sent, found.report.words_received) > 6 * max(found.report[4:6]) + 2 * size:
        raise AssertionError(f"{case}: more words than the bound says: {found.report}")
    kept = found.sum.raw_indices
    whole[kept] = _values(found.sum)[kept]
    return whole


def _whole(case: Case, found: SparseStream, rank: int, size: int) -> Array:
    counts = _counts(case, size) or [case.count // size + (r < case.count % size) for r in range(size)]
    begin = sum(counts[:rank])
    end = begin + counts[rank]
    if found.nnz and not begin <= int(found.raw_indices[0]) <= int(found.raw_indices[-1]) < end:
        raise AssertionError(f"{case}: rank {rank} has entries outside of its slice [{begin}, {end})")
    whole: npt.NDArray[np.float64] = np.sum([_values(input_stream(case, other, size)) for other in range(size)], axis=0)
    whole[begin:end] = _values(found)[begin:end]
    return whole


def _values(stream: SparseStream) -> npt.NDArray[np.float64]:
    bits = dense_bits(stream)
    return (from_bf16(bits) if stream.dtype == "bf16" else bits).astype(np.float64)


def _counts(case: Case, size: int) -> list[int] | None:
    """Lengths of slices that differ, some of them 0; ``None``: they are alike."""
    if case.operation != SCATTER_V:
        return None
    shares = [(rank * 7 + 3) % 4 for rank in range(size)]
    counts = [case.count * share // sum(shares) for share in shares]
    counts[size // 2] += case.count - sum(counts)
    return counts
