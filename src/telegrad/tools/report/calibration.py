"""How a calibration looks (``telegrad.tuning.calibration.to_data``): its costs, its table, its plot."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from telegrad.cost import ALLREDUCE_ALGORITHMS, DEVICE_ALGORITHMS, Choice, DeviceTuning, Tuning
from telegrad.tools.bench.plan import text_of
from telegrad.tools.report.durations import duration

Row = Mapping[str, Any]


def costs_text(tuning: Tuning, round_s: float) -> str:
    """The costs in one line, and how well they fit."""
    costs = tuning.costs
    rate = f" ({8e-9 / costs.beta_s_per_byte:.3g} Gbit/s)" if costs.beta_s_per_byte else ""
    return (
        f"α {duration(costs.alpha_s)} (an empty round: {duration(round_s)}), "
        f"β {costs.beta_s_per_byte * 1e9:.3g} ns/B{rate}, "
        f"β in exchange {costs.beta_exchange_s_per_byte * 1e9:.3g} ns/B, γ {costs.gamma_s_per_byte * 1e9:.3g} ns/B; "
        f"messages are {tuning.residual * 100:.0f} % off these (median)"
    )


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per size; the choice is bold. A dash: not measured there, hopeless."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    table.add_column("size", justify="right")
    names = [name for name in ALLREDUCE_ALGORITHMS if any(row["algorithm"] == name for row in rows)]
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("choice / best", justify="right")
    for size, group in itertools.groupby(rows, key=lambda row: row["bytes"]):
        of = {row["algorithm"]: row for row in group}
        ratio = next((row["ratio_to_best"] for row in of.values() if row["chosen"]), None)
        cells = [_cell(of.get(name)) for name in names]
        table.add_row(text_of(size), *cells, "–" if ratio is None else f"{ratio:.2f}")
    return table


def device_table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per size: what each way took, and what its line says; the choice is bold."""
    table = Table(title=escape(title), title_justify="left", header_style="bold")
    table.add_column("size", justify="right")
    names = [name for name in DEVICE_ALGORITHMS if any(row["algorithm"] == name for row in rows)]
    for name in names:
        table.add_column(name, justify="right")
        table.add_column("fitted", justify="right")
    for size, group in itertools.groupby(rows, key=lambda row: row["bytes"]):
        of = {row["algorithm"]: row for row in group}
        cells = [cell for name in names for cell in (_cell(of.get(name)), _fitted(of.get(name)))]
        table.add_row(text_of(size), *cells)
    return table


def device_costs_text(tuning: DeviceTuning) -> str:
    """The fitted lines, and how well they fit."""
    lines = {"nccl": tuning.nccl, "host_transfer": tuning.host_transfer}
    told = [
        f"{name} {duration(cost.startup_s)} + {cost.s_per_byte * 1e9:.3g} ns/B"
        for name, cost in lines.items()
        if cost is not None
    ]
    return f"{', '.join(told)}; sums are {tuning.residual * 100:.0f} % off these (median)"


def _fitted(row: Row | None) -> str:
    return "–" if row is None else duration(row["fitted_s"])


def _cell(row: Row | None) -> str:
    if row is None:
        return "–"
    text = duration(row["median_s"])
    return f"[bold]{text}[/]" if row["chosen"] else text


def plot(found: Mapping[str, Any], title: str, path: Path) -> None:
    """Left: the messages' times as points, the fitted costs as lines. Right: each algorithm's time against the vector's
    size, on the colour of the one that is chosen there; beside it the same of device tensors, if they were measured,
    with the fitted lines. As PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tuning = Tuning.from_data(found["tuning"])
    pictures = 3 if found["device_rows"] else 2
    figure, drawn = pyplot.subplots(1, pictures, figsize=(6.5 * pictures, 5), layout="constrained")
    _draw_messages(drawn[0], found, tuning)
    _draw_algorithms(drawn[1], found["rows"], tuning)
    if pictures == 3:
        _draw_device_sums(drawn[2], found["device_rows"], tuning)
    for axes, label in zip(drawn, ("bytes of a message", "bytes of the vector", "bytes of the vector"), strict=False):
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds (median)")
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_messages(axes: Any, found: Mapping[str, Any], tuning: Tuning) -> None:
    costs = tuning.costs
    exchange_s_per_byte = costs.beta_exchange_s_per_byte + costs.gamma_s_per_byte
    lines = {
        "one_way": (found["message_s"], costs.beta_s_per_byte, "one way: β, and what a message takes besides"),
        "exchange": (costs.alpha_s, exchange_s_per_byte, "exchange and addition: α, β in exchange + γ"),
    }
    for number, (kind, (intercept_s, slope, label)) in enumerate(lines.items()):
        points = sorted((probe["bytes"], probe["median_s"]) for probe in found["probes"] if probe["kind"] == kind)
        sizes = [size for size, _ in points]
        axes.plot(*zip(*points, strict=True), "o", color=f"C{number}")
        axes.plot(sizes, [intercept_s + size * slope for size in sizes], color=f"C{number}", label=label)
    axes.set_title(f"messages and fitted costs; {tuning.residual * 100:.0f} % off (median)")


def _draw_device_sums(axes: Any, rows: Sequence[Row], tuning: Tuning) -> None:
    measured = tuning.on_device
    assert measured is not None
    colours = {name: f"C{number}" for number, name in enumerate(DEVICE_ALGORITHMS)}
    for name, colour in colours.items():
        points = sorted((row["bytes"], row["median_s"], row["fitted_s"]) for row in rows if row["algorithm"] == name)
        if points:
            sizes, medians, lines = zip(*points, strict=True)
            axes.plot(sizes, medians, "o", color=colour)
            axes.plot(sizes, lines, color=colour, label=name)
    _colour_choices(axes, rows, measured.choices, colours)
    axes.set_title(f"on {measured.device}, on the colour of the choice; {measured.residual * 100:.0f} % off (median)")


def _draw_algorithms(axes: Any, rows: Sequence[Row], tuning: Tuning) -> None:
    colours = {name: f"C{number}" for number, name in enumerate(ALLREDUCE_ALGORITHMS)}
    for name, colour in colours.items():
        points = sorted((row["bytes"], row["median_s"]) for row in rows if row["algorithm"] == name)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name)
    _colour_choices(axes, rows, tuning.allreduce.choices, colours)
    axes.set_title("algorithms, on the colour of the choice")


def _colour_choices(axes: Any, rows: Sequence[Row], choices: Sequence[Choice], colours: Mapping[str, str]) -> None:
    ends = [row["bytes"] for row in rows]
    for choice, later in itertools.zip_longest(choices, choices[1:]):
        begin, end = max(choice.from_bytes, min(ends)), min(later.from_bytes, max(ends)) if later else max(ends)
        if begin < end:
            axes.axvspan(begin, end, color=colours[choice.algorithm], alpha=0.12, linewidth=0)
