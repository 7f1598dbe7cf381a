"""``telegrad report``: the hang reports of all ranks, merged into one verdict; or a training's telemetry, drawn."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from telegrad.tools.cli.outputs import check_writable, say_file, written
from telegrad.tools.doctor.installation import is_installed
from telegrad.tools.report import flight_recorder, telemetry
from telegrad.tools.report.hang import HangVerdict, told_seconds, verdicts
from telegrad.tools.report.hang_files import default_folder, find
from telegrad.tools.report.hang_view import as_json, lines_of, plot, table_of

_WIDTH_OF_FILES = 160
_OLD_S = 600.0


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]... | RUN.jsonl",
            help="Where the reports lie; several for ranks of several hosts. Default: TELEGRAD_REPORT_DIR, else "
            "telegrad-reports-<uid> in the folder for temporary files. Or the file of a training's telemetry.",
            show_default=False,
        ),
    ] = None,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON, and nothing else.")] = False,
    plot_file: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            dir_okay=False,
            help="Draw the last operations of each rank into this PNG file; or the telemetry (default: RUN.png).",
        ),
    ] = None,
    flight_recorder_folder: Annotated[
        Path | None,
        typer.Option(
            "--flight-recorder",
            file_okay=False,
            help="Write the reports into this new folder in the form that torch's analyser (torchfrtrace) reads.",
        ),
    ] = None,
    communicator: Annotated[
        str | None, typer.Option(help="Only this communicator: its name stands before -rank in the files' names.")
    ] = None,
) -> None:
    """Say why a job hangs: which operation is stuck, who has not called it or called something else, who waits for
    whom.

    Each rank of telegrad writes a report when an operation runs into its time limit, and when its process gets SIGUSR1
    ([bold]kill -USR1 PID[/]). This command reads the reports of all ranks and tells the culprit.

    Given a file of [bold]telegrad.ddp.JsonLines[/] it shows a training's telemetry instead: of each tensor the
    selected entries, the compression, the residual's norm beside the gradient's and the threshold, as a table and a
    picture.

    Exit status: 0 where nothing is stuck, or nobody had waited for a second when the job was asked; 1 where something
    is stuck, 2 where there is nothing to read.
    """
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:  # a file has no edge at which to fold
        console.width = max(console.width, _WIDTH_OF_FILES)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    places = folders or [default_folder()]
    if any(place.exists() and not place.is_dir() for place in places):
        if len(places) > 1:
            raise typer.BadParameter(f"a file of telemetry goes alone: leave out all but {places[0]}")
        _report_run(console, errors, places[0], plot_file, as_json_text)
        return
    check_writable(plot_file, "--plot")
    try:
        found = find(places)
    except OSError as error:
        hint = "" if folders else ": no rank has written a report here; give the folder, or set TELEGRAD_REPORT_DIR"
        errors.print(f"{error.filename}: {error.strerror}{hint}", markup=False)
        raise typer.Exit(2) from error
    known = sorted({one.communicator for one in found.reports})
    current, stale = verdicts(one for one in found.reports if communicator in (None, one.communicator))
    if not current:
        for note in found.notes:
            errors.print(note, markup=False)
        where = ", ".join(map(str, places))
        what = f"no report of communicator {communicator}" if communicator else "no report"
        others = f"; there are reports of {', '.join(known)}" if known else ""
        errors.print(f"{what} in {where}{others}", markup=False)
        raise typer.Exit(2)
    if as_json_text:
        typer.echo(json.dumps(as_json(current, stale, found.notes), indent=1, allow_nan=False))
    else:
        _show(console, current, stale, found.notes)
        age_s = time.time() - max(one.written_unix_s for one in found.reports)
        if age_s > _OLD_S:
            console.print(f"note: the latest report was written {told_seconds(age_s)} ago: is it of this hang?")
    if plot_file is not None:
        _plot(current[0], plot_file)
        errors.print(f"plot of communicator {current[0].communicator}: {plot_file}", markup=False)
    if flight_recorder_folder is not None:
        _write_flight_recorder(errors, current, flight_recorder_folder)
    if any(verdict.kind not in ("nothing", "running") for verdict in current):
        raise typer.Exit(1)


def _show(console: Console, current: list[HangVerdict], stale: list[HangVerdict], notes: list[str]) -> None:
    for verdict in current:
        sentence, *more = lines_of(verdict)
        console.print(sentence, markup=False, style="bold")
        for line in more:
            console.print(line, markup=False)
        console.print(table_of(verdict), soft_wrap=False)
    if stale:
        latest = stale[0].communicator
        what = (
            f"communicator {latest} of an earlier job is left out: --communicator {latest} shows it"
            if len(stale) == 1
            else f"{len(stale)} communicators of earlier jobs are left out: --communicator ID shows one (the latest of "
            f"them is {latest}), --json names all"
        )
        console.print(f"note: {what}", markup=False, style="dim")
    for note in notes:
        console.print(f"note: {note}", markup=False)


def _plot(verdict: HangVerdict, path: Path) -> None:
    try:
        plot(verdict, path)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"needs {error.name}: pip install 'telegrad[cli]'", param_hint="--plot") from error
    except OSError as error:
        raise typer.BadParameter(str(error), param_hint="--plot") from error


def _write_flight_recorder(console: Console, current: list[HangVerdict], folder: Path) -> None:
    """Into ``folder`` itself, or, of several communicators, each into a folder of its own there."""
    for verdict in current:
        own = folder if len(current) == 1 else folder / _as_file_name(verdict.communicator)
        try:
            written, notes = flight_recorder.write(verdict, own)
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint="--flight-recorder") from error
        for note in notes:
            console.print(f"note: {note}", markup=False)
        incomplete = "" if len(written) == verdict.world_size else " --allow-incomplete-ranks"
        console.print(
            f"{len(written)} dumps: torchfrtrace {own} --prefix {flight_recorder.PREFIX}{incomplete}", markup=False
        )


def _as_file_name(text: str) -> str:
    """Reports come from anywhere: no name may lead out of the folder."""
    return "".join(character if character.isalnum() else "_" for character in text)[:64] or "_"


def _report_run(console: Console, errors: Console, file: Path, plot_file: Path | None, as_json_text: bool) -> None:
    """Prints the table (or JSON) and draws the picture, by default beside ``file``, where tensors were compressed.
    Exit status 2 if it is no telemetry, or has nothing of the picture that was asked for."""
    check_writable(plot_file, "--plot")
    target = plot_file or file.with_suffix(".png")
    if target.resolve() == file.resolve():
        errors.print(f"{file} is what is read: give the picture another path, by --plot", markup=False)
        raise typer.Exit(2)
    try:
        run = telemetry.read(file)
    except OSError as error:
        errors.print(f"{file}: {error.strerror}", markup=False)
        raise typer.Exit(2) from error
    except ValueError as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(2) from error
    if as_json_text:
        typer.echo(json.dumps(telemetry.as_json(run), indent=1, allow_nan=False))
    elif run.names:
        console.print(telemetry.table_of(run), soft_wrap=False)
    else:
        console.print(telemetry.title_of(run), markup=False)
    if not run.names:
        errors.print("no tensor was compressed in these steps: there is nothing to draw", markup=False)
        if plot_file is not None:
            raise typer.Exit(2)
        return
    if plot_file is None and not is_installed("matplotlib"):
        errors.print("no picture: it needs matplotlib; pip install 'telegrad[cli]'", markup=False)
        return
    with written(errors, target):
        telemetry.plot(run, target)
    say_file(errors, "plot", target)
