"""CUDA's runtime as far as it goes without a GPU: what it refuses, and what it calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from telegrad.comm.device.cuda import CudaRuntime


class FakeDriver(SimpleNamespace):
    """Stands for cuda.bindings.driver: every function returns a tuple that begins with the result code."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NOT_SUPPORTED=801)

    def __init__(self, error: int = 0) -> None:
        super().__init__(calls=[], current=[], retained=[])
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
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, str]:  # noqa: N802
        return 0, self.current.pop()

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:  # noqa: N802
        self.calls.append((self.current[-1], "pointer", address, flags))
        return 0, address + 0x1000

    def cuStreamWriteValue32(self, *arguments: int) -> tuple[int]:  # noqa: N802
        return self._call("write", *arguments)

    def cuStreamWaitValue32(self, *arguments: int) -> tuple[int]:  # noqa: N802
        return self._call("wait", *arguments)


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> CudaRuntime:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)  # type: ignore[arg-type]
    return CudaRuntime()


def test_cuda_bindings_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"pip install cuda-bindings, or move tensors with \.cpu\(\)"):
        CudaRuntime()


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(TypeError, match=r"ROCm device, whose streams are not supported: move it with \.cpu\(\)"):
        CudaRuntime()


def test_flags_are_stream_memory_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    stream = SimpleNamespace(cuda_stream=77, device_index=0)
    runtime.write_value(stream, 0x100, 5)
    runtime.wait_value(stream, 0x100, 6)
    context = "context of device 0"
    assert driver.calls == [
        (context, "pointer", 0x100, 0),
        (context, "write", 77, 0x1100, 5, 0),
        (context, "wait", 77, 0x1100, 6, 0),
    ]


def test_kernels_are_launched_into_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeDriver())
    current: list[Any] = []

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    launched: list[Any] = []
    runtime.launch("a stream", lambda *tensors: launched.append((tensors, list(current))), 1, 2)
    assert launched == [((1, 2), ["a stream"])]
    assert current == []


def test_every_device_is_met_in_its_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    runtime = use(monkeypatch, driver)
    for device in (1, 0, 1):  # the default stream has the same number on each
        runtime.write_value(SimpleNamespace(cuda_stream=0, device_index=device), 0x100, 5)
    assert [call[0] for call in driver.calls if call[1] == "write"] == [
        f"context of device {device}" for device in (1, 0, 1)
    ]
    assert driver.retained == ["device 1", "device 0"]
    assert driver.current == []


def test_a_device_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(error=801)
    runtime = use(monkeypatch, driver)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 failed with 801: .*use host tensors"):
        runtime.wait_value(SimpleNamespace(cuda_stream=0, device_index=0), 0x100, 6)
    assert driver.current == []  # also after an error


def test_other_errors_are_told_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = use(monkeypatch, FakeDriver(error=700))
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed with 700$"):
        runtime.write_value(SimpleNamespace(cuda_stream=0, device_index=0), 0x100, 6)


def test_a_future_is_completed_in_the_operations_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch records the event that streams wait for."""
    runtime = use(monkeypatch, FakeDriver())
    said: list[Any] = []

    @contextmanager
    def stream(chosen: str) -> Iterator[None]:
        said.append(f"into {chosen}")
        yield
        said.append(f"out of {chosen}")

    class Future:
        def __init__(self, *, devices: list[Any]) -> None:
            said.append(devices)

        def set_result(self, value: str) -> None:
            said.append(value)

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.futures, "Future", Future)
    with runtime.on("one"):
        said.append("a kernel")
    device = torch.device("cuda", 1)
    runtime.complete(runtime.future(device), "another", "the tensor")
    runtime.wait_on_host(SimpleNamespace(synchronize=lambda: said.append("waited")))
    one, another = ["into one", "a kernel", "out of one"], ["into another", "the tensor", "out of another"]
    assert said == [*one, [device], *another, "waited"]
