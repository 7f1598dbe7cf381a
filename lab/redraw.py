"""The pictures of the result pages, drawn again from the rows that are committed beside them: nothing is measured."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.common.programs import ROOT
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.outputs import drawn, table_console
from telegrad.tools.report.figures import dated

FOLDER = ROOT / "benchmarks" / "results"

Data = Mapping[str, Any]
Draw = Callable[[Data, str, Path], None]
"""Of a result file's content, the day of it, and the picture's path."""


def _accuracy(data: Data, day: str, path: Path) -> None:
    from lab.accuracy.plots import plot

    parts: dict[str, list[Any]] = {}
    for run in data["runs"]:
        parts.setdefault(run["part"], []).append(run)
    plot(parts, dated("held-out figures, dense and compressed", day), path)


def _accuracy_over_time(data: Data, day: str, path: Path) -> None:
    from lab.accuracy.study import MAIN
    from lab.accuracy.time_to_accuracy import plot_over_time

    runs = [run for run in data["runs"] if run["part"] == MAIN]
    plot_over_time(runs, data["times"], sorted({row["ranks"] for row in data["times"]})[:2], path, day)


def _times_to_losses(data: Data, day: str, path: Path) -> None:
    from lab.accuracy.time_to_loss import plot

    plot(data["curves"], dated("held-out losses over time", day), path)


def _outer(data: Data, day: str, path: Path) -> None:
    from lab.outer import plot

    rows = data["rows"]
    plot(
        rows,
        dated(f"outer loops at equal tokens, {rows[0]['replicas']} replicas, {rows[0]['steps']:,} steps", day),
        path,
    )


def _adamw(data: Data, day: str, path: Path) -> None:
    from lab.adamw import picture_title, plot

    plot(data["rows"], dated(picture_title(), day), path)


def _advice(data: Data, day: str, path: Path) -> None:
    """Rows have no forward pass: it is the share of all computation that it is in the model's trace."""
    from telegrad.tools.advise.step import GroupTimes, Step
    from telegrad.tools.advise.workload import DEVICES, of_model
    from telegrad.tools.cli.advise import segments_of
    from telegrad.tools.report.figures import Timeline, draw_timelines

    trace = of_model(data["model"], next(iter(DEVICES.values()))).trace
    timelines = []
    for row in data["rows"]:
        forward_s = row["compute_s"] * trace.forward_s / trace.compute_s
        groups = tuple(GroupTimes(**group) for group in row["groups"])
        step = Step(row["compute_s"], forward_s, row["compute_s"] - forward_s, groups, row["step_s"])
        chosen = row["scheme"] == data["recommended"]
        timelines.append(Timeline(row["scheme"], segments_of(step), row["step_s"], chosen))
    network = data["network"].partition(":")[0]
    title = f"predicted training step of {data['model']}, {data['ranks']} ranks, {network}"
    draw_timelines(timelines, data["rows"][0]["compute_s"], dated(title, day), path)


def _allreduce(data: Data, day: str, path: Path) -> None:
    from lab.dense_sums import plot, title

    plot(data["rows"], dated(title(data["rows"]), day), path)


def _demo(data: Data, day: str, path: Path) -> None:
    from telegrad.tools.cli.demo import picture_title, plot

    where = f"{data['network']}, {data['machine']['gpu']}" if data["device"] == "cuda" else data["network"]
    plot(data, dated(picture_title(data, where), day), path)


def _faults(data: Data, day: str, path: Path) -> None:
    from lab.faults.command import plot, title_of

    plot(data["trials"], dated(title_of(data["trials"]), day), path)


def _linear(data: Data, day: str, path: Path) -> None:
    from lab.linear import plot

    one = data["rows"][0]
    plot(data["rows"], dated(f"logistic regression, {one['ranks']} ranks over {one['network']}", day), path)


def _linear_scaling(data: Data, day: str, path: Path) -> None:
    from lab.linear_scaling import plot

    plot(data["rows"], dated("linear models in virtual time, 1 Gbit/s", day), path)


def _measured_steps(data: Data, day: str, path: Path) -> None:
    from lab.training_step import plot

    one = data["rows"][0]
    plot(data["rows"], dated(f"training steps, {one['ranks']} ranks, {one['network']}", day), path)


def _overlap(data: Data, day: str, path: Path) -> None:
    from lab.overlap import picture_title, plot

    plot(data["rows"], dated(picture_title(data["machine"]), day), path)


def _paper_steps(data: Data, day: str, path: Path) -> None:
    from lab.paper_steps import plot

    names = ", ".join(dict.fromkeys(row["figure"] for row in data["rows"]))
    plot(data["rows"], dated(f"predicted training steps: {names}", day), path)


def _predictions(data: Data, day: str, path: Path) -> None:
    from lab.predictions import picture_title, plot

    plot(data["rows"], dated(picture_title(data["rows"]), day), path)


def _select(data: Data, day: str, path: Path) -> None:
    from lab.select import picture_title, plot

    plot(data["rows"], dated(picture_title(data["machine"].get("gpu")), day), path)


