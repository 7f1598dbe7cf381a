"""Sums of a device's tensors that the core puts into streams itself, by a library that stands for CUDA's driver:
tensors are the host's, and lie on the "device" cpu."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_device import DEVICE_TYPE, FakeRuntime, on_fake_device

from telegrad import Communicator, _core
from telegrad.communicator.cuda import runtime as runtimes
from telegrad.communicator.cuda import staging as fast_paths
from telegrad.communicator.cuda.staging import FastPath, Staging, Words
from telegrad.errors import TransportError

CPU = torch.device("cpu")
STREAM = 55
LENGTH = 4096


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("g++")
    assert compiler is not None, "telegrad is built by a compiler"
    made = tmp_path_factory.mktemp("driver") / "libstandin.so"
    source = Path(__file__).with_name("stand_in_driver.c")
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", made, source], check=True)
    return made


@pytest.fixture
def driver(library: Path) -> Any:
    loaded = ctypes.CDLL(str(library))
    loaded.stand_in_calls.restype = ctypes.c_char_p
    loaded.stand_in_reset()
    return loaded


def _calls(driver: Any) -> list[str]:
    return [one for one in driver.stand_in_calls().decode().split(";") if one]


@dataclass
class Rank:
    """A communicator and its fast path. ``aborted``: what it was asked to end with."""

    comm: Communicator
    way: _core.DeviceFastPath
    kept: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def lend(self, length: int = LENGTH) -> None:
        buffers = [torch.zeros(length, dtype=torch.uint8) for _ in range(2)]
        words = torch.zeros(32, dtype=torch.int32)
        self.kept.append((buffers, words))
        first = words.data_ptr()
        self.way.lend(length, buffers[0].data_ptr(), buffers[1].data_ptr(), first, first + 64, 0, 3)

    def sum(self, x: Any, op: str = "sum", *, apart: bool = False) -> bool:
        member = SimpleNamespace(abort=self.aborted.append)
        return self.way.all_reduce(member, self.comm._core, x, op, apart) is not None


@pytest.fixture
def make(library: Path, driver: Any) -> Iterator[Callable[..., list[Rank]]]:
    made: list[Rank] = []  # with memory that the engine may write to before they are closed

    def ranks(count: int = 1, stream: int = STREAM) -> list[Rank]:
        comms = Communicator.local(count, timeout_s=20)
        shared = _core.StreamDriver(str(library), 7)
        ranks = [Rank(comm, _core.DeviceFastPath(shared, CPU, 0, lambda index: stream + index)) for comm in comms]
        made.extend(ranks)
        return ranks

    yield ranks
    for rank in made:
        rank.comm.close()


def test_a_sum_is_two_visits_to_the_stream(make: Callable[..., list[Rank]], driver: Any) -> None:
    (rank,) = make()
    rank.lend()
    x = torch.arange(6, dtype=torch.float32)
    for number in (1, 2):
        driver.stand_in_reset()
        assert rank.sum(x)
        assert _calls(driver) == [
            *("to_host 24 55", f"write {number} 55", f"wait {number} 55", "to_device 24 55", "record 3 55"),
        ]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert rank.way.slot(0, rank.comm._core)[0] == 2


def test_on_streams_of_its_own_inputs_wait_for_the_caller_and_results_for_inputs(
    make: Callable[..., list[Rank]], driver: Any
) -> None:
    (rank,) = make()
    rank.lend()
    x = torch.arange(6, dtype=torch.float32)
    assert not rank.sum(x, apart=True)  # it has none
    rank.way.use(61, 62)
    assert rank.sum(x, apart=True)
    assert _calls(driver) == [
        *("record 3 55", "wait_for 3 61", "to_host 24 61", "write 1 61"),
        *("record 3 61", "wait_for 3 62", "wait 1 62", "to_device 24 62", "record 3 62"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("op", ["sum", "max", "prod"])
def test_ranks_sum_what_they_have(make: Callable[..., list[Rank]], dtype: torch.dtype, op: str) -> None:
    ranks = make(3)
    tensors = [torch.arange(1, 21).to(dtype).view(4, 5) + rank for rank in range(3)]
    stacked = torch.stack([one.double() for one in tensors])
    expected = {"sum": stacked.sum(0), "max": stacked.max(0).values, "prod": stacked.prod(0)}[op]
    for one in ranks:
        one.lend()
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda number: ranks[number].sum(tensors[number], op), range(3)))
    for tensor in tensors:
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-2, atol=0)
        assert torch.equal(tensor, tensors[0])


def test_it_meets_ranks_that_go_the_long_way(make: Callable[..., list[Rank]]) -> None:
    """What peers see of it is the same."""
    ranks = make(2)
    ranks[0].lend()
    x, y = torch.ones(5), torch.full((5,), 2.0)
    with ThreadPoolExecutor(2) as pool:
        short, long = pool.submit(ranks[0].sum, x), pool.submit(ranks[1].comm.all_reduce, y)
        assert short.result()
        long.result()
    assert x.tolist() == y.tolist() == [3.0] * 5


@pytest.mark.parametrize(
    ("x", "op"),
    [
        (torch.ones(LENGTH // 4 + 1), "sum"),
        (torch.ones(0), "sum"),
        (torch.ones(4, 4).T[:, :2], "sum"),
        (torch.ones(4, dtype=torch.int16), "sum"),
        (torch.ones(4, dtype=torch.int32), "avg"),
        (torch.ones(4), "mean"),
        (torch.ones(4, device="meta"), "sum"),
        (torch.ones(4).to_sparse(), "sum"),
        ([1.0], "sum"),
    ],
    ids=["long", "empty", "strided", "dtype", "average", "op", "device", "layout", "list"],
)
def test_all_else_is_left_to_the_method(make: Callable[..., list[Rank]], driver: Any, x: Any, op: str) -> None:
    (rank,) = make()
    rank.lend()
    assert not rank.sum(x, op)
    assert _calls(driver) == []


def test_so_is_what_inference_mode_has_made(make: Callable[..., list[Rank]]) -> None:
    (rank,) = make()
    rank.lend()
    with torch.inference_mode():
        x = torch.ones(4)
    assert not rank.sum(x)


def test_so_is_what_a_graph_captures_but_the_default_stream_is_not_asked(
    make: Callable[..., list[Rank]], driver: Any
) -> None:
    (rank,) = make()
    (on_default,) = make(stream=0)
    rank.lend()
    on_default.lend()
    driver.stand_in_capture(1)
    assert not rank.sum(torch.ones(4))
    driver.stand_in_capture(2)
    assert on_default.sum(torch.ones(4))
    assert _calls(driver)[0] == "to_host 16 1"


def test_memory_is_used_again_once_the_stream_has_passed(make: Callable[..., list[Rank]], driver: Any) -> None:
    (rank,) = make()
    x = torch.ones(4)
    assert not rank.sum(x)  # it has none
    rank.lend()
    rank.lend()
    for _ in range(4):
        assert rank.sum(x)
    assert [rank.way.slot(number, rank.comm._core)[0] for number in range(2)] == [2, 2]
    driver.stand_in_unready(1)
    assert not rank.sum(x)
    assert rank.sum(x)


def test_what_it_has_begun_is_told_once(make: Callable[..., list[Rank]]) -> None:
    ranks = make(2)
    for one in ranks:
        one.lend()
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda one: one.sum(torch.ones(4)), ranks))
    core = ranks[0].comm._core
    assert ranks[0].way.has_outstanding()
    ((request, number),) = ranks[0].way.take_outstanding(core)
    assert (number, request.wait(60.0)) == (0, True)
    assert not ranks[0].way.has_outstanding()


def test_after_a_failure_the_method_says_what_it_was(make: Callable[..., list[Rank]]) -> None:
    ranks = make(2)
    for _ in range(2):
        ranks[0].lend()
    x = torch.ones(4)
    with ThreadPoolExecutor(1) as pool:
        summed = pool.submit(ranks[0].sum, x)
        ranks[1].comm.abort("enough")
        assert summed.result()  # it stood in the stream
    assert x.isnan().all()
    assert not ranks[0].sum(x)
    ((request, _),) = ranks[0].way.take_outstanding(ranks[0].comm._core)
    with pytest.raises(TransportError, match="enough"):
        request.wait(60.0)
    assert not ranks[0].sum(x)  # though there is memory, and nobody need be told


def test_what_was_taken_over_before_it_failed_stops_it_as_well(make: Callable[..., list[Rank]]) -> None:
    ranks = make(2)
    for _ in range(2):
        ranks[0].lend()
    x = torch.ones(4)
    with ThreadPoolExecutor(1) as pool:
        summed = pool.submit(ranks[0].sum, x)
        while not ranks[0].way.has_outstanding():
            time.sleep(1e-3)
        ranks[0].way.take_outstanding(ranks[0].comm._core)
        ranks[1].comm.abort("enough")
        assert summed.result()
    assert not ranks[0].sum(x)


def test_stopped_or_closed_it_takes_nothing(make: Callable[..., list[Rank]], driver: Any) -> None:
    for rank, end in zip((*make(), *make()), ("stop", "close"), strict=True):
        rank.lend()
        rank.way.use(61, 62)
        getattr(rank.way, end)()
        assert not rank.sum(torch.ones(4))
        assert not rank.sum(torch.ones(4), apart=True)
        assert _calls(driver) == []


def test_a_driver_that_refuses_the_first_visit_has_begun_nothing(make: Callable[..., list[Rank]], driver: Any) -> None:
    (rank,) = make()
    rank.lend()
    driver.stand_in_fail_after(1)
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed with CUDA_ERROR_NOT_SUPPORTED"):
        rank.sum(torch.ones(4))
    assert rank.aborted == []
    assert not rank.way.has_outstanding()
    assert rank.way.slot(0, rank.comm._core) == (1, None, True)
    driver.stand_in_reset()
    assert not rank.sum(torch.ones(4))  # its memory is not used again


def test_one_that_refuses_the_second_ends_the_operations_of_all(make: Callable[..., list[Rank]], driver: Any) -> None:
    (rank,) = make()
    rank.lend()
    driver.stand_in_fail_after(2)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 failed with"):
        rank.sum(torch.ones(4))
    assert rank.aborted == [
        "all_reduce of device tensors broke off: cuStreamWaitValue32 failed with CUDA_ERROR_NOT_SUPPORTED"
    ]
    assert rank.way.slot(0, rank.comm._core)[2]


@pytest.mark.parametrize(
    ("library", "why"), [("libnone.so", "libnone"), ("libm.so.6", "libm.so.6 has no cuCtxPushCurrent_v2")]
)
def test_a_library_that_is_no_driver(library: str, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        _core.StreamDriver(library, 7)


# The communicator that lends it memory


class ShortRuntime(FakeRuntime):
    """Of tensors that are the host's, and whose streams the stand-in runs at once."""

    def __init__(self, library: Path) -> None:
        super().__init__()
        self._library = library

    def fast_path(self, device: Any) -> _core.DeviceFastPath:
        driver = _core.StreamDriver(str(self._library), 7)
        return _core.DeviceFastPath(driver, CPU, 0, lambda index: STREAM)

    reaches = True

    def lend_streams(self, way: _core.DeviceFastPath, inputs: Any, results: Any) -> None:
        way.use(61, 62)

    def lend(self, way: _core.DeviceFastPath, lease: Any, event: Any) -> int | None:
        if not self.reaches:
            return None
        words: Words = lease.words
        buffers = lease.key[0], lease.input_address, lease.output_address
        return way.lend(*buffers, words.ready, words.done, words.value, 3)


