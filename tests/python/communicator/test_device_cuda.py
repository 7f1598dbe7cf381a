"""CUDA's runtime as far as it goes without a GPU: what it refuses, and what it calls."""

from __future__ import annotations

import itertools
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad.communicator import nodes
from telegrad.communicator.cuda.cuda import CudaRuntime, CudaStream


class FakeDriver(SimpleNamespace):
    """Stands for cuda.bindings.driver: every function returns a tuple that begins with the result code."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_READY=600, CUDA_ERROR_NOT_SUPPORTED=801)

    def __init__(self, error: int = 0) -> None:
        super().__init__(calls=[], current=[], retained=[], pushed=0, events=0, streams=[], capturing=0)
        self._error = error

    def _call(self, *call: Any) -> tuple[int]:
        self.calls.append((self.current[-1], *call))
        return (self._error,)

    def cuDeviceGet(self, index: int) -> tuple[int, str]:  # noqa: N802
        return 0, f"device {index}"

    def cuDevicePrimaryCtxRetain(self, device: str) -> tuple[int, str]:  # noqa: N802
        self.retained.append(device)
        return 0, f"context of {device}"

    def cuCtxPushCurrent(self, context: str) -> tuple[int]:  # noqa: N802
        self.current.append(context)
        self.pushed += 1
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, str]:  # noqa: N802
        return 0, self.current.pop()

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:  # noqa: N802
        self.calls.append((self.current[-1], "pointer", address, flags))
        return 0, address + 0x1000

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:  # noqa: N802
        self.streams.append((self.current[-1], flags))
        return self._error, 1000 + len(self.streams)

    def cuStreamIsCapturing(self, stream: Any) -> tuple[int, int]:  # noqa: N802
        self.calls.append((self.current[-1], "capturing", stream))
        return 0, self.capturing

    def cuMemcpyDtoHAsync(self, *arguments: int) -> tuple[int]:  # noqa: N802
        return self._call("to host", *arguments)

    def cuMemcpyHtoDAsync(self, *arguments: int) -> tuple[int]:  # noqa: N802
        return self._call("to device", *arguments)

    def cuEventCreate(self, flags: int) -> tuple[int, str]:  # noqa: N802
        self.events += 1
        return 0, f"event {self.events} of {flags}"

    def cuEventRecord(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        return self._call("record", *arguments)

    def cuStreamWaitEvent(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        return self._call("wait for", *arguments)

    def cuEventQuery(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        return self._call("query", *arguments)

    def cuEventSynchronize(self, *arguments: Any) -> tuple[int]:  # noqa: N802
        return self._call("synchronise", *arguments)

    def cuStreamWriteValue32(self, *arguments: int) -> tuple[int]:  # noqa: N802
        return self._call("write", *arguments)

    def cuStreamWaitValue32(self, *arguments: int) -> tuple[int]:  # noqa: N802
        return self._call("wait", *arguments)


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> CudaRuntime:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)  # type: ignore[arg-type]
    return CudaRuntime()


def stream_of(device: int, handle: int, of_torch: Any = None) -> CudaStream:
    return CudaStream(device, handle, f"stream {handle}", of_torch)


def test_cuda_bindings_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"pip install 'cuda-bindings>=12\.9\.1', or move tensors with \.cpu\(\)"):
        CudaRuntime()


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(TypeError, match=r"ROCm device, whose streams are not supported: move it with \.cpu\(\)"):
        CudaRuntime()


def test_flags_are_stream_memory_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    stream = stream_of(0, 77)
    runtime.write_value(stream, 0x100, 5)
    runtime.wait_value(stream, 0x100, 6)
    context = "context of device 0"
    assert driver.calls == [
        (context, "pointer", 0x100, 0),
        (context, "write", "stream 77", 0x1100, 5, 0),
        (context, "wait", "stream 77", 0x1100, 6, 0),
    ]


class CurrentStreams:
    """What torch knows of them: the current device, and each one's stream, by handle; ``changes``: all that they were
    made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: int = 0) -> None:
        self.device, self.streams, self.changes = device, {0: 0, 1: 0}, list[tuple[int, int]]()
        for name in ("getDevice", "getCurrentRawStream", "getCurrentStream", "setStream"):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", getattr(self, f"_{name}"), raising=False)
        monkeypatch.setattr(torch.cuda, "stream", self._by_torch)

    def _getDevice(self) -> int:  # noqa: N802
        return self.device

    def _getCurrentRawStream(self, device: int) -> int:  # noqa: N802
        return self.streams[device]

    def _getCurrentStream(self, device: int) -> tuple[int, int, int]:  # noqa: N802
        return 10 * self.streams[device], device, 1

    def _setStream(self, *, stream_id: int, device_index: int, device_type: int) -> None:  # noqa: N802
        assert device_type == 1
        self.device, self.streams[device_index] = device_index, stream_id // 10
        self.changes.append((device_index, stream_id // 10))

    @contextmanager
    def _by_torch(self, stream: Any) -> Iterator[None]:
        before = self.device, self.streams[stream.device_index]
        self._setStream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=1)
        yield
        self._setStream(stream_id=10 * before[1], device_index=stream.device_index, device_type=1)
        self.device = before[0]


def torch_stream(device: int, handle: int) -> CudaStream:
    of_torch = SimpleNamespace(stream_id=10 * handle, device_index=device, device_type=1)
    return stream_of(device, handle, of_torch)


@pytest.mark.parametrize(("device", "changes"), [(0, [(0, 77), (0, 5)]), (1, [(1, 77), (1, 0)])])
def test_kernels_are_launched_into_the_stream(
    monkeypatch: pytest.MonkeyPatch, device: int, changes: list[tuple[int, int]]
) -> None:
    """On the current device, and on another one."""
    runtime, torchs = use(monkeypatch, FakeDriver()), CurrentStreams(monkeypatch)
    torchs.streams[0] = 5
    launched: list[Any] = []

    def kernels(*tensors: int) -> None:
        launched.append((tensors, torchs.device, torchs.streams[device]))
        with runtime.on(torch_stream(device, 77)):  # it is
            launched.append(list(torchs.changes))

    runtime.launch(torch_stream(device, 77), kernels, 1, 2)
    assert launched == [((1, 2), device, 77), changes[:1]]
    assert torchs.changes == changes
    assert torchs.device == 0


class Graph:
    """As torch.cuda.CUDAGraph. ``told``: what all of them were told."""

    told: list[Any]

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.told.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        self.told.append("end")

    def replay(self) -> None:
        self.told.append("replay")


def test_work_is_captured_in_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime, torchs = use(monkeypatch, driver), CurrentStreams(monkeypatch)
    told: list[Any] = []
    monkeypatch.setattr(Graph, "told", told, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    pools = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(pools)}")
    monkeypatch.setattr(runtime, "new_stream", lambda device: torch_stream(device.index, 9))
    stream, driver.capturing, driver.CUstream = torch_stream(0, 5), 1, str
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace())

    def work() -> None:
        told.append(runtime.current_stream(torch.device("cuda", 0)).handle)
        with pytest.raises(RuntimeError, match="pinned memory is another one each time"):
            runtime.pinned(8)

    first = runtime.capture(stream, work, None)
    second = runtime.capture(stream, work, first)
    assert told == 2 * [("begin", "pool 1", "thread_local"), 9, "end"]
    assert first.stream is second.stream is stream
    torchs.streams[0] = 5
    told.clear()
    runtime.replay(second)
    assert told == ["replay"]
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        runtime.current_stream(torch.device("cuda", 0))  # of a graph of the caller's


