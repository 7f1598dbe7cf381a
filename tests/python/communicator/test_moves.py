"""Moving blocks from Python: shapes, out=, counts=, torch and numpy, and what is refused before anything is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from telegrad import Communicator, MismatchedCall, TransportError

torch = pytest.importorskip("torch")

RANKS = 3
OnAll = Callable[[Callable[[Communicator], Any]], list[Any]]


@pytest.fixture
def comms() -> Iterator[list[Communicator]]:
    communicators = Communicator.local(RANKS, timeout_s=30.0)
    yield communicators
    for communicator in communicators:
        communicator.close()


@pytest.fixture
def on_all(comms: list[Communicator]) -> OnAll:
    def run(program: Callable[[Communicator], Any]) -> list[Any]:
        results: list[Any] = [None] * RANKS

        def one(rank: int) -> None:
            try:
                results[rank] = program(comms[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run


MAKERS = [lambda values: np.array(values, np.int16), lambda values: torch.tensor(values, dtype=torch.float16)]


@pytest.mark.parametrize("make", MAKERS, ids=["numpy", "torch"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_equal_blocks_of_any_shape(on_all: OnAll, make: Callable[[Any], Any], asynchronous: bool) -> None:
    def done(begun: Any) -> Any:
        return begun.result() if asynchronous else begun

    def program(comm: Communicator) -> list[Any]:
        x = make([[comm.rank, 1], [2, 3]])
        gathered = done(comm.all_gather(x, async_op=asynchronous))
        at_root = done(comm.gather(x, 1, async_op=asynchronous))
        back = done(comm.scatter(at_root, make([[0, 0], [0, 0]]), 1, async_op=asynchronous))
        exchanged = done(comm.all_to_all(make([[10 * comm.rank + to] for to in range(RANKS)]), async_op=asynchronous))
        return [gathered, at_root, back, exchanged]

    for rank, (gathered, at_root, back, exchanged) in enumerate(on_all(program)):
        assert gathered.shape == (RANKS, 2, 2)
        assert gathered[:, 0, 0].tolist() == [0, 1, 2]
        assert gathered.dtype == make([0]).dtype
        assert (at_root is None) == (rank != 1)
        assert rank != 1 or at_root.tolist() == gathered.tolist()
        assert back.tolist() == [[rank, 1], [2, 3]]
        assert exchanged.tolist() == [[rank], [10 + rank], [20 + rank]]


def test_unequal_blocks_into_out(on_all: OnAll) -> None:
    counts = [2, 0, 3]

    def program(comm: Communicator) -> list[Any]:
        mine = torch.full((counts[comm.rank],), comm.rank)
        all_of_them = torch.empty(5, dtype=torch.int64)
        assert comm.all_gather(mine, out=all_of_them, counts=counts) is all_of_them
        at_root = torch.empty(5, dtype=torch.int64) if comm.rank == 2 else None
        comm.gather(mine, 2, out=at_root, counts=np.array(counts))
        whole = np.arange(5.0) if comm.rank == 0 else None
        part = comm.scatter(whole, np.empty(counts[comm.rank]), 0, counts=tuple(counts))
        sent, received = [comm.rank] * RANKS, [0, 1, 2]
        exchanged = comm.all_to_all(
            np.repeat(np.arange(3) + 10 * comm.rank, comm.rank), send_counts=sent, receive_counts=received
        )
        return [all_of_them, at_root, part, exchanged]

    found = on_all(program)
    for rank, (all_of_them, _, part, exchanged) in enumerate(found):
        assert all_of_them.tolist() == [0, 0, 2, 2, 2]
        assert part.tolist() == [[0, 1], [], [2, 3, 4]][rank]
        assert exchanged.tolist() == [10 + rank, 20 + rank, 20 + rank]
    assert found[2][1].tolist() == [0, 0, 2, 2, 2]


def test_a_block_in_its_own_place(on_all: OnAll) -> None:
    def program(comm: Communicator) -> Any:
        out = np.full((RANKS, 4), -1)
        out[comm.rank] = comm.rank
        comm.all_gather(out[comm.rank], out=out)
        whole = np.arange(12).reshape(RANKS, 4) if comm.rank == 1 else None
        mine = np.empty(4, np.int64) if whole is None else whole[1]
        comm.scatter(whole, mine, 1)
        return out.tolist(), mine.tolist()

    for rank, (out, mine) in enumerate(on_all(program)):
        assert out == [[0] * 4, [1] * 4, [2] * 4]
        assert mine == list(range(4 * rank, 4 * rank + 4))


@pytest.mark.parametrize("operation", ["all_gather", "gather", "scatter"])
def test_other_counts_than_the_others(on_all: OnAll, operation: str) -> None:
    def program(comm: Communicator) -> Any:
        counts = [1, 2, 3] if comm.rank < 2 else [2, 1, 3]
        mine = np.zeros(counts[comm.rank])
        if operation == "scatter":
            comm.scatter(np.zeros(6) if comm.rank == 0 else None, mine, 0, counts=counts)
        elif operation == "gather":
            comm.gather(mine, 0, counts=counts)
        else:
            comm.all_gather(mine, counts=counts)
        comm.barrier()

    for error in on_all(program):
        assert isinstance(error, MismatchedCall), error


def test_lengths_that_pairs_do_not_agree_on(on_all: OnAll) -> None:
    def program(comm: Communicator) -> Any:
        received = [1, 1, 1] if comm.rank else [1, 2, 1]
        comm.all_to_all(np.zeros(3), send_counts=[1, 1, 1], receive_counts=received)
        comm.barrier()

    for error in on_all(program):
        assert isinstance(error, TransportError)
        assert "the block of rank 1 for rank 0 has 8 bytes instead of 16" in str(error)
        assert "compare send_counts[0] on rank 1 with receive_counts[1] on rank 0" in str(error)


def test_lengths_are_compared_and_shapes_are_not(on_all: OnAll) -> None:
    def program(comm: Communicator) -> Any:
        return comm.all_gather(np.full((2, 3) if comm.rank == 0 else (3, 2), comm.rank))

    shapes = [found.shape for found in on_all(program)]
    assert shapes == [(3, 2, 3), (3, 3, 2), (3, 3, 2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [("M8[s]", "M8[ms]"), (np.longdouble, np.uint8), ("i4,f4", "f4,i4"), (torch.float8_e4m3fn, torch.float8_e5m2)],
)
def test_dtypes_without_a_name_in_messages_are_compared_as_bytes(on_all: OnAll, one: Any, other: Any) -> None:
    """As docs/reference/errors.md says: nobody sees that they differ, but as many bytes they must have."""
    made = torch.zeros if isinstance(one, torch.dtype) else np.zeros
    ratio = np.dtype(one).itemsize if other is np.uint8 else 1

    def program(comm: Communicator) -> Any:
        x = made(4, dtype=one) if comm.rank == 0 else made(4 * ratio, dtype=other)
        comm.broadcast(x, 0)
        comm.broadcast(x if comm.rank == 0 else made(4 * ratio + 1, dtype=other), 0)

    assert all(isinstance(error, MismatchedCall) and "dtype=u8" in str(error) for error in on_all(program))


X = np.zeros(6)
OUT = np.zeros(18)
REFUSED: list[tuple[Callable[[Communicator], Any], type[Exception], str]] = [
    (lambda c: c.all_gather(X, counts=[6, 6]), ValueError, "counts has 2 entries: give one for each of the 3 ranks"),
    (
        lambda c: c.all_gather(X, counts=[6, 2**62, 0]),
        ValueError,
        r"counts\[1\]=4611686018427387904 is more than memory",
    ),
    (lambda c: c.all_gather(X, counts=[6, -1, 0]), ValueError, r"counts\[1\]=-1 must not be negative"),
    (lambda c: c.all_gather(X, counts="6"), TypeError, "counts='6' must be a sequence of ints"),
    (lambda c: c.all_gather(X, counts=[6.0, 1, 1]), TypeError, "must be a sequence of ints"),
    (lambda c: c.all_gather(X, counts=[5, 1, 1]), ValueError, r"x has shape \(6,\) but counts\[0\]=5"),
    (lambda c: c.all_gather(X, out=OUT), ValueError, r"out has shape \(18,\): the result has shape \(3, 6\)"),
    (lambda c: c.all_gather(X, out=np.zeros((3, 6), np.float32)), TypeError, "give a numpy one of float64, as x is"),
    (lambda c: c.all_gather(X, out=torch.zeros(3, 6)), TypeError, "give a numpy one of float64, as x is"),
    (
        lambda c: c.all_gather(OUT[1:7], out=OUT.reshape(3, 6)),
        ValueError,
        "x shares memory with out: give out memory of its own, or its own block to x",
    ),
    (lambda c: c.gather(X, 3), ValueError, r"root=3 is no rank: use an int in \[0, 3\)"),
    (lambda c: c.gather(X, True), TypeError, "root=True must be an int"),
    (lambda c: c.scatter(X, OUT, 1.0), TypeError, "root=1.0 must be an int"),
    (lambda c: c.gather(X, 1, out=OUT), ValueError, "out is given on rank 0, but the result is on root=1 only"),
    (lambda c: c.scatter(OUT, X, 1), ValueError, "x is given on rank 0, but the blocks are root=1's: pass None"),
    (
        lambda c: c.scatter(None, X, 0),
        TypeError,
        "x is None, but rank 0 is the root: it gives x, the blocks of all ranks",
    ),
    (lambda c: c.scatter(OUT[:17], X, 0), ValueError, r"x has shape \(17,\): give 3 blocks like out, \(3, 6\)"),
    (lambda c: c.scatter(OUT.astype(int), X, 0), TypeError, "x is a ndarray of int64, out a ndarray of float64"),
    (lambda c: c.scatter(OUT, OUT[1:7], 0), ValueError, "x shares memory with out"),
    (lambda c: c.scatter(OUT, X, 0, counts=[6, 6, 7]), ValueError, "counts add up to 19"),
    (lambda c: c.all_to_all(np.zeros(4)), ValueError, r"x has shape \(4,\), which 3 ranks cannot share evenly"),
    (lambda c: c.all_to_all(np.zeros(())), ValueError, "cannot share evenly"),
    (lambda c: c.all_to_all(X, out=X), ValueError, "x shares memory with out: give out memory of its own"),
    (lambda c: c.all_to_all(X, send_counts=[2, 2, 2]), ValueError, "only send_counts is given"),
    (lambda c: c.all_to_all(X, receive_counts=[2, 2, 2]), ValueError, "only receive_counts is given"),
    (
        lambda c: c.all_to_all(X, send_counts=[2, 2, 2], receive_counts=[1, 2, 2]),
        ValueError,
        r"send_counts\[0\]=2 but receive_counts\[0\]=1",
    ),
    (
        lambda c: c.all_to_all(X, send_counts=[2, 2, 1], receive_counts=[2, 2, 2]),
        ValueError,
        r"x has shape \(6,\) but send_counts add up to 5",
    ),
    (lambda c: c.broadcast(X, -1), ValueError, "root=-1 is no rank"),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_refused_before_anything_is_sent(
    comms: list[Communicator], call: Callable[[Communicator], Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        call(comms[0])
    assert comms[0].stats()["operations"] == 0


def test_a_rank_alone() -> None:
    (alone,) = Communicator.local(1)
    x = np.arange(4)
    assert alone.all_gather(x).tolist() == [[0, 1, 2, 3]]
    assert alone.gather(x, 0, counts=[4]).tolist() == [0, 1, 2, 3]
    assert alone.scatter(x, np.empty(4, np.int64), 0).tolist() == [0, 1, 2, 3]
    assert alone.all_to_all(x).tolist() == [0, 1, 2, 3]
    alone.close()
