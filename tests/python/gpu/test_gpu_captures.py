"""Work that is captured on a GPU, and what comes of a capture that CUDA finds fault with."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from gpu_jobs import skip_without

from telegrad.ddp.cuda.captured_work import CapturedWork

pytestmark = skip_without("cuda.bindings")

_BYTES = 64 << 20


def captured_sums(times: int, spoil: Callable[[], object] = lambda: None) -> list[float]:
    """Of a tensor that grows, by work that is the same each time; ``spoil`` is called in the second."""
    captured: CapturedWork[torch.Tensor] = CapturedWork()
    total = torch.zeros(1000, device="cuda")
    found: list[float] = []

    def work(made: torch.Tensor) -> None:
        if len(found) == 1:
            spoil()
        total.add_(1.0)
        torch.sum(total.clone() * 2.0, 0, keepdim=True, out=made)

    for _ in range(times):
        made = captured.run("x", captured, 0, total, lambda: total.new_empty(1), work)
        found.append(float(made))
    return found


def test_gpu_work_is_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    plain = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: [replays.append(1), plain(graph)][1])
    assert captured_sums(5) == [2000.0 * number for number in range(1, 6)]
    assert len(replays) == 4


def test_gpu_a_capture_with_a_fault_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """torch's allocator, too, which puts off what streams give back while it knows of a capture."""
    with caplog.at_level(logging.WARNING, "telegrad"):
        assert captured_sums(4, torch.cuda.synchronize) == [2000.0 * number for number in range(1, 5)]
    assert "cannot be captured in a CUDA graph" in caplog.text
    other = torch.cuda.Stream()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(16):
        given = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
        given.record_stream(other)
        del given
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before <= 2 * _BYTES
    assert captured_sums(4) == [2000.0 * number for number in range(1, 5)]


def test_gpu_other_threads_launch_and_allocate_meanwhile() -> None:
    failed: list[BaseException] = []

    def compute() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for size in (10, 1 << 20, 24 << 20):
                    (torch.ones(size, device="cuda") * 2.0).record_stream(torch.cuda.default_stream())
        except BaseException as error:
            failed.append(error)

    def beside() -> None:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()

    assert captured_sums(4, beside) == [2000.0 * number for number in range(1, 5)]
    assert failed == []
