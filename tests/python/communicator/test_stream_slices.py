"""all_reduce(stream, slices=): the same sums over balanced slices, and what is refused. Ranks of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_ranks import SIZE

from telegrad import Communicator, MismatchedCall, SparseVector
from telegrad.communicator.operands import WIRES

N = 300_000
ALGORITHMS = ("auto", "split_allgather", "split_dense_allgather", "ring")
PATTERNS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "uniform": lambda draw, _: draw.choice(N, 3000, replace=False),
    "one_slice": lambda draw, _: draw.choice(N // SIZE, 3000, replace=False),
    "zipf": lambda draw, _: np.unique(np.exp(draw.uniform(0.0, np.log(N), 3000)).astype(np.int64) - 1),
    "apart": lambda draw, rank: N // SIZE // SIZE * rank + draw.choice(N // SIZE // SIZE, 3000, replace=False),
    "one_rank": lambda draw, rank: draw.choice(N, 3000 if rank == 1 else 0, replace=False),
    "full": lambda draw, _: np.arange(N),
}


def streams(pattern: str) -> list[SparseVector]:
    made = []
    for rank in range(SIZE):
        draw = np.random.default_rng(rank)
        indices = np.sort(PATTERNS[pattern](draw, rank)).astype(np.uint32)
        made.append(SparseVector(indices, draw.integers(1, 9, indices.size).astype(np.float32), N))
    return made


def reduced(ranks: list[Communicator], inputs: list[SparseVector], **options: Any) -> list[SparseVector]:
    works = [rank.all_reduce(x, async_op=True, **options) for rank, x in zip(ranks, inputs, strict=True)]
    return [work.result() for work in works]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_balanced_slices_give_the_same_sums(ranks: list[Communicator], pattern: str, algorithm: str) -> None:
    inputs = streams(pattern)
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=np.float32)
    for found in reduced(ranks, inputs, algorithm=algorithm, slices="balanced"):
        np.testing.assert_array_equal(found.to_dense(), total)
    outs = [np.full(N, np.nan, np.float32) for _ in ranks]
    works = [
        rank.all_reduce_into(x, out, algorithm=algorithm, slices="balanced", async_op=True)
        for rank, x, out in zip(ranks, inputs, outs, strict=True)
    ]
    for work, out in zip(works, outs, strict=True):
        assert work is not None
        work.wait()
        np.testing.assert_array_equal(out, total)


@pytest.mark.parametrize("wire", WIRES)
def test_errors_of_rounding_add_up_too(ranks: list[Communicator], wire: str) -> None:
    inputs, errors = streams("one_slice"), [np.zeros(N, np.float32) for _ in ranks]
    works = [
        rank.all_reduce(x, wire=wire, error=error, slices="balanced", async_op=True)
        for rank, x, error in zip(ranks, inputs, errors, strict=True)
    ]
    found = [work.result().to_dense() for work in works]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    total = np.sum([x.to_dense() for x in inputs], axis=0, dtype=np.float64)
    np.testing.assert_allclose(found[0] + np.sum(errors, axis=0, dtype=np.float64), total, atol=1e-3)


def test_no_rank_receives_all_of_a_cluster(ranks: list[Communicator]) -> None:
    inputs = streams("one_slice")
    most = {}
    for slices in ("equal", "balanced"):
        before = [rank.stats()["bytes_received"] for rank in ranks]
        reduced(ranks, inputs, algorithm="split_allgather", wire="raw", slices=slices)
        most[slices] = max(rank.stats()["bytes_received"] - was for rank, was in zip(ranks, before, strict=True))
    entries = sum(x.nnz for x in inputs)
    assert most["balanced"] <= 8 * (1.25 * entries / SIZE + 2 * SIZE + entries) + SIZE * (8 + 4 * 8 * SIZE + 96)
    assert most["equal"] >= 8 * (SIZE - 1) * inputs[0].nnz
    assert most["balanced"] < 0.95 * most["equal"]


def test_ranks_with_other_slices_disagree(on_ranks: Callable[..., list[Any]]) -> None:
    def run(communicator: Communicator) -> None:
        slices = "balanced" if communicator.rank == 1 else "equal"
        with pytest.raises(MismatchedCall, match="slices=balanced"):
            communicator.all_reduce(streams("uniform")[communicator.rank], algorithm="ring", slices=slices)

    on_ranks(SIZE, run)


def test_what_is_refused(ranks: list[Communicator]) -> None:
    x = streams("uniform")[0]
    with pytest.raises(ValueError, match="slices='even' does not exist: use one of equal, balanced"):
        ranks[0].all_reduce(x, slices="even")
    with pytest.raises(ValueError, match="slices='balanced' is not for algorithm='recursive_doubling', which has none"):
        ranks[0].all_reduce_into(x, np.zeros(N, np.float32), algorithm="recursive_doubling", slices="balanced")
    assert ranks[0].stats()["operations"] == 0
