"""What ranks of benchmarks on a GPU run in tests: on a fake device of their own."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from computing_device import ComputingRuntime
from fake_device import DEVICE_TYPE
from measured_device import MeasuredDevice

from lab import overlap, transfers
from lab.overlap import OverlapPlan
from lab.transfers import TransfersPlan
from telegrad.communicator.cuda import runtime as runtimes
from telegrad.launch import join


def transfers_main(plan_json: str) -> None:
    """Instead of ``lab.transfers:rank_main``, in a process of its own."""
    _on_the_device(lambda comm, device, tell: transfers.measure(TransfersPlan.from_json(plan_json), comm, device, tell))


def overlap_main(plan_json: str) -> None:
    """Instead of ``lab.overlap:rank_main``."""
    _on_the_device(lambda comm, device, tell: overlap.measure(OverlapPlan.from_json(plan_json), comm, device, tell))


def _on_the_device(measure: Callable[..., None]) -> None:
    runtime = ComputingRuntime()
    runtimes.register_runtime(DEVICE_TYPE, lambda: runtime)
    torch.set_num_threads(1)
    with join(timeout_s=60.0, join_timeout_s=60.0) as communicator, runtime.on(runtime.new_stream()):
        measure(communicator, MeasuredDevice(runtime), lambda row: print(json.dumps(row), flush=True))
    runtime.stop()
