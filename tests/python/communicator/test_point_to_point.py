"""Messages between two ranks in threads, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import Communicator
from telegrad.errors import MismatchedCall, PeerFailed, TimeoutExpired, TransportError

Local = Callable[..., list[Communicator]]
OnRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_a_message_arrives_blocking_numpy(on_ranks: OnRanks, count: int) -> None:
    def run(comm: Communicator) -> np.ndarray:
        x = np.arange(count, dtype=np.int64) if comm.rank == 2 else np.zeros(count, np.int64)
        if comm.rank == 2:
            assert comm.send(x, 0, tag=5) is None
        elif comm.rank == 0:
            assert comm.recv(x, 2, tag=5) == 2
        comm.barrier()
        return x

    zero, one, two = on_ranks(3, run)
    np.testing.assert_array_equal(zero, two)
    assert not one.any()


def test_torch_async_and_order_within_a_tag(local: Local) -> None:
    one, other = local(2)
    sent = [torch.full((3,), float(i), dtype=torch.bfloat16) for i in range(6)]
    works = [one.send(x, 1, tag=i % 2, async_op=True) for i, x in enumerate(sent)]
    received = {tag: [torch.empty(3, dtype=torch.bfloat16) for _ in range(3)] for tag in (1, 0)}
    for tag, tensors in received.items():
        for x in tensors:
            work = other.recv(x, 0, tag=tag, async_op=True)
            assert work is not None
            assert work.result() is x
    for tag, tensors in received.items():
        assert [float(x[0]) for x in tensors] == [tag, tag + 2, tag + 4]
    for work in works:
        assert work is not None
        work.wait()


def test_a_receive_from_any_rank_tells_the_sender(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[tuple[int, float]]:
        if comm.rank > 0:
            comm.send(np.full(4, float(comm.rank)), 0, tag=2)
            return []
        got = []
        for _ in range(2):
            x = np.zeros(4)
            got.append((comm.recv(x, tag=2), float(x[3])))
        x = np.zeros(4)
        work = comm.recv(x, None, tag=2, async_op=True)
        work.wait()
        return [*got, (work.source(), float(x[0]))]

    assert sorted(on_ranks(4, run)[0]) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_any_rank_of_one_is_none(local: Local) -> None:
    with pytest.raises(ValueError, match="source=None, but there is no other rank to receive from"):
        local(1)[0].recv(np.zeros(3))


def test_sendrecv_round_a_ring(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[np.ndarray, torch.Tensor]:
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        x, out = np.full(200_000, comm.rank, np.float32), np.empty(200_000, np.float32)
        assert comm.sendrecv(x, right, out, left) is None
        mine, theirs = torch.full((4,), comm.rank), torch.empty(4, dtype=torch.int64)
        work = comm.sendrecv(mine, left, theirs, right, tag=1, async_op=True)
        assert work is not None
        assert work.get_future().wait() is theirs
        assert work.is_completed()
        return out, theirs

    for rank, (out, theirs) in enumerate(on_ranks(3, run)):
        assert (out == (rank - 1) % 3).all()
        assert theirs.tolist() == [(rank + 1) % 3] * 4


def test_sendrecv_of_different_sizes_with_one_peer(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> np.ndarray:
        out = np.zeros(2 - comm.rank, np.uint8)
        comm.sendrecv(np.full(1 + comm.rank, 7 + comm.rank, np.uint8), 1 - comm.rank, out, 1 - comm.rank)
        return out

    assert [out.tolist() for out in on_ranks(2, run)] == [[8, 8], [7]]


@pytest.mark.parametrize(("dtype", "count"), [(np.float32, 4), (np.int32, 5)])
def test_another_dtype_or_length_is_a_mismatch_on_all_ranks(on_ranks: OnRanks, dtype: Any, count: int) -> None:
    def run(comm: Communicator) -> TransportError:
        def call() -> None:
            if comm.rank == 0:
                comm.send(np.zeros(5, np.float32), 1, tag=3)
            elif comm.rank == 1:
                comm.recv(np.zeros(count, dtype), 0, tag=3)
            comm.barrier()

        with pytest.raises(MismatchedCall, match=r"rank 0 called send\(count=5, dtype=f32, to=1, tag=3\)") as found:
            call()
        return found.value

    errors = on_ranks(3, run)
    assert [error.peer for error in errors] == [1, 1, 1]
    assert errors[1].operation is not None
    assert errors[1].operation.startswith("recv(count=")
    assert errors[1].tag == 3


def test_a_receive_that_nobody_sends_times_out(local: Local) -> None:
    comm = local(2, timeout_s=0.3)[0]
    with pytest.raises(TimeoutExpired, match="waiting for rank 1") as found:
        comm.recv(np.zeros(5), 1)
    assert found.value.peer == 1


def test_a_receive_from_a_closed_rank_fails_at_once_but_what_it_sent_arrives(local: Local) -> None:
    one, other = local(2)
    x = np.zeros(5)
    work = one.recv(x, 1, async_op=True)
    other.send(np.full(5, 3.0), 0)
    other.close()
    assert work is not None
    work.wait()
    assert x.tolist() == [3.0] * 5
    with pytest.raises(PeerFailed, match="closed its communicator") as found:
        one.recv(x, 1)
    assert found.value.peer == 1


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "to=0 is this rank itself", lambda c, x: c.send(x, 0)),
        (ValueError, "source=0 is this rank itself", lambda c, x: c.recv(x, 0)),
        (ValueError, r"to=2 is no rank: use an int in \[0, 2\)", lambda c, x: c.send(x, 2)),
        (ValueError, "source=-1 is no rank", lambda c, x: c.recv(x, -1)),
        (TypeError, "to=True must be an int", lambda c, x: c.send(x, True)),
        (TypeError, "source=1.0 must be an int", lambda c, x: c.recv(x, 1.0)),
        (TypeError, "tag='a' must be an int", lambda c, x: c.send(x, 1, tag="a")),
        (ValueError, "tag=-1 is out of range", lambda c, x: c.send(x, 1, tag=-1)),
        (ValueError, "tag=2147483648 is out of range", lambda c, x: c.recv(x, 1, tag=1 << 31)),
        (ValueError, "x is not contiguous", lambda c, x: c.send(x[::2], 1)),
        (TypeError, "x is a list", lambda c, x: c.send([1.0], 1)),
        (ValueError, "x is read-only", lambda c, x: c.recv(np.broadcast_to(x[:1], (1,)), 1)),
        (ValueError, "out shares memory with x", lambda c, x: c.sendrecv(x[:4], 1, x[3:6], 1)),
        (ValueError, "source=2 is no rank", lambda c, x: c.sendrecv(x, 1, x.copy(), 2)),
    ],
)
def test_misuse_is_refused_before_anything_is_sent(
    local: Local, error: type[Exception], message: str, call: Callable[[Communicator, np.ndarray], None]
) -> None:
    comm = local(2)[0]
    with pytest.raises(error, match=message):
        call(comm, np.zeros(8, np.float32))
    assert comm.stats()["operations"] == 0


def test_numpy_integers_name_ranks_and_tags(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> float:
        x = np.full(1, comm.rank, np.float64)
        if comm.rank == 0:
            comm.send(x, np.int64(1), tag=np.uint8(2))
        else:
            comm.recv(x, torch.tensor(0), tag=2)  # type: ignore[arg-type]
        return float(x[0])

    assert on_ranks(2, run) == [0.0, 0.0]


def test_a_receive_that_waits_long_does_not_hold_what_is_over(local: Callable[..., list[Communicator]]) -> None:
    one, other = local(2)
    late = np.zeros(4)
    waits = one.recv(late, 1, tag=5, async_op=True)
    for number in range(400):
        for work in [comm.all_reduce(np.full(4, float(number)), async_op=True) for comm in (one, other)]:
            work.wait()
    assert len(one._kept) <= 130
    other.send(np.ones(4), 0, tag=5)
    waits.wait()
    assert late.tolist() == [1.0] * 4
