"""Runs pages' blocks of Python, scripts as torchrun does, and the command ``telegrad``, in processes that are forked
from one that has torch.

Listens on a Unix socket. Takes {"page", "blocks": [[line, code], …], "prelude", "ranks", "folder", "port"},
{"script", "environment", "ranks", "folder", "port"} or {"command", "environment", "ranks", "folder", "port"} on a
line; answers with the processes' exit statuses and what they printed.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401  # commands import it and the next two
import rich.table  # noqa: F401
import torch
import torch._dynamo  # as all that follows: optimizers, DDP and pages import it, and a rank would do so anew
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch.nn.parallel import DistributedDataParallel

import telegrad
import telegrad.ddp
import telegrad.launch
from telegrad.tools import cli

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PATIENCE_S = 200
GRACE_S = 0.5  # in which ranks that hear of the failure say so
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


def run_blocks(request: dict[str, Any], folder: Path) -> None:
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


def run_script(request: dict[str, Any]) -> dict[str, Any]:
    """As the interpreter would. Returns the script's names. They must not be destroyed: with torch 2.13 the end of a
    DDP model waits for a thread of Gloo, which waits for Python's lock."""
    os.environ.update(request["environment"])
    sys.argv = request["script"]
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(Path(sys.argv[0]).parent.resolve()), *own]
    try:
        return runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def run_command(request: dict[str, Any]) -> None:
    """As the script ``telegrad`` would."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    try:
        cli.main()
    finally:
        atexit._run_exitfuncs()


def status_of(end: SystemExit) -> int:
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def rank_of(request: dict[str, Any], rank: int, log: int) -> int:
    """Forks a rank, which ends with status 0 if all went well."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"], "MASTER_PORT": request["port"]}
        given = {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
        if "command" in request:
            os.chdir(request["folder"])
            run_command(request)
        elif "script" in request:
            os.chdir(request["folder"])
            kept = run_script(request | {"environment": request["environment"] | given})  # noqa: F841
        else:
            os.environ.update(given)
            folder = Path(request["folder"], f"rank{rank}")
            folder.mkdir()
            os.chdir(folder)
            run_blocks(request, folder)
        status = 0
    except SystemExit as end:
        status = status_of(end)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ends_of(children: list[int]) -> list[int]:
    """The ranks' statuses. Where one fails, or time is up, the others are ended as torchrun does."""
    until = time.monotonic() + PATIENCE_S
    statuses: dict[int, int] = {}
    ended = False
    while len(statuses) < len(children):
        found, status = os.waitpid(-1, os.WNOHANG)
        if found:
            statuses[found] = os.waitstatus_to_exitcode(status)
        if not ended and (any(statuses.values()) or time.monotonic() > until):
            ended = True
            time.sleep(GRACE_S)
            for child in children:
                if child not in statuses:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [statuses[child] for child in children]


def main(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listens", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream, tempfile.TemporaryFile() as log:
                if not (line := stream.readline()):
                    return
                request = json.loads(line)
                children = [rank_of(request, rank, log.fileno()) for rank in range(request["ranks"])]
                statuses = ends_of(children)
                log.seek(0)
                stream.write(json.dumps([statuses, log.read().decode(errors="replace")]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
