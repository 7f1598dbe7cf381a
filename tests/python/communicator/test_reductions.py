"""reduce, reduce_scatter and all_reduce(out=): what they give, write and refuse. Ranks of this process."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from local_ranks import SIZE

from telegrad import Communicator


def inputs(count: int = 12) -> list[np.ndarray[Any, Any]]:
    return [np.arange(count, dtype=np.float32) * (rank + 1) for rank in range(SIZE)]


def total(count: int = 12) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.float32) * 6


@pytest.mark.parametrize("root", range(SIZE))
def test_reduce_writes_on_the_root_only(ranks: list[Communicator], root: int) -> None:
    xs = inputs()
    works = [rank.reduce(x, root, async_op=True) for rank, x in zip(ranks, xs, strict=True)]
    results = [work.result() for work in works if work is not None]
    assert [result is x for result, x in zip(results, xs, strict=True)] == [r == root for r in range(SIZE)]
    for number, (x, before) in enumerate(zip(xs, inputs(), strict=True)):
        np.testing.assert_array_equal(x, total() if number == root else before)


def test_reduce_to_out_takes_read_only_inputs(ranks: list[Communicator]) -> None:
    xs, out = inputs(), np.full(12, np.nan, np.float32)
    for x in xs:
        x.flags.writeable = False
    works = [
        r.reduce(x, 1, "avg", out=out if r.rank == 1 else None, async_op=True) for r, x in zip(ranks, xs, strict=True)
    ]
    assert [work.result() is out for work in works if work is not None] == [False, True, False]
    np.testing.assert_allclose(out, total() / SIZE, rtol=1e-6)


def test_all_reduce_into_out_leaves_x_alone(ranks: list[Communicator]) -> None:
    xs, outs = inputs(), inputs()
    works = [r.all_reduce(x, out=o, async_op=True) for r, x, o in zip(ranks, xs, outs, strict=True)]
    assert [work.result() is out for work, out in zip(works, outs, strict=True)] == [True] * SIZE
    for x, before, out in zip(xs, inputs(), outs, strict=True):
        np.testing.assert_array_equal(x, before)
        np.testing.assert_array_equal(out, total())


def test_out_may_be_x_itself(ranks: list[Communicator]) -> None:
    xs = inputs()
    for work in [r.all_reduce(x, out=x, async_op=True) for r, x in zip(ranks, xs, strict=True)]:
        work.wait()
    for x in xs:
        np.testing.assert_array_equal(x, total())


def test_reduce_scatter_gives_rows(ranks: list[Communicator]) -> None:
    works = [r.reduce_scatter(x.reshape(6, 2), async_op=True) for r, x in zip(ranks, inputs(), strict=True)]
    for number, work in enumerate(works):
        np.testing.assert_array_equal(work.result(), total().reshape(6, 2)[2 * number : 2 * number + 2])


def test_reduce_scatter_of_counts_into_out(ranks: list[Communicator]) -> None:
    counts = [0, 5, 7]
    outs = [np.full(count, np.nan, np.float32) for count in counts]
    works = [
        r.reduce_scatter(x, counts=counts, out=o, async_op=True) for r, x, o in zip(ranks, inputs(), outs, strict=True)
    ]
    for work, out, begin in zip(works, outs, (0, 0, 5), strict=True):
        assert work.result() is out
        np.testing.assert_array_equal(out, total()[begin : begin + out.size])


def test_torch_tensors(ranks: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")
    xs = [torch.full((6, 2), float(rank + 1), dtype=torch.bfloat16) for rank in range(SIZE)]
    works = [r.reduce_scatter(x, async_op=True) for r, x in zip(ranks, xs, strict=True)]
    for work in works:
        block = work.result()
        assert block.shape == (2, 2)
        assert block.dtype == torch.bfloat16
        assert bool((block == 6).all())


def test_ranks_with_other_counts_disagree(ranks: list[Communicator]) -> None:
    from telegrad import MismatchedCall

    works = [
        r.reduce_scatter(x, counts=[4, 4, 4] if r.rank else [3, 4, 5], async_op=True)
        for r, x in zip(ranks, inputs(), strict=True)
    ]
    for work in works:
        with pytest.raises(MismatchedCall, match="counts=#"):
            work.wait()


@pytest.mark.parametrize("root", [-1, 3, np.int64(3)])
def test_a_root_that_is_no_rank(ranks: list[Communicator], root: Any) -> None:
    with pytest.raises(ValueError, match=r"root=.* is no rank: use an int in \[0, 3\)"):
        ranks[0].reduce(np.ones(3, np.float32), root)


@pytest.mark.parametrize("root", [True, 1.0, None, "1", np.float64(1)])
def test_a_root_that_is_no_integer(ranks: list[Communicator], root: Any) -> None:
    with pytest.raises(TypeError, match=f"root={re.escape(repr(root))} must be an int"):
        ranks[0].reduce(np.ones(3, np.float32), root)


@pytest.mark.parametrize("root", [np.int64(1), np.uint8(1), np.array(1)])
def test_a_root_may_be_any_integer(ranks: list[Communicator], root: Any) -> None:
    x = [np.full(4, rank.rank + 1.0) for rank in ranks]
    for work in [rank.reduce(mine, root, async_op=True) for rank, mine in zip(ranks, x, strict=True)]:
        assert work is not None
        work.wait()
    assert [mine[0] for mine in x] == [1.0, 6.0, 3.0]
    for work in [rank.broadcast(mine, root, async_op=True) for rank, mine in zip(ranks, x, strict=True)]:
        assert work is not None
        work.wait()
    assert [mine[0] for mine in x] == [6.0, 6.0, 6.0]
    gathered = [rank.gather(mine, root, async_op=True) for rank, mine in zip(ranks, x, strict=True)]
    assert [work.result() is not None for work in gathered] == [False, True, False]
    blocks = [
        rank.scatter(np.arange(3.0) if rank.rank == 1 else None, np.zeros(()), root, async_op=True) for rank in ranks
    ]
    assert [float(work.result()) for work in blocks] == [0.0, 1.0, 2.0]


def test_an_out_that_does_not_fit(ranks: list[Communicator]) -> None:
    x, read_only = np.ones(12, np.float32), np.ones(12, np.float32)
    read_only.flags.writeable = False
    for call in (lambda out: ranks[0].all_reduce(x, out=out), lambda out: ranks[0].reduce(x, 0, out=out)):
        with pytest.raises(ValueError, match=r"out has shape \(11,\) but x has \(12,\): give both the same"):
            call(np.ones(11, np.float32))
        with pytest.raises(ValueError, match="out is read-only"):
            call(read_only)
    both = np.ones(13, np.float32)
    with pytest.raises(ValueError, match="out shares a part of its memory with x"):
        ranks[0].all_reduce(both[:12], out=both[1:])
    with pytest.raises(ValueError, match="out shares memory with x: give it memory of its own"):
        ranks[0].reduce_scatter(x, out=x[:4])
    with pytest.raises(ValueError, match="out has 5 elements but rank 0's block has 4"):
        ranks[0].reduce_scatter(x, out=np.ones(5, np.float32))
    torch = pytest.importorskip("torch")
    half = torch.ones(12, dtype=torch.bfloat16)
    for call in (lambda: ranks[0].all_reduce(x, out=half), lambda: ranks[0].reduce_scatter(x, out=half[:4])):
        with pytest.raises(TypeError, match="out has dtype torch.bfloat16 but x has float32: give both the same"):
            call()


def test_counts_and_shapes_that_do_not_fit(ranks: list[Communicator]) -> None:
    x = np.ones(12, np.float32)
    with pytest.raises(
        ValueError, match=r"x has shape \(4, 3\): its first dimension must be a multiple of the 3 ranks"
    ):
        ranks[0].reduce_scatter(x.reshape(4, 3))
    for counts, message in (
        ([4, 8], "counts has 2 entries: give one for each"),
        ([4, -4, 12], r"counts\[1\]=-4 must not"),
    ):
        with pytest.raises(ValueError, match=message):
            ranks[0].reduce_scatter(x, counts=counts)
    no_counts: list[Any] = [6, [4.0, 4.0, 4.0], "444", [True, 5, 6]]
    for counts in no_counts:
        with pytest.raises(TypeError, match="counts=.* must be a sequence of ints: the number of elements of each"):
            ranks[0].reduce_scatter(x, counts=counts)
    for bad, counts in ((x, [4, 4, 5]), (x.reshape(4, 3), [4, 4, 4])):
        with pytest.raises(ValueError, match="with counts it must have one dimension of 1[23] elements, their sum"):
            ranks[0].reduce_scatter(bad, counts=counts)


def test_a_sparse_sum_takes_no_out(ranks: list[Communicator]) -> None:
    from telegrad import SparseVector

    stream = SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 4)
    with pytest.raises(TypeError, match="out is for a dense x"):
        ranks[0].all_reduce(stream, out=np.ones(4, np.float32))
