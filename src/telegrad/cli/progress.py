"""The bar of commands that count something: what, how many of how many, and how long."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn


def counting(console: Console, *more: ProgressColumn) -> Progress:
    """A progress bar with ``more`` columns at its end; it is gone when it is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, *more, console=console, transient=True)
