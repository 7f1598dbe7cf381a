"""How a command ends before its time: by Ctrl-C, or by SIGTERM, which counts as one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import typer
from rich.console import Console

_STATUS = 130  # what shells expect of an interrupted command


@contextlib.contextmanager
def ended_by_interrupt(console: Console, said: str) -> Iterator[None]:
    """Within it, Ctrl-C and SIGTERM end the command with ``said`` and status 130, after all clean-up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        console.print(said, style="yellow")
        raise typer.Exit(_STATUS) from error
    finally:
        signal.signal(signal.SIGTERM, before)
