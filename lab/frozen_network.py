"""Streaming DiLoCo on a network that stands still in the middle of an exchange.

Either the round completes, or all replicas agree that it did not.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.netlab import INTERFACE, Netlab
from telegrad.tools.cli.options import RowsFile
from telegrad.tools.cli.outputs import check_writable, table_console, write_result

REPLICAS, ROUNDS, FREEZES_AT = 3, 24, 7
PORT = 29_400


def replica(number: int, address: str, liveness_s: float, output: str) -> None:
    """Trains until ``ROUNDS`` rounds are over; writes a line for each, and for each warning."""
    import torch
    from torch._C._distributed_c10d import TCPStore

    import telegrad
    from telegrad.diloco.replica_ranks import ReplicaGroup

    torch.set_num_threads(1)
    with Path(output).open("a") as file:

        def say(**what: Any) -> None:
            file.write(json.dumps({"s": time.time(), **what}) + "\n")
            file.flush()

        warnings.showwarning = lambda message, *_, **__: say(warned=str(message))
        store = TCPStore(address, PORT, is_master=False, wait_for_workers=False)
        group = ReplicaGroup(store, REPLICAS, liveness_timeout_s=liveness_s, interface=INTERFACE)
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        streaming = telegrad.Streaming(3, delay=8, mix=0.5)
        diloco = telegrad.DiLoCo(model, group, optimizer, every=30, streaming=streaming)
        samples, told = torch.Generator().manual_seed(number), 0
        while diloco.rounds < ROUNDS:
            x = torch.randn(8, 700, generator=samples)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            time.sleep(0.05)
            if diloco.rounds != told:
                told = diloco.rounds
                say(round=told, checksum=diloco.checksum(), size=diloco.comm.world_size)
        diloco.exchange()
        say(ended=diloco.rounds, checksum=diloco.checksum())
        diloco.close()


def serve() -> None:
    """The store, in a process and a namespace of its own."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()


def _lines(folder: Path, number: int) -> list[dict[str, Any]]:
    path = folder / f"{number}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _longest_gap_s(lines: list[dict[str, Any]]) -> float:
    """Between two rounds of a replica."""
    ends = [line["s"] for line in lines if "round" in line]
    return float(round(max(later - earlier for earlier, later in itertools.pairwise(ends)), 1))


def freeze(lab: Netlab, seconds: float) -> None:
    """Nothing passes a port of the bridge for so long; connections stay."""
    for state in ("down", "up"):
        for rank in range(lab.ranks):
            subprocess.run(["ip", "-n", lab.hub, "link", "set", f"p{rank}", state], check=True)
        time.sleep(seconds if state == "down" else 0.0)


def command(
    freeze_s: Annotated[float, typer.Option(min=0.1, help="Seconds for which nothing passes.")] = 30.0,
    liveness_s: Annotated[
        float, typer.Option(min=1, help="Silence after which a replica takes another for dead.")
    ] = 8.0,
    rate: Annotated[str, typer.Option(help="Of the network, such as 20mbit.")] = "20mbit",
    json_file: RowsFile = None,
) -> None:
    """Freeze the network of three replicas once, and say what becomes of the round. Needs root, for namespaces.

    Fails where replicas differ, or do not end.
    """
    console = table_console()
    check_writable(json_file, "--json")
    found = run(freeze_s, liveness_s, rate)
    console.print_json(json.dumps(found))
    if json_file is not None:
        write_result(console, json_file, {"rows": [found], "machine": describe_machine()})
    if any(found["exit"]) or found["differing_rounds"]:
        raise typer.Exit(1)


def run(freeze_s: float, liveness_s: float, rate: str) -> dict[str, Any]:
    """One training with one freeze."""
    environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}  # namespaces share memory
    program = [sys.executable, "-c"]
    with tempfile.TemporaryDirectory() as name, Netlab(REPLICAS + 1, rate) as lab:
        folder, address = Path(name), lab.address_of(REPLICAS)
        server = subprocess.Popen(
            [*lab.prefix_of(REPLICAS), *program, "from lab.frozen_network import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        server.stdout.readline()

        def of_replica(one: int) -> tuple[int, str, float, str]:
            return one, address, liveness_s, str(folder / f"{one}.jsonl")

        started = [
            subprocess.Popen(
                [*lab.prefix_of(one), *program, f"from lab.frozen_network import replica; replica{of_replica(one)}"],
                env=environment,
            )
            for one in range(REPLICAS)
        ]
        try:
            while all(one.poll() is None for one in started) and not any(
                line.get("round", 0) >= FREEZES_AT for line in _lines(folder, 0)
            ):
                time.sleep(0.05)
            frozen_s = time.time()
            freeze(lab, freeze_s)
            codes = [one.wait(600) for one in started]
        finally:
            for one in (*started, server):
                one.kill()
                one.wait()
        said = [_lines(folder, one) for one in range(REPLICAS)]
    bits: dict[Any, set[int]] = {}
    for lines in said:
        for line in lines:
            if "checksum" in line:
                bits.setdefault(line.get("round", "end"), set()).add(line["checksum"])
    after = [[line["s"] for line in lines if "round" in line and line["s"] > frozen_s + freeze_s] for lines in said]
    return {
        "freeze_s": freeze_s,
        "liveness_s": liveness_s,
        "exit": codes,
        "rounds": [lines[-1].get("ended") for lines in said],
        "sizes": sorted({line["size"] for lines in said for line in lines if "size" in line}),
        "longest_gap_s": [_longest_gap_s(lines) for lines in said],
        "differing_rounds": [number for number, found in bits.items() if len(found) > 1],
        "next_round_after_s": [round(min(one) - frozen_s - freeze_s, 1) if one else None for one in after],
        "warnings": [[line["warned"][:300] for line in lines if "warned" in line] for lines in said],
    }
