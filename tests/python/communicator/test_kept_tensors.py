"""The network's tensors outlive whoever forgets them: a Work keeps its own, and its communicator those of Works that
end before their operations."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from telegrad import Communicator, SparseVector, TransportError, _core
from telegrad.communicator.work import Work, once

Local = Callable[..., list[Communicator]]
BEGIN: list[Callable[[Communicator, Any], Work]] = [
    lambda c, x: c.all_reduce(x, async_op=True),
    lambda c, x: c.all_reduce(x, out=x, async_op=True),
    lambda c, x: c.broadcast(x, 0, async_op=True),
]
each_way = pytest.mark.parametrize("begin", BEGIN, ids=["short-way", "method", "broadcast-of-root"])


def soon(met: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not met() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    return met()


@each_way
def test_a_forgotten_works_tensor_lives_until_it_is_over(
    local: Local, begin: Callable[[Communicator, Any], Work]
) -> None:
    one, other = local(2)
    gate = np.ones(1)
    first = one.all_reduce(gate, async_op=True)  # nothing begins behind it at a rank of which it is the first
    x = np.full(100_000, 1.0)
    kept = weakref.ref(x)
    begin(one, x)  # its Work ends here
    del x
    gc.collect()
    assert kept() is not None
    second = np.ones(1)
    begun = [other.all_reduce(second, async_op=True), begin(other, np.ones(100_000))]
    for work in (first, *begun):
        work.wait()
    assert soon(lambda: (one.all_reduce(gate, async_op=True), kept() is None)[1])  # with a later call


def test_a_work_in_a_cycle_hands_over_too(local: Local) -> None:
    one, _ = local(2)
    x = np.ones(10)
    kept = weakref.ref(x)
    cycle: list[Any] = [one.all_reduce(x, async_op=True)]
    cycle.append(cycle)
    del x, cycle
    gc.collect()
    assert kept() is not None
    one.close()
    gc.collect()
    assert kept() is None


def test_a_work_that_is_over_leaves_nothing_behind(local: Local) -> None:
    one = local(1)[0]
    x = np.ones(10)
    kept = weakref.ref(x)
    work = one.all_reduce(x, async_op=True)
    work.wait()
    assert work.result() is x
    del x
    assert kept() is not None
    del work
    assert kept() is None
    assert not one._kept


def test_tensors_of_a_failed_operation_live_until_close(local: Local) -> None:
    one, other = local(2)
    x = np.ones(10)
    kept = weakref.ref(x)
    work = one.all_reduce(x, async_op=True)
    other.abort("the test says so")
    with pytest.raises(TransportError, match="the test says so"):
        work.wait()
    del x, work
    gc.collect()
    assert kept() is not None
    for _ in range(3):  # which reach nobody, and are not kept
        late = np.ones(3)
        forgotten = weakref.ref(late)
        with pytest.raises(TransportError):
            one.all_reduce(late, async_op=True).wait()
    del late
    gc.collect()
    assert forgotten() is None
    one.close()
    gc.collect()
    assert kept() is None


def test_what_ends_after_close_is_not_kept(local: Local) -> None:
    one, _ = local(2)
    x = np.ones(10)
    kept = weakref.ref(x)
    work = one.all_reduce(x, async_op=True)
    one.close()
    del x, work
    gc.collect()
    assert kept() is None


def test_a_finished_work_keeps_its_result_alone(local: Local) -> None:
    one = local(1)[0]
    x, out = np.ones(10), np.empty(10)
    given = weakref.ref(x)
    work = one.all_reduce(x, out=out, async_op=True)
    work.wait()
    del x
    assert given() is None
    assert work.result() is out


def test_many_forgotten_works_do_not_pile_up(local: Local) -> None:
    one, other = local(2)
    late = np.zeros(4)
    one.recv(late, 1, tag=5, async_op=True)
    for number in range(400):
        mine = one.all_reduce(np.full(4, float(number)), async_op=True)
        other.all_reduce(np.full(4, float(number)), async_op=True)  # forgotten, perhaps under way
        mine.wait()
    assert len(one._kept) <= 130
    assert len(other._kept) <= 130
    other.send(np.ones(4), 0, tag=5)
    assert soon(lambda: late.tolist() == [1.0] * 4)


def test_a_forked_child_forgets_works_without_a_word(local: Local) -> None:
    one, other = local(2)
    x = np.ones(10)
    work = one.all_reduce(x, async_op=True)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (work.wait, work.get_future):
                with pytest.raises(ValueError, match="belongs to process"):
                    call()
            one._lock.acquire()  # as another thread may have it for ever
            del work
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    other.all_reduce(np.ones(10), async_op=True)
    assert work.wait()
    assert x[0] == 2.0


def test_a_result_that_can_be_taken_once_is_the_same_for_all() -> None:
    taken = []

    def take(_: Any) -> object:
        taken.append(object())
        return taken[-1]

    finish = once(take)
    request: Any = None
    assert finish(request) is finish(request)
    assert len(taken) == 1


def test_a_sparse_sums_result_is_one_stream(local: Local) -> None:
    one = local(1)[0]
    work = one.all_reduce(SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 10), async_op=True)
    assert work.result() is work.result()


def test_a_works_wait_is_described_as_the_method_is() -> None:
    assert "Blocks until the operation is over" in str(Work.wait.__doc__)
    with pytest.raises(TypeError, match="positional argument"):
        Work.wait()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="there is no fast path"):
        _core.FastPath(len)


def test_a_state_is_made_as_a_work_only() -> None:
    with pytest.raises(TypeError, match=r"WorkState is the base of telegrad\.communicator\.work\.Work: make a Work"):
        _core.WorkState()
