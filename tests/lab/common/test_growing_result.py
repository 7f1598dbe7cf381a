"""What is said of the files that experiments have written."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from lab.common.growing_result import GrowingResult
from telegrad.tools.cli.outputs import write_result


def test_brackets_in_names_of_files_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("ü [b].json")
    console = Console(width=120)
    growing = GrowingResult(path, {})
    growing.add({"wrong": 0})
    with console.capture() as said:
        write_result(console, path, {"rows": []}, what="times")
        growing.end(console)
    assert said.get() == "times: ü [b].json\nrows: ü [b].json\n"
