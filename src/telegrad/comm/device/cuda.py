"""CUDA's streams: copies, events and pinned memory by torch, flags by the driver's stream memory operations.

Not yet run on a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ: by the sign of the difference
_DEFAULT = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: a memory barrier before the write


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
        self._addresses: dict[int, int] = {}  # of words, by their addresses here

    def current_stream(self, device: Any) -> Any:
        return self._torch.cuda.current_stream(device)

    def new_stream(self, device: Any) -> Any:
        return self._torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def copy(self, stream: Any, target: Any, source: Any) -> None:
        with self._torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def write_value(self, stream: Any, address: int, value: int) -> None:
        place = self._on_device(address)
        self._checked("cuStreamWriteValue32", stream.cuda_stream, place, value, _DEFAULT)

    def wait_value(self, stream: Any, address: int, value: int) -> None:
        place = self._on_device(address)
        self._checked("cuStreamWaitValue32", stream.cuda_stream, place, value, _GREATER_OR_EQUAL)

    def record(self, stream: Any) -> Any:
        return stream.record_event()

    def wait_event(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def passed(self, event: Any) -> bool:
        return bool(event.query())

    def keep(self, tensor: Any, stream: Any) -> None:
        tensor.record_stream(stream)

    def _on_device(self, address: int) -> int:
        found = self._addresses.get(address)
        if found is None:
            found = self._addresses[address] = int(self._checked("cuMemHostGetDevicePointer", address, 0))
        return found

    def _checked(self, function: str, *arguments: Any) -> Any:
        error, *values = getattr(self._driver, function)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"{function} failed with {error!r}: if this device has no stream memory operations, use host tensors "
                "(.cpu())"
            )
        return values[0] if values else None