@pytest.mark.parametrize("end", ["_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool"])
def test_a_capture_that_breaks_off_is_ended(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    runtime = use(monkeypatch, FakeDriver())
    torchs = CurrentStreams(monkeypatch)
    told: list[Any] = []

    class Spoilt(Graph):
        def capture_end(self) -> None:
            super().capture_end()
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(Spoilt, "told", told, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Spoilt)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    monkeypatch.setattr(torch._C, end, lambda *arguments: told.append(arguments), raising=False)
    monkeypatch.setattr(runtime, "new_stream", lambda device: torch_stream(device.index, 9))

    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime.capture(torch_stream(0, 5), work, None)
    assert told[1:] == ["end", (0, "a pool")]
    assert torchs.changes == [(0, 9), (0, 0)]
    assert runtime._entered.captures is False


def test_every_device_is_met_in_its_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    for device in (1, 0, 1):  # the default stream has the same number on each
        runtime.write_value(stream_of(device, 0), 0x100, 5)
    assert [call[0] for call in driver.calls if call[1] == "write"] == [
        f"context of device {device}" for device in (1, 0, 1)
    ]
    assert driver.retained == ["device 1", "device 0"]
    assert driver.current == []


def test_a_device_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(error=801)
    runtime = use(monkeypatch, driver)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 failed with 801: .*use host tensors"):
        runtime.wait_value(stream_of(0, 0), 0x100, 6)
    assert driver.current == []  # also after an error


def test_other_errors_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeDriver(error=700))
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed with 700$"):
        runtime.write_value(stream_of(0, 0), 0x100, 6)


