"""Entries that equal a reduction's neutral element: they stay entries, however the result is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import Communicator, MismatchedCall, SparseVector

RANKS = 3
NEUTRAL = {"prod": 1.0, "max": -math.inf, "min": math.inf}
OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def comms() -> Iterator[list[Communicator]]:
    ranks = Communicator.local(RANKS, timeout_s=30.0)
    yield ranks
    for comm in ranks:
        comm.close()


def _of_each(comms: list[Communicator], call: Callable[[Communicator], Any]) -> list[Any]:
    return [work.result() for work in [call(comm) for comm in comms]]


def _full(value: float, n: int) -> SparseVector:
    return SparseVector(np.arange(n, dtype=np.uint32), np.full(n, value, np.float32), n)


def _held_densely(comms: list[Communicator], x: SparseVector, op: str) -> list[SparseVector]:
    results = _of_each(comms, lambda comm: comm.all_reduce(x, op, switch_factor=0.0, async_op=True))
    assert all(one.is_dense for one in results)
    return results


@pytest.mark.parametrize("options", [{}, {"switch_factor": 0.0}, {"switch_factor": 1.0}, {"switch_factor": math.inf}])
@pytest.mark.parametrize("op", NEUTRAL)
@pytest.mark.parametrize("n", [10, 70_000])
def test_a_coo_tensor_of_neutral_elements_comes_back(
    comms: list[Communicator], op: str, options: dict[str, Any], n: int
) -> None:
    x = torch.full((n // 2, 2), NEUTRAL[op]).to_sparse()
    for found in _of_each(comms, lambda comm: comm.all_reduce(x, op, async_op=True, **options)):
        assert found._nnz() == n
        assert torch.equal(found.to_dense(), x.to_dense())


@pytest.mark.parametrize("density", [0.0, 0.01, 0.6, 1.0])
@pytest.mark.parametrize("op", NEUTRAL)
@pytest.mark.parametrize("n", [40, 70_000])
def test_a_result_has_the_entries_of_the_ranks_at_any_density(
    comms: list[Communicator], op: str, density: float, n: int
) -> None:
    inputs = []
    for rank in range(RANKS):
        draw = np.random.default_rng(rank)
        indices = np.flatnonzero(draw.random(n) < density).astype(np.uint32)
        inputs.append(SparseVector(indices, draw.choice([NEUTRAL[op], 2.0], indices.size).astype(np.float32), n))
    union = np.unique(np.concatenate([one.indices for one in inputs]))
    for found in _of_each(comms, lambda comm: comm.all_reduce(inputs[comm.rank], op, async_op=True)):
        assert not found.is_dense
        np.testing.assert_array_equal(found.indices, union)
    as_coo = [one.to_coo((n // 2, 2)) for one in inputs]
    for found in _of_each(comms, lambda comm: comm.all_reduce(as_coo[comm.rank], op, async_op=True)):
        np.testing.assert_array_equal(found.indices()[0] * 2 + found.indices()[1], union)


@pytest.mark.parametrize("op", NEUTRAL)
def test_a_result_that_is_held_densely_loses_nothing_in_the_next_operation(comms: list[Communicator], op: str) -> None:
    n, value = 10, NEUTRAL[op]
    given = _held_densely(comms, _full(value, n), op)
    whole = np.full(n, value, np.float32)
    total = RANKS * whole  # of prod 3, of the others infinite
    for found in _of_each(comms, lambda comm: comm.all_reduce(given[comm.rank], async_op=True)):
        np.testing.assert_array_equal(found.to_dense(), total)
    outs = [np.empty(n, np.float32) for _ in comms]
    for found in _of_each(comms, lambda comm: comm.all_reduce_into(given[comm.rank], outs[comm.rank], async_op=True)):
        np.testing.assert_array_equal(found, total)
    scattered = _of_each(comms, lambda comm: comm.reduce_scatter(given[comm.rank], async_op=True))
    np.testing.assert_array_equal(sum(one.nnz for one in scattered), n)
    for every in _of_each(comms, lambda comm: comm.all_gather(given[comm.rank], async_op=True)):
        for found in every:
            np.testing.assert_array_equal(found.to_dense(), whole)
    again = _of_each(comms, lambda comm: comm.all_reduce(given[comm.rank], op, async_op=True))
    for found in again:
        np.testing.assert_array_equal(found.to_dense(), whole)


def test_a_sum_that_has_cancelled_out_goes_into_a_minimum_as_zero(comms: list[Communicator]) -> None:
    indices = np.array([1, 2, 3], np.uint32)
    inputs = [SparseVector(indices, np.array(values, np.float32), 4) for values in ([5, 1, 2], [-5, 1, 2], [0, 1, 2])]
    sums = _of_each(comms, lambda comm: comm.all_reduce(inputs[comm.rank], switch_factor=0.0, async_op=True))
    positive = _full(7.0, 4)
    for found in _of_each(
        comms, lambda comm: comm.all_reduce(sums[0] if comm.rank == 0 else positive, "min", async_op=True)
    ):
        assert found.to_dense().tolist() == [0, 0, 3, 6]


def test_zeros_of_a_dense_vector_are_no_entries(comms: list[Communicator]) -> None:
    stream = SparseVector.from_dense(np.array([3, 0, 4, 5], np.float32))
    assert stream.is_dense
    for found in _of_each(comms, lambda comm: comm.all_reduce(stream, "min", async_op=True)):
        assert found.indices.tolist() == [0, 2, 3]


@pytest.mark.parametrize("op", ["sum", *NEUTRAL])
def test_ranks_may_bring_tensors_and_streams_and_want_either(on_ranks: OnRanks, op: str) -> None:
    n = 12
    entries = _full(2.0, n)

    def run(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            return list(comm.all_reduce(entries.to_coo(), op).to_dense().tolist())
        if comm.rank == 1:
            return list(comm.all_reduce(entries, op).to_dense().tolist())
        out = np.empty(n, np.float32)
        comm.all_reduce_into(entries, out, op)
        return list(out.tolist())

    expected = {"sum": 6.0, "prod": 8.0}.get(op, 2.0)
    assert on_ranks(3, run) == [[expected] * n] * 3


@pytest.mark.parametrize("op", NEUTRAL)
def test_a_slice_has_the_entries_of_the_ranks(comms: list[Communicator], op: str) -> None:
    n, value = 30_000, NEUTRAL[op]
    x = torch.full((n,), value).to_sparse()
    for factor in (None, math.inf):
        found = _of_each(
            comms, lambda comm, factor=factor: comm.reduce_scatter(x, op, switch_factor=factor, async_op=True)
        )
        assert [one._nnz() for one in found] == [n // RANKS] * RANKS
        assert torch.equal(torch.cat([one.values() for one in found]), x.to_dense())
    with pytest.raises(ValueError, match=rf"switch_factor=1.0 is not for slices of op='{op}'.*leave it out"):
        comms[0].reduce_scatter(x, op, switch_factor=1.0)


def test_who_names_a_factor_and_who_does_not_differ(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(MismatchedCall, match="switch_factor=inf"):
            comm.all_reduce(_full(1.0, 4), "max", **({"switch_factor": 1.0} if comm.rank else {}))

    on_ranks(2, run)
