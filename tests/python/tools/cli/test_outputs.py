"""What is said of the files that commands have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from rich.console import Console

from telegrad.tools.cli.outputs import GrowingResult, check_writable, write_result


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


def test_the_next_option_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match="--overlap is an option, and this one wants a file before it"):
        check_writable(Path("--overlap"), "--json")
    check_writable(tmp_path / "--overlap", "--json")  # who means it can say so
