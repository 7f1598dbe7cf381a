"""Runs the Python blocks of pages, each page's on two ranks, which are forked from a process that has imported torch.

Reads a request a line: {"page", "blocks": [[line, code], …], "prelude", "folder", "port"}. Answers with the ranks' exit
statuses; null is a rank that was killed because time was up.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import telegrad

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RANKS = 2
PATIENCE_S = 60
WRAPS = re.compile(r"\b(?:DistributedDataParallel|Synchronizer)\(\s*model\b")


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


def training(folder: Path) -> dict[str, Any]:
    """What the script of docs/how-to/ddp.md has made before it wraps its model."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    inputs = torch.randn(8, 32, 64, generator=torch.Generator().manual_seed(rank))
    return {
        "comm": telegrad.Communicator.from_torch(),
        "batches": [(one, one[:, :10].argmax(dim=1)) for one in inputs],
        "criterion": torch.nn.functional.cross_entropy,
        "folder": folder.parent / "shared",
        "rank": rank,
    }


def resuming(folder: Path) -> dict[str, Any]:
    """As ``training``, in a folder that has the states of three ranks."""
    names = training(folder)
    state = telegrad.DDPState(names["comm"], DistributedDataParallel(network()))
    if names["rank"] == 0:
        for old in range(3):
            torch.save(state.state_dict() | {"rank": old, "world_size": 3}, names["folder"] / f"telegrad-{old}.pt")
    dist.barrier()
    return names


def trainers(folder: Path) -> dict[str, Any]:
    """Models and data of the examples for trainers; they make the process group themselves."""
    sys.path.append(str(EXAMPLES))
    import lightning_ddp
    import transformers_ddp

    names = {"module": lightning_ddp.Network(), "loader": lightning_ddp.batches(), "network": network()}
    return names | {"hf_model": transformers_ddp.Network(), "dataset": transformers_ddp.samples()}


def nothing(folder: Path) -> dict[str, Any]:
    return {}


PRELUDES = {"training": training, "resuming": resuming, "trainers": trainers, "nothing": nothing}


def run(request: dict[str, Any], folder: Path) -> None:
    """Raises what a block raises. A block that wraps the model gets a new one, and an optimizer of it."""
    names = {"torch": torch, "dist": dist, "telegrad": telegrad, "DistributedDataParallel": DistributedDataParallel}
    names |= {"os": os, "Path": Path, "__name__": "__main__", **PRELUDES[request["prelude"]](folder)}
    for line, code in request["blocks"]:
        if WRAPS.search(code) or "model" not in names:
            names["model"] = network()
            names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        exec(compile("\n" * line + code, request["page"], "exec"), names)
    if isinstance(comm := names.get("comm"), telegrad.Communicator):
        comm.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_of(request: dict[str, Any], rank: int) -> int:
    """Forks a rank, which ends with status 0 if all blocks did."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        folder = Path(request["folder"], f"rank{rank}")
        folder.mkdir(parents=True)
        os.chdir(folder)
        log = os.open("log", os.O_CREAT | os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(request["port"])}
        run(request, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end_of(child: int, until: float) -> int | None:
    """Its status; ``None`` where it was killed because time was up."""
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        children = [rank_of(request, rank) for rank in range(RANKS)]
        until = time.monotonic() + PATIENCE_S
        print(json.dumps([end_of(child, until) for child in children]), flush=True)


if __name__ == "__main__":
    main()
