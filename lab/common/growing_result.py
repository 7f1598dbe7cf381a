"""Rows of a long experiment, in their file as soon as they are known."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from telegrad.launch import LaunchError
from telegrad.tools.cli.outputs import say_file, written


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
