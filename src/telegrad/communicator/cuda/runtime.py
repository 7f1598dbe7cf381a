"""What operations on device tensors need of a device's runtime, and which devices have one.

It must not import torch, nor know of communicators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from telegrad.communicator.torch_terms import first_line

if TYPE_CHECKING:
    from telegrad import _core
    from telegrad.communicator.cuda.staging import Lease

Stream = Hashable
"""A queue of the device. What is put into it runs in that order, and later than the call that puts it there."""

Event = Any
"""A point in a stream."""


class Captured(Protocol):
    """Work to be done in ``stream`` by each replay."""

    @property
    def stream(self) -> Stream: ...


class DeviceRuntime(Protocol):
    """Streams of one kind of device. Tensors are torch's; ``device`` is a tensor's. Only ``wait_on_host`` waits."""

    def enter(self, device: Any) -> None:
        """What this thread calls from here to ``leave()`` is mostly about this device, and costs less then."""

    def leave(self) -> None:
        """The end of the last ``enter()``."""

    def resolved(self, device: Any) -> Any:
        """``device`` with its number: without one it is the calling thread's current one. The process has met it by
        then. Raises what meeting it does."""

    def identity(self, device: Any) -> tuple[str, str]:
        """Which kind of device it is, and which piece of hardware: that text is another one for every other piece, on
        every machine, and the same for all processes that use this one or a part of it."""

    def current_stream(self, device: Any) -> Stream:
        """The one that the calling thread puts its work into."""

    def new_stream(self, device: Any) -> Stream:
        """One that waits for no other one by itself."""

    def pinned(self, nbytes: int) -> Any:
        """A one-dimensional uint8 tensor in host memory that the device reaches, at its ``data_ptr()``."""

    def copy_to_host(self, stream: Stream, address: int, x: Any, first: int, nbytes: int) -> None:
        """Copies bytes of a contiguous device tensor, from ``first`` on, to pinned memory at ``address``. Both are the
        caller's to keep until the stream has passed; of the tensor the stream itself does, if it was made on it."""

    def copy_to_device(self, stream: Stream, x: Any, first: int, address: int, nbytes: int) -> None:
        """The other way."""

    def copy(self, stream: Stream, target: Any, source: Any) -> None:
        """Copies between two contiguous tensors of one dtype and length, one of them in pinned memory, which stays what
        it is until the stream has passed, also where nobody keeps it."""

    def launch(self, stream: Stream, kernels: Callable[..., None], *tensors: Any) -> None:
        """Puts what ``kernels(*tensors)`` does into the stream; it waits for nothing. Tensors may be pinned ones."""

    def capture(self, stream: Stream, work: Callable[[], object], beside: Captured | None) -> Captured:
        """What ``work()`` has the device do in its current stream, which is not done now, to be done in ``stream`` by
        each ``replay``. Tensors that it uses stay where they are until then; those that it makes, which nobody holds
        once it is over, have memory of its own, or that of ``beside``, another one for the same stream. Raises
        ``RuntimeError`` for what cannot be captured, such as pinned memory that is allocated."""

    def replay(self, captured: Captured) -> None:
        """Puts it into its stream once more."""

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        """Writes 32 bits into pinned memory, after all that the stream has written before."""

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        """The stream goes on once the 32 bits there are at least ``value``; values may wrap round."""

    def record(self, stream: Stream) -> Event:
        """The point that the stream reaches once all that is in it by now is over."""

    def record_timed(self, stream: Stream) -> Event:
        """As ``record()``, and the device notes when that is."""

    def seconds_between(self, before: Event, after: Event) -> float:
        """By the device's clock. Both are of ``record_timed()``, on one device, in this order, and have passed."""

    def wait_event(self, stream: Stream, event: Event) -> None:
        """The stream goes on once the event has passed."""

    def passed(self, event: Event) -> bool:
        """Whether the event has."""

    def wait_on_host(self, event: Event) -> None:
        """Returns once the event has passed."""

    def fast_path(self, device: Any) -> _core.DeviceFastPath | None:
        """By which the core puts the plainest operations on tensors of ``device`` into their streams itself; ``None``:
        it cannot."""

    def lend(self, way: _core.DeviceFastPath, lease: Lease, event: Event) -> int | None:
        """Lends it the memory of ``lease``, two buffers of one length, with ``event``, which it records after each use;
        returns the number that it has there. ``None``: the device does not reach that as it needs."""

    def lend_streams(self, way: _core.DeviceFastPath, inputs: Stream, results: Stream) -> None:
        """Lends it streams for operations that wait for nothing else."""

    def keep(self, tensor: Any, stream: Stream) -> None:
        """The tensor's memory is not used for another tensor before ``stream`` has come to here."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """What this thread has the device compute inside goes into that stream."""

    def future(self, device: Any) -> Any:
        """A ``torch.futures.Future`` of a tensor of the device, or of a list of them. Whoever waits for it has the
        current stream wait for what ``complete`` says, and waits itself only for the call of that."""

    def complete(self, future: Any, stream: Stream, value: Any) -> None:
        """The future has ``value``, once the stream has come to here."""


_makers: dict[str, Callable[[], DeviceRuntime]] = {}
_runtimes: dict[str, DeviceRuntime] = {}


def register_runtime(device_type: str, make: Callable[[], DeviceRuntime]) -> None:
    """Operations take tensors whose ``device.type`` this is; ``make`` is called for the first one."""
    _makers[device_type] = make
    _runtimes.pop(device_type, None)


def has_runtime(device_type: str) -> bool:
    """Whether tensors of such a device are taken."""
    return device_type in _makers


def runtime_of(device_type: str) -> DeviceRuntime:
    """The process's runtime of a device that has one. Raises what making it does: ``ImportError``, ``TypeError``."""
    if device_type not in _runtimes:
        _runtimes[device_type] = _makers[device_type]()
    return _runtimes[device_type]


