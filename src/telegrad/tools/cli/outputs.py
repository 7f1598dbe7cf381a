"""What commands print and write: files that are checked before the work, tables, and bars of what is counted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

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


def sharing(console: Console) -> Progress:
    """A progress bar of one whole, with the field ``what`` at its end; it is gone when it is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[what]}"))
    return Progress(*columns, console=console, transient=True)


_FILE_COLUMNS = 190  # the widest: sums among ranks that are dealt out to nodes, beside five peers


def table_console() -> Console:
    """A console whose tables keep their columns also where they go into a file."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _FILE_COLUMNS))


def say_without(console: Console, missing: Mapping[str, str]) -> None:
    """Which peers take no part, and why."""
    for peer, why in missing.items():
        console.print(f"[yellow]Without {title_of(peer)}:[/] {why}", highlight=False)
