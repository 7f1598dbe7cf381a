"""The ranks' side of ``telegrad calibrate``."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from telegrad.communicator import Communicator
from telegrad.launch import join, rank_and_size
from telegrad.tuning.calibration import measure, store_unless_noisy, to_data

_TIMEOUT_S = 120.0


def main(seconds: str) -> None:
    """One rank, which measures for about so long.

    Rank 0 prints ``{"part", "what"}`` as it goes on, at last ``{"found"}`` (``to_data()``) and either ``{"kept"}``, the
    file in which later jobs find it, or ``{"not_kept"}``, why they will not.
    """
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S) as communicator:
        tell(communicator, float(seconds))


def main_on_cuda(seconds: str, store: str) -> None:
    """The same, with the GPU whose number is the rank's, as far as there are so many. ``store``: a file that does not
    exist yet, by which ranks with a GPU each come to have NCCL."""
    import torch

    rank, size = rank_and_size()
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    like = torch.empty(0, dtype=torch.float32, device="cuda")
    if gpus < size:
        with join(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S) as communicator:
            tell(communicator, float(seconds), like)
        return
    import torch.distributed as dist

    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout, device_id=like.device
    )
    with Communicator.from_torch(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S) as communicator:
        tell(communicator, float(seconds), like)
    dist.destroy_process_group()


def tell(communicator: Communicator, seconds: float, like: Any = None) -> None:
    """What rank 0 prints. ``like``: a tensor on this rank's device, if devices are to be measured."""
    first = communicator.rank == 0

    def say(**what: object) -> None:
        if first:
            print(json.dumps(what), flush=True)

    found = measure(communicator, seconds=seconds, on_progress=lambda part, what: say(part=part, what=what), like=like)
    say(found=to_data(found))
    if first:
        try:
            say(kept=str(store_unless_noisy(found.tuning, found.doubts)))
        except (OSError, RuntimeError) as error:
            say(not_kept=str(error))
