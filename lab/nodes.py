"""A step of the DDP hook on two nodes of two ranks: flat, and with ``node=``, whose ranks share the gradient's pieces.

Each node is a network namespace, with IPC and processes of its own; a link of ``--rate`` joins them. Both variants
train the same network in one job, some steps in turn, so that other load on the machine meets both. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import telegrad
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.cli.options import JobTimeout, RowsFile, among
from telegrad.tools.cli.outputs import check_writable, table_console, write_result

Row = dict[str, Any]
METHODS = ("topk", "lowrank", "dense")
VARIANTS = ("flat", "node")
NODES, RANKS = 2, 2
_LINK, _ADDRESS = "eth0", "10.88.61"


def _options(method: str) -> dict[str, Any]:
    if method == "dense":
        return {"compress": None}
    return {"compress": telegrad.TopK(density=0.01) if method == "topk" else telegrad.LowRank()}


class _Variant:
    """A network and its hook, on all ranks."""

    def __init__(self, comm: telegrad.Communicator, method: str, layers: int, width: int, node: Any) -> None:
        torch.manual_seed(0)
        wide = [one for _ in range(layers) for one in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.ddp = DistributedDataParallel(torch.nn.Sequential(*wide), bucket_cap_mb=8)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.comm, self.width = comm, width
        self.ddp.register_comm_hook(telegrad.DDPState(comm, self.ddp, node=node, **_options(method)), telegrad.ddp_hook)

    def step(self, number: int) -> tuple[float, int, float]:
        """Seconds on the wall, bytes that this node has sent to the other, and this rank's seconds of the processor."""
        x = torch.randn(4, self.width, generator=torch.Generator().manual_seed(number * 8 + self.comm.rank))
        self.comm.barrier()
        sent, started_s, own_s = _sent(), time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        self.ddp(x).square().mean().backward()
        self.optimizer.step()
        self.comm.barrier()
        return time.perf_counter() - started_s, _sent() - sent, time.process_time() - own_s

    def same_bits(self) -> bool:
        """On all ranks."""
        own = torch.cat([one.detach().reshape(-1) for one in self.ddp.parameters()]).view(torch.int32).long()
        sums = torch.stack([own.sum(), (own * torch.arange(own.numel())).sum()])
        return bool((self.comm.all_gather(sums).view(-1, 2) == sums).all())


def _sent() -> int:
    return int(Path(f"/sys/class/net/{_LINK}/statistics/tx_bytes").read_text())


