"""What is said of the files that commands have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from telegrad.tools.cli.outputs import check_writable


def test_the_next_option_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match="--overlap is an option, and this one wants a file before it"):
        check_writable(Path("--overlap"), "--json")
    check_writable(tmp_path / "--overlap", "--json")  # who means it can say so