@pytest.fixture
def lender(library: Path, driver: Any) -> Iterator[tuple[FastPath, Staging]]:
    runtime = ShortRuntime(library)
    staging = Staging(runtime, most_bytes=1 << 20)
    way = runtime.fast_path(CPU)
    yield FastPath(runtime, staging, way, CPU), staging
    runtime.stop()


def test_so_much_is_lent(lender: tuple[FastPath, Staging], monkeypatch: pytest.MonkeyPatch) -> None:
    short, staging = lender
    stream = staging._runtime.new_stream(CPU)
    for _ in range(3):
        short.lend(stream, 5000)
    assert len(short.way) == 3
    assert staging.counts.lent_bytes == 0  # nobody waits for it
    short.lend(stream, 1 << 18)  # a large part of all that may be lent
    assert len(short.way) == 3
    monkeypatch.setattr(fast_paths, "MOST_BYTES", 4 * 2 * 8192)
    for _ in range(3):
        short.lend(stream, 8192)
    assert len(short.way) == 4


def test_nothing_is_lent_where_as_much_is_under_way_as_may_be(lender: tuple[FastPath, Staging]) -> None:
    short, staging = lender
    staging.lease([(1 << 19, 1 << 19)], [])
    short.lend(staging._runtime.new_stream(CPU), 16)
    assert (len(short.way), staging.counts.lent_bytes) == (0, 1 << 20)