def _simulated_sparse_sweep(data: Data, day: str, path: Path) -> None:
    from lab.sparse_sweep import panels_of, picture_title, plot

    plot(panels_of(data["rows"]), dated(picture_title(data["rows"], data["network"]["name"]), day), path)


def _simulated_steps(data: Data, day: str, path: Path) -> None:
    from lab.paper_steps import plot

    title = f"simulated training steps of {data['rows'][0]['model']}, {data['network']['name']}"
    plot(data["rows"], dated(title, day), path)


def _sparse_sweep(data: Data, day: str, path: Path) -> None:
    from telegrad.tools.cli.bench_sparse import plot

    networks = ", ".join(dict.fromkeys(row["network"] for row in data["rows"]))
    plot(data["rows"], dated(f"allreduce of sparse vectors, {networks}", day), path)


def _balancing(data: Data, day: str, path: Path) -> None:
    _topk({"balancing": data["balancing"], "about": data["about"]}, day, path)


def _topk(data: Data, day: str, path: Path) -> None:
    from lab.topk.plots import picture_title, plot

    plot(data, dated(picture_title(data), day), path)


def _transfers(data: Data, day: str, path: Path) -> None:
    from lab.transfers import picture_title, plot

    plot(data["rows"], dated(picture_title(data["machine"]), day), path)


DRAWS: dict[str, Draw] = {
    "accuracy*-time": _accuracy_over_time,
    "accuracy*": _accuracy,
    "adamw*": _adamw,
    "advise*": _advice,
    "allreduce*": _allreduce,
    "demo*": _demo,
    "faults*": _faults,
    "gpu-demo": _demo,
    "gpu-overlap": _overlap,
    "gpu-select*": _select,
    "gpu-transfers": _transfers,
    "linear-scaling*": _linear_scaling,
    "linear*": _linear,
    "outer*": _outer,
    "predictions*": _predictions,
    "select": _select,
    "simulate-sparse-sweep": _simulated_sparse_sweep,
    "sparse-sweep*": _sparse_sweep,
    "time-to-loss*": _times_to_losses,
    "topk-balancing*": _balancing,
    "topk*": _topk,
    "training-step": _simulated_steps,
    "training-step-measured*": _measured_steps,
    "training-step-*": _paper_steps,
}
"""By a pattern of the file's name without its day; the first that fits."""


def draw_of(name: str) -> Draw | None:
    """What draws the picture of a result file of this name, such as ``2026-11-23-select``."""
    about = re.sub(r"^\d{4}-\d\d-\d\d-", "", name)
    return next((draw for pattern, draw in DRAWS.items() if fnmatch(about, pattern)), None)


def redraw(name: str, folder: Path, rows: Path = FOLDER) -> Path:
    """Writes the picture ``name`` into ``folder`` from the rows in the folder ``rows``. Raises ``ValueError`` for a
    name that no command draws or that has no rows."""
    draw = draw_of(name)
    if draw is None:
        raise ValueError(
            f"{name} is no result that has a picture: its name must be that of a command with --plot, such as "
            "2026-11-23-select"
        )
    file = _rows_file(name, rows)
    if file is None:
        raise ValueError(f"{name} has no rows: {rows / name}.json is missing; name another, or give --rows")
    data = json.loads(file.read_text())
    day = re.match(r"\d{4}-\d\d-\d\d", name)
    path = folder / f"{name}.png"
    draw(data, day[0] if day else data["machine"]["date"][:10], path)
    _limit_colors(path)
    return path


def _limit_colors(path: Path) -> None:
    """A picture that is committed is to be small: 256 colours take a third of the bytes, and no eye sees it."""
    from PIL import Image  # comes with matplotlib

    with Image.open(path) as full:
        picture = full.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


def _rows_file(name: str, rows: Path) -> Path | None:
    """A picture over time has the rows of the one over steps."""
    files = (rows / f"{one}.json" for one in (name, name.removesuffix("-time")))
    return next((file for file in files if file.is_file()), None)


def pictures(rows: Path = FOLDER) -> list[str]:
    """The names of all pictures in the folder ``rows``."""
    return sorted(path.stem for path in rows.glob("*.png"))


# The command


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Results, such as 2026-11-23-select; all that have a picture without.", show_default=False),
    ] = None,
    rows: Annotated[
        Path, typer.Option(file_okay=False, exists=True, help="Where the rows are, as NAME.json.")
    ] = FOLDER,
    folder: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            exists=True,
            writable=True,
            help="Where the pictures are written, as NAME.png. Default: beside the rows.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Draw the pictures of results again from their committed rows; nothing is measured.

    [bold]Example:[/] python -m lab redraw 2026-11-23-select --folder /tmp
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is not installed: pip install 'telegrad[cli]'")
    console = table_console()
    wanted = names or pictures(rows)
    for name in wanted:
        if draw_of(name) is None or _rows_file(name, rows) is None:
            known = ", ".join(one for one in pictures(rows) if draw_of(one) is not None)
            raise typer.BadParameter(f"{name} has no rows in {rows}, or no picture: use one of {known}")
    with ended_by_interrupt(console, "interrupted: some pictures were not drawn"):
        for name in wanted:
            with drawn(console, (folder or rows) / f"{name}.png"):
                redraw(name, folder or rows, rows)
