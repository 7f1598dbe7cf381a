"""torch.sparse_coo tensors in a sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from telegrad import Communicator

OnRanks = Callable[..., list[Any]]


def _tensor(rank: int, shape: tuple[int, ...], sparse_dim: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    count = 7
    indices = torch.stack([torch.randint(size, (count,), generator=generator) for size in shape[:sparse_dim]])
    values = torch.randint(1, 9, (count, *shape[sparse_dim:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)  # with repeated and unsorted indices


def test_sum_into_a_dense_tensor(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> torch.Tensor:
        out = torch.full((9, 11), 7.0)
        comm.all_reduce_into(_tensor(comm.rank, (9, 11), 2, torch.float32), out)
        return out

    expected = sum(_tensor(rank, (9, 11), 2, torch.float32).to_dense() for rank in range(3))
    for total in on_ranks(3, run):
        assert torch.equal(total, expected)


@pytest.mark.parametrize(
    ("shape", "sparse_dim"), [((50,), 1), ((9, 11), 2), ((20, 4), 1), ((6, 5, 4), 3), ((8, 3, 2), 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_sum_has_the_shape_and_layout_of_its_terms(
    on_ranks: OnRanks, shape: tuple[int, ...], sparse_dim: int, dtype: torch.dtype
) -> None:
    def run(comm: Communicator) -> torch.Tensor:
        return comm.all_reduce(_tensor(comm.rank, shape, sparse_dim, dtype))

    expected = sum(_tensor(rank, shape, sparse_dim, dtype).to_dense() for rank in range(3))
    for total in on_ranks(3, run):
        assert total.layout == torch.sparse_coo
        assert (total.shape, total.dtype, total.sparse_dim()) == (shape, dtype, sparse_dim)
        assert total.is_coalesced()
        assert torch.equal(total.to_dense(), expected)


def test_nothing_at_all(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> torch.Tensor:
        return comm.all_reduce(torch.zeros(4, 5).to_sparse(), async_op=True).result()

    for total in on_ranks(2, run):
        assert total._nnz() == 0
        assert total.shape == (4, 5)


def test_minimum_is_that_of_the_entries(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> torch.Tensor:
        x = torch.zeros(2, 3)
        x[0, comm.rank] = 5.0
        x[1, 0] = comm.rank + 1.0
        return comm.all_reduce(x.to_sparse(), "min")

    for least in on_ranks(3, run):
        assert least.indices().tolist() == [[0, 0, 0, 1], [0, 1, 2, 0]]
        assert least.values().tolist() == [5.0, 5.0, 5.0, 1.0]


def test_wrong_dtype(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(TypeError, match="values has dtype torch.int16"):
            comm.all_reduce(torch.eye(3).to(torch.int16).to_sparse())

    on_ranks(1, run)
