"""Whether the first steps on this GPU hold, on which everything else stands: a minute before many are spent.

    python benchmarks/gpu/smoke.py --json FILE

A row for each step, in the file as soon as it is over: how long it took, and what it said if it failed. A step is a
process of its own, or a job of two, and one that hangs is ended. Ends with status 1 unless all of them held.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from limited import ROOT, last_of, run_limited

sys.path.insert(0, str(ROOT))

from lab.common.growing_result import GrowingResult

_STEP_S = 27.0
_LAST_LINES = 12
_LONG = 9 << 20  # bytes that travel in several chunks, and by UCX's protocol for long messages
_TRANSFERS = ["--sizes", f"4,{_LONG}", "--samples", "3", "--seconds", "2", "--timeout", str(_STEP_S - 3)]
_RANKS = 2


def run_all(steps: Mapping[str, Sequence[str]], path: Path, about: Mapping[str, Any], limit_s: float = _STEP_S) -> bool:
    """Whether all commands ended with 0. One after the other, whatever becomes of each."""
    result = GrowingResult(path, {"machine": about})
    for name, command in steps.items():
        begin = time.monotonic()
        row: dict[str, Any] = {"step": name, "holds": False, "failed": "was interrupted"}
        try:
            row["failed"] = _failed(command, limit_s)
            row["holds"] = row["failed"] is None
        finally:
            row["seconds"] = round(time.monotonic() - begin, 1)
            result.add(row)
            print(f"{name}: {'holds' if row['holds'] else 'DOES NOT HOLD: ' + row['failed']}", flush=True)
    return all(row["holds"] for row in result.rows)


def _failed(command: Sequence[str], limit_s: float) -> str | None:
    """What a command said last, unless it ended with 0 in time."""
    with tempfile.NamedTemporaryFile(prefix="telegrad-smoke-") as file:
        log = Path(file.name)
        status = run_limited(command, log, limit_s, {}, interrupted_s=0)
        if status == 0:
            return None
        why = f"was ended after {limit_s:.0f} s" if status is None else f"status {status}"
        return f"{why}; {last_of(log, _LAST_LINES)}"


# What the steps are


def _steps() -> dict[str, list[str]]:
    own = [sys.executable, str(Path(__file__).resolve()), "--step"]
    transfers = [sys.executable, "-m", "lab", "transfers", *_TRANSFERS, "--ranks"]
    return {
        "two processes sum host arrays": [*own, "host"],
        "an exact top-k on the GPU chooses what numpy does": [*own, "selection"],
        "one process sums tensors of the GPU": [*transfers, "1"],
        "two processes sum tensors of the GPU": [*transfers, str(_RANKS)],
    }


def host() -> None:
    """Two processes, whose arrays travel by what UCX has on this machine."""
    from telegrad.launch import Ranks

    folder = Path(__file__).resolve().parent
    environment = {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1"}
    with Ranks("smoke:host_rank", _RANKS, environment=environment, timeout_s=_STEP_S - 5) as ranks:
        ranks.wait()


def host_rank() -> None:
    """One of them."""
    from telegrad.launch import join

    with join(timeout_s=10.0, join_timeout_s=15.0) as communicator:
        for nbytes in (4, _LONG):
            x = np.arange(nbytes // 4, dtype=np.float32) % 1009 + 1
            own = x * (communicator.rank + 1)
            communicator.all_reduce(own)
            np.testing.assert_array_equal(own, x * 3)


def selection(device: str = "cuda", size: int = (1 << 20) + 17) -> None:
    """Sums that are left over and entries that are sent, bit for bit."""
    import torch

    from telegrad.compress import Residual, selection_named

    rng, k = np.random.default_rng(0), size // 100
    gradients = [rng.standard_normal(size).astype(np.float32) for _ in range(3)]
    found = []
    for of_device in (False, True):
        residual = torch.zeros(size, device=device) if of_device else np.zeros(size, np.float32)
        indices = torch.zeros(k, dtype=torch.uint32, device=device) if of_device else np.zeros(k, np.uint32)
        values = torch.zeros(k, device=device) if of_device else np.zeros(k, np.float32)
        entry = Residual("x", residual, k)  # type: ignore[arg-type]
        for one in gradients:
            gradient = torch.from_numpy(one).to(device) if of_device else one
            assert selection_named("topk").select(entry, gradient, indices, values, 0) == k  # type: ignore[arg-type]
        arrays = (residual, indices, values)
        found.append([x.cpu().numpy() if isinstance(x, torch.Tensor) else x for x in arrays])
    for ours, wanted in zip(found[1], found[0], strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), wanted.view(np.uint32))


STEPS: Mapping[str, Callable[[], None]] = {one.__name__: one for one in (host, selection)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-smoke.json"), help="where rows go")
    parser.add_argument("--step", choices=STEPS, help="this one alone, here")
    asked = parser.parse_args(arguments)
    if asked.step is not None:
        STEPS[asked.step]()
        return 0
    from telegrad.tools.bench.device import describe_gpu, gpu_name

    gpu = gpu_name()
    if gpu is None:
        print("no GPU: torch sees none here, and nothing was tried")
        return 1
    about = describe_gpu(gpu)
    print(json.dumps(about), flush=True)
    return 0 if run_all(_steps(), asked.json, about) else 1


if __name__ == "__main__":
    sys.exit(main())
