"""CUDA's streams, by the driver's calls: copies, events, and flags by its stream memory operations. Pinned memory is
torch's.

Streams are looked up and contexts pushed once for an operation: each of torch's own ways there
costs as much as a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from telegrad import _core
from telegrad.communicator.nodes import machine_id

if TYPE_CHECKING:
    from telegrad.communicator.cuda.staging import Lease

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: by the sign of the difference
_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: a memory barrier before the write
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the default stream does not wait for it, nor it for that one
_NO_TIMES = 2  # CU_EVENT_DISABLE_TIMING
_NOT_CAPTURING = 0  # CU_STREAM_CAPTURE_STATUS_NONE
_PLAIN_WAIT = 0  # CU_EVENT_WAIT_DEFAULT
_LEGACY = 1  # CU_STREAM_LEGACY
_STREAMS_AHEAD = 8
_LIBRARY = "libcuda.so.1"


class CudaStream:
    """One of the driver's. ``of_torch``: the same as torch has it."""

    __slots__ = ("device", "driven", "handle", "of_torch")

    def __init__(self, device: int, handle: int, driven: Any, of_torch: Any) -> None:
        self.device, self.handle, self.driven, self.of_torch = device, handle, driven, of_torch


class CudaEvent:
    """One of the driver's, which is used again once nobody refers to this."""

    __slots__ = ("_idle", "device", "driven")

    def __init__(self, device: int, driven: Any, idle: list[Any]) -> None:
        self.device, self.driven, self._idle = device, driven, idle

    def __del__(self) -> None:
        self._idle.append(self.driven)


class TimedEvent(CudaEvent):
    """One of torch's, which has times."""

    __slots__ = ("of_torch",)

    def __init__(self, device: int, driven: Any, of_torch: Any, idle: list[Any]) -> None:
        super().__init__(device, driven, idle)
        self.of_torch = of_torch

    def __del__(self) -> None:
        self._idle.append(self.of_torch)


class CudaGraph:
    """One of torch's, the stream that it is for, and the pool that it has its memory from."""

    __slots__ = ("of_torch", "pool", "stream")

    def __init__(self, stream: CudaStream, of_torch: Any, pool: Any) -> None:
        self.stream, self.of_torch, self.pool = stream, of_torch, pool


class _OnStream:
    """As ``torch.cuda.stream``, which costs as much as a launch, mostly to find out the device: the current one."""

    __slots__ = ("_before", "_core", "_stream")

    def __init__(self, core: Any, stream: CudaStream) -> None:
        self._core, self._stream = core, stream

    def __enter__(self) -> None:
        of_torch = self._stream.of_torch
        self._before = self._core._cuda_getCurrentStream(self._stream.device)
        self._set(of_torch.stream_id, of_torch.device_index, of_torch.device_type)

    def __exit__(self, *_: object) -> None:
        self._set(*self._before)

    def _set(self, stream: int, device: int, kind: int) -> None:
        self._core._cuda_setStream(stream_id=stream, device_index=device, device_type=kind)


class _Entered(threading.local):
    """The devices whose contexts this thread has pushed, and whether it captures."""

    def __init__(self) -> None:
        self.devices: list[int] = []
        self.captures = False


