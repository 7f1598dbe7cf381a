"""Bytes and seconds of a round of DiLoCo, SparseLoCo and torchft's DiLoCo, by turns in one job.

The model of the demo, with steps that compute nothing. Each rank has a network namespace, whose interface counts bytes
with all headers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.table import Table

from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.netlab import INTERFACE, Netlab, why_unavailable
from telegrad.tools.cli.options import RowsFile, among
from telegrad.tools.cli.outputs import check_writable, table_console, write_result

KINDS = ("dense", "sparse", "oktopk", "torchft")
PORT = 29_500


def replica(rank: int, replicas: int, address: str, kinds: list[str], rounds: int, width: int) -> None:
    """Prints, as rank 0, a line for each round."""
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    import torch
    import torch.distributed as dist

    import telegrad
    from telegrad.tools.demo.job import ModelSize
    from telegrad.tools.demo.training import ByteGPT, _Trainer, sent_bytes

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=replicas)
    comm = telegrad.Communicator.from_torch()
    inner: dict[str, Any] = {}
    held: list[Any] = []  # what a hook refers to weakly
    for kind in kinds:
        torch.manual_seed(0)
        model = ByteGPT(ModelSize(width=width))
        inner[kind] = optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if kind == "torchft":
            ends = contextlib.ExitStack()
            own = SimpleNamespace(rank=rank, world_size=replicas, ends=ends, model=model, optimizer=optimizer)
            _Trainer._use_torchft(own, 1)  # type: ignore[arg-type]
            held.append(own)
        elif kind == "dense":
            held.append(telegrad.DiLoCo(model, comm, optimizer, every=1))
        else:
            combine = "allgather" if kind == "sparse" else kind
            held.append(telegrad.DiLoCo.sparse(model, comm, optimizer, every=1, combine=combine))
    generator = torch.Generator().manual_seed(rank)
    for number in range(-1, rounds):  # one before, in which connections are made
        for kind, optimizer in inner.items():
            for one in optimizer.param_groups[0]["params"]:
                one.grad = 1e-3 * torch.randn(one.shape, generator=generator)
            dist.barrier()
            sent, begin = sent_bytes(INTERFACE), time.perf_counter()
            optimizer.step()
            seconds, sent = time.perf_counter() - begin, sent_bytes(INTERFACE) - sent
            dist.barrier()
            if rank == 0 and number >= 0:
                print(json.dumps({"kind": kind, "round": number, "s": round(seconds, 4), "bytes": sent}), flush=True)
    dist.barrier()
    os._exit(0)  # torchft's threads would wait for each other


def measured(replicas: int, rate: str, kinds: list[str], rounds: int, width: int) -> list[dict[str, Any]]:
    """Medians of each kind."""
    environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}
    with Netlab(replicas, rate) as lab:

        def start(rank: int) -> subprocess.Popen[str]:
            call = f"replica{(rank, replicas, lab.address_of(0), kinds, rounds, width)}"
            program = [sys.executable, "-c", f"from lab.outer_rounds import replica; {call}"]
            output = subprocess.PIPE if rank == 0 else None
            return subprocess.Popen([*lab.prefix_of(rank), *program], env=environment, stdout=output, text=True)

        started = [start(rank) for rank in range(replicas)]
        try:
            said = started[0].communicate(timeout=900)[0].splitlines()
        finally:
            for one in started:
                one.kill()
                one.wait()
    lines = [json.loads(line) for line in said if line.startswith("{")]
    rows = []
    for kind in kinds:
        own = [line for line in lines if line["kind"] == kind]
        if len(own) < rounds:
            raise RuntimeError(f"{kind}: {len(own)} of {rounds} rounds were measured; what a rank says above tells why")
        seconds = [line["s"] for line in own]
        row = {"kind": kind, "replicas": replicas, "network": rate, "rounds": rounds, "width": width}
        sent = statistics.median(line["bytes"] for line in own)
        rows.append(row | {"bytes": sent, "s": statistics.median(seconds), "least_s": min(seconds)})
    return rows


def command(
    kinds: Annotated[str, typer.Option(help="Names, separated by commas.")] = "dense,sparse,oktopk",
    replicas: Annotated[int, typer.Option(min=2, max=64, help="Processes of this machine.")] = 4,
    network: Annotated[str, typer.Option(help="The rate of each link.")] = "100mbit",
    rounds: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 5,
    width: Annotated[int, typer.Option(min=7, help="Of the model: 448 has 5.3 million parameters.")] = 448,
    json_file: RowsFile = None,
) -> None:
    """Measure rounds of outer loops on namespaces. Needs root; [bold]torchft[/] needs torchft.

    [bold]Example:[/] python -m lab outer-rounds --kinds dense,torchft,sparse --rounds 9
    """
    console = table_console()
    names = among(kinds, KINDS, "--kinds")
    check_writable(json_file, "--json")
    if (reason := why_unavailable()) is not None:
        raise typer.BadParameter(reason, param_hint="--network")
    if "torchft" in names and importlib.util.find_spec("torchft") is None:
        raise typer.BadParameter("torchft is not installed: pip install torchft", param_hint="--kinds")
    rows = measured(replicas, network, list(names), rounds, width)
    dense = max(row["bytes"] for row in rows)
    table = Table("kind", "replicas", "MB", "less", "median", "least", header_style="bold")
    for row in rows:
        cells = f"{row['bytes'] / 1e6:.3f}", f"1/{dense / row['bytes']:.0f}", f"{row['s']:.3f} s"
        table.add_row(row["kind"], str(replicas), *cells, f"{row['least_s']:.3f} s")
    console.print(table)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": machine})
