"""``telegrad report RUN.jsonl``: what a training's telemetry says, as a table and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console

from telegrad.cli.outputs import check_writable, say_file, written
from telegrad.doctor.installation import is_installed
from telegrad.report.telemetry import as_json, read, table_of, title_of
from telegrad.report.telemetry_plot import plot


def report_run(console: Console, errors: Console, file: Path, plot_file: Path | None, as_json_text: bool) -> None:
    """Prints the table (or JSON) and draws the picture, by default beside ``file``, where tensors were compressed.
    Exit status 2 if it is no telemetry, or has nothing of the picture that was asked for."""
    check_writable(plot_file, "--plot")
    target = plot_file or file.with_suffix(".png")
    if target.resolve() == file.resolve():
        errors.print(f"{file} is what is read: give the picture another path, by --plot", markup=False)
        raise typer.Exit(2)
    try:
        run = read(file)
    except OSError as error:
        errors.print(f"{file}: {error.strerror}", markup=False)
        raise typer.Exit(2) from error
    except ValueError as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(2) from error
    if as_json_text:
        typer.echo(json.dumps(as_json(run), indent=1, allow_nan=False))
    elif run.names:
        console.print(table_of(run), soft_wrap=False)
    else:
        console.print(title_of(run), markup=False)
    if not run.names:
        errors.print("no tensor was compressed in these steps: there is nothing to draw", markup=False)
        if plot_file is not None:
            raise typer.Exit(2)
        return
    if plot_file is None and not is_installed("matplotlib"):
        errors.print("no picture: it needs matplotlib; pip install 'telegrad[cli]'", markup=False)
        return
    with written(errors, target):
        plot(run, target)
    say_file(errors, "plot", target)
