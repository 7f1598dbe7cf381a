"""What commands print alike: tables beside peers, and the bar of what is counted."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from telegrad.tools.bench.peers import title_of


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
