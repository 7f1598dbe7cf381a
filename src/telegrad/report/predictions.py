"""How the rows of ``telegrad bench predictions`` look: as a table, and as points around the line of a true prophet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from telegrad.bench.plan import text_of
from telegrad.bench.predictions import WITHIN
from telegrad.calibration.fit import CostFit
from telegrad.report.durations import duration

Row = Mapping[str, Any]

_MARKERS = "osDv^P"
_NAME_COLUMNS = 20  # longer names take several lines: so the table fits 80 columns


def name_of(row: Row) -> str:
    """A collective by name: ``allreduce ring``, ``sparse_allreduce split_allgather 1 %``."""
    percent = "" if row["density"] is None else f"{row['density'] * 100:.4g} %"
    return " ".join(part for part in (row["op"], row["algorithm"], percent) if part)


def costs_text(calibration: CostFit) -> str:
    """The calibrated costs in one line."""
    exchange = [beta for _, beta in calibration.exchange]
    return (
        f"α {duration(calibration.alpha_s)} (an empty round: {duration(calibration.round_s)}), "
        f"β {calibration.beta_s_per_byte * 1e9:.3f} ns/B ({8e-9 / calibration.beta_s_per_byte:.3f} Gbit/s), "
        f"β in exchange {min(exchange) * 1e9:.3f} … {max(exchange) * 1e9:.3f} ns/B, by length, "
        f"γ {calibration.gamma_s_per_byte * 1e9:.3f} ns/B"
    )


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per collective and size. Dim: not judged. Red: judged, and further off than it may be."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "brings: what a rank brings, of a sparse vector its entries; --json has min and p90 too"
    table.caption_justify = "left"
    table.add_column("collective", width=_NAME_COLUMNS)
    for name in ("size", "brings", "predicted", "measured", "ratio", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        name = name_of(row)
        if previous not in (None, name):
            table.add_section()
        style = "dim" if not row["judged"] else None if row["within"] else "red"
        table.add_row(
            name if name != previous else "",
            text_of(row["bytes"]),
            text_of(row["input_bytes"]),
            *(duration(row[field]) for field in ("predicted_s", "median_s")),
            f"{row['ratio']:.3f}",
            str(row["wrong"]),
            style=style,
        )
        previous = name
    return table


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Predicted against measured time, a colour per collective and a marker per number of ranks, hollow where not
    judged, with the band in which a prediction counts as right; as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(map(name_of, rows)))
    ranks = sorted({row["ranks"] for row in rows})
    markers = {count: _MARKERS[index % len(_MARKERS)] for index, count in enumerate(ranks)}
    colors = dict(zip(names, pyplot.colormaps["tab20"](range(20)), strict=False))  # there are more than ten collectives
    times = [row[field] for row in rows for field in ("predicted_s", "median_s")]
    ends = [min(times) / 1.5, max(times) * 1.5]

    figure, axes = pyplot.subplots(figsize=(8, 6.5), layout="constrained")
    below, above = ([end * (1 + sign * WITHIN) for end in ends] for sign in (-1, 1))
    axes.fill_between(ends, below, above, color="0.9")
    axes.plot(ends, ends, color="0.6", linewidth=1)
    for row in rows:
        color = colors[name_of(row)]
        axes.plot(
            row["median_s"],
            row["predicted_s"],
            marker=markers[row["ranks"]],
            markersize=6,
            color=color,
            markerfacecolor=color if row["judged"] else "none",
            linestyle="none",
        )
    legend = [Line2D([], [], color="0.9", linewidth=8, label=f"±{WITHIN * 100:.0f} %")]
    legend += [Line2D([], [], color=colors[name], marker="o", linestyle="none", label=name) for name in names]
    legend += [
        Line2D([], [], color="0.3", marker=markers[count], linestyle="none", label=f"{count} ranks") for count in ranks
    ]
    axes.legend(handles=legend, fontsize="small")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, s (median)", ylabel="predicted, s")
    axes.set_title(title)
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