def test_a_future_is_completed_in_the_operations_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch records the event that streams wait for."""
    runtime, torchs = use(monkeypatch, FakeDriver()), CurrentStreams(monkeypatch, device=1)
    said: list[Any] = []

    class Future:
        def __init__(self, *, devices: list[Any]) -> None:
            said.append(devices)

        def set_result(self, value: str) -> None:
            said.append((value, torchs.streams[1]))

    monkeypatch.setattr(torch.futures, "Future", Future)
    device = torch.device("cuda", 1)
    runtime.complete(runtime.future(device), torch_stream(1, 6), "the tensor")
    assert said == [[device], ("the tensor", 6)]
    assert torchs.streams[1] == 0


def test_an_operations_calls_share_one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    x = torch.zeros(8)
    runtime.enter(torch.device("cuda", 1))
    runtime.copy_to_host(stream_of(1, 5), 0x100, x, 8, 16)
    runtime.copy_to_device(stream_of(1, 5), x, 4, 0x200, 12)
    runtime.copy_to_host(stream_of(0, 5), 0x300, x, 0, 4)  # of another device
    runtime.leave()
    first, other = "context of device 1", "context of device 0"
    assert driver.calls == [
        (first, "to host", 0x100, x.data_ptr() + 8, 16, "stream 5"),
        (first, "to device", x.data_ptr() + 4, 0x200, 12, "stream 5"),
        (other, "to host", 0x300, x.data_ptr(), 4, "stream 5"),
    ]
    assert driver.current == []
    assert driver.pushed == 2


def test_events_are_used_again_once_nobody_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    first, second = runtime.record(stream_of(0, 5)), runtime.record(stream_of(0, 5))
    runtime.wait_event(stream_of(0, 6), first)
    runtime.wait_on_host(second)
    assert runtime.passed(first)
    del first
    assert runtime.record(stream_of(0, 7)).driven == "event 1 of 2"
    assert [call[1:] for call in driver.calls] == [
        ("record", "event 1 of 2", "stream 5"),
        ("record", "event 2 of 2", "stream 5"),
        ("wait for", "stream 6", "event 1 of 2", 0),
        ("synchronise", "event 2 of 2"),
        ("query", "event 1 of 2"),
        ("record", "event 1 of 2", "stream 7"),
    ]


class TorchEvent:
    """Stands for torch.cuda.Event, which is made when it is first recorded. ``made``: how many are."""

    made = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.streams: list[Any] = []

    def record(self, stream: Any) -> None:
        if not self.streams:
            TorchEvent.made += 1
            self.cuda_event = 100 + TorchEvent.made
        self.streams.append(stream)

    def elapsed_time(self, end: TorchEvent) -> float:
        return 1.5 * (end.cuda_event - self.cuda_event)


def test_events_with_times_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own call for the time between two is another one for newer bindings, which older drivers lack."""
    driver = FakeDriver()
    driver.CUevent = lambda handle: f"torch's {handle}"
    runtime = use(monkeypatch, driver)
    monkeypatch.setattr(torch.cuda, "Event", TorchEvent)
    monkeypatch.setattr(TorchEvent, "made", 0)
    runtime.record(stream_of(0, 5))  # and is idle again
    first, second = (runtime.record_timed(stream_of(0, handle, f"stream of {handle}")) for handle in (5, 6))
    assert [event.of_torch.streams for event in (first, second)] == [["stream of 5"], ["stream of 6"]]
    assert runtime.passed(second)
    runtime.wait_event(stream_of(0, 7), first)
    assert runtime.seconds_between(first, second) == 1.5e-3
    assert [call[1:] for call in driver.calls] == [
        ("record", "event 1 of 2", "stream 5"),
        ("query", "torch's 102"),
        ("wait for", "stream 7", "torch's 101", 0),
    ]
    del first, second
    again = runtime.record_timed(stream_of(0, 5))
    assert TorchEvent.made == 2
    assert runtime.record(stream_of(0, 5)).driven == "event 1 of 2"
    assert again.driven == "torch's 102"
    assert runtime.record_timed(stream_of(1, 5)).driven == "torch's 103"  # of another device