def rank_main(method: str, rounds: int, layers: int, width: int) -> None:
    """One rank; rank 0 prints what it has measured."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with telegrad.Communicator.from_torch(interface=_LINK) as comm:
        variants = {
            name: _Variant(comm, method, layers, width, "auto" if name == "node" else None) for name in VARIANTS
        }
        found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in VARIANTS}
        for number in range(rounds + 2):
            for name, one in variants.items():
                measured = [one.step(5 * number + place) for place in range(5)]
                found[name] += measured if number > 1 else []
        same = {name: one.same_bits() for name, one in variants.items()}
        cpu = {
            name: comm.all_gather(np.array([one[2] for one in steps])).sum(0).tolist() for name, steps in found.items()
        }
        if comm.rank == 0:
            print(json.dumps({"steps": found, "same_bits": same, "cpu_s": cpu}), flush=True)
        comm.barrier()
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def two_nodes(rate: str) -> Iterator[list[str]]:
    """The names of two network namespaces, joined by a link of that rate in each direction."""
    names = [f"tgnodes{node}" for node in range(NODES)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        first, second = names
        ip("link", "add", _LINK, "netns", first, "type", "veth", "peer", "name", _LINK, "netns", second)
        for node, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{_ADDRESS}.{node + 1}/24", "dev", _LINK)
            ip("-n", name, "link", "set", _LINK, "up")
            shaped = ["root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", _LINK, *shaped], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(method: str, rate: str, rounds: int, layers: int, width: int, *, timeout_s: float) -> list[Row]:
    """A row for each variant. Raises ``RuntimeError`` where a rank fails."""
    with two_nodes(rate) as names, tempfile.TemporaryDirectory() as folder:
        jobs: list[subprocess.Popen[str]] = []
        for rank in range(NODES * RANKS):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % RANKS),
                "WORLD_SIZE": str(NODES * RANKS),
                "MASTER_ADDR": f"{_ADDRESS}.1",
                "MASTER_PORT": "29561",
                "GLOO_SOCKET_IFNAME": _LINK,
                "TELEGRAD_NODE": str(rank // RANKS),
                "HOME": folder,
                "OMP_NUM_THREADS": "1",
                "TELEGRAD_WARN": "0",
            }
            code = f"from lab.nodes import rank_main; rank_main({method!r}, {rounds}, {layers}, {width})"
            alone = ["unshare", "--ipc"] if rank % RANKS == 0 else []
            if not alone:  # in the IPC namespace of its node's first rank
                alone = ["nsenter", f"--ipc=/proc/{jobs[-1].pid}/ns/ipc"]
                _wait_for_namespace(jobs[-1].pid)
            command = ["ip", "netns", "exec", names[rank // RANKS], *alone, sys.executable, "-c", code]
            jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            said = jobs[0].communicate(timeout=timeout_s)[0]
            failed = [rank for rank, job in enumerate(jobs) if job.wait(timeout=60) != 0]
        finally:
            for job in jobs:
                job.kill()
        if failed:
            raise RuntimeError(f"ranks {failed} have failed")
    found = json.loads(said.splitlines()[-1])
    return [
        {
            "method": method,
            "variant": name,
            "rate": rate,
            "elements": layers * width * (width + 1),
            "steps": len(found["steps"][name]),
            "step_s": median(wall_s for wall_s, _, _ in found["steps"][name]),
            "cpu_s": median(found["cpu_s"][name]),
            "bytes_between_nodes": median(sent for _, sent, _ in found["steps"][name]),
            "same_bits": found["same_bits"][name],
        }
        for name in VARIANTS
    ]


def _wait_for_namespace(pid: int) -> None:
    own = os.readlink("/proc/self/ns/ipc")
    for _ in range(500):
        if os.readlink(f"/proc/{pid}/ns/ipc") != own:
            return
        time.sleep(0.01)
    raise RuntimeError(f"process {pid} has no IPC namespace of its own after 5 s")


def table_of(rows: Sequence[Row]) -> Table:
    """Each variant, and its part of the flat one."""
    table = Table(header_style="bold", box=SIMPLE_HEAD, padding=0)
    of = "of flat"
    names = ("method", "rate", "variant", "ms a step", of, "CPU ms", of, "MB between", of, "same bits")
    for name in names:
        table.add_column(name, justify="left" if name in ("method", "rate", "variant") else "right")
    for row in rows:
        alike = [one for one in rows if (one["method"], one["rate"]) == (row["method"], row["rate"])]
        flat = next(one for one in alike if one["variant"] == "flat")
        cells = []
        for name, unit in (("step_s", 1e-3), ("cpu_s", 1e-3), ("bytes_between_nodes", 1e6)):
            cells += [f"{row[name] / unit:,.2f}", f"{row[name] / flat[name]:.2f}x"]
        table.add_row(row["method"], row["rate"], row["variant"], *cells, "yes" if row["same_bits"] else "NO")
    return table


def command(
    methods: Annotated[str, typer.Option(help="Which, separated by commas.")] = ",".join(METHODS),
    rate: Annotated[str, typer.Option(help="Of the link between nodes, as tc has it; or several.")] = "1gbit",
    rounds: Annotated[int, typer.Option(min=1, help="Of five steps of each variant.")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="Of the network.")] = 8,
    width: Annotated[int, typer.Option(min=16, help="Of each layer.")] = 1024,
    json_file: RowsFile = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Time steps on two nodes of two ranks, flat and with node=."""
    console = table_console()
    check_writable(json_file, "--json")
    rows: list[Row] = []
    for method in among(methods, METHODS, "--methods"):
        for one in rate.split(","):
            rows += run(method, one, rounds, layers, width, timeout_s=timeout)
    console.print(table_of(rows))
    console.print(describe_machine())
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": describe_machine()})
