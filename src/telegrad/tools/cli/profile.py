"""``telegrad profile``: when the gradients of a model come, from a few steps of training on this machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from telegrad.synchronizer.trace import Trace
from telegrad.tools.bench.plan import text_of
from telegrad.tools.cli.options import refuse_given
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, say_file, table_console, written
from telegrad.tools.cli.workload_options import DeviceOption, as_bad_parameter, chosen_device
from telegrad.tools.report.figures import BLUE, duration, ink_of, picture

# The largest and the slowest gradients as tables, and a plot of the bytes that are there as time passes.

_LABELLED = 5


def summary_of(trace: Trace) -> str:
    """One sentence."""
    return (
        f"{trace.about}: forward pass {duration(trace.forward_s)}, backward pass {duration(trace.backward_s)}, "
        f"{len(trace.names)} gradients, {text_of(trace.bytes)}"
        + (f", a step of the optimizer {duration(trace.rest_s)}" if trace.rest_s else "")
    )


def tables_of(trace: Trace, most: int = 10) -> list[Table]:
    """Two, of at most so many gradients: the largest, and those that the backward pass takes longest for."""
    places = range(len(trace.names))
    largest = sorted(places, key=lambda place: -trace.sizes[place])[:most]
    slowest = sorted(places, key=lambda place: -trace.backward_times[place])[:most]
    return [_table(trace, "largest gradients", largest), _table(trace, "slowest gradients", slowest)]


def _table(trace: Trace, title: str, places: list[int]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("parameter", overflow="fold")
    for name in ("place", "bytes", "of all", "after the last", "of the pass", "there after"):
        table.add_column(name, justify="right", no_wrap=True)
    there = [*accumulate(trace.backward_times)]
    for place in places:
        table.add_row(
            trace.names[place],
            str(place),
            text_of(trace.sizes[place]),
            _share(trace.sizes[place], trace.bytes),
            duration(trace.backward_times[place]),
            _share(trace.backward_times[place], trace.backward_s),
            duration(there[place]),
        )
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else "–"


def plot(trace: Trace, path: Path) -> None:
    """The bytes of the gradients that are there, against the time since the backward pass began; the largest ones are
    named. The format is that of the path's suffix; PNG without one."""
    at_ms = [second * 1e3 for second in accumulate(trace.backward_times)]
    held = [size / (1 << 20) for size in accumulate(trace.sizes)]
    with picture(path, summary_of(trace), height=4.2) as figure:
        axes = figure.subplots()
        axes.step([0.0, *at_ms], [0.0, *held], where="post", color=BLUE)
        for place in sorted(range(len(held)), key=lambda place: -trace.sizes[place])[:_LABELLED]:
            point = at_ms[place], held[place]
            left = at_ms[place] < 0.2 * at_ms[-1]  # no room before it
            offset = {
                "xytext": (4 if left else -4, 3),
                "textcoords": "offset points",
                "ha": "left" if left else "right",
            }
            axes.annotate(trace.names[place].replace("$", r"\$"), point, color=ink_of(BLUE), **offset)
        axes.set(xlabel="ms since the backward pass began", ylabel="MiB of gradients that are there")


def profile(
    context: typer.Context,
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="What makes the model, such as mypackage.models:make_model or models.py:make_model.",
        ),
    ],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Passed to the function as batch=.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=200, help="Steps whose medians are taken.")] = 20,
    skip: Annotated[int, typer.Option(min=0, help="Steps before them that are left out.")] = 3,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that torch computes with.")] = 1,
    optimizer: Annotated[
        Literal["adamw", "adam", "sgd", "sgd-momentum"],
        typer.Option(help="Whose step is timed too, as torch makes it without options."),
    ] = "adamw",
    meta: Annotated[
        bool,
        typer.Option(
            "--meta",
            help="Run nothing: take shapes from torch's meta tensors, and count what --device takes for each "
            "operation. A model of a billion parameters takes seconds.",
        ),
    ] = False,
    device: DeviceOption = "v100",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write the trace here: Trace.from_json() reads it."),
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot-file", dir_okay=False, help="Draw when gradients come into this PNG file.")
    ] = None,
) -> None:
    """Train a model for a few steps and say when each gradient comes: what plans are made from.

    MODULE:FUNCTION returns a model and its loss of one batch:

    [bold]def make_model(batch=32):[/]

    [bold]    x, y = torch.randn(batch, 784), torch.randint(10, (batch,))[/]

    [bold]    model = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))[/]

    [bold]    return model, lambda model: torch.nn.functional.cross_entropy(model(x), y)[/]

    For a model that is too large for this machine: [bold]--meta --device h100[/].

    Nothing is sent. telegrad.synchronizer.merge plans with the trace in --json; in a job, Synchronizer takes its own.
    """
    console = table_console()
    check_all_writable({"--json": json_file, "--plot-file": plot_file})
    if meta:
        refuse_given(context, ("steps", "skip", "threads", "optimizer"), "--meta runs no step")
    else:
        refuse_given(context, ("device",), "without --meta this machine computes")
    chosen = chosen_device(device)
    try:
        import torch

        from telegrad.tools.bench import model_profile
    except ImportError as error:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[torch]'") from error
    if meta:
        with as_bad_parameter("MODULE:FUNCTION"):
            made = model_profile.open_factory(factory)
            trace = model_profile.profile_on_meta(made, batch, chosen)
            trace = replace(
                trace,
                about=f"{factory}, counted for {chosen.name}",
                samples=model_profile.samples_of(made, batch),
            )
        _show(console, trace, json_file, plot_file)
        console.print(chosen.about, style="dim", highlight=False, markup=False)
        return
    torch.set_num_threads(threads)
    with counting(console) as bar, as_bad_parameter("MODULE:FUNCTION"):
        shown = bar.add_task("making the model", total=skip + steps)
        opened = model_profile.open_factory(factory)
        model, loss = model_profile.make(opened, batch)
        bar.update(shown, description="training")
        trace = model_profile.profile(
            model, loss, steps=steps, skip=skip, optimizer=optimizer, on_step=lambda: bar.advance(shown)
        )
        samples = model_profile.samples_of(opened, batch)
        trace = replace(trace, samples=samples, about=f"{trace.about}, with {optimizer}")
    _show(console, trace, json_file, plot_file)


def _show(console: Console, trace: Trace, json_file: Path | None, plot_file: Path | None) -> None:
    for table in tables_of(trace):
        console.print(table)
    console.print(summary_of(trace), highlight=False, markup=False)
    if json_file is not None:
        with written(console, json_file):
            json_file.write_text(trace.to_json() + "\n")
        say_file(console, "trace", json_file)
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(trace, plot_file)
