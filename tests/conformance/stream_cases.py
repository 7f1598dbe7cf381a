"""Cases of the operations that give ranks sparse vectors other than the whole sum. Their floats are small integers.

Of a gather the outcome is all streams, densely; of a slice, and of the largest entries, the whole right sum, with what
the rank got in its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from cases import MOST_OF_ALL, PATTERNS, Array, Case, Group, dense_bits, from_bf16, input_stream

from telegrad import BoundedTopkState, Communicator, GTopkState, OkTopkState, SparseVector, Work, _core
from telegrad.communicator import TopkSum
from telegrad.communicator.topk import TopkState
from topk_references import Entries, by_bounded_messages, by_tree

GATHER, SCATTER, SCATTER_V, TOPK, TOPK_STALE, GTOPK, BOUNDED, BOUNDED_STALE = OPERATIONS = (
    "sparse_all_gather",
    "sparse_reduce_scatter",
    "sparse_reduce_scatter_v",
    "sparse_topk",
    "sparse_topk_stale",  # with slices and a threshold that fit other entries
    "sparse_gtopk",
    "sparse_bounded_topk",
    "sparse_bounded_topk_stale",
)

TOPK_OF: dict[str, Callable[[int], TopkState]] = {
    TOPK: OkTopkState,
    TOPK_STALE: OkTopkState,
    GTOPK: GTopkState,
    BOUNDED: BoundedTopkState,
    BOUNDED_STALE: BoundedTopkState,
}
RIVALS = (GTOPK, BOUNDED, BOUNDED_STALE)
WITH_ALL_CASES = tuple(operation for operation in OPERATIONS if operation not in RIVALS)


def stream_groups(size: int) -> list[Group]:
    """One case each, and all kinds in flight together."""
    cases = [
        Case(operation, 1000, dtype, pattern=pattern, blocking=dtype == "f32")
        for operation in WITH_ALL_CASES
        for pattern in PATTERNS
        for dtype in ("f32", "bf16")
        if dtype == "f32" or pattern in ("uniform", "crowded")
    ]
    cases += [Case(operation, count) for operation in WITH_ALL_CASES for count in (0, 1, 7, 63)]
    cases += [
        Case(operation, 1000, dtype, pattern="crowded") for operation in WITH_ALL_CASES for dtype in ("f64", "f16")
    ]
    cases += [
        Case(operation, 1000, dtype, values="wide", pattern=pattern)
        for operation in (GATHER, SCATTER, SCATTER_V)
        for dtype in ("i32", "i64", "u32", "u64")
        for pattern in ("uniform", "crowded")
    ]
    if size <= MOST_OF_ALL:
        cases += [
            Case(operation, 200_003, pattern=pattern)
            for operation in WITH_ALL_CASES
            for pattern in ("uniform", "one_slice", "crowded")
        ]
    cases += [  # the C++ tests have many more; judging them takes long here
        Case(operation, 1000, dtype, pattern=pattern, blocking=dtype == "f32")
        for operation in RIVALS
        for pattern, dtype in (("uniform", "f32"), ("one_slice", "f64"), ("crowded", "bf16"))
    ]
    cases += [Case(operation, count) for operation in RIVALS for count in (1, 63)]
    if size == 3:
        cases += [Case(operation, 200_003) for operation in RIVALS]
    mixed = tuple(Case(operation, 1000 + number) for number, operation in enumerate(WITH_ALL_CASES * 3 + RIVALS))
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
    elif case.operation in TOPK_OF:
        state = _state(case, size)
        begun = communicator.all_reduce_topk(stream, state, async_op=not blocking)
    else:
        counts = _counts(case, size)
        begun = communicator.reduce_scatter(stream, counts=counts, async_op=not blocking)

    def outcome() -> Array:
        found = begun if blocking else begun.result()
        if case.operation == GATHER:
            return np.stack([_values(one) for one in found])
        if case.operation in (TOPK, TOPK_STALE):
            return _whole_of_largest(case, found, stream, size)
        if case.operation in TOPK_OF:
            return _whole_of_rival(case, found, state, rank, size)
        return _whole(case, found, rank, size)

    return None if blocking else begun, outcome


def _state(case: Case, size: int) -> TopkState:
    state = TOPK_OF[case.operation](_k(case))
    if case.operation in (TOPK_STALE, BOUNDED_STALE):
        slices = [case.count // size + (r < case.count % size) for r in range(size)]
        state.load_state_dict({**state.state_dict(), "calls": 1, "threshold": 0.0, "slices": slices})
    return state


def _k(case: Case) -> int:
    return max(1, case.count // 50)


def _whole_of_largest(case: Case, found: TopkSum, stream: SparseVector, size: int) -> Array:
    whole, held = _sum_of_all(case, size)
    whole = whole.copy()
    k = _k(case)
    least = np.sort(np.abs(whole[held]))[-k] if held.size >= k else 0.0
    sizes = np.abs(whole[held])
    above, ties = held[sizes > least], held[sizes == least]
    right = np.sort(np.concatenate([above, ties[: max(2 * k - above.size, 0)] if least else ties]))
    near = case.operation == TOPK_STALE and k <= held.size <= k + k // 4  # the threshold may stay, and keeps all
    if not np.array_equal(found.sum.raw_indices, held if near else right):
        raise AssertionError(f"{case}: the sum keeps other entries than the {k} largest")
    stays = ~np.isin(stream.raw_indices, found.sum.raw_indices)
    if not np.array_equal(found.left.raw_indices, stream.raw_indices[stays]):
        raise AssertionError(f"{case}: other entries are left than have no part in the sum")
    most = _core.OkTopkState.words_most(max(found.report.local_most, found.report.selected), size)
    if max(found.report.words_sent, found.report.words_received) > most:
        raise AssertionError(f"{case}: more words than the bound says: {found.report}")
    kept = found.sum.raw_indices
    whole[kept] = _values(found.sum)[kept]
    return whole


def _whole_of_rival(case: Case, found: TopkSum, state: TopkState, rank: int, size: int) -> Array:
    if isinstance(state, BoundedTopkState):
        past = state.state_dict()
        capacity = min(case.count, math.ceil(past["slack"] * state.k / size))
        kept, left = _by_bounded_messages(case, size, capacity, tuple(past["slices"]), past["threshold"])
        words = 4 * capacity * (size - 1)
    else:
        kept, left = _by_tree(case, size)
        words = 2 * min(state.k, case.count) * (size - 1).bit_length()
    if _entries(found.sum) != kept or _entries(found.left) != left[rank]:
        raise AssertionError(f"{case}: other entries are kept or left than by the algorithm in one place")
    if max(found.report.words_sent, found.report.words_received) > words:
        raise AssertionError(f"{case}: more words than the bound says: {found.report}")
    # The sum may hold a part of what all have given at an index: it has been judged.
    return _sum_of_all(case, size)[0]


@functools.lru_cache(maxsize=4)  # for the ranks of one process
def _sum_of_all(case: Case, size: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """The dense sum of what all ranks give, and where at least one of them has an entry."""
    is_held = np.zeros(case.count, np.bool_)
    streams = [input_stream(case, rank, size) for rank in range(size)]
    for stream in streams:
        is_held[stream.raw_indices] = True
    whole = functools.reduce(np.add, map(_values, streams))  # integers wrap round
    return whole, np.flatnonzero(is_held)


@functools.lru_cache(maxsize=4)
def _by_tree(case: Case, size: int) -> tuple[Entries, list[Entries]]:
    return by_tree(_given(case, size), _k(case))


@functools.lru_cache(maxsize=4)
def _by_bounded_messages(
    case: Case, size: int, capacity: int, slices: tuple[int, ...], threshold: float
) -> tuple[Entries, list[Entries]]:
    kept, left, _ = by_bounded_messages(_given(case, size), capacity, slices, threshold)
    return kept, left


def _given(case: Case, size: int) -> list[Entries]:
    return [_entries(input_stream(case, rank, size)) for rank in range(size)]


def _entries(stream: SparseVector) -> Entries:
    return dict(zip(stream.raw_indices.tolist(), _values(stream)[stream.raw_indices].tolist(), strict=True))


def _whole(case: Case, found: SparseVector, rank: int, size: int) -> Array:
    counts = _counts(case, size) or [case.count // size + (r < case.count % size) for r in range(size)]
    begin = sum(counts[:rank])
    end = begin + counts[rank]
    if found.nnz and not begin <= int(found.raw_indices[0]) <= int(found.raw_indices[-1]) < end:
        raise AssertionError(f"{case}: rank {rank} has entries outside of its slice [{begin}, {end})")
    whole = _sum_of_all(case, size)[0].copy()
    whole[begin:end] = _values(found)[begin:end]
    return whole


def _values(stream: SparseVector) -> Array:
    bits = dense_bits(stream)
    if bits.dtype.kind in "iu" and stream.dtype != "bf16":
        return bits
    return (from_bf16(bits) if stream.dtype == "bf16" else bits).astype(np.float64)


def _counts(case: Case, size: int) -> list[int] | None:
    """Lengths of slices that differ, some of them 0; ``None``: they are alike."""
    if case.operation != SCATTER_V:
        return None
    shares = [(rank * 7 + 3) % 4 for rank in range(size)]
    counts = [case.count * share // sum(shares) for share in shares]
    counts[size // 2] += case.count - sum(counts)
    return counts
