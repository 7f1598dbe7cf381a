"""A study on the terminal: a table for each task, and one for each sweep; bars while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from lab.accuracy.runs import TASKS, Run, Task

Row = Mapping[str, Any]

_BEHIND = {"accuracy": "behind dense", "loss": "above dense"}


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """One for each task: a line for each method and density."""
    return [
        _table_of_task([row for row in rows if row["task"] == task])
        for task in dict.fromkeys(row["task"] for row in rows)
    ]


def sweep_table(rows: Sequence[Row], across: str) -> Table:
    """A line for each value of ``across`` (``"batch"`` or ``"ranks"``) of each method and density."""
    task = TASKS[rows[0]["task"]]
    table = _table(f"{task.about}, {rows[0]['steps']:,} steps")
    for head in (across, "method", "density", _head(task), _BEHIND[task.judged_by], "reduced density"):
        _column(table, head)
    for row in rows:
        table.add_row(f"{row[across]:,}", row["method"], _density(row), _value(row), _behind(row), _reduced(row))
    return table


def _table_of_task(rows: Sequence[Row]) -> Table:
    judged_by = rows[0]["judged_by"]
    task = TASKS[rows[0]["task"]]
    table = _table(f"{task.about}: {_about(rows[0])}")
    swept = any(len(row["rates"]) > 1 for row in rows)
    has_perplexity = judged_by == "loss" and not swept  # the result has it; with the rate there is no room
    for head in ("method", "density", *(["rate"] if swept else []), "seeds", _head(task), _BEHIND[judged_by]):
        _column(table, head)
    if has_perplexity:
        _column(table, "perplexity")
    for head in ("sent/step", "less", "travelled", "reduced density", "selected/k"):
        _column(table, head)
    for row in rows:
        sent, less = row["sent_bytes_per_step"], row["less"]
        rate = [_learning_rate(task, row)] if swept else []
        cells = [row["method"], _density(row), *rate, str(len(row["seeds"])), _value(row), _behind(row)]
        if has_perplexity:
            cells.append("–" if row["perplexity"] is None else f"{row['perplexity']:.3f}")
        cells += [
            "–" if sent is None else f"{sent / 1e3:,.1f} kB",
            "–" if less is None else f"{less:.1f}x",
            _share(row["travelled"]),
            _reduced(row),
            "" if not row["compressed_parameters"] or row["selected"] is None else f"{row['selected']:.2f}",
        ]
        table.add_row(*cells)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _column(table: Table, head: str) -> None:
    table.add_column(head, justify="left" if head == "method" else "right", no_wrap=True)


def _about(row: Row) -> str:
    size = f", {row['size']}" if row["size"] != "small" else ""
    return f"{row['parameters']:,} parameters{size}, {row['ranks']} ranks, batch {row['batch']}, {row['steps']:,} steps"


def _density(row: Row) -> str:
    return f"{row['density'] * 100:g} %" if row["compressed_parameters"] and row["density"] < 1 else ""


def _value(row: Row) -> str:
    """The mean, ± half of the range over seeds."""
    if row["value"] is None:
        return "[red]diverged[/]"
    digits = 2 if row["judged_by"] == "accuracy" else 4
    lost = sum(value is None for value in row["values"])
    spread = f" ± {(row['highest'] - row['lowest']) / 2:.{digits}f}" if len(row["values"]) > 1 + lost else ""
    return f"{row['value']:.{digits}f}{spread}" + (f" [red]({lost} diverged)[/]" if lost else "")


def _behind(row: Row) -> str:
    if row["behind_dense"] is None:
        return "–"
    return f"{row['behind_dense']:+.2f}" + ("" if row["judged_by"] == "accuracy" else " %")


def _reduced(row: Row) -> str:
    if not row["compressed_parameters"]:
        return ""
    return _share(row["reduced_density"])


def _share(of: float | None) -> str:
    return "–" if of is None else f"{of * 100:.3g} %"


def _head(task: Task) -> str:
    return "top-1 (%)" if task.judged_by == "accuracy" else f"loss (nats/{task.unit})"


def _learning_rate(task: Task, row: Row) -> str:
    """That a method does best with. At an end of the sweep a better one may lie beyond."""
    rates = [float(rate) for rate in row["rates"]]
    at_end = len(rates) > 1 and row["rate"] in (min(rates), max(rates))
    return f"{row['rate'] * task.learning_rate:g}" + (" (end)" if at_end else "")


class StudyProgress:
    """A bar for the study and one for each process; a line for each run that is over if the output is no terminal."""

    def __init__(self, console: Console, runs: Sequence[Run], jobs: int) -> None:
        self._console = console
        self._runs = {run.name: run for run in runs}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._all = self._bars.add_task("runs", total=len(runs))
        self._of_worker: list[TaskID] = [self._bars.add_task("", total=None, visible=False) for _ in range(jobs)]
        self._over = 0

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, worker: int, message: Mapping[str, Any]) -> None:
        """A process has said that it begins, goes on with or ends a run."""
        run, bar = self._runs[message["run"]], self._of_worker[worker]
        if message["kind"] == "begin":
            self._bars.reset(bar, total=run.steps, completed=message["step"], description=run.name, visible=True)
        self._bars.update(bar, completed=message["step"])
        if message["kind"] == "end":
            self._over += 1
            self._bars.update(self._all, completed=self._over)
            if not self._console.is_terminal:
                self._console.print(f"{self._over} of {len(self._runs)}: {run.name}", soft_wrap=True, highlight=False)
