"""Replicas of Streaming DiLoCo whose network stands still in the middle of an exchange: either the round completes, or
all agree that it did not.

Run as root: python -m lab.frozen_network --freeze-s 30 --liveness-s 8
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from telegrad.tools.bench.netlab import INTERFACE, Netlab

REPLICAS, ROUNDS, FREEZES_AT = 3, 24, 7
PORT = 29_400


def replica(number: int, address: str, liveness_s: float, output: str) -> None:
    """Trains until ``ROUNDS`` rounds are over; writes a line for each, and for each warning."""
    import torch
    from torch._C._distributed_c10d import TCPStore

    import telegrad
    from telegrad.diloco.membership import ReplicaGroup

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
        options: dict[str, Any] = {"every": 30, "fragments": 3, "delay": 8, "mix": 0.5}
        diloco = telegrad.DiLoCo(model, group, optimizer, **options)
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


def main() -> None:
    """Prints what happened, as JSON; fails where replicas differ or do not end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--freeze-s", type=float, default=30.0)
    parser.add_argument("--liveness-s", type=float, default=8.0)
    parser.add_argument("--rate", default="20mbit")
    parser.add_argument("--replica", nargs=3, metavar=("NUMBER", "ADDRESS", "FILE"))
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    if given.serve:
        serve()
    elif given.replica:
        number, address, output = given.replica
        replica(int(number), address, given.liveness_s, output)
    else:
        print(json.dumps(run(given.freeze_s, given.liveness_s, given.rate), indent=1))


def run(freeze_s: float, liveness_s: float, rate: str) -> dict[str, Any]:
    """One training with one freeze."""
    environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": INTERFACE}  # namespaces share memory
    command = [sys.executable, "-m", "lab.frozen_network", "--liveness-s", str(liveness_s)]
    with tempfile.TemporaryDirectory() as name, Netlab(REPLICAS + 1, rate) as lab:
        folder, address = Path(name), lab.address_of(REPLICAS)
        server = subprocess.Popen(
            [*lab.prefix_of(REPLICAS), *command, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        server.stdout.readline()
        started = [
            subprocess.Popen(
                [*lab.prefix_of(one), *command, "--replica", str(one), address, str(folder / f"{one}.jsonl")],
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
    result = {
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
    if any(codes) or result["differing_rounds"]:
        raise SystemExit(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
