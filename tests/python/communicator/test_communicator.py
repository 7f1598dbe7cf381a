"""The collectives, over ranks in threads: each against what numpy says."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import Communicator, SparseVector
from telegrad.errors import MismatchedCall, TimeoutExpired, TransportError

Local = Callable[..., list[Communicator]]
OnRanks = Callable[..., list[Any]]
SIZES = [1, 2, 3, 4]


def _vector(rank: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng(rank).integers(-9, 9, size).astype(np.float32)


def _stream(rank: int, n: int = 1000, nnz: int = 30) -> SparseVector:
    rng = np.random.default_rng(rank)
    indices = np.sort(rng.choice(n, nnz, replace=False)).astype(np.uint32)
    return SparseVector(indices, rng.integers(1, 9, nnz).astype(np.float32), n)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "recursive_doubling", "rabenseifner", "two_level"])
def test_dense_numpy(on_ranks: OnRanks, size: int, algorithm: str) -> None:
    def run(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        total, mean = _vector(comm.rank).reshape(10, 100), _vector(comm.rank)
        assert comm.all_reduce(total, algorithm=algorithm) is None
        comm.all_reduce(mean, "avg", algorithm=algorithm)
        return total, mean

    expected = np.sum([_vector(rank) for rank in range(size)], axis=0)
    for total, mean in on_ranks(size, run):
        np.testing.assert_array_equal(total, expected.reshape(10, 100))
        np.testing.assert_allclose(mean, expected / size, rtol=1e-6)


_FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*_FLOATS, torch.int32, torch.int64])
def test_dense_torch(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> torch.Tensor:
        x = torch.from_numpy(_vector(comm.rank)).to(dtype)
        work = comm.all_reduce(x, async_op=True)
        assert work.result() is x
        return x

    expected = torch.from_numpy(np.sum([_vector(rank) for rank in range(3)], axis=0)).to(dtype)
    for total in on_ranks(3, run):
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [*_FLOATS, torch.int32, torch.int64])
def test_reductions_of_torch_tensors(on_ranks: OnRanks, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> list[torch.Tensor]:
        results = []
        for op in ("prod", "min", "max", *(["avg"] if dtype.is_floating_point else [])):
            results.append(torch.from_numpy(_vector(comm.rank, 50)).to(dtype))
            comm.all_reduce(results[-1], op)
        return results

    inputs = torch.from_numpy(np.stack([_vector(rank, 50) for rank in range(2)])).double()
    expected = [inputs.prod(0), inputs.amin(0), inputs.amax(0), inputs.mean(0)]
    for results in on_ranks(2, run):
        for result, right in zip(results, expected, strict=False):
            assert torch.equal(result, right.to(dtype))


@pytest.mark.parametrize("size", SIZES)
def test_sparse(on_ranks: OnRanks, size: int) -> None:
    def run(comm: Communicator) -> tuple[SparseVector, np.ndarray]:
        out = np.full((10, 100), np.nan, np.float32)
        assert comm.all_reduce_into(_stream(comm.rank), out, "avg") is None
        return comm.all_reduce(_stream(comm.rank)), out

    expected = np.sum([_stream(rank).to_dense() for rank in range(size)], axis=0)
    for stream, out in on_ranks(size, run):
        np.testing.assert_array_equal(stream.to_dense(), expected)
        np.testing.assert_array_equal(stream.indices, np.flatnonzero(expected))
        np.testing.assert_allclose(out.reshape(-1), expected / size, rtol=1e-6)


def test_a_result_on_top_of_its_stream_is_refused(local: Callable[..., list[Communicator]]) -> None:
    values = np.ones(10, np.float32)
    stream = SparseVector(np.arange(5, dtype=np.uint32), values[:5], 10)
    if not np.may_share_memory(stream.values, values):
        pytest.skip("the stream has copied its values")
    with pytest.raises(ValueError, match="out shares memory with the stream"):
        local(1)[0].all_reduce_into(stream, values)


def test_sparse_torch_bfloat16(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[SparseVector, torch.Tensor]:
        stream = _stream(comm.rank)
        stream = SparseVector(stream.indices, torch.from_numpy(stream.values).bfloat16(), stream.n)
        out = torch.empty(stream.n, dtype=torch.bfloat16)
        comm.all_reduce_into(stream, out)
        return comm.all_reduce(stream), out

    expected = torch.from_numpy(np.sum([_stream(rank).to_dense() for rank in range(2)], axis=0)).bfloat16()
    for stream, out in on_ranks(2, run):
        assert stream.values.dtype == torch.bfloat16
        assert torch.equal(stream.to_dense(), expected)
        assert torch.equal(out, expected)


def test_a_full_sum_is_held_densely_and_reads_the_same(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[SparseVector, SparseVector]:
        full = _stream(comm.rank, 100, 90)
        return comm.all_reduce(full, switch_factor=0.1), comm.all_reduce(full, switch_factor=100.0)

    for dense, sparse in on_ranks(2, run):
        assert dense.is_dense
        assert not sparse.is_dense
        np.testing.assert_array_equal(dense.to_dense(), sparse.to_dense())
        np.testing.assert_array_equal(dense.indices, sparse.indices)
        np.testing.assert_array_equal(dense.values, sparse.values)


def test_streams_of_any_length_and_none(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[np.ndarray]:
        own = _stream(0, 64, 20) if comm.rank == 1 else _stream(0, 64, 0)
        nothing = SparseVector(np.empty(0, np.uint32), np.empty(0, np.float32), 0)
        return [comm.all_reduce(own).to_dense(), comm.all_reduce(nothing).to_dense()]

    for some, nothing in on_ranks(3, run):
        np.testing.assert_array_equal(some, _stream(0, 64, 20).to_dense())
        assert nothing.shape == (0,)


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: np.arange(6, dtype=np.int64).reshape(2, 3) + rank,
        lambda rank: np.array(rank == 1),
        lambda rank: torch.full((2, 2), rank, dtype=torch.float64),
        lambda rank: torch.full((3,), rank, dtype=torch.bfloat16),
        lambda rank: np.empty((0, 3), np.uint8),
    ],
)
def test_all_gather_and_broadcast_of_any_type(on_ranks: OnRanks, make: Callable[[int], Any]) -> None:
    def run(comm: Communicator) -> tuple[Any, Any, Any]:
        x = make(comm.rank)
        gathered = comm.all_gather(x)
        assert comm.broadcast(x, 1) is None
        return gathered, comm.all_gather(x, async_op=True).result(), x

    for gathered, later, x in on_ranks(3, run):
        assert type(gathered) is type(x)
        assert gathered.dtype == x.dtype
        np.testing.assert_array_equal(
            np.asarray(gathered.tolist()), np.stack([make(rank).tolist() for rank in range(3)])
        )
        assert x.tolist() == make(1).tolist()
        assert all(item.tolist() == x.tolist() for item in later)


def test_broadcast_reads_but_does_not_write_at_the_root(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[int]:
        x = np.full(4, comm.rank)
        x.flags.writeable = comm.rank != 0
        comm.broadcast(x, 0)
        return x.tolist()

    assert on_ranks(2, run) == [[0] * 4, [0] * 4]


def test_one_thread_drives_all_ranks_with_async_op(local: Local) -> None:
    comms = local(3)
    vectors = [_vector(rank) for rank in range(3)]
    works = [comm.all_reduce(x, async_op=True) for comm, x in zip(comms, vectors, strict=True)]
    works += [comm.barrier(async_op=True) for comm in comms]
    works += [comm.all_reduce(_stream(comm.rank), async_op=True) for comm in comms]
    assert all(work.wait() for work in works)
    assert all(work.is_completed() for work in works)
    np.testing.assert_array_equal(vectors[0], vectors[2])


def test_many_operations_in_flight(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> bool:
        vectors = [np.full(10 + number, comm.rank + number, np.float32) for number in range(50)]
        works = [comm.all_reduce(x, async_op=True) for x in vectors]
        for work in reversed(works):
            work.wait()
        return all((x == 1 + 2 * number).all() for number, x in enumerate(vectors))

    assert on_ranks(2, run) == [True, True]


def test_a_dropped_work_keeps_its_tensor_alive(local: Local) -> None:
    one, two = local(2)
    one.all_reduce(np.ones(1 << 20, np.float32), async_op=True)  # nobody else refers to this array
    filler = [np.zeros(1 << 20, np.float32) for _ in range(4)]
    x = np.ones(1 << 20, np.float32)
    two.all_reduce(x)
    assert (x == 2).all()
    assert not any(item.any() for item in filler)


def test_facts(local: Local) -> None:
    comms = local(3)
    assert [comm.rank for comm in comms] == [0, 1, 2]
    assert {comm.world_size for comm in comms} == {3}
    assert {comm.driver for comm in comms} == {"local"}
    before = comms[0].stats()
    for work in [comm.all_reduce(_vector(0), async_op=True) for comm in comms]:
        work.wait()
    after = comms[0].stats()
    assert after["operations"] == before["operations"] + 1
    assert after["bytes_sent"] > before["bytes_sent"]
    assert sum(after["bytes_sent_to"]) == after["bytes_sent"]
    assert after["bytes_sent_to"][0] == after["bytes_received_from"][0] == 0
    for peer in (1, 2):
        assert after["bytes_received_from"][peer] == comms[peer].stats()["bytes_sent_to"][0]
    assert after["in_flight"] == 0
    assert "rank=1, world_size=3, driver='local'" in repr(comms[1])


def test_operations_in_flight_and_time_waited(local: Local) -> None:
    one, two = local(2)
    works = [one.barrier(async_op=True) for _ in range(3)]
    assert one.stats()["in_flight"] == 3
    assert one.stats()["waiting_s"] == 0
    with pytest.raises(TimeoutExpired):
        works[0].wait(0.05)
    assert 0.05 <= one.stats()["waiting_s"] < 30
    for _ in range(3):
        two.barrier()
    for work in works:
        work.wait()
    assert one.stats()["in_flight"] == 0


def test_different_calls_are_an_error_on_every_rank(local: Local) -> None:
    comms = local(2)
    works = [comm.all_reduce(np.ones(3 + comm.rank, np.float32), async_op=True) for comm in comms]
    errors = []
    for work in works:
        with pytest.raises(TransportError) as caught:
            work.wait()
        errors.append(caught.value)
    assert any(isinstance(error, MismatchedCall) for error in errors)
    assert {error.operation is not None for error in errors} == {True}


def test_after_a_failure_only_close_is_left(local: Local) -> None:
    comms = local(2)
    work = comms[1].all_reduce(np.ones(3, np.float32), async_op=True)
    comms[0].abort("out of coffee")
    with pytest.raises(TransportError, match="out of coffee"):
        work.wait()
    for comm in comms:
        with pytest.raises(TransportError, match="out of coffee"):
            comm.all_reduce(np.ones(3, np.float32))


def test_an_error_inside_with_reaches_the_others(local: Local) -> None:
    comms = local(2)
    x = np.ones(3, np.float32)
    waiting = comms[1].all_reduce(x, async_op=True)

    def leave() -> None:
        with comms[0]:
            raise KeyError("data")

    with pytest.raises(KeyError):
        leave()
    with pytest.raises(TransportError, match="KeyError on rank 0: 'data'"):
        waiting.wait()
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize("reason", ["\ud83d is half a character", "x" + 3000 * "é", "xx" + 3000 * "é", "NUL \0 inside"])
def test_a_reason_may_be_any_text(local: Local, reason: str) -> None:
    comms = local(2)
    waiting = comms[1].barrier(async_op=True)

    def leave() -> None:
        with comms[0]:
            raise ValueError(reason)

    with pytest.raises(ValueError, match=re.escape(reason[:20])):
        leave()
    said = reason[:1000].encode(errors="backslashreplace").decode()
    with pytest.raises(TransportError, match=re.escape(f"ValueError on rank 0: {said}")) as caught:
        waiting.wait()
    assert "\ufffd" not in str(caught.value)  # no character was cut
    with pytest.raises(TypeError, match="reason=3 must be a str"):
        comms[1].abort(3)  # type: ignore[arg-type]


def test_closed(local: Local) -> None:
    comms = local(2)
    threads = [threading.Thread(target=comm.close) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comms[0].close()  # again does nothing
    comms[0].abort("too late")  # neither does this
    for call in (
        lambda: comms[0].all_reduce(np.ones(1, np.float32)),
        lambda: comms[0].barrier(),
        lambda: comms[0].stats(),
        lambda: comms[0].broadcast(np.ones(1), 0),
        lambda: comms[0].all_gather(np.ones(1)),
    ):
        with pytest.raises(ValueError, match=r"Communicator \(rank 0\) is closed: make a new one"):
            call()
    assert "closed" in repr(comms[0])


def test_with_closes(local: Local) -> None:
    comm = local(1)[0]
    with comm as same:
        assert same is comm
    with pytest.raises(ValueError, match="is closed"):
        comm.barrier()


def test_close_with_an_operation_under_way_is_quick_and_fails_it(local: Local) -> None:
    comms = local(2)
    work = comms[0].all_reduce(np.ones(3, np.float32), async_op=True)
    start_s = time.monotonic()
    comms[0].close()
    assert time.monotonic() - start_s < 2.0
    with pytest.raises(TransportError, match="closed"):
        work.wait()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_cannot_be_copied(local: Local, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copied(local(1)[0])


def test_no_process_has_so_many_ranks() -> None:
    with pytest.raises(ValueError, match=f"n={2**40} must be at most 65536"):
        Communicator.local(2**40)


def test_an_array_is_no_algorithm(local: Local) -> None:
    with pytest.raises(ValueError, match="does not exist for this operation: use one of auto"):
        local(1)[0].all_reduce(np.ones(3), algorithm=np.array(["a", "b"]))  # type: ignore[arg-type]