def resolved_device(device: Any) -> Any:
    """The ``torch.device``, as a tensor there says it, that ``device`` names: one, or a text such as ``"cuda"``. Raises
    ``TypeError`` for what is neither, and ``ValueError`` where there is none, or tensors there are not taken."""
    import torch

    try:
        chosen = torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"device={device!r} must be a torch.device, or the name of one, as 'cuda'") from error
    if not has_runtime(chosen.type):
        raise ValueError(f"device={device!r} has no streams that communicate: give a CUDA device")
    try:
        return runtime_of(chosen.type).resolved(chosen)
    except (AssertionError, RuntimeError) as error:  # torch's
        raise ValueError(
            f"device={device!r} cannot be used here: torch says '{first_line(error)}'; see torch.cuda.is_available()"
        ) from error


def _make_cuda() -> DeviceRuntime:
    from telegrad.communicator.cuda.cuda import CudaRuntime

    return CudaRuntime()


register_runtime("cuda", _make_cuda)


# A pool of streams: communicators take streams and give them back.


class StreamPool:
    """The streams of one runtime. Any thread may call."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._idle: dict[Any, list[tuple[Event, Stream]]] = {}  # by device, with what is still in them

    def take(self, device: Any) -> Stream:
        """One that has nothing to do: an idle one, or a new one."""
        with self._lock:
            idle = self._idle.setdefault(device, [])
            for at, (event, stream) in enumerate(idle):
                if self._runtime.passed(event):
                    del idle[at]
                    return stream
        return self._runtime.new_stream(device)

    def give_back(self, device: Any, stream: Stream) -> None:
        """It is taken again once all that is in it by now is over."""
        try:
            event = self._runtime.record(stream)
        except Exception:  # of a device that does nothing any more nobody takes a stream
            return
        with self._lock:
            self._idle.setdefault(device, []).append((event, stream))


_lock = threading.Lock()
_pools: dict[DeviceRuntime, StreamPool] = {}


def pool_of(runtime: DeviceRuntime) -> StreamPool:
    """The one that all communicators of this process share."""
    with _lock:
        pool = _pools.get(runtime)
        if pool is None:
            pool = _pools[runtime] = StreamPool(runtime)
        return pool


# Reads from a device that the host asks for now and takes later.


class LateRead:
    """The contents that a small contiguous device tensor has when the current stream comes to here."""

    def __init__(self, x: Any) -> None:
        self._runtime = runtime_of(x.device.type)
        stream = self._runtime.current_stream(x.device)
        flat = x.detach().view(-1)
        self._host = self._runtime.pinned(flat.nbytes).view(flat.dtype)
        self._runtime.copy(stream, self._host, flat)
        self._event = self._runtime.record(stream)

    @property
    def is_known(self) -> bool:
        """Whether ``values()`` would not wait."""
        return self._runtime.passed(self._event)

    def values(self) -> Any:
        """A host tensor of one dimension; the host waits for the stream to have come there."""
        self._runtime.wait_on_host(self._event)
        return self._host
