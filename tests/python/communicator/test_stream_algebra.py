"""Reductions of streams, drawn at random: those of the dense vectors in which an absent element is neutral."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from telegrad import Communicator, SparseVector

RANKS = 3
NEUTRAL = {"sum": 0.0, "avg": 0.0, "prod": 1.0, "min": np.inf, "max": -np.inf, "max_abs": 0.0}
DTYPES = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}

OPS = st.sampled_from(["sum", "avg", "prod", "min", "max", "max_abs"])
EXACT_OPS = OPS.filter(lambda op: op != "avg")
Entries = dict[int, int]


@pytest.fixture(scope="module")
def comms() -> Iterator[list[Communicator]]:
    ranks = Communicator.local(RANKS)
    yield ranks
    for comm in ranks:
        comm.close()


@st.composite
def drawn_streams(draw: st.DrawFn) -> tuple[int, list[Entries]]:
    """A length, and each rank's entries: small integers, so that every reduction is exact in 16 bits too."""
    n = draw(st.integers(0, 40))
    entries = st.dictionaries(st.integers(0, n - 1), st.integers(-4, 4)) if n else st.just({})
    return n, draw(st.lists(entries, min_size=RANKS, max_size=RANKS))


def _stream(entries: Entries, n: int, dtype: str) -> SparseVector:
    indices = torch.tensor(sorted(entries), dtype=torch.int64)
    return SparseVector(indices, torch.tensor([entries[i] for i in sorted(entries)], dtype=DTYPES[dtype]), n)


def _reduced(comms: list[Communicator], streams: list[SparseVector], op: str, factor: float = 1.0) -> SparseVector:
    """All ranks' result, once it is known to be the same on all."""
    works = [
        comm.all_reduce(x, op, async_op=True, switch_factor=factor) for comm, x in zip(comms, streams, strict=True)
    ]
    results = [work.result() for work in works]
    for result in results[1:]:
        assert result.is_dense == results[0].is_dense
        assert torch.equal(result.indices, results[0].indices)
        assert torch.equal(result.values, results[0].values)
    return results[0]


def _of_dense(drawn: list[Entries], n: int, op: str) -> list[float]:
    vectors = np.array([[entries.get(i, NEUTRAL[op]) for i in range(n)] for entries in drawn]).reshape(RANKS, n)
    match op:
        case "prod":
            return list(vectors.prod(0))
        case "min":
            return list(vectors.min(0))
        case "max":
            return list(vectors.max(0))
        case "max_abs":  # of two that differ in sign, the positive one
            return [max(column, key=lambda x: (abs(x), x)) for column in vectors.T]
        case _:
            return list(vectors.sum(0))


@given(
    drawn_streams(), OPS.filter(lambda op: op != "avg"), st.sampled_from(sorted(DTYPES)), st.sampled_from([0.0, 1e9])
)
def test_reduction_is_that_of_the_dense_vectors(
    comms: list[Communicator], drawn: tuple[int, list[Entries]], op: str, dtype: str, factor: float
) -> None:
    n, entries = drawn
    result = _reduced(comms, [_stream(one, n, dtype) for one in entries], op, factor)
    assert (result.n, result.dtype, result.absent) == (n, dtype, NEUTRAL[op])
    assert result.to_dense().tolist() == _of_dense(entries, n, op)
    if not result.is_dense:  # who has an entry is in the result, whatever its value
        assert set(result.indices.tolist()) == set().union(*entries)

    out = torch.full((n,), 77.0, dtype=DTYPES[dtype])
    outs = [out.clone() for _ in comms]
    works = [
        comm.all_reduce_into(_stream(one, n, dtype), into, op, async_op=True, switch_factor=factor)
        for comm, one, into in zip(comms, entries, outs, strict=True)
    ]
    for work, into in zip(works, outs, strict=True):
        assert work is not None
        work.wait()
        assert torch.equal(into, result.to_dense())


@given(drawn_streams(), OPS, st.permutations(range(RANKS)))
def test_reduction_does_not_depend_on_who_has_what(
    comms: list[Communicator], drawn: tuple[int, list[Entries]], op: str, order: list[int]
) -> None:
    n, entries = drawn
    streams = [_stream(one, n, "f64") for one in entries]
    result = _reduced(comms, streams, op)
    other = _reduced(comms, [streams[rank] for rank in order], op)
    # As vectors: whether a stream is dense depends on the algorithm as well, which "auto" chooses by earlier results.
    assert torch.equal(result.to_dense(), other.to_dense())


@given(drawn_streams(), EXACT_OPS)
def test_a_result_reduced_with_nothing_is_itself(
    comms: list[Communicator], drawn: tuple[int, list[Entries]], op: str
) -> None:
    n, entries = drawn
    once = _reduced(comms, [_stream(one, n, "f32") for one in entries], op)
    nothing = _stream({}, n, "f32")
    twice = _reduced(comms, [nothing, once, nothing], op)
    assert torch.equal(once.to_dense(), twice.to_dense())


@given(drawn_streams(), st.sampled_from(["min", "max", "max_abs"]))
def test_extremes_of_one_stream_on_all_ranks_are_the_stream(
    comms: list[Communicator], drawn: tuple[int, list[Entries]], op: str
) -> None:
    n, entries = drawn
    stream = _stream(entries[0], n, "bf16")
    result = _reduced(comms, [stream] * RANKS, op, 1e9)
    assert torch.equal(result.indices, stream.indices)
    assert torch.equal(result.values, stream.values)
