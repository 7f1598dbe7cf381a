"""What commands print and write: files that are checked before the work, tables, and bars of what is counted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from telegrad.launch import LaunchError
from telegrad.tools.bench.plan import title_of

_PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".eps", ".ps", ".webp", ".tif", ".tiff")


def check_writable(path: Path | None, option: str) -> None:
    """Raises ``BadParameter`` if ``path``, given as ``option``, cannot be written, is the next option's name, or is to
    be a plot and has the suffix of no picture. What is in it stays; if it does not exist, it does not afterwards."""
    if path is None:
        return
    if str(path).startswith("--"):  # what follows an option is taken for its value
        raise typer.BadParameter(f"{path} is an option, and this one wants a file before it", param_hint=option)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist: make it first", param_hint=option)
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


def check_all_writable(outputs: Mapping[str, Path | None]) -> None:
    """``check_writable`` of each, by option. Raises ``BadParameter``, too, where two are one file."""
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        check_writable(path, option)
        if path is None or (path.exists() and not path.is_file()):
            continue
        first = taken.setdefault(path.resolve(), option)
        if first != option:
            raise typer.BadParameter(f"{path} is what {first} writes: name another file", param_hint=option)


def say_file(console: Console, what: str, path: Path) -> None:
    """Says where ``what`` was written."""
    console.print(f"{what}: {path}", highlight=False, markup=False)


def write_result(console: Console, path: Path, result: Mapping[str, object], *, what: str = "rows") -> None:
    """Writes ``result`` as JSON, and says that ``what`` it holds is there."""
    with written(console, path):
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    say_file(console, what, path)


@contextlib.contextmanager
def drawn(console: Console, path: Path) -> Iterator[None]:
    """Within it a plot is drawn into ``path``, as within ``written``; then says that it is there."""
    with written(console, path):
        yield
    say_file(console, "plot", path)


class GrowingResult:
    """Rows that are in their file as soon as they are known: what comes later may hang, or end the process.

    ``about`` is written beside them. ``failures`` says what could not be measured, and why. Without a path it only
    keeps them.
    """

    def __init__(self, path: Path | None, about: Mapping[str, object]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self._path, self._about = path, about

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write()

    def fail(self, failure: dict[str, Any]) -> None:
        self.failures.append(failure)
        self._write()

    @contextlib.contextmanager
    def failing_as(self, **about: Any) -> Iterator[None]:
        """A job; if it fails, ``about`` and its error are a failure, and the command goes on."""
        try:
            yield
        except (LaunchError, RuntimeError) as error:
            self.fail({**about, "error": str(error)})

    def _write(self) -> None:
        if self._path is None:
            return
        text = json.dumps({"rows": self.rows, "failures": self.failures, **self._about}, indent=1, allow_nan=False)
        with written(Console(stderr=True), self._path):
            if self._path.exists() and not self._path.is_file():  # a pipe or a device, to be written, not replaced
                self._path.write_text(text + "\n")
                return
            partial = self._path.with_name(self._path.name + ".partial")  # whoever reads meanwhile finds a whole file
            partial.write_text(text + "\n")
            partial.replace(self._path)

    def say_failures(self, console: Console) -> None:
        """What could not be measured, with all that is known of why."""
        for failure in self.failures:
            said = ", ".join(f"{name}: {value}" for name, value in failure.items())
            console.print(said, style="red", markup=False, highlight=False, soft_wrap=True)

    def end(self, console: Console) -> None:
        """Says where the rows are, and ends the command with status 1 if something failed or a row counts ``"wrong"``
        values."""
        if self._path is not None and (self.rows or self.failures):
            say_file(console, "rows", self._path)
        if any(row.get("wrong") for row in self.rows):
            console.print("[red]some values were wrong[/]")
        if self.failures or any(row.get("wrong") for row in self.rows):
            raise typer.Exit(1)


@contextlib.contextmanager
def written(console: Console, path: Path) -> Iterator[None]:
    """Within it, ``path`` is written: an ``OSError`` ends the command with status 1 and says which file and why."""
    try:
        yield
    except OSError as error:
        console.print(f"cannot write {path}: {error.strerror or error}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from error


# Tables and progress bars.


def counting(console: Console, *more: ProgressColumn) -> Progress:
    """A progress bar with ``more`` columns at its end; it is gone when it is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, *more, console=console, transient=True)


_FILE_COLUMNS = 140  # the widest: sums among ranks that are dealt out to nodes, beside both peers


def table_console() -> Console:
    """A console whose tables keep their columns also where they go into a file."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _FILE_COLUMNS))


def say_without(console: Console, missing: Mapping[str, str]) -> None:
    """Which peers take no part, and why."""
    for peer, why in missing.items():
        console.print(f"[yellow]Without {title_of(peer)}:[/] {why}", highlight=False)
