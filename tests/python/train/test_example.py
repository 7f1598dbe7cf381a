"""The scripts that README and docs/gpu.md point to run as they stand, and learn; on the CPU, where there is no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_the_example_for_gpus_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    said = "".join(said_by("ddp_gpu.py", tmp_path) for _ in range(2))
    found = re.findall(r"^step (\d+) on \w+: loss ([\d.]+), ", said, re.MULTILINE)
    assert [int(step) for step, _ in found] == [100, 200], said
    assert float(found[1][1]) < float(found[0][1]) < _LOSS_OF_GUESSING, found
