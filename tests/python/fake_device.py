"""A device without hardware: its streams are threads that run what is put into them in order, and its tensors are
torch's, in host memory, of a type of their own. What a test holds back, the stream waits for, as a GPU's would.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

DEVICE_TYPE = "privateuseone"


class FakeTensor(torch.Tensor):
    """A tensor that says it is on the device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE_TYPE, 0)


def on_fake_device(x: torch.Tensor) -> FakeTensor:
    """A copy of ``x`` there."""
    return x.detach().clone().as_subclass(FakeTensor)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


def _check_bytes(x: torch.Tensor, first: int, nbytes: int) -> None:
    assert isinstance(x, FakeTensor)
    assert x.is_contiguous()
    assert 0 <= first < first + nbytes <= x.numel() * x.element_size()


def _moved(target: int, source: int, nbytes: int, _: torch.UntypedStorage) -> None:
    """Of the tensor a stream has the memory alone, so that tests see when nobody holds the tensor."""
    ctypes.memmove(target, source, nbytes)


class FakeEvent(threading.Event):
    """``at_s``: when the stream came to it, by its own clock."""

    at_s = 0.0

    def pass_by(self, stream: FakeStream) -> None:
        self.at_s = stream.now_s
        self.set()


class FakeStream:
    """``now_s``: its clock, which stands but for what a test says of it; who waits for another stream's event is at
    least as late as that."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._actions: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: Exception | None = None  # the first one of what has run
        self.runs = True  # until the test is over: then nobody waits for what has not come
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], object]) -> None:
        self._actions.put(action)

    def spend(self, seconds: float) -> None:
        """For tests: what comes after this is so much later, by its clock."""

        def pass_on() -> None:
            self.now_s += seconds

        self.put(pass_on)

    def synchronize(self, timeout_s: float = 60.0) -> None:
        """For tests: the host waits for all that is in the stream."""
        over = threading.Event()
        self.put(over.set)
        assert over.wait(timeout_s), "the stream hangs"
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._actions.put(None)
        self._thread.join(timeout=60.0)
        assert not self._thread.is_alive(), "the stream hangs"

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                action()
            except Exception as error:
                self._error = self._error or error


class FakeCapture:
    """What would be done in ``stream``, in the place of a stream while that is found out."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream
        self.actions: list[Callable[[], object]] = []
        self.made: list[torch.UntypedStorage] = []  # its own memory, which others have behind each replay
        self.replays = 0
        self._is_open = True

    def put(self, action: Callable[[], object]) -> None:
        if self._is_open:  # afterwards memory is given back that it has made; nobody else ever gets it
            self.actions.append(action)

    def close(self) -> None:
        self._is_open = False


