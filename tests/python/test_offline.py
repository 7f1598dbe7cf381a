"""``make offline`` where it does not come to its end, and set-ups by its folder that must not build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def test_a_wheel_of_other_sources_is_an_error_where_nothing_is_to_be_built(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    for name in ("setup", "sources_sum"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci" / name)
    for folder in ("cmake", "core", ".offline"):
        (tmp_path / folder).mkdir()
    (tmp_path / "CMakeLists.txt").write_text("")
    (tmp_path / ".offline" / "telegrad-0-py3-none-any.whl").write_text("")
    (tmp_path / ".offline" / "sources").write_text("of another day\n")
    done = subprocess.run(
        [tmp_path / ".ci" / "setup"],
        env={**os.environ, "OFFLINE": ".offline", "WHEEL": "only", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    assert "the wheel is of other C++ sources" in done.stdout
    assert "WHEEL=only, and the wheel in .offline does not fit this tree" in done.stderr
    assert not (tmp_path / ".venv-offline" / "made_from").exists()