def test_what_a_device_does_not_reach_is_given_back(lender: tuple[FastPath, Staging]) -> None:
    short, staging = lender
    runtime: Any = staging._runtime
    runtime.reaches = False
    stream = runtime.new_stream(CPU)
    short.lend(stream, 16)
    stream.synchronize()
    again: list[Any] = []
    staging.lease([(16, 16)], again)
    assert (len(short.way), staging.counts.lent_bytes, staging.counts.reused) == (0, 2 * 4096, 1)


def test_what_was_lent_is_used_by_others_afterwards(lender: tuple[FastPath, Staging]) -> None:
    short, staging = lender
    (comm,) = Communicator.local(1)
    stream = staging._runtime.new_stream(CPU)
    short.lend(stream, 16)
    x = torch.ones(4)
    for _ in range(5):
        assert short.way.all_reduce(comm, comm._core, x, "sum")
    ((request, lease),) = short.outstanding(comm._core)[-1:]
    request.wait(60.0)
    short.close(comm._core)
    assert lease.words.value == 6
    comm.close()
    stream.synchronize()
    again: list[Any] = []
    staging.lease([(16, 16)], again)
    assert again == [lease]
    assert (staging.counts.lent_bytes, lease.words.value) == (2 * 4096, 7)


def test_a_communicator_lends_it_memory_and_hears_of_its_failures(
    library: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = ShortRuntime(library)
    monkeypatch.setitem(runtimes._makers, DEVICE_TYPE, lambda: runtime)
    monkeypatch.setitem(runtimes._runtimes, DEVICE_TYPE, runtime)
    (comm,) = Communicator.local(1)
    x = on_fake_device(torch.ones(4))
    with runtime.on(runtime.new_stream()):
        assert comm._device_fast_path is None
        comm.all_reduce(x, algorithm="ring")
        comm.all_reduce(x, out=on_fake_device(torch.ones(4)))
        comm.all_reduce(on_fake_device(torch.ones(0)))
        assert comm._device_fast_path is None
        comm.all_reduce(x)
        way = comm._device_fast_path
        assert way is not None
        assert len(way) == 1
        way.all_reduce(comm, comm._core, torch.ones(4), "sum")
        comm.synchronize()
        assert not way.has_outstanding()
        for other in (torch.ones(4), x, [1.0]):  # of another device, a class of its own, none
            assert comm._begin_shortly(other, "sum") is None
        comm.all_reduce(x, async_op=True).wait()
        transfers: Any = comm._transfers[DEVICE_TYPE]
        monkeypatch.setattr(transfers._fast_path, "device", CPU)
        assert transfers.begin_shortly(comm, torch.ones(4), "sum").communicated()
        monkeypatch.setattr(transfers._fast_path, "device", x.device)
        assert len(way) == 2
        way.lend(4096, 4096, 4096, 4096, 4096, 0, 3)  # memory that nobody may use, behind the other's
        comm.abort("enough")
        assert way.all_reduce(comm, comm._core, torch.ones(4), "sum")
        for call in (comm.synchronize, lambda: comm.all_reduce(x), lambda: comm.broadcast(x, 0)):
            with pytest.raises(TransportError, match="enough"):
                call()
            assert way.all_reduce(comm, comm._core, torch.ones(4), "sum") is None
        comm.close()
    assert comm._device_fast_path is None
    runtime.stop()
