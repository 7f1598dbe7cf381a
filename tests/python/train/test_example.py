"""The script that README points to runs as it stands, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_EXAMPLE = Path(__file__).parents[3] / "examples" / "ddp.py"
_LOSS_OF_GUESSING = 2.30  # ln 10


def test_the_example_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(_EXAMPLE)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+), ", done.stdout, re.MULTILINE)]
    assert len(losses) == 4, done.stdout
    assert losses[-1] < _LOSS_OF_GUESSING - 0.5, losses
