"""How a command ends before its time: by Ctrl-C, or by SIGTERM, which counts as one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import typer
from rich.console import Console

_STATUS = 130  # what shells expect of an interrupted command


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within it, SIGTERM raises ``KeyboardInterrupt`` like Ctrl-C does, so that all clean-up happens."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def ended_by_interrupt(console: Console, said: str) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM end the command with ``said`` and status 130, after all clean-up."""
    try:
        with sigterm_as_interrupt():
            yield
    except KeyboardInterrupt as error:
        console.print(said, style="yellow")
        raise typer.Exit(_STATUS) from error
