"""``telegrad report``, as its tests call it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def run() -> Callable[..., object]:
    """Calls the command with the given arguments; returns typer's Result."""
    import typer
    from typer.testing import CliRunner

    from telegrad.tools.cli.report import report

    app = typer.Typer()
    app.command()(report)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
