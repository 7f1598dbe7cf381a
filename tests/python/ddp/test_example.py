"""The scripts that README and docs/how-to/gpu.md name run as they stand, and learn; on the CPU without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

_EXAMPLES = Path(__file__).parents[3] / "examples"
_LOSS_OF_GUESSING = 2.30  # ln 10


def said_by(example: str, folder: Path) -> str:
    """What two ranks of it print."""
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*script, str(_EXAMPLES / example)], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_learns(tmp_path: Path) -> None:
    said = said_by("ddp.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), ", said, re.MULTILINE)]
    assert len(losses) == 4, said
    assert losses[-1] < _LOSS_OF_GUESSING - 0.5, losses


def test_the_example_for_gpus_keeps_what_it_goes_on_from(tmp_path: Path) -> None:
    said = said_by("ddp_gpu.py", tmp_path)
    found = re.search(r"^step 100 on \w+: loss ([\d.]+), ", said, re.MULTILINE)
    assert found is not None, said
    assert float(found[1]) < _LOSS_OF_GUESSING
    for rank in range(2):
        kept = torch.load(tmp_path / "ddp_gpu" / f"rank{rank}.pt", weights_only=True)
        assert kept["telegrad"]["step"] == 100
        assert any(entry["residual"].any() for entry in kept["telegrad"]["compressor"]["parameters"].values())


def test_replicas_of_the_example_learn_together(tmp_path: Path) -> None:
    said = said_by("diloco.py", tmp_path)
    found = re.search(r"^7 rounds: held-out loss ([\d.]+), ", said, re.MULTILINE)
    assert found is not None, said
    assert float(found[1]) < _LOSS_OF_GUESSING - 0.5
