"""What DDP's hook costs the host, on this GPU: two processes that share it, a GPT of 102 million parameters.

    python benchmarks/gpu/hook.py --json FILE

A row for each way, in the file as it comes: of passes (forward and backward, until the device is through) the
first one's time, in which Triton compiles, and the median of later ones; of these how long the host was in the hook
and in all of ``backward()``; and which of torch's calls of one pass the host was longest in.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import rows
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad.ddp.cuda.captured_work import SWITCH
from telegrad.launch import Ranks
from telegrad.tools.bench.device import ENVIRONMENT
from telegrad.tools.demo.job import ModelSize
from telegrad.tools.demo.training import ByteGPT, loss_of

_RANKS = 2
_SIZE = ModelSize(width=1024, heads=16, layers=8, context=256)
_BATCH = 4
_PASSES = 12
_WARM_UP = 3  # DDP plans its buckets after the first
_CALLS = 15
_LIMIT_S = 150.0


class Way(NamedTuple):
    """``options``: of DDPState; ``None``: a hook that hands gradients back. ``captures``: whether CUDA graphs hold what
    each pass repeats, as they do unless one says otherwise."""

    options: dict[str, Any] | None
    bucket_mb: int = 25  # DDP's own
    captures: bool = True


_TOPK, _REUSED = {"compress": telegrad.TopK(select="topk")}, {"compress": telegrad.TopK()}
WAYS: Mapping[str, Way] = {
    "bare": Way(None),
    "dense": Way({"compress": None}),
    "topk": Way(_TOPK),
    "topk, launched": Way(_TOPK, captures=False),
    "topk, 100 MiB": Way(_TOPK, bucket_mb=100),
    "reused": Way(_REUSED),
    "reused, launched": Way(_REUSED, captures=False),
}


class Timed:
    """``hook``, and how long the host has been in it since ``seconds`` was last made 0."""

    def __init__(self, hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]) -> None:
        self.seconds = 0.0
        self._hook = hook

    def call(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        begin = time.perf_counter()
        try:
            return self._hook(state, bucket)
        finally:
            self.seconds += time.perf_counter() - begin


def rank(meeting: str, device: str, size: str, passes: str) -> None:
    """One of them. ``meeting``: a file where torch's processes meet; ``size``: the model's, in JSON."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=int(os.environ["TELEGRAD_RANK"]),
        world_size=_RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    with telegrad.Communicator.from_torch(timeout_s=60.0) as comm:
        for name, way in WAYS.items():
            row = measured(comm, way, torch.device(device), ModelSize(**json.loads(size)), int(passes))
            if comm.rank == 0:
                print(json.dumps({"way": name, **row}), flush=True)
    dist.destroy_process_group()


def measured(
    comm: telegrad.Communicator, way: Way, device: torch.device, size: ModelSize, passes: int
) -> dict[str, Any]:
    torch.manual_seed(1)
    os.environ[SWITCH] = str(int(way.captures))
    ddp = DistributedDataParallel(ByteGPT(size).to(device), bucket_cap_mb=way.bucket_mb)
    state = None if way.options is None else telegrad.DDPState(comm, ddp, **way.options)
    hook = Timed(_handed_back if state is None else telegrad.ddp_hook)
    ddp.register_comm_hook(state, hook.call)
    tokens = torch.randint(256, (_BATCH, size.context + 1), generator=torch.Generator().manual_seed(comm.rank))
    found = [timed_pass(ddp, hook, tokens.to(device), comm) for _ in range(_WARM_UP + passes)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        timed_pass(ddp, hook, tokens.to(device), comm)
    if state is not None:
        state.synchronize()
    first, later = found[0], found[_WARM_UP:]
    calls = sorted(profile.key_averages(), key=lambda one: -one.self_cpu_time_total)[:_CALLS]
    return {
        "first_pass_s": first["pass_s"],
        "second_pass_s": found[1]["pass_s"],
        "parameters": sum(1 for one in ddp.parameters() if one.requires_grad),
        **{f"median_{name}": statistics.median(one[name] for one in later) for name in first},
        "calls": [{"name": one.key, "count": one.count, "self_s": one.self_cpu_time_total * 1e-6} for one in calls],
    }


def timed_pass(
    ddp: DistributedDataParallel, hook: Timed, tokens: torch.Tensor, comm: telegrad.Communicator
) -> dict[str, float]:
    """All ranks begin together, on a device that has nothing to do."""
    ddp.zero_grad()
    _wait_for(tokens.device)
    comm.barrier()
    hook.seconds, begin = 0.0, time.perf_counter()
    loss = loss_of(ddp(tokens[:, :-1]), tokens[:, 1:])
    forward = time.perf_counter()
    loss.backward()  # type: ignore[no-untyped-call]
    backward = time.perf_counter()
    _wait_for(tokens.device)
    return {
        "pass_s": time.perf_counter() - begin,
        "host_in_backward_s": backward - forward,
        "host_in_hook_s": hook.seconds,
    }


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _handed_back(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    made: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    made.set_result(bucket.buffer())
    return made


def measure(
    device: str, tell: Callable[[dict[str, Any]], None], *, size: ModelSize = _SIZE, passes: int = _PASSES
) -> None:
    """``tell`` gets a row for each way, as it comes."""

    def take(number: int, line: str) -> None:
        if number == 0 and line.startswith("{"):
            tell(json.loads(line))
        else:
            print(f"rank {number}: {line.rstrip()}", flush=True)

    folder = Path(__file__).resolve().parent
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="telegrad-hook-") as meeting:
        arguments = [str(Path(meeting, "store")), device, json.dumps(asdict(size)), str(passes)]
        with Ranks(
            "hook:rank", _RANKS, arguments=arguments, environment=environment, on_line=take, timeout_s=_LIMIT_S
        ) as ranks:
            ranks.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    return rows.run(__doc__, "hook", partial(measure, "cuda"), arguments, unsaid=("calls",))


if __name__ == "__main__":
    sys.exit(main())
