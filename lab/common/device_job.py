"""Jobs that measure tensors of a device: each row comes as a line of rank 0, as soon as it is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lab.common.device_profile import ProfiledCuda, ProfiledDevice
from telegrad import Communicator
from telegrad.launch import join
from telegrad.tools.bench.plan import JobPlan, run_job

Tell = Callable[[Mapping[str, Any]], None]

_TIMEOUT_S, _JOIN_TIMEOUT_S = 60.0, 120.0


def run_for_rows(target: str, plan: JobPlan, *, timeout_s: float, on_row: Callable[[dict[str, Any]], None]) -> None:
    """Everything that ``plan`` asks for; ``on_row`` gets each row as it comes. Raises ``RankFailed``,
    ``RanksTimedOut``."""

    def take(rank: int, line: str) -> None:
        if rank == 0 and line.startswith("{"):
            on_row(json.loads(line))

    run_job(target, plan, take, timeout_s=timeout_s)


def tell_rows(measure: Callable[[Communicator, ProfiledDevice, Tell], None]) -> None:
    """What a rank of such a job runs: ``measure`` on the GPU, which tells rank 0's rows."""
    device = ProfiledCuda()
    torch.set_num_threads(1)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator:
        measure(communicator, device, lambda row: print(json.dumps(row), flush=True))
