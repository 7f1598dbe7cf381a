"""``telegrad report``: the hang reports of all ranks, merged into one verdict; or a training's telemetry, drawn."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from telegrad.tools.cli.outputs import check_writable, say_file, written
from telegrad.tools.doctor.installation import is_installed
from telegrad.tools.report import telemetry
from telegrad.tools.report.hang import HangVerdict, Lane, told_ranks, told_seconds, verdicts
from telegrad.tools.report.hang_files import Operation, default_folder, find

# A hang as a sentence and a table, and as JSON.

_LEFT_OUT_OF_TABLE = 64
_COLUMNS = ("rank", "host:pid", "done/calls", "operation", "since", "waits for", "sends to", "remark")
_ALWAYS = ("rank", "host:pid", "done/calls")
_WHOLE = ("rank", "host:pid", "done/calls", "operation", "since")
_STATES = {"running": "", "completed": ", done", "failed": ", failed"}
_NUMBERS = ("rank", "done/calls", "since")


def lines_of(verdict: HangVerdict) -> list[str]:
    """The sentence and what belongs to it, as plain lines without markup."""
    return [verdict.sentence + ".", *(f"{text}." for text in verdict.details), *(f"note: {n}" for n in verdict.notes)]


def table_of(verdict: HangVerdict) -> Table:
    """A line per rank; culprits are bold. Of more than 64 ranks, those of whom nothing is special are left out; so are
    columns in which nothing stands.
    """
    latest_s = max((lane.report.written_unix_s for lane in verdict.lanes if lane.report), default=0.0)
    shown = [lane for lane in verdict.lanes if verdict.world_size <= _LEFT_OUT_OF_TABLE or _special(lane, verdict)]
    rows = {lane.rank: _cells(lane, verdict, latest_s) for lane in shown}
    columns = [name for name in _COLUMNS if name in _ALWAYS or any(row[name] for row in rows.values())]
    table = Table(
        title=f"communicator {escape(verdict.communicator)}, {verdict.world_size} ranks",
        title_justify="left",
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name in _WHOLE, overflow="fold")
    for rank, row in rows.items():
        style = "bold red" if rank in verdict.culprits else None
        table.add_row(*(escape(row[name]) for name in columns), style=style)
    if len(shown) < len(verdict.lanes):
        table.caption = f"{len(verdict.lanes) - len(shown)} more ranks are as the others"
    return table


def _special(lane: Lane, verdict: HangVerdict) -> bool:
    ordinary = lane.rank not in verdict.culprits and lane.report is not None
    return not ordinary or lane.rank in verdict.waiting[:8]


def _cells(lane: Lane, verdict: HangVerdict, latest_s: float) -> dict[str, str]:
    report = lane.report
    row = dict.fromkeys(_COLUMNS, "")
    row["rank"] = str(lane.rank)
    row["host:pid"] = f"{lane.host or '?'}:{lane.pid if lane.pid is not None else '?'}"
    called = f"{'' if lane.exact else '≥ '}{lane.called}"
    row["done/calls"] = f"{report.completed if report else '?'}/{called}"
    if report is None:
        row["operation"] = "no report" + (f", {lane.state}" if lane.state else "")
        return row
    if operation := last_of(lane, verdict.tag):
        row["operation"] = f"{operation.tag} {operation.operation}" + _STATES[operation.state]
        row["since"] = told_seconds(operation.called_s_ago)
        row["waits for"] = _few(operation.waits_for)
        row["sends to"] = _few(operation.sends_to)
    remarks = [report.failure.error] if report.failure else []
    if _age(lane, latest_s) >= 1:
        remarks.append(f"written {told_seconds(_age(lane, latest_s))} earlier")
    row["remark"] = ", ".join(remarks)
    return row


def _age(lane: Lane, latest_s: float) -> float:
    return latest_s - lane.report.written_unix_s if lane.report else 0.0


def _few(ranks: Sequence[int]) -> str:
    return told_ranks(ranks).split(" ", 1)[1] if ranks else ""


def last_of(lane: Lane, tag: int | None) -> Operation | None:
    """What the rank says of the operation in question, else its last one."""
    if lane.report is None:
        return None
    stuck = lane.report.at(tag) if tag is not None else None
    return stuck or (lane.report.operations[-1] if lane.report.operations else None)


def as_json(current: Sequence[HangVerdict], stale: Sequence[HangVerdict], notes: Sequence[str]) -> dict[str, Any]:
    """``verdicts`` (the latest communicator first), ``earlier_jobs`` and ``notes``; version 1."""
    return {
        "kind": "telegrad hang verdict",
        "version": 1,
        "verdicts": [_verdict_as_json(one) for one in current],
        "earlier_jobs": [_verdict_as_json(one) for one in stale],
        "notes": list(notes),
    }


def _verdict_as_json(verdict: HangVerdict) -> dict[str, Any]:
    return {
        "communicator": verdict.communicator,
        "world_size": verdict.world_size,
        "verdict": verdict.kind,
        "culprits": verdict.culprits,
        "tag": verdict.tag,
        "call": verdict.call,
        "waiting": verdict.waiting,
        "sentence": verdict.sentence,
        "details": verdict.details,
        "notes": verdict.notes,
        "ranks": [_lane_as_json(lane, verdict.tag) for lane in verdict.lanes],
    }


def _lane_as_json(lane: Lane, tag: int | None) -> dict[str, Any]:
    operation = last_of(lane, tag)
    failure = lane.report.failure if lane.report else None
    return {
        "rank": lane.rank,
        "host": lane.host,
        "pid": lane.pid,
        "report": lane.report.why if lane.report else None,
        "called_at_least": lane.called,
        "called_is_exact": lane.exact,
        "completed": lane.report.completed if lane.report else None,
        "state_by_peers": lane.state,
        "heard_s_ago": lane.heard_s_ago,
        "failure": {"error": failure.error, "peer": failure.peer, "message": failure.message} if failure else None,
        "operation": {
            "tag": operation.tag,
            "call": operation.call,
            "state": operation.state,
            "called_s_ago": operation.called_s_ago,
            "waits_for": list(operation.waits_for),
            "sends_to": list(operation.sends_to),
        }
        if operation
        else None,
    }


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
            help="Draw the telemetry into this PNG file. Default: RUN.png.",
        ),
    ] = None,
    communicator: Annotated[
        str | None, typer.Option(help="Only this communicator: its name stands before -rank in the files' names.")
    ] = None,
) -> None:
    """Say why a job hangs: which rank is missing in which operation. Or show the telemetry of a training.

    Each rank of telegrad writes a report when an operation exceeds timeout_s, and when its process gets SIGUSR1
    ([bold]kill -USR1 PID[/]). This command reads the reports of all ranks. A rank that crashed leaves none.

    Given a file of [bold]telegrad.ddp.JsonLines[/] it shows the telemetry: of each tensor the selected entries, the
    compression, the norms of residual and gradient, and the threshold, as a table and a picture.

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
    if plot_file is not None:
        raise typer.BadParameter("hang reports have no plot: name a file of telemetry", param_hint="--plot")
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
        hint = others or ": kill -USR1 PID asks a rank that hangs; of a rank that crashed, read its log"
        errors.print(f"{what} in {where}{hint}", markup=False)
        raise typer.Exit(2)
    if as_json_text:
        typer.echo(json.dumps(as_json(current, stale, found.notes), indent=1, allow_nan=False))
    else:
        _show(console, current, stale, found.notes)
        age_s = time.time() - max(one.written_unix_s for one in found.reports)
        if age_s > _OLD_S:
            console.print(f"note: the latest report was written {told_seconds(age_s)} ago: is it of this hang?")
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
    if not run.names and not run.of_round("move"):
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
