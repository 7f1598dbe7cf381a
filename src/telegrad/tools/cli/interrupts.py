"""How a command ends before its time: by Ctrl-C, or by SIGTERM or SIGHUP (its terminal is gone), which count as one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import typer
from rich.console import Console

_STATUS = 130  # what shells expect of an interrupted command


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise ``KeyboardInterrupt`` like Ctrl-C does, so that all clean-up happens. A
    SIGHUP that is ignored, as under nohup, stays so."""

    def interrupt(number: int, _: object) -> None:
        if number == signal.SIGHUP:  # the kernel and the shell may each send one: the second must not stop the clean-up
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) not in (signal.SIG_IGN, None):  # None: a library's, which Python cannot put back
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ended_by_interrupt(console: Console, said: str | Callable[[], str]) -> Iterator[None]:
    """Within it, Ctrl-C, SIGTERM and SIGHUP end the command with ``said`` and status 130, after all clean-up."""
    try:
        with signals_as_interrupts():
            yield
    except KeyboardInterrupt as error:
        console.print(said if isinstance(said, str) else said(), style="yellow", soft_wrap=True)
        raise typer.Exit(_STATUS) from error
