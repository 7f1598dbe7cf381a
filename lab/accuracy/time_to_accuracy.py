"""Held-out figures of a study over time (Ok-Topk, Figures 9 and 11): its steps, each as long as an iteration of one of
the paper's models takes in the weak scaling of ``python -m lab topk --simulate``."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.accuracy.results import Result, Row
from lab.accuracy.runs import TASKS
from telegrad.tools.report.figures import dated, duration, picture

_MODEL_OF = {
    "vgg": "VGG-16",
    "resnet": "VGG-16",
    "vgg-momentum": "VGG-16",
    "lstm": "LSTM",
    "gpt": "BERT",
}  # others: none
_SCHEME_OF = {
    "dense": "dense-overlapped",
    "topk": "topkdsa",
    "topka": "topka",
    "gtopk": "gtopk",
    "gaussiank": "gaussiank",
    "oktopk": "oktopk",
    "bounded": "oktopk-bounded",
}


def read_iterations(file: Path) -> list[Row]:
    """The rows of weak scaling in a result of ``python -m lab topk --simulate --json``. Raises
    ``ValueError`` for a file that has none, and ``OSError``."""
    try:
        rows = json.loads(file.read_text())["weak_scaling"]
        if not rows or not all({"model", "scheme", "ranks", "density", "iteration_s"} <= row.keys() for row in rows):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} has no rows of weak scaling: write one with python -m lab topk --simulate --json FILE"
        ) from error
    return list(rows)


def timed(rows: Sequence[Row], iterations: Sequence[Mapping[str, Any]]) -> list[Row]:
    """For each row of a study (as ``rows_of`` makes them) whose method is a scheme of ``iterations``, and each number
    of ranks there: ``iteration_s``, and ``run_s``, all steps. ``ranks`` are those of the iteration, not of the study's
    run, and so are ``model`` and its ``model_density``."""
    found = []
    for row in rows:
        scheme, model = _SCHEME_OF.get(row["method"]), _MODEL_OF.get(row["task"])
        found += [
            {
                **{name: row[name] for name in ("task", "method", "density", "steps", "value", "judged_by")},
                "model": model,
                "model_density": one["density"],
                "scheme": scheme,
                "ranks": one["ranks"],
                "iteration_s": one["iteration_s"],
                "run_s": one["iteration_s"] * row["steps"],
            }
            for one in iterations
            if (one["model"], one["scheme"]) == (model, scheme)
        ]
    return found


def plot_over_time(
    results: Sequence[Result], times: Sequence[Row], ranks: Sequence[int], path: Path, day: str | None = None
) -> None:
    """A row of panels for each task, one for each number of ``ranks``, empty where no iteration of the task's model is
    among so many; curves are means over seeds. ``times``: what ``timed`` gave; ``day``: of the runs, today's without.
    Needs matplotlib. PNG unless the path's suffix says otherwise."""
    from lab.accuracy.plots import draw_curves

    tasks = list(dict.fromkeys(row["task"] for row in times))
    title = dated("held-out figures over virtual time; a step takes the paper's iteration", day)
    with picture(path, title, height=0.5 + 3.1 * len(tasks)) as figure:
        grid = figure.subplots(len(tasks), len(ranks), squeeze=False)
        for task, panels in zip(tasks, grid, strict=True):
            for count, panel in zip(ranks, panels, strict=True):
                here = [row for row in times if (row["task"], row["ranks"]) == (task, count)]
                if not here:
                    panel.set_axis_off()
                    continue
                seconds = {(row["method"], row["density"]): row["iteration_s"] for row in here}
                draw_curves(task, [one for one in results if one["run"]["task"] == task], panel, seconds)
                panel.set(
                    xlabel=f"time, iterations of {here[0]['model']} among {count} ranks",
                    title="\n".join(textwrap.wrap(TASKS[task].about, 34)),
                )


def times_table(times: Sequence[Row]) -> Table:
    """By task, method and density: the figure at the end, and the time of all steps by ranks."""
    ranks = sorted({row["ranks"] for row in times})
    table = Table(title="all steps, each an iteration of the paper's model (virtual time)")
    for name in ("task", "method", "density", "held-out", "iterations of", *(f"{count:,} ranks" for count in ranks)):
        table.add_column(name, justify="left" if name in ("task", "method") else "right")
    groups: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in times:
        value = "diverged" if row["value"] is None else f"{row['value']:.2f}"
        of_model = f"{row['model']}, {row['model_density']:g}"
        key = (row["task"], row["method"], f"{row['density']:g}", value, of_model)
        groups.setdefault(key, {})[row["ranks"]] = row["run_s"]
    for key, by_ranks in groups.items():
        table.add_row(*key, *(duration(by_ranks[count]) if count in by_ranks else "–" for count in ranks))
    return table
