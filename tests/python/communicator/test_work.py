"""Work and its futures: completion, results, and errors with their type and text."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import Communicator, SparseVector, Work
from telegrad.communicator.work import future_of_all
from telegrad.errors import TimeoutExpired, TransportError

Local = Callable[..., list[Communicator]]


def _ones() -> np.ndarray:
    return np.ones(5, np.float32)


def test_wait_is_completed_result(local: Local) -> None:
    one, two = local(2)
    x = _ones()
    work = one.all_reduce(x, async_op=True)
    assert isinstance(work, Work)
    assert not work.is_completed()
    assert "running" in repr(work)
    two.all_reduce(_ones())
    assert work.wait() is True
    assert work.wait(timeout_s=1) is True
    assert work.is_completed()
    assert work.result() is x
    assert "completed" in repr(work)


def test_waiting_too_long_says_so_and_harms_nothing(local: Local) -> None:
    one, two = local(2)
    x = _ones()
    work = one.all_reduce(x, async_op=True)
    with pytest.raises(
        TimeoutExpired, match=r"all_reduce on rank 0 is still running after timeout_s=0.05 s.*abort\(\)"
    ):
        work.wait(timeout_s=0.05)
    two.all_reduce(_ones())
    work.wait()
    assert x.tolist() == [2] * 5


def test_an_operation_has_the_communicators_time_out(local: Local) -> None:
    one, _ = local(2, timeout_s=0.2)
    with pytest.raises(TimeoutExpired) as caught:
        one.all_reduce(_ones())
    assert caught.value.rank == 0
    assert caught.value.operation is not None


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-2, ValueError), ("1", TypeError)])
def test_bad_time_out(local: Local, value: object, error: type[Exception]) -> None:
    work = local(1)[0].barrier(async_op=True)
    assert work is not None
    with pytest.raises(error, match="timeout_s="):
        work.wait(timeout_s=value)  # type: ignore[arg-type]


def test_a_sparse_result_can_be_read_again_and_from_many_threads(local: Local) -> None:
    stream = SparseVector(np.array([1, 3], np.uint32), np.ones(2, np.float32), 5)
    work = local(1)[0].all_reduce(stream, async_op=True)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(work.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(result) for result in results}) == 1
    assert work.result().indices.tolist() == [1, 3]


def test_future_of_a_running_and_of_a_finished_operation(local: Local) -> None:
    one, two = local(2)
    x = torch.ones(5)
    work = one.all_reduce(x, async_op=True)
    future = work.get_future()
    chained = future.then(lambda done: done.value().sum().item())
    assert not future.done()
    two.all_reduce(_ones())
    assert future.wait() is x
    assert chained.wait() == 10
    assert work.get_future().wait() is x


def test_future_of_a_sparse_sum(local: Local) -> None:
    stream = SparseVector(np.array([2], np.uint32), np.ones(1, np.float32), 5)
    works = [comm.all_reduce(stream, async_op=True) for comm in local(2)]
    for work in works:
        assert work.get_future().wait().values.tolist() == [2]


def test_one_thread_completes_all_futures(local: Local) -> None:
    names: set[str] = set()
    comms = local(2)
    works = [comm.barrier(async_op=True) for _ in range(20) for comm in comms]
    futures = [work.get_future().then(lambda _: names.add(threading.current_thread().name)) for work in works if work]
    torch.futures.wait_all(futures)
    assert names <= {"telegrad-completion", threading.current_thread().name}  # then() of a finished future runs here
    assert sum(thread.name == "telegrad-completion" for thread in threading.enumerate()) == 1


def test_future_of_a_failure_keeps_type_and_text(local: Local) -> None:
    one, two = local(2)
    future = one.all_reduce(_ones(), async_op=True).get_future()
    chained = future.then(lambda done: done.value())
    two.abort("rank 1 ran out of disk")
    with pytest.raises(TransportError, match="ran out of disk") as caught:
        future.wait()
    assert caught.value.peer == 1
    with pytest.raises(RuntimeError, match="PeerFailed: .*ran out of disk"):  # what torch makes of it
        chained.wait()


def test_a_callers_error_in_then_stops_nothing(local: Local) -> None:
    one, two = local(2)
    works = [one.all_reduce(_ones(), async_op=True), one.all_reduce(_ones(), async_op=True)]
    bad = works[0].get_future().then(lambda _: 1 / 0)
    good = works[1].get_future()
    two.all_reduce(_ones())
    two.all_reduce(_ones())
    good.wait()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        bad.wait()


def test_future_of_all(local: Local) -> None:
    one, two = local(2)
    works = [one.all_reduce(_ones(), async_op=True), one.all_reduce(_ones(), async_op=True)]
    errors: list[Exception] = []
    future = future_of_all(works, lambda: "both", errors.append)
    two.all_reduce(_ones())
    assert not future.done()
    two.all_reduce(_ones())
    assert future.wait() == "both"
    works = [one.all_reduce(_ones(), async_op=True), one.all_reduce(_ones(), async_op=True)]
    future = future_of_all(works, lambda: "never", errors.append)
    two.abort("no more")
    with pytest.raises(RuntimeError, match="PeerFailed: .*no more"):
        future.wait()
    assert isinstance(errors[0], TransportError)


def test_the_span_is_of_the_clock_that_the_caller_reads(local: Local) -> None:
    one, two = local(2)
    before = time.perf_counter()
    work = one.all_reduce(_ones(), async_op=True)
    assert work.span_s() is None
    two.all_reduce(_ones())
    work.wait()
    span = work.span_s()
    assert span is not None
    assert before - 1.0 < span[0] <= span[1] <= time.perf_counter()  # the engine's last look may lie before the call


def test_a_failed_operation_has_no_span(local: Local) -> None:
    one, two = local(2)
    work = one.all_reduce(_ones(), async_op=True)
    two.abort("no more")
    with pytest.raises(TransportError):
        work.wait()
    assert work.span_s() is None