def test_another_thread_may_take_the_last_idle_event(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raced(list[Any]):
        """Has one when it is looked at, and none when it is asked for that."""

        def __len__(self) -> int:
            return 1

    runtime = use(monkeypatch, FakeDriver())
    runtime._idle_events[0] = Raced()
    assert runtime.record(stream_of(0, 5)).driven == "event 1 of 2"


@pytest.mark.parametrize(("error", "passed"), [(0, True), (600, False)])
def test_whether_an_event_has_passed(monkeypatch: pytest.MonkeyPatch, error: int, passed: bool) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    event = runtime.record(stream_of(0, 5))
    driver._error = error
    assert runtime.passed(event) is passed


def test_an_event_that_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    event = runtime.record(stream_of(0, 5))
    driver._error = 700
    with pytest.raises(RuntimeError, match="cuEventQuery failed with 700"):
        runtime.passed(event)


def test_the_current_stream_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver.CUstream = lambda handle: f"stream {handle}"
    runtime = use(monkeypatch, driver)
    handles = iter([0, 77, 77])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: next(handles), raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"torch's of {device}")
    device = torch.device("cuda", 1)
    default, first, again = (runtime.current_stream(device) for _ in range(3))
    assert (default.handle, first.handle, first.driven, first.of_torch) == (0, 77, "stream 77", "torch's of cuda:1")
    assert default.driven == "stream 1"  # CU_STREAM_LEGACY, which is torch's 0 whatever the driver takes for its own
    assert first is again
    assert [call[1:] for call in driver.calls] == [("capturing", "stream 77")] * 2  # the default one never is


def test_streams_are_made_before_any_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one may last until those that wait go on."""
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"torch's of {handle} on {device}")
    one, other = torch.device("cuda", 1), torch.device("cuda", 0)
    for device in (one, other, one):
        runtime.enter(device)
        runtime.leave()
    ahead = [("context of device 1", 1)] * 8 + [("context of device 0", 1)] * 8
    assert driver.streams == ahead
    made = [runtime.new_stream(one) for _ in range(8)]
    assert sorted(stream.driven for stream in made) == list(range(1001, 1009))
    assert made[0].of_torch == f"torch's of {made[0].handle} on cuda:1"
    assert driver.streams == ahead
    assert runtime.new_stream(one).driven == 1017
    assert runtime.new_stream(other).driven in range(1009, 1017)
    assert driver.current == []


def test_a_device_that_makes_no_streams_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(error=2)
    runtime = use(monkeypatch, driver)
    with pytest.raises(RuntimeError, match="cuStreamCreate failed with 2"):
        runtime.enter(torch.device("cuda", 0))
    assert driver.current == []
    driver._error = 0
    runtime.enter(torch.device("cuda", 0))
    assert driver.current == ["context of device 0"]


def test_a_device_is_known_by_its_bus_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL knows it: processes see one under other numbers, and parts of it are at the same address."""
    driver = FakeDriver()
    numbers = {"PCI_DOMAIN_ID": 0, "PCI_BUS_ID": 0x65, "PCI_DEVICE_ID": 1}
    driver.CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in numbers})
    driver.cuDeviceGetAttribute = lambda attribute, device: (0, numbers[attribute])
    runtime = use(monkeypatch, driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 as {device}")
    monkeypatch.setattr(nodes, "_boot_id", lambda: "this boot")
    found = runtime.identity(torch.device("cuda", 3))
    assert found == ("H200 as cuda:3", "0000:65:01 of machine this boot")


@pytest.mark.parametrize(("given", "found"), [("cuda", "cuda:2"), ("cuda:1", "cuda:1"), ("cuda:0", "cuda:0")])
def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch, given: str, found: str) -> None:
    """The driver answers nothing before torch has initialised it."""
    called: list[str] = []
    runtime = use(monkeypatch, FakeDriver())
    monkeypatch.setattr(torch.cuda, "init", lambda: called.append("init"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: called.append("current") or 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: called.append(f"name of {device}"))
    assert runtime.resolved(torch.device(given)) == torch.device(found)
    assert called == ["init", *["current"] * (given == "cuda"), f"name of {found}"]


def test_a_machine_without_proc_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(nodes, "_boot_id", none)
    assert nodes.machine_id() == socket.gethostname()


def test_graphs_capture_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver.CUstream, driver.capturing = str, 1
    runtime = use(monkeypatch, driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        runtime.current_stream(torch.device("cuda", 0))
