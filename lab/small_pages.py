"""What PyTorch's small pages cost dense sums among ranks of one host, and what putting them into huge ones takes.

Sums in place of a torch tensor and of a numpy array of the same length in turn, in new processes with
TELEGRAD_HUGE_PAGES=0 and without it: medians, and their ratio. "at first": what the first eight sums of the tensor take
beyond eight medians: connecting, and in the third or so moving its memory.
"""

from __future__ import annotations

import functools
import json
import statistics
from typing import Annotated

import numpy as np
import typer

from lab.common.commands import counts_of
from telegrad.launch import Ranks, join

TARGET = "lab.small_pages:rank_main"
"""What the ranks run."""

FIRST_SUMS = 8
SUMS_AT_ONCE = 3


def rank_main(mib_text: str, rounds_text: str) -> None:
    """One rank. Rank 0 prints its medians as JSON."""
    import torch

    from telegrad.tuning.probes import timed_sample

    mib, rounds = int(mib_text), int(rounds_text)
    with join(timeout_s=120, join_timeout_s=60) as communicator:
        tensor = torch.ones(mib << 18)
        arrays = {"torch": tensor.numpy(), "numpy": np.ones(mib << 18, np.float32)}

        def spent_s(name: str, calls: int) -> float:
            sample = timed_sample(communicator, lambda: communicator.all_reduce(arrays[name]), calls, warm=False)
            return sample.spent_s

        first_s = sum(spent_s("torch", 1) for _ in range(FIRST_SUMS))
        spent_s("numpy", FIRST_SUMS)
        rounds_s = [{name: spent_s(name, SUMS_AT_ONCE) / SUMS_AT_ONCE for name in arrays} for _ in range(rounds)]
        if communicator.rank == 0:
            medians = {name: statistics.median(one[name] for one in rounds_s) for name in arrays}
            print(json.dumps({**medians, "at_first": first_s - FIRST_SUMS * medians["torch"]}), flush=True)


def command(
    ranks: Annotated[str, typer.Option(help="Numbers of processes: 2,4.")] = "2,4",
    mib: Annotated[str, typer.Option(help="Lengths of the vectors in MiB: 4,25,64.")] = "4,25,64",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of three sums each.")] = 9,
) -> None:
    """Time dense sums of a torch tensor and of a numpy array, with huge pages and without."""
    numbers, lengths = counts_of(ranks, 1, 256, "--ranks"), counts_of(mib, 1, 1 << 16, "--mib")
    print(f"{'ranks':>5} {'MiB':>4} {'huge pages':>10} {'numpy':>9} {'torch':>9} {'ratio':>6} {'at first':>9}")
    for count in numbers:
        for length in lengths:
            for wanted in ("0", "1"):
                lines: list[str] = []
                with Ranks(
                    TARGET,
                    count,
                    timeout_s=300,
                    arguments=[str(length), str(rounds)],
                    environment={"TELEGRAD_HUGE_PAGES": wanted},
                    on_line=functools.partial(_keep, lines),
                ) as job:
                    job.wait()
                found = json.loads(lines[-1])
                numpy_ms, torch_ms, at_first_ms = (found[name] * 1e3 for name in ("numpy", "torch", "at_first"))
                huge = "off" if wanted == "0" else "on"
                print(
                    f"{count:>5} {length:>4} {huge:>10} {numpy_ms:>6.2f} ms {torch_ms:>6.2f} ms "
                    f"{torch_ms / numpy_ms:>6.2f} {at_first_ms:>6.0f} ms",
                    flush=True,
                )


def _keep(lines: list[str], rank: int, line: str) -> None:
    lines.append(line)