class FakeFuture(torch.futures.Future[Any]):
    """As torch's of CUDA tensors: ``wait()`` makes the current stream wait for ``event``."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()
        self._runtime = runtime
        self.event = FakeEvent()

    def wait(self) -> Any:
        assert self.done(), "the host would wait for ever: nobody else completes it"
        self._runtime.wait_event(self._runtime.current_stream(torch.device(DEVICE_TYPE, 0)), self.event)
        return super().wait()


class FakeRuntime:
    """See telegrad.communicator.cuda.runtime.DeviceRuntime."""

    def __init__(self) -> None:
        self._local = threading.local()
        self.streams: list[FakeStream] = []  # all that were ever made
        self._interpreter = threading.Lock()  # Triton's has one state for all threads
        self.kept: list[tuple[Any, FakeStream]] = []
        self.captures: list[FakeCapture] = []  # all that were ever made
        self.replaying = threading.local()  # ``on``: in a stream's thread, while it does what was captured
        self.host_waits = 0  # for what was not there yet
        self.identities: dict[FakeStream, tuple[str, str]] = {}  # of ranks that are on a piece of hardware of their own

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[FakeStream]:
        """It is the current one."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield stream
        finally:
            self._local.stream = before

    def stop(self) -> None:
        for stream in self.streams:
            stream.runs = False
        for stream in self.streams:
            stream.stop()

    def resolved(self, device: Any) -> torch.device:
        assert device.type == DEVICE_TYPE
        return torch.device(DEVICE_TYPE, device.index or 0)

    def identity(self, device: Any) -> tuple[str, str]:
        return self.identities.get(self.current_stream(device), ("fake", "the only one"))

    def current_stream(self, device: Any) -> FakeStream:
        assert device.type == DEVICE_TYPE
        return self._local.stream

    def new_stream(self, device: Any = None) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def pinned(self, nbytes: int) -> torch.Tensor:
        if isinstance(getattr(self._local, "stream", None), FakeCapture):
            raise RuntimeError("pinned memory cannot be captured")
        return torch.full((nbytes,), 0x55, dtype=torch.uint8)  # not what anybody wants to see

    def enter(self, device: Any) -> None:
        assert device.type == DEVICE_TYPE

    def leave(self) -> None:
        pass

    def copy_to_host(self, stream: FakeStream, address: int, x: torch.Tensor, first: int, nbytes: int) -> None:
        _check_bytes(x, first, nbytes)
        source, storage = x.data_ptr() + first, x.untyped_storage()
        stream.put(lambda: _moved(address, source, nbytes, storage))

    def copy_to_device(self, stream: FakeStream, x: torch.Tensor, first: int, address: int, nbytes: int) -> None:
        _check_bytes(x, first, nbytes)
        target, storage = x.data_ptr() + first, x.untyped_storage()
        stream.put(lambda: _moved(target, address, nbytes, storage))

    def copy(self, stream: FakeStream, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.dtype == source.dtype
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert isinstance(target, FakeTensor) != isinstance(source, FakeTensor)
        stream.put(lambda: _plain(target).copy_(_plain(source)))

    def launch(self, stream: FakeStream, kernels: Callable[..., None], *tensors: torch.Tensor) -> None:
        def run() -> None:
            with self._interpreter:
                kernels(*map(_plain, tensors))

        stream.put(run)

    def capture(self, stream: FakeStream, work: Callable[[], object], beside: FakeCapture | None) -> FakeCapture:
        assert beside is None or beside.stream is stream
        made = FakeCapture(stream)
        with self.on(made):  # type: ignore[arg-type]
            work()
        made.close()
        self.captures.append(made)
        return made

    def replay(self, captured: FakeCapture) -> None:
        captured.replays += 1

        def do() -> None:
            self.replaying.on = True
            try:
                for action in captured.actions:
                    action()
                for memory in captured.made:
                    torch.empty(0, dtype=torch.uint8).set_(memory).fill_(0xFF)  # type: ignore[call-overload]
            finally:
                self.replaying.on = False

        captured.stream.put(do)

    def write_value(self, stream: FakeStream, address: int, value: int) -> None:
        def write() -> None:
            ctypes.c_uint32.from_address(address).value = value

        stream.put(write)

    def wait_value(self, stream: FakeStream, address: int, value: int) -> None:
        word = ctypes.c_uint32.from_address(address)

        def wait() -> None:
            while ctypes.c_int32(word.value - value).value < 0:
                time.sleep(100e-6)

        stream.put(wait)

    def record(self, stream: FakeStream) -> FakeEvent:
        assert isinstance(stream, FakeStream), "an event of a capture is none of a stream"
        event = FakeEvent()
        stream.put(lambda: event.pass_by(stream))
        return event

    def record_timed(self, stream: FakeStream) -> FakeEvent:
        return self.record(stream)

    def seconds_between(self, before: FakeEvent, after: FakeEvent) -> float:
        assert before.is_set(), "it must not be asked before the stream has come there"
        assert after.is_set(), "it must not be asked before the stream has come there"
        return after.at_s - before.at_s

    def wait_event(self, stream: FakeStream, event: FakeEvent) -> None:
        def wait() -> None:
            event.wait()
            stream.now_s = max(stream.now_s, event.at_s)

        stream.put(wait)

    def passed(self, event: threading.Event) -> bool:
        return event.is_set()

    def wait_on_host(self, event: threading.Event) -> None:
        self.host_waits += not event.is_set()
        assert event.wait(60.0), "the stream hangs"

    def fast_path(self, device: Any) -> None:
        return None

    def lend(self, way: Any, lease: Any, event: Any) -> int:
        raise AssertionError("there is no fast path")

    def lend_streams(self, way: Any, inputs: Any, results: Any) -> None:
        raise AssertionError("there is no fast path")

    def keep(self, tensor: Any, stream: FakeStream) -> None:
        self.kept.append((tensor, stream))

    def future(self, device: Any) -> FakeFuture:
        assert device.type == DEVICE_TYPE
        return FakeFuture(self)

    def complete(self, future: FakeFuture, stream: FakeStream, value: Any) -> None:
        future.event = self.record(stream)
        future.set_result(value)
