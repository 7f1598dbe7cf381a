"""``telegrad profile``: when the gradients of a model come, from a few steps of training on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from telegrad.synchronizer.trace import Trace
from telegrad.tools.cli.console import counting, table_console
from telegrad.tools.cli.outputs import check_all_writable, say_file, written
from telegrad.tools.report.model_profile import plot, summary_of, tables_of


def profile(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="What makes the model, such as mypackage.models:make_model or models.py:make_model; or one of "
            "[bold]demo:small[/], [bold]demo:large[/], [bold]demo:mixed[/].",
        ),
    ],
    batch: Annotated[
        int | None, typer.Option(min=1, help="Passed to the function as batch=.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=200, help="Steps whose medians are taken.")] = 20,
    skip: Annotated[int, typer.Option(min=0, help="Steps before them that are left out.")] = 3,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="Threads that torch computes with.")] = 1,
    most: Annotated[int, typer.Option("--top", min=1, help="Gradients in each table.")] = 10,
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

    Nothing is sent. telegrad.synchronizer.merge plans with the trace in --json; in a job, Synchronizer takes its own.
    """
    console = table_console()
    check_all_writable({"--json": json_file, "--plot-file": plot_file})
    try:
        import torch

        from telegrad.tools.bench import model_profile
    except ImportError as error:
        raise typer.BadParameter("torch is not installed: pip install 'telegrad[torch]'") from error
    torch.set_num_threads(threads)
    with counting(console) as bar:
        shown = bar.add_task("making the model", total=skip + steps)
        try:
            model, loss = model_profile.make(model_profile.open_factory(factory), batch)
            bar.update(shown, description="training")
            trace = model_profile.profile(model, loss, steps=steps, skip=skip, on_step=lambda: bar.advance(shown))
        except model_profile.FactoryError as error:
            raise typer.BadParameter(str(error), param_hint="MODULE:FUNCTION") from error
    _show(console, trace, most, json_file, plot_file)


def _show(console: Console, trace: Trace, most: int, json_file: Path | None, plot_file: Path | None) -> None:
    for table in tables_of(trace, most):
        console.print(table)
    console.print(summary_of(trace), highlight=False, markup=False)
    if json_file is not None:
        with written(console, json_file):
            json_file.write_text(trace.to_json() + "\n")
        say_file(console, "trace", json_file)
    if plot_file is not None:
        with written(console, plot_file):
            plot(trace, plot_file)
        say_file(console, "plot", plot_file)
