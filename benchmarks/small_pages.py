"""What PyTorch's small pages cost dense sums among ranks of one host, and what putting them into huge ones takes.

    python benchmarks/small_pages.py [--ranks 2 4] [--mib 4 25 64] [--rounds 9]

Sums in place of a torch tensor and of a numpy array of the same length in turn, in new processes with
TELEGRAD_HUGE_PAGES=0 and without it: medians, and their ratio. "at first": what the first eight sums of the tensor take
beyond eight medians: connecting, and in the third or so moving its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import numpy as np

from telegrad.launch import Ranks, join

FIRST_SUMS = 8
SUMS_AT_ONCE = 3
IS_RANK = "SMALL_PAGES_RANK"  # set for the processes that this one starts


def rank_main(mib: int, rounds: int) -> None:
    import torch

    from telegrad.calibration.pairs import timed_sample

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--mib", type=int, nargs="+", default=[4, 25, 64], help="lengths of the vectors")
    parser.add_argument("--rounds", type=int, default=9, help="samples of three sums each")
    options = parser.parse_args()
    print(f"{'ranks':>5} {'MiB':>4} {'huge pages':>10} {'numpy':>9} {'torch':>9} {'ratio':>6} {'at first':>9}")
    for ranks in options.ranks:
        for mib in options.mib:
            for wanted in ("0", "1"):
                lines: list[str] = []
                with Ranks(
                    str(Path(__file__).resolve()),
                    ranks,
                    timeout_s=300,
                    arguments=[str(mib), str(options.rounds)],
                    environment={"TELEGRAD_HUGE_PAGES": wanted, IS_RANK: "1"},
                    on_line=lambda rank, line, lines=lines: lines.append(line),
                ) as job:
                    job.wait()
                found = json.loads(lines[-1])
                numpy_ms, torch_ms, at_first_ms = (found[name] * 1e3 for name in ("numpy", "torch", "at_first"))
                huge = "off" if wanted == "0" else "on"
                print(
                    f"{ranks:>5} {mib:>4} {huge:>10} {numpy_ms:>6.2f} ms {torch_ms:>6.2f} ms "
                    f"{torch_ms / numpy_ms:>6.2f} {at_first_ms:>6.0f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    if os.environ.get(IS_RANK):
        rank_main(int(sys.argv[1]), int(sys.argv[2]))
    else:
        main()
