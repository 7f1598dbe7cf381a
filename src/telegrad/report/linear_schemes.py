"""How ``telegrad bench linear`` looks: a line for each scheme, and bars of where a step's time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from telegrad.report.durations import duration

Row = Mapping[str, Any]

_REFERENCES = ("gloo-dense", "cd-dense")


def schemes_table(rows: Sequence[Row], title: str) -> Table:
    """The rows of ``telegrad bench linear`` of one data set and optimiser; ratios are to Gloo's dense sum, the
    dense allgather of coordinate descent, or the first scheme."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    reference = reference_of(rows)
    columns: dict[str, Callable[[Row], str]] = {
        "a step": lambda row: duration(row["step_s"]),
        "its\ncomm.": lambda row: duration(row["step_comm_s"]),
        "epoch": lambda row: duration(row["epoch_s"]),
        f"epoch to\n{reference['scheme']}": lambda row: f"{reference['epoch_s'] / row['epoch_s']:.1f}x",
        f"comm. to\n{reference['scheme']}": lambda row: f"{reference['comm_s'] / row['comm_s']:.1f}x",
        "MB\nreceived": lambda row: _megabytes(row["received_bytes"]),
        "MB\nbound": lambda row: _megabytes(row["bound_bytes"]),
        "bound\nby": bound_by,
    }
    table.add_column("scheme", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["scheme"], *(cell(row) for cell in columns.values()))
    return table


def about_data(rows: Sequence[Row]) -> str:
    """What is known of the columns of the rows' data, and what all schemes have reached."""
    row = rows[0]
    made = (
        f"made-up rows, exponent {row['exponent']:.3f}; {row['non_empty_columns']:,} non-empty columns expected in "
        f"{row['scaled_to_rows']:,} rows, {row['columns_expected']:,} in those of the steps"
        if row["synthetic"]
        else f"{row['scaled_to_rows']:,} rows with {row['non_empty_columns']:,} non-empty columns"
    )
    met = f"{row['columns_met']:,} of {row['features']:,} met"
    steps = f"{row['steps']} steps, {row['entries_a_rank']:,.0f} entries of a rank in each"
    reached = [f"{one['objective']:.6f}" for one in rows]
    said = reached[0] if len(set(reached)) == 1 else f"{min(reached)} to {max(reached)}"
    return f"{made}; {met}; {steps}; objective {said}"


def bound_by(row: Row) -> str:
    """What most of a step's time goes to."""
    return "comm." if row["step_comm_s"] > row["step_s"] / 2 else "compute"


def reference_of(rows: Sequence[Row]) -> Row:
    """The row, of one data set and optimiser, that ratios are to."""
    return next((row for row in rows if row["scheme"] in _REFERENCES), rows[0])


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel for each data set and optimiser: a step's time by scheme, in communication and computation. The format is
    that of the path's suffix; PNG without one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sets = by_data(rows)
    figure, grid = pyplot.subplots(1, len(sets), figsize=(6.5 * len(sets), 4), layout="constrained", squeeze=False)
    figure.suptitle(title)
    for axes, alike in zip(grid.flat, sets, strict=True):
        names = [row["scheme"] for row in alike]
        comm = [row["step_comm_s"] for row in alike]
        rest = [row["step_s"] - row["step_comm_s"] for row in alike]
        axes.barh(names, comm, label="communication", color="C0")
        bars = axes.barh(names, rest, left=comm, label="computation", color="C1")
        first = reference_of(alike)["epoch_s"]  # of which a step may be another part, in coordinate descent
        labels = [f" {duration(row['step_s'])}, epoch {first / row['epoch_s']:.1f}x" for row in alike]
        axes.bar_label(bars, labels, fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set(xlabel="seconds a step", title=title_of(alike[0]))
        axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")
    pyplot.close(figure)


def by_data(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each data set and optimiser, in the order of the first ones."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["data"], row["optimizer"]), []).append(row)
    return list(found.values())


def title_of(row: Row) -> str:
    """Of the table that a row is in."""
    return f"{row['data']}, {row['optimizer'].replace('_', ' ')}"


def _megabytes(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 1e6:.2f}" if count >= 1e6 else f"{count / 1e6:.3g}"
