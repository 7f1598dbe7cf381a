"""What the ranks of test_real_job.py do: the study's runs as a user would write them, with DistributedDataParallel."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telegrad
from lab.accuracy.one_process import checksum
from lab.accuracy.problems import Problem, open_problem
from lab.accuracy.runs import METHODS, Run


def train_all(init_method: str, runs: str, data: str, texts: str) -> None:
    """Each rank prints, for each run, the checksum of its weights and the bytes that it has sent."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=init_method, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    for fields in json.loads(runs):
        run = Run.from_dict(fields)
        print(json.dumps({"run": run.name, **train(run, open_problem(run.task, Path(data), Path(texts)))}), flush=True)
    dist.destroy_process_group()


def train(run: Run, problem: Problem) -> dict[str, int]:
    method = METHODS[run.method]
    torch.manual_seed(run.seed)
    ddp = DistributedDataParallel(problem.model("small", "cpu"), bucket_cap_mb=100)
    optimizer = problem.optimizer(ddp, momentum=not method.takes_momentum)
    options = method.arguments(problem.task, density=run.density, steps=run.steps, optimizer=optimizer)
    with telegrad.Communicator.from_torch() as comm:
        # Not ddp: random-k draws by name, and those of its parameters begin with "module."
        state = telegrad.DDPState(comm, ddp.module, **options)
        ddp.register_comm_hook(state, telegrad.ddp_hook)
        before = int(comm.stats()["bytes_sent"])  # by comparing options
        for step in range(run.steps):
            optimizer.param_groups[0]["lr"] = run.learning_rate_at(step)
            optimizer.zero_grad()
            inputs, targets = problem.batch(run, step, comm.rank)
            problem.loss(ddp, inputs, targets).backward()
            if problem.task.clip is not None and not method.clips_locally(problem.task):
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), problem.task.clip)
            optimizer.step()
        return {
            "weights_crc32": checksum(ddp.module.parameters()),
            "buffers_crc32": checksum(ddp.module.buffers()),
            "sent_bytes": int(comm.stats()["bytes_sent"]) - before,
        }