class CudaRuntime:
    """See DeviceRuntime. Raises ``ImportError`` without cuda-bindings, ``TypeError`` for torch's ROCm builds."""

    def __init__(self) -> None:
        import torch

        if torch.version.hip is not None:
            raise TypeError("x is on a ROCm device, whose streams are not supported: move it with .cpu()")
        try:
            driver = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ImportError(
                "operations on CUDA tensors need CUDA's driver interface: pip install 'cuda-bindings>=12.9.1', or move "
                "tensors with .cpu()"
            ) from error
        self._torch: Any = torch
        self._driver: Any = driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self._entered = _Entered()
        self._streams: dict[tuple[int, int], CudaStream] = {}  # the callers', by device and handle
        self._idle_events: dict[int, list[Any]] = {}  # by device
        self._idle_timed_events: dict[int, list[Any]] = {}  # torch's, by device
        self._addresses: dict[tuple[int, int], int] = {}  # of words: by device, and by their addresses here
        self._contexts: dict[int, Any] = {}  # the primary ones, by device
        self._streams_ahead: dict[int, list[Any]] = {}  # by device: the driver's, that nobody has yet
        self._capturing: dict[int, Any] = {}  # by device: streams that nothing is launched into
        self._one_capture = threading.Lock()
        self._meeting = threading.Lock()

    def enter(self, device: Any) -> None:
        index = device.index
        self._push(index)
        self._entered.devices.append(index)
        if index not in self._streams_ahead:
            try:
                self._meet(index)
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        self._entered.devices.pop()
        self._pop()

    # The driver knows nothing before torch has initialised it, and has no current device.
    def resolved(self, device: Any) -> Any:
        cuda = self._torch.cuda
        cuda.init()
        found = device if device.index is not None else self._torch.device(device.type, cuda.current_device())
        cuda.get_device_name(found)  # raises if there is no such device
        return found

    # By the bus, as NCCL tells devices apart: parts of one (MIG) are at one address. Containers share the boot's id.
    def identity(self, device: Any) -> tuple[str, str]:
        error, handle = self._driver.cuDeviceGet(device.index)
        self._check("cuDeviceGet", error)
        numbers = []
        for part in ("DOMAIN", "BUS", "DEVICE"):
            attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_PCI_{part}_ID")
            numbers.append(int(self._called(device.index, "cuDeviceGetAttribute", attribute, handle)))
        domain, bus, slot = numbers
        return self._torch.cuda.get_device_name(device), f"{domain:04x}:{bus:02x}:{slot:02x} of machine {machine_id()}"

    def current_stream(self, device: Any) -> CudaStream:
        index = device.index
        handle = self._torch._C._cuda_getCurrentRawStream(index)
        stream = self._streams.get((index, handle))
        if stream is None:
            of_torch = self._torch.cuda.current_stream(device)
            # With CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM set the driver has another 0 than torch.
            stream = CudaStream(index, handle, self._driver.CUstream(handle or _LEGACY), of_torch)
            self._streams[index, handle] = stream
        # The default stream, 0, cannot be captured, and must not be asked while another one is.
        if (
            handle
            and not self._entered.captures
            and int(self._called(index, "cuStreamIsCapturing", stream.driven)) != _NOT_CAPTURING
        ):
            raise RuntimeError(
                "an operation of a communicator cannot be captured in a CUDA graph, as every replay would need an "
                "operation of its own: call it outside of the graph"
            )
        return stream

    # torch's own Stream() is one of a few that all of a program shares: what waits in it would hold up others.
    def new_stream(self, device: Any) -> CudaStream:
        try:
            made = self._streams_ahead.get(device.index, []).pop()
        except IndexError:
            made = self._called(device.index, "cuStreamCreate", _NON_BLOCKING)
        of_torch = self._torch.cuda.ExternalStream(int(made), device=device)
        return CudaStream(device.index, int(made), made, of_torch)

    def pinned(self, nbytes: int) -> Any:
        if self._entered.captures:
            raise RuntimeError("pinned memory is another one each time, which no graph knows")
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)

    def copy_to_host(self, stream: Any, address: int, x: Any, first: int, nbytes: int) -> None:
        self._called(stream.device, "cuMemcpyDtoHAsync", address, x.data_ptr() + first, nbytes, stream.driven)

    def copy_to_device(self, stream: Any, x: Any, first: int, address: int, nbytes: int) -> None:
        self._called(stream.device, "cuMemcpyHtoDAsync", x.data_ptr() + first, address, nbytes, stream.driven)

    # By torch, whose allocator of pinned memory then knows of it.
    def copy(self, stream: Any, target: Any, source: Any) -> None:
        with self.on(stream):
            target.copy_(source, non_blocking=True)

    def launch(self, stream: Any, kernels: Callable[..., None], *tensors: Any) -> None:
        with self.on(stream):
            kernels(*tensors)

    # In a stream of its own, as torch captures no default stream. Other threads may launch and allocate meanwhile.
    def capture(self, stream: Any, work: Callable[[], object], beside: Any) -> CudaGraph:
        cuda, device = self._torch.cuda, stream.device
        graph = cuda.CUDAGraph()
        pool = cuda.graph_pool_handle() if beside is None else beside.pool
        with self._one_capture:
            side = self._capturing.get(device)
            if side is None:
                side = self._capturing[device] = self.new_stream(self._torch.device("cuda", device))
            with self.on(side):
                try:
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    self._entered.captures = True
                    try:
                        work()
                    except BaseException:
                        with suppress(RuntimeError):
                            graph.capture_end()
                        raise
                    finally:
                        self._entered.captures = False
                    graph.capture_end()
                except BaseException:
                    self._end_pool(device, pool)
                    raise
        return CudaGraph(stream, graph, pool)

    # torch before 2.13 leaves its allocator in the pool where CUDA has found fault with a capture: it would then
    # put off for ever what other streams give back.
    def _end_pool(self, device: int, pool: Any) -> None:
        core = self._torch._C
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # of torch 2.8, and before
        end = next((getattr(core, name) for name in names if hasattr(core, name)), None)
        if end is not None:
            with suppress(RuntimeError):  # mostly it is over
                end(device, pool)

    def replay(self, captured: Any) -> None:
        with self.on(captured.stream):
            captured.of_torch.replay()

    def write_value(self, stream: Any, address: int, value: int) -> None:
        device = stream.device
        place = self._on_device(device, address)
        self._called(device, "cuStreamWriteValue32", stream.driven, place, value, _DEFAULT)

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        device = stream.device
        place = self._on_device(device, address)
        self._called(device, "cuStreamWaitValue32", stream.driven, place, value, _GREATER_OR_EQUAL)

    def record(self, stream: Any) -> CudaEvent:
        idle = self._idle_events.setdefault(stream.device, [])
        try:
            driven = idle.pop()  # asking first whether there is one would let another thread take it in between
        except IndexError:
            driven = self._called(stream.device, "cuEventCreate", _NO_TIMES)
        event = CudaEvent(stream.device, driven, idle)
        self._called(stream.device, "cuEventRecord", driven, stream.driven)
        return event

    # By torch, which asks whatever driver there is: the bindings of CUDA 13 ask for cuEventElapsedTime_v2, which
    # drivers before CUDA 12.8 do not have.
    def record_timed(self, stream: Any) -> CudaEvent:
        idle = self._idle_timed_events.setdefault(stream.device, [])
        try:
            of_torch = idle.pop()
        except IndexError:
            of_torch = self._torch.cuda.Event(enable_timing=True)
        of_torch.record(stream.of_torch)
        return TimedEvent(stream.device, self._driver.CUevent(of_torch.cuda_event), of_torch, idle)

    def seconds_between(self, before: Any, after: Any) -> float:
        return float(before.of_torch.elapsed_time(after.of_torch)) * 1e-3

    def wait_event(self, stream: Any, event: Any) -> None:
        self._called(stream.device, "cuStreamWaitEvent", stream.driven, event.driven, _PLAIN_WAIT)

    def passed(self, event: Any) -> bool:
        (error,) = self._answer(event.device, "cuEventQuery", event.driven)
        if error == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check("cuEventQuery", error)
        return True

    def wait_on_host(self, event: Any) -> None:
        self._called(event.device, "cuEventSynchronize", event.driven)

    def fast_path(self, device: Any) -> _core.DeviceFastPath | None:
        index = device.index
        try:
            driver = _core.StreamDriver(_LIBRARY, int(self._context(index)))
        except RuntimeError:  # an older driver, without what it needs
            return None
        return _core.DeviceFastPath(driver, device, index, self._torch._C._cuda_getCurrentRawStream)

    def lend(self, way: _core.DeviceFastPath, lease: Lease, event: Any) -> int | None:
        words, device = lease.words, event.device
        given, taken = self._on_device(device, words.ready), self._on_device(device, words.done)
        if (given, taken) != (words.ready, words.done):
            return None
        buffers = (lease.key[0], lease.input_address, lease.output_address)
        return way.lend(*buffers, words.ready, words.done, words.value, int(event.driven))

    def lend_streams(self, way: _core.DeviceFastPath, inputs: Any, results: Any) -> None:
        way.use(inputs.handle, results.handle)

    def keep(self, tensor: Any, stream: Any) -> None:
        tensor.record_stream(stream.of_torch)

    def on(self, stream: Any) -> Any:
        index, core = stream.device, self._torch._C
        if core._cuda_getDevice() != index:
            return self._torch.cuda.stream(stream.of_torch)
        if core._cuda_getCurrentRawStream(index) == stream.handle:
            return nullcontext()
        return _OnStream(core, stream)

    def future(self, device: Any) -> Any:
        return self._torch.futures.Future(devices=[device])

    # torch records an event in the current stream, for which the stream of whoever waits then waits.
    def complete(self, future: Any, stream: Any, value: Any) -> None:
        with self.on(stream):
            future.set_result(value)

    # While a stream waits, the driver may not return from making another one before it goes on:
    # so there are some before the first does.
    def _meet(self, index: int) -> None:
        with self._meeting:
            if index not in self._streams_ahead:
                made = [self._called(index, "cuStreamCreate", _NON_BLOCKING) for _ in range(_STREAMS_AHEAD)]
                self._streams_ahead[index] = made

    def _on_device(self, device: int, address: int) -> int:
        found = self._addresses.get((device, address))
        if found is None:
            error, told = self._answer(device, "cuMemHostGetDevicePointer", address, 0)
            # The driver promises that only where memory begins. Elsewhere, with unified addressing, it is the same.
            found = self._addresses[device, address] = int(told) if error == self._success else address
        return found

    def _called(self, device: int, function: str, *arguments: Any) -> Any:
        answer = self._answer(device, function, *arguments)
        if answer[0] != self._success:
            self._check(function, answer[0])
        return answer[1] if len(answer) > 1 else None

    # The default stream is the same number on every device: the driver takes it for that of the thread's current
    # context, which may be of another device, or none in a thread that has not met CUDA yet.
    def _answer(self, device: int, function: str, *arguments: Any) -> Any:
        entered = self._entered.devices
        if entered and entered[-1] == device:
            return getattr(self._driver, function)(*arguments)
        self._push(device)
        try:
            return getattr(self._driver, function)(*arguments)
        finally:
            self._pop()

    def _push(self, device: int) -> None:
        self._check("cuCtxPushCurrent", self._driver.cuCtxPushCurrent(self._context(device))[0])

    def _context(self, device: int) -> Any:
        context = self._contexts.get(device)
        if context is None:
            error, handle = self._driver.cuDeviceGet(device)
            self._check("cuDeviceGet", error)
            error, context = self._driver.cuDevicePrimaryCtxRetain(handle)
            self._check("cuDevicePrimaryCtxRetain", error)
            self._contexts[device] = context
        return context

    def _pop(self) -> None:
        self._check("cuCtxPopCurrent", self._driver.cuCtxPopCurrent()[0])

    def _check(self, function: str, error: Any) -> None:
        if error == self._success:
            return
        remedy = ""
        if error == self._driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
            remedy = ": this device has no stream memory operations; use host tensors (.cpu())"
        raise RuntimeError(f"{function} failed with {error!r}{remedy}")
