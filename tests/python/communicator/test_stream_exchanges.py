"""all_gather(stream) and reduce_scatter(stream): what they give and refuse. Ranks of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_ranks import SIZE

from telegrad import Communicator, MismatchedCall, SparseVector
from telegrad.communicator.operands import WIRES

N = 20_000
WAYS = ("raw", "blocked", "packed", "auto", "packed-f32")
DTYPES: tuple[type[np.floating[Any]], ...] = (np.float32, np.float64, np.float16)


def streams(density: float = 0.01, dtype: type[np.floating[Any]] = np.float32, n: int = N) -> list[SparseVector]:
    made = []
    for rank in range(SIZE):
        draw = np.random.default_rng(rank)
        indices = np.sort(draw.choice(n, int(n * density), replace=False)).astype(np.uint32)
        made.append(SparseVector(indices, draw.integers(-8, 9, indices.size).astype(dtype), n))
    return made


def results(works: list[Any]) -> list[Any]:
    return [work.result() for work in works]


def gathered(ranks: list[Communicator], inputs: list[Any], **options: Any) -> list[list[Any]]:
    return results([r.all_gather(x, async_op=True, **options) for r, x in zip(ranks, inputs, strict=True)])


def scattered(ranks: list[Communicator], inputs: list[Any], op: str = "sum", **options: Any) -> list[Any]:
    return results([r.reduce_scatter(x, op, async_op=True, **options) for r, x in zip(ranks, inputs, strict=True)])


def slices(counts: list[int] | None = None, n: int = N) -> list[slice]:
    lengths = counts or [n // SIZE + (rank < n % SIZE) for rank in range(SIZE)]
    ends = np.cumsum(lengths)
    return [slice(end - length, end) for end, length in zip(ends.tolist(), lengths, strict=True)]


def assert_slices(found: list[SparseVector], total: Any, parts: list[slice], absent: float = 0.0) -> None:
    for stream, part in zip(found, parts, strict=True):
        assert not stream.is_dense
        assert stream.n == total.size
        right = np.full(total.size, absent, total.dtype)
        right[part] = total[part]
        np.testing.assert_array_equal(stream.to_dense(), right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", ["raw", "blocked", "packed", "auto"])
def test_all_gather_gives_every_stream_to_every_rank(
    ranks: list[Communicator], wire: str, dtype: type[np.floating[Any]]
) -> None:
    inputs = streams(dtype=dtype)  # of which some entries are zero
    for found in gathered(ranks, inputs, wire=wire):
        assert len(found) == SIZE
        for one, given in zip(found, inputs, strict=True):
            assert (one.n, one.dtype, one.absent, one.is_dense) == (N, given.dtype, 0.0, False)
            np.testing.assert_array_equal(one.indices, given.indices)
            np.testing.assert_array_equal(one.values, given.values)


def test_full_and_empty_streams_stay_sparse(ranks: list[Communicator]) -> None:
    inputs = [*streams(1.0)[:-1], *streams(0.0)[-1:]]
    for found in gathered(ranks, inputs):
        assert [one.is_dense for one in found] == [False] * SIZE
        assert [one.nnz for one in found] == [N] * (SIZE - 1) + [0]


@pytest.mark.parametrize("wire", [*WIRES, "packed-bf16"])
def test_gathered_values_and_errors_add_up(ranks: list[Communicator], wire: str) -> None:
    draw = np.random.default_rng(1)
    indices = np.arange(0, N, 7, dtype=np.uint32)
    inputs = [SparseVector(indices, draw.standard_normal(indices.size).astype(np.float32), N) for _ in ranks]
    errors = [np.ones(N, np.float32) for _ in ranks]
    works = [
        rank.all_gather(x, wire=wire, error=error, seed=3, async_op=True)
        for rank, x, error in zip(ranks, inputs, errors, strict=True)
    ]
    found = results(works)
    for source, (given, error) in enumerate(zip(inputs, errors, strict=True)):
        for on_rank in found[1:]:
            np.testing.assert_array_equal(on_rank[source].values, found[0][source].values)
        lost = error - 1.0
        assert np.count_nonzero(lost) > indices.size // 2
        np.testing.assert_allclose(found[0][source].to_dense() + lost, given.to_dense(), atol=1e-6)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max", "max_abs"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter_gives_slices_of_what_all_reduce_gives(
    ranks: list[Communicator], op: str, dtype: type[np.floating[Any]]
) -> None:
    inputs = streams(0.3, dtype)
    works = [rank.all_reduce(x, op, async_op=True) for rank, x in zip(ranks, inputs, strict=True)]
    whole = works[0].result() if works[0] is not None else None
    found = scattered(ranks, inputs, op)
    absent = {"prod": 1.0, "min": np.inf, "max": -np.inf}.get(op, 0.0)
    assert [stream.absent for stream in found] == [absent] * SIZE
    assert_slices(found, whole.to_dense(), slices(), absent)


@pytest.mark.parametrize("counts", [None, [0, N, 0], [7, 0, N - 7], [N // 2, N // 4, N // 4]])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.9])
@pytest.mark.parametrize("wire", WAYS)
def test_slices_of_any_lengths(ranks: list[Communicator], wire: str, density: float, counts: list[int] | None) -> None:
    inputs = streams(density)
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=np.float32)
    assert_slices(scattered(ranks, inputs, counts=counts, wire=wire), total, slices(counts))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("wire", WIRES)
def test_slices_and_errors_add_up_to_all_inputs(ranks: list[Communicator], wire: str, op: str) -> None:
    inputs, errors = streams(0.02), [np.zeros(N, np.float32) for _ in range(SIZE)]
    works = [
        rank.reduce_scatter(x, op, wire=wire, error=error, async_op=True)
        for rank, x, error in zip(ranks, inputs, errors, strict=True)
    ]
    held = np.sum([one.to_dense() for one in results(works)], axis=0, dtype=np.float64)
    total = held * (SIZE if op == "avg" else 1) + np.sum(errors, axis=0, dtype=np.float64)
    np.testing.assert_allclose(total, np.sum([x.to_dense() for x in inputs], axis=0), atol=1e-4)


def test_coo_tensors_come_back_as_such(ranks: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")
    inputs = []
    for rank in range(SIZE):
        rows = torch.tensor([[rank, 4, 5]])
        inputs.append(torch.sparse_coo_tensor(rows, torch.full((3, 2), rank + 1.0), (6, 2), check_invariants=True))
    for found in gathered(ranks, inputs):
        for one, given in zip(found, inputs, strict=True):
            assert one.layout == torch.sparse_coo
            assert (one.shape, one.sparse_dim(), one.dtype) == ((6, 2), 1, torch.float32)
            assert torch.equal(one.to_dense(), given.to_dense())
    parts = scattered(ranks, inputs, counts=[2, 6, 4])
    assert [part.sparse_dim() for part in parts] == [1] * SIZE
    total = sum(x.to_dense() for x in inputs)
    assert torch.equal(sum(part.to_dense() for part in parts), total)
    assert torch.equal(parts[0].to_dense()[:1], total[:1])
    assert parts[0]._nnz() == 1


def test_bfloat16(ranks: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")
    inputs = [SparseVector(np.array([2, 9], np.uint32), torch.full((2,), r + 1.0).bfloat16(), 12) for r in range(SIZE)]
    for found in gathered(ranks, inputs):
        assert [one.values.tolist() for one in found] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert found[0].values.dtype == torch.bfloat16
    assert [one.indices.tolist() for one in scattered(ranks, inputs)] == [[2], [], [9]]


def test_several_in_flight(ranks: list[Communicator]) -> None:
    inputs = streams()
    works = [
        [rank.all_gather(x, async_op=True), rank.reduce_scatter(x, async_op=True), rank.all_gather(x, async_op=True)]
        for rank, x in zip(ranks, inputs, strict=True)
    ]
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=np.float32)
    assert_slices([works[rank][1].result() for rank in range(SIZE)], total, slices())
    for begun in works:
        for number in (2, 0):
            assert [one.nnz for one in begun[number].result()] == [x.nnz for x in inputs]


def test_one_rank_alone() -> None:
    with Communicator.local(1)[0] as alone:
        x = streams()[0]
        (same,) = alone.all_gather(x)
        np.testing.assert_array_equal(same.values, x.values)
        np.testing.assert_array_equal(alone.reduce_scatter(x).to_dense(), x.to_dense())


Call = Callable[[Communicator, SparseVector], Any]


@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [
        (lambda c, x: c.all_gather(x), lambda c, x: c.all_gather(SparseVector(x.indices, x.values, N + 1)), "count="),
        (lambda c, x: c.all_gather(x), lambda c, x: c.all_gather(x, wire="bf16"), "wire=bf16"),
        (lambda c, x: c.all_gather(x), lambda c, x: c.reduce_scatter(x), "sparse reduce_scatter"),
        (lambda c, x: c.reduce_scatter(x), lambda c, x: c.reduce_scatter(x, "avg"), "reduction=avg"),
        (lambda c, x: c.reduce_scatter(x), lambda c, x: c.reduce_scatter(x, switch_factor=2.0), "switch_factor=2"),
        (lambda c, x: c.reduce_scatter(x), lambda c, x: c.reduce_scatter(x, counts=[N, 0, 0]), "counts=#"),
        (lambda c, x: c.reduce_scatter(x), lambda c, x: c.all_reduce(x), "sparse allreduce"),
    ],
)
def test_ranks_that_call_otherwise_get_an_error(
    on_ranks: Callable[..., list[Any]], usual: Call, odd: Call, said: str
) -> None:
    def run(communicator: Communicator) -> None:
        with pytest.raises(MismatchedCall, match=said):
            (odd if communicator.rank == 1 else usual)(communicator, streams()[communicator.rank])

    on_ranks(SIZE, run)


def test_what_is_refused_before_anything_is_sent(ranks: list[Communicator]) -> None:
    comm, x = ranks[0], streams()[0]
    for name, value in (("out", np.zeros(N, np.float32)), ("counts", [1, 1, 1])):
        given: dict[str, Any] = {name: value}
        with pytest.raises(TypeError, match=f"{name} is for a dense x: sparse vectors are gathered into a new list"):
            comm.all_gather(x, **given)
    with pytest.raises(TypeError, match="out is for a dense x: a slice of a sparse sum is a new sparse vector"):
        comm.reduce_scatter(x, out=np.zeros(N, np.float32))
    with pytest.raises(ValueError, match=f"counts add up to {N - 1} but x has {N} elements: give each to one rank"):
        comm.reduce_scatter(x, counts=[N - 1, 0, 0])
    with pytest.raises(ValueError, match=r"counts has 2 entries: give one for each of the 3 ranks"):
        comm.reduce_scatter(x, counts=[N, 0])
    for call in (comm.all_gather, comm.reduce_scatter):
        with pytest.raises(TypeError, match="wire and error are for sparse vectors: leave them out"):
            call(np.zeros(3, np.float32), wire="bf16")
        with pytest.raises(ValueError, match="wire='zip' does not exist for sparse vectors"):
            call(x, wire="zip")
        with pytest.raises(ValueError, match=r"wire=array\(\[0., 0.\]\) does not exist for sparse vectors"):
            call(x, wire=np.zeros(2))
        with pytest.raises(TypeError, match="error has dtype float64: give a float32 one"):
            call(x, wire="bf16", error=np.zeros(N))
        with pytest.raises(TypeError, match="wire='bf16' does not fit a sparse vector of f64"):
            call(streams(dtype=np.float64)[0], wire="bf16")
    with pytest.raises(ValueError, match="op='max' is not supported with wire='int8', which rounds"):
        comm.reduce_scatter(x, "max", wire="int8")
    with pytest.raises(ValueError, match="switch_factor=-1 must be 0 or more"):
        comm.reduce_scatter(x, switch_factor=-1)
    assert comm.stats()["operations"] == 0
