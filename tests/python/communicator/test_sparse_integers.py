"""Sparse vectors of integers: every operation beside numpy's, bit for bit; order, wrapping, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from local_ranks import SIZE

from telegrad import Communicator, MismatchedCall, OkTopkState, SparseVector

Array = np.ndarray[Any, Any]

DTYPES = ("int32", "int64", "uint32", "uint64")
ALGORITHMS = ("auto", "split_allgather", "split_dense_allgather", "recursive_doubling", "ring", "two_level")
N = 3001


def _larger_magnitude(a: Array, b: Array) -> Array:
    sizes = [np.where(x < 0, -x.astype(object), x.astype(object)) for x in (a, b)]
    return np.where(sizes[0] == sizes[1], np.maximum(a, b), np.where(sizes[0] < sizes[1], b, a))


COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "max_abs": _larger_magnitude,
}


def reductions_of(dtype: str) -> list[str]:
    return [op for op in COMBINE if op != "max_abs" or dtype.startswith("int")]


def neutral(op: str, dtype: str) -> int:
    limits = np.iinfo(dtype)
    return {"prod": 1, "min": limits.max, "max": limits.min}.get(op, 0)


def vectors(dtype: str, density: float, n: int = N) -> list[SparseVector]:
    """Of any value, 0 and both ends among them."""
    limits, made = np.iinfo(dtype), []
    for rank in range(SIZE):
        draw = np.random.default_rng([rank, n])
        indices = np.flatnonzero(draw.random(n) < density).astype(np.uint32)
        values = draw.integers(limits.min, limits.max, indices.size, dtype, endpoint=True)
        special = draw.random(indices.size) < 0.2
        values[special] = draw.choice(np.array([limits.min, limits.max, 0, 1], dtype), int(special.sum()))
        made.append(SparseVector(indices, values, n))
    return made


def dense_of(x: SparseVector, op: str, dtype: str) -> Array:
    whole = np.full(x.n, neutral(op, dtype), dtype)
    whole[x.indices] = x.values
    return whole


def right_of(inputs: list[SparseVector], op: str, dtype: str) -> Array:
    return reduce(COMBINE[op], [dense_of(x, op, dtype) for x in inputs])


@pytest.mark.parametrize("density", [0.0, 0.01, 0.4, 1.0])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction_by_every_algorithm_has_numpys_bits(
    ranks: list[Communicator], dtype: str, algorithm: str, density: float
) -> None:
    inputs = vectors(dtype, density)
    before = [x.values.copy() for x in inputs]
    union = np.unique(np.concatenate([x.indices for x in inputs]))
    for op in reductions_of(dtype):
        right = right_of(inputs, op, dtype)
        for options in ({}, {"switch_factor": 0.0}, {"switch_factor": 1.0, "wire": "packed"}, {"wire": "raw"}):
            works = [
                r.all_reduce(x, op, algorithm=algorithm, async_op=True, **options)
                for r, x in zip(ranks, inputs, strict=True)
            ]
            found = [work.result() for work in works]
            for one in found:
                assert (one.values.dtype, one.absent) == (np.dtype(dtype), neutral(op, dtype))
                np.testing.assert_array_equal(one.to_dense(), right)
                if not one.is_dense:
                    np.testing.assert_array_equal(one.indices, union)
            outs = [np.full(N, 77, dtype) for _ in ranks]
            for work in [
                r.all_reduce_into(x, out, op, algorithm=algorithm, async_op=True, **options)
                for r, x, out in zip(ranks, inputs, outs, strict=True)
            ]:
                assert work is not None
                work.wait()
            assert all((out == right).all() for out in outs)
    assert all((x.values == values).all() for x, values in zip(inputs, before, strict=True))


@pytest.mark.parametrize("n", [SIZE * 40_000, 7, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_many_entries_slices_and_gathers(ranks: list[Communicator], dtype: str, n: int) -> None:
    inputs = vectors(dtype, 0.3, n)
    counts = [n // 2, 0, n - n // 2]
    for op in reductions_of(dtype):
        right = right_of(inputs, op, dtype)
        for slices in ("equal", "balanced"):
            works = [r.all_reduce(x, op, slices=slices, async_op=True) for r, x in zip(ranks, inputs, strict=True)]
            for work in works:
                np.testing.assert_array_equal(work.result().to_dense(), right)
        works = [r.reduce_scatter(x, op, counts=counts, async_op=True) for r, x in zip(ranks, inputs, strict=True)]
        begin = 0
        for work, count in zip(works, counts, strict=True):
            part = work.result()
            assert part.values.dtype == dtype
            whole = np.full(n, neutral(op, dtype), dtype)
            whole[begin : begin + count] = right[begin : begin + count]
            np.testing.assert_array_equal(part.to_dense(), whole)
            begin += count
    for work in [r.all_gather(x, async_op=True) for r, x in zip(ranks, inputs, strict=True)]:
        for one, x in zip(work.result(), inputs, strict=True):
            assert one.values.dtype == dtype
            np.testing.assert_array_equal(one.to_dense(), x.to_dense())


def test_sums_wrap_as_dense_ones_do(ranks: list[Communicator]) -> None:
    for dtype in DTYPES:
        highest = np.full(9, np.iinfo(dtype).max, dtype)
        dense = [highest.copy() for _ in ranks]
        for work in [r.all_reduce(x, async_op=True) for r, x in zip(ranks, dense, strict=True)]:
            work.wait()
        stream = SparseVector(np.arange(9, dtype=np.uint32), highest, 9)
        for work in [r.all_reduce(stream, async_op=True) for r in ranks]:
            np.testing.assert_array_equal(work.result().to_dense(), dense[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_and_coo(ranks: list[Communicator], dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = torch.tensor([5, 7], dtype=torch.int64).to(kind)
    stream = SparseVector(torch.tensor([1, 4]), values, 6)
    for work in [r.all_reduce(stream, "prod", async_op=True) for r in ranks]:
        found = work.result()
        assert found.values.dtype == kind
        assert found.to_dense().tolist() == [1, 125, 1, 1, 343, 1]
    if dtype.startswith("u"):  # torch adds no such tensors up
        return
    coo = torch.sparse_coo_tensor(torch.tensor([[1, 1, 2], [0, 0, 1]]), torch.tensor([1, 2, 3], dtype=kind), (3, 2))
    for work in [r.all_reduce(coo, async_op=True) for r in ranks]:
        assert work.result().to_dense().tolist() == [[0, 0], [9, 0], [0, 9]]
        assert work.result().dtype == kind


@pytest.mark.parametrize("dtype", DTYPES)
def test_made_from_dense_and_rows_and_back(dtype: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    limits = np.iinfo(dtype)
    x = np.zeros(1000, dtype)
    x[[3, 500, 999]] = [limits.max, 1, limits.min or 2]
    stream = SparseVector.from_dense(x)
    assert (stream.nnz, stream.dtype, stream.absent) == (3, f"{dtype[0]}{x.itemsize * 8}", 0)
    np.testing.assert_array_equal(stream.to_dense(), x)
    row = stream.to_csr()
    assert row.dtype == dtype
    np.testing.assert_array_equal(SparseVector.from_csr(sparse.csr_array(x[None])).to_dense(), x)
    full = SparseVector.from_dense(np.full(10, limits.max, dtype))
    assert full.is_dense
    assert full.nnz == 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_integers_do_not_have_is_refused_before_anything_is_sent(ranks: list[Communicator], dtype: str) -> None:
    stream, comm = vectors(dtype, 0.1)[0], ranks[0]
    with pytest.raises(TypeError, match=rf"op='avg' of {dtype} does not exist: use 'sum' and divide"):
        comm.all_reduce(stream, "avg")
    with pytest.raises(TypeError, match=rf"op='avg' of {dtype} does not exist"):
        comm.reduce_scatter(stream, "avg")
    with pytest.raises(ValueError, match="op='bor' is not supported: use 'sum', "):
        comm.all_reduce(stream, "bor")
    if dtype.startswith("u"):
        with pytest.raises(
            TypeError, match=rf"op='max_abs' of {dtype} does not exist: use 'sum', 'prod', 'min', 'max'$"
        ):
            comm.all_reduce_into(stream, np.zeros(N, dtype), "max_abs")
    for wire in ("int8", "packed-bf16", "mean", "f32"):
        with pytest.raises(TypeError, match=f"wire='{wire}' does not fit a sparse vector of {stream.dtype}"):
            comm.all_reduce(stream, wire=wire)
    with pytest.raises(ValueError, match="error takes what wire= loses"):
        comm.all_reduce(stream, error=np.zeros(N, np.float32))
    with pytest.raises(TypeError, match=rf"x holds {stream.dtype}: the largest entries are of floats"):
        comm.all_reduce_topk(stream, OkTopkState(3))
    with pytest.raises(TypeError, match=r"out has dtype float32 but the sparse vector holds"):
        comm.all_reduce_into(stream, np.zeros(N, np.float32))
    assert all(r.stats()["operations"] == 0 for r in ranks)


def test_other_widths_are_refused_with_the_remedy() -> None:
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.bool_):
        with pytest.raises(TypeError, match=r"values has dtype .*another float or an integer of 32 or 64 bits"):
            SparseVector(np.zeros(1, np.uint32), np.zeros(1, dtype), 3)


def test_signed_and_unsigned_are_different_calls(ranks: list[Communicator]) -> None:
    works = [
        rank.all_reduce(SparseVector(np.zeros(1, np.uint32), np.ones(1, dtype), 3), async_op=True)
        for rank, dtype in zip(ranks, ("int32", "uint32", "int32"), strict=True)
    ]
    for work in works:
        with pytest.raises(MismatchedCall, match="dtype=u32"):
            work.wait()
