"""The files that commands write: said before the work, not after it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from telegrad.bench.machine import describe_machine, machine_text

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".eps", ".ps", ".webp", ".tif", ".tiff")


def check_folder_of(path: Path | None, option: str) -> None:
    """Raises ``BadParameter`` if ``path``, given as ``option``, is in a folder that does not exist."""
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist: make it first", param_hint=option)


def check_writable(path: Path | None, option: str) -> None:
    """Raises ``BadParameter`` if ``path``, given as ``option``, cannot be written, or is to be a plot and has the
    suffix of no picture. What is in it stays; if it does not exist, it does not afterwards."""
    if path is None:
        return
    check_folder_of(path, option)
    if "plot" in option and path.suffix and path.suffix.lower() not in _PICTURES:
        raise typer.BadParameter(
            f"{path.suffix} is no format of pictures: use one of {', '.join(_PICTURES)}", param_hint=option
        )
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its reader
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        target = path.resolve()  # a link may point to what does not exist yet
        existed = target.exists()
        target.open("ab").close()
        if not existed:
            target.unlink()
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write {path}: {error.strerror}; name another file", param_hint=option
        ) from error


def write_result(console: Console, path: Path, result: Mapping[str, object], *, what: str = "rows") -> None:
    """Writes ``result`` as JSON, and says that ``what`` it holds is there."""
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    console.print(f"{what}: {path}")


def end_with_rows(console: Console, rows: Sequence[Mapping[str, Any]], json_file: Path | None) -> None:
    """Says which machine it was, writes ``rows`` and the machine into ``json_file`` if that is given, and ends the
    command with status 1 if a row counts ``"wrong"`` sums."""
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "machine": machine})
    if any(row["wrong"] for row in rows):
        console.print("[red]some sums were wrong[/]")
        raise typer.Exit(1)


@contextlib.contextmanager
def written(console: Console, path: Path) -> Iterator[None]:
    """Within it, ``path`` is written: an ``OSError`` ends the command with status 1 and says which file and why."""
    try:
        yield
    except OSError as error:
        console.print(f"cannot write {path}: {error.strerror or error}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from error
