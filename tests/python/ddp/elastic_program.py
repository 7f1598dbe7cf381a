"""What torchrun starts in test_elastic.py: the example, which is watched while it takes its checkpoint over."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import elastic
import numpy as np
import torch

from telegrad.ddp import DDPState, checkpoint, reshard

found: dict[str, Any] = {"residuals": {}}


def watched_reshard(states: Iterable[Mapping[str, Any]], world_size: int, *, keep: str) -> list[dict[str, Any]]:
    """Notes the sums of what the checkpoint holds of all ranks."""
    listed = list(states)
    found["ranks_before"] = len(listed)
    for state in listed:
        for name, entry in state["compressor"]["parameters"].items():
            own = entry["residual"].numpy().astype(np.float64)
            found["residuals"][name] = found["residuals"].get(name, 0) + own
    return reshard(listed, world_size, keep=keep)


def watched_load(state: DDPState, folder: Path) -> None:
    """Compares them with the sums of what the ranks of now hold, which a float64 sum over telegrad makes."""
    checkpoint.load_resharded(state, folder)
    worst = []
    for name, entry in state.state_dict()["compressor"]["parameters"].items():
        total = entry["residual"].to(torch.float64)
        state.comm.all_reduce(total)
        before = found["residuals"][name]
        assert np.linalg.norm(before) > 0
        worst.append(float(np.linalg.norm(total.numpy() - before) / np.linalg.norm(before)))
    found.update(step=state.step, residual_error=max(worst), compressed=len(worst))


def main(folder: str, steps: str, report: str) -> None:
    checkpoint.reshard = watched_reshard  # type: ignore[assignment]
    elastic.load_resharded = watched_load  # type: ignore[assignment]
    found["losses"] = elastic.main(Path(folder), int(steps))
    del found["residuals"]
    if os.environ["RANK"] == "0":
        Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
