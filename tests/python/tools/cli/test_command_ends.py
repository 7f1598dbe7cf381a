"""How every command ends before its time, and where its output cannot be written."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("rich")
pytest.importorskip("typer")

import typer

from telegrad.tools.cli import COMMANDS, main, make_app
from telegrad.tools.cli.interrupts import signals_as_interrupts


def _interrupted(function: Callable[..., None], by: signal.Signals) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*_: Any, **__: Any) -> None:
        signal.raise_signal(by)
        time.sleep(10)

    return call


@pytest.fixture
def hang_up() -> Iterator[None]:
    """As a shell of a terminal leaves it, whatever runs the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_an_interrupt_before_the_command_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """While what it needs is imported."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("telegrad.tools.cli.make_app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_command_cleans_up_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    for command in COMMANDS:
        found = getattr(importlib.import_module(command.module), command.function)
        if not isinstance(found, typer.Typer):
            module = importlib.import_module(command.module)
            monkeypatch.setattr(module, command.function, _interrupted(found, number))
            continue
        for inner in found.registered_commands:
            monkeypatch.setattr(inner, "callback", _interrupted(inner.callback, number))
    app = make_app()
    apps = [app, *(group.typer_instance for group in app.registered_groups)]
    calls = [one.callback for each in apps for one in each.registered_commands]
    assert len(calls) > len(COMMANDS)
    for call in calls:
        with pytest.raises(typer.Exit) as ended:
            call()
        assert ended.value.exit_code == 130, call


@pytest.mark.usefixtures("hang_up")
def test_a_second_hang_up_does_not_stop_the_clean_up() -> None:
    with signals_as_interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.usefixtures("hang_up")
def test_an_ignored_hang_up_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_as_interrupts():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


SIMULATE = ("simulate", "allreduce", "--ranks", "4", "--bytes", "1KiB", "--alpha", "2e-6", "--jobs", "1")


def _telegrad(*arguments: str, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "telegrad", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environment},
    )


@pytest.mark.parametrize("arguments", [("--help",), ("env",), SIMULATE])
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = _telegrad(*arguments, stdout=full)
    assert (done.returncode, done.stderr) == (1, "standard output cannot be written: No space left on device\n")


def test_a_closed_standard_output_is_one_line() -> None:
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m telegrad env --json >&-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 1
    assert done.stderr == "standard output is closed: leave it open, or send it to /dev/null\n"


@pytest.mark.parametrize(
    "encoding",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_what_the_encoding_has_not_is_replaced(encoding: dict[str, str]) -> None:
    done = _telegrad(*SIMULATE, **encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "?s" in done.stdout
