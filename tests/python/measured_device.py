"""The fake device as benchmarks see one (telegrad.tools.bench.device.BenchmarkDevice)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from computing_device import ComputingRuntime, StreamTensor
from fake_device import DEVICE_TYPE, FakeStream

from lab.common.device_profile import KERNELS, Interval


class Mark:
    """``at_s``: when the stream came to it."""

    def __init__(self) -> None:
        self.at_s = float("nan")
        self.passed = threading.Event()

    def pass_by(self) -> None:
        self.at_s = time.perf_counter()
        self.passed.set()


class MeasuredDevice:
    """Of one thread, whose current stream must be set. Streams that it makes are the runtime's to stop."""

    def __init__(self, runtime: ComputingRuntime) -> None:
        self.runtime = runtime

    def empty(self, elements: int) -> torch.Tensor:
        return StreamTensor.of(torch.full((elements,), float("nan")), self.runtime)

    def pinned(self, elements: int) -> torch.Tensor:
        return torch.full((elements,), float("nan"))

    def mark(self) -> Mark:
        made = Mark()
        self._current().put(made.pass_by)
        return made

    def seconds(self, begin: Mark, end: Mark) -> float:
        assert begin.passed.is_set(), "it must not be asked before the stream has come there"
        assert end.passed.is_set(), "it must not be asked before the stream has come there"
        return end.at_s - begin.at_s

    def synchronize(self) -> None:
        self._current().synchronize()

    def new_stream(self) -> FakeStream:
        return self.runtime.new_stream()

    def on(self, stream: FakeStream) -> AbstractContextManager[Any]:
        return self.runtime.on(stream)

    def profiled(self, work: Callable[[], object]) -> list[Interval]:
        begin_s = time.perf_counter()
        work()
        return [Interval(KERNELS, 0.0, time.perf_counter() - begin_s)]

    def _current(self) -> FakeStream:
        return self.runtime.current_stream(torch.device(DEVICE_TYPE, 0))
