"""CUDA's streams: copies, events and pinned memory by torch, flags by the driver's stream memory operations.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: by the sign of the difference
_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: a memory barrier before the write
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the default stream does not wait for it, nor it for that one


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
                "operations on CUDA tensors need CUDA's driver interface: pip install cuda-bindings, or move tensors "
                "with .cpu()"
            ) from error
        self._torch: Any = torch
        self._driver: Any = driver
        self._addresses: dict[tuple[int, int], int] = {}  # of words: by device, and by their addresses here
        self._contexts: dict[int, Any] = {}  # the primary ones, by device

    def current_stream(self, device: Any) -> Any:
        stream = self._torch.cuda.current_stream(device)
        with self.on(stream):
            if self._torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "an operation of a communicator cannot be captured in a CUDA graph, as every replay would need an "
                    "operation of its own: call it outside of the graph"
                )
        return stream

    # torch's own Stream() is one of a few that all of a program shares: what waits in it would hold up others.
    def new_stream(self, device: Any) -> Any:
        with self._torch.cuda.device(device):
            index = self._torch.cuda.current_device()
        made = self._called(index, "cuStreamCreate", _NON_BLOCKING)
        return self._torch.cuda.ExternalStream(int(made), device=device)

    def pinned(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cpu", pin_memory=True)

    def copy(self, stream: Any, target: Any, source: Any) -> None:
        with self.on(stream):
            target.copy_(source, non_blocking=True)

    def launch(self, stream: Any, kernels: Callable[..., None], *tensors: Any) -> None:
        with self.on(stream):
            kernels(*tensors)

    def write_value(self, stream: Any, address: int, value: int) -> None:
        device = stream.device_index
        place = self._on_device(device, address)
        self._called(device, "cuStreamWriteValue32", stream.cuda_stream, place, value, _DEFAULT)

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        device = stream.device_index
        place = self._on_device(device, address)
        self._called(device, "cuStreamWaitValue32", stream.cuda_stream, place, value, _GREATER_OR_EQUAL)

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def wait_event(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def wait_on_host(self, event: Any) -> None:
        event.synchronize()

    def keep(self, tensor: Any, stream: Any) -> None:
        tensor.record_stream(stream)

    def on(self, stream: Any) -> Any:
        return self._torch.cuda.stream(stream)

    def future(self, device: Any) -> Any:
        return self._torch.futures.Future(devices=[device])

    # torch records an event in the current stream, for which the stream of whoever waits then waits.
    def complete(self, future: Any, stream: Any, value: Any) -> None:
        with self.on(stream):
            future.set_result(value)

    def _on_device(self, device: int, address: int) -> int:
        found = self._addresses.get((device, address))
        if found is None:
            found = int(self._called(device, "cuMemHostGetDevicePointer", address, 0))
            self._addresses[device, address] = found
        return found

    # The default stream is 0 on every device: the driver takes it for that of the thread's current context, which may
    # be of another device, or none in a thread that has not met CUDA yet.
    def _called(self, device: int, function: str, *arguments: Any) -> Any:
        context = self._contexts.get(device)
        if context is None:
            handle = self._checked("cuDeviceGet", device)
            context = self._contexts[device] = self._checked("cuDevicePrimaryCtxRetain", handle)
        self._checked("cuCtxPushCurrent", context)
        try:
            return self._checked(function, *arguments)
        finally:
            self._checked("cuCtxPopCurrent")

    def _checked(self, function: str, *arguments: Any) -> Any:
        error, *values = getattr(self._driver, function)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            remedy = ""
            if error == self._driver.CUresult.CUDA_ERROR_NOT_SUPPORTED:
                remedy = ": this device has no stream memory operations; use host tensors (.cpu())"
            raise RuntimeError(f"{function} failed with {error!r}{remedy}")
        return values[0] if values else None
