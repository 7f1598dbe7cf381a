"""``make offline`` where it does not come to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_folder_that_was_filled_before_stays_where_filling_fails(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "offline", tmp_path / ".ci" / "offline")
    (tmp_path / ".offline").mkdir()
    (tmp_path / ".offline" / "commit").write_text("whole\n")
    broken = tmp_path / "python"  # its version is asked, then it is to make an environment
    broken.write_text('#!/bin/sh\n[ "$1" = -c ] || [ "$1" = --version ]\n')
    broken.chmod(0o755)
    done = subprocess.run(
        [tmp_path / ".ci" / "offline"], env={**os.environ, "FOR": str(broken)}, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert [path.name for path in (tmp_path / ".offline").iterdir()] == ["commit"]
    assert (tmp_path / ".offline" / "commit").read_text() == "whole\n"
