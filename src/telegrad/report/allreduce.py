"""How the rows of ``telegrad bench allreduce`` look: as a table and as curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from telegrad.bench.peers import PEERS, title_of
from telegrad.bench.plan import ALGORITHMS, bus_factor, text_of
from telegrad.report.durations import duration

Row = Mapping[str, Any]

_AGAIN = "*"


def table_of(rows: Sequence[Row], title: str) -> Table:
    """The rows of one network: a line for each of ours and for each peer, by size. What is fastest is bold."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    present = [peer for peer in PEERS if any(row[f"{peer}_median_s"] is not None for row in rows)]
    ratios = [f"to\n{title_of(peer)}" for peer in present]
    for name in ("median", "p90", "algbw\nGB/s", "busbw\nGB/s", "sent/\nrank", "of\nbound", *ratios, "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for size, group in itertools.groupby(rows, key=lambda row: int(row["bytes"])):
        lines = [*_lines_of(list(group), present)]
        fastest = min(seconds for seconds, _ in lines)
        for number, (seconds, cells) in enumerate(lines):
            shown = "" if number else text_of(size)
            table.add_row(shown, *cells, style="bold" if seconds == fastest else None)
        table.add_section()
    if any(row["measured_again"] for row in rows):
        table.caption = f"{_AGAIN} auto looked slow here: measured again at the end, with more samples"
        table.caption_justify = "left"
    return table


def _lines_of(group: Sequence[Row], present: Sequence[str]) -> Iterator[tuple[float, list[str]]]:
    """Median and cells of each contender at one size."""
    for row in group:
        bound_s = row["bound_s"]
        yield (
            row["median_s"],
            [
                _name_of(row) + (_AGAIN if row["measured_again"] else ""),
                *_speed(row, row["median_s"], row["p90_s"]),
                text_of(row["wire_bytes"]),
                _share(row["median_s"], bound_s),
                *(_ratio(row[f"ratio_to_{peer}"]) for peer in present),
                str(row["wrong"]),
            ],
        )
    for peer in present:
        row = group[0]  # all of a size have the same
        median_s, p90_s = row[f"{peer}_median_s"], row[f"{peer}_p90_s"]
        if median_s is None:
            continue
        yield (
            median_s,
            [
                title_of(peer),
                *_speed(row, median_s, p90_s),
                "–",
                _share(median_s, row["bound_s"]),
                *("–" for _ in present),
                str(row[f"{peer}_wrong"]),
            ],
        )


def _name_of(row: Row) -> str:
    return f"{row['algorithm']} ({row['chosen']})" if row["chosen"] else row["algorithm"]


def _speed(row: Row, median_s: float, p90_s: float) -> list[str]:
    algbw = row["bytes"] / median_s
    busbw = algbw * bus_factor(row["ranks"])
    return [duration(median_s), duration(p90_s), *(f"{each / 1e9:.4f}" for each in (algbw, busbw))]


def _share(seconds: float, bound_s: float | None) -> str:
    return "–" if bound_s is None else f"{bound_s / seconds:.1%}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Median time against size, as PNG: a panel per network, in it a curve per algorithm and one per peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure, panels = pyplot.subplots(
        1, len(networks), figsize=(2 + 6 * len(networks), 5), layout="constrained", squeeze=False
    )
    for axes, network in zip(panels[0], networks, strict=True):
        _draw(axes, [row for row in rows if row["network"] == network])
        axes.set_title(network)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bounds_of(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """Size and bound in seconds, of full floats by ``""`` and of wires that send less by their names: such that round
    to as many bits share a line."""
    by_bits: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        points = {(row["bytes"], row["bound_s"]) for row in rows if row["algorithm"] == name}
        if bounds := tuple(sorted((size, bound) for size, bound in points if bound is not None)):
            by_bits.setdefault(bounds, []).append(name)
    return {
        ", ".join(name for name in names if name not in ALGORITHMS): list(bounds) for bounds, names in by_bits.items()
    }


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        points = [(row["bytes"], row["median_s"]) for row in rows if row["algorithm"] == algorithm]
        style = {"linewidth": 3, "alpha": 0.4} if algorithm == "auto" else {"linewidth": 1}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=f"telegrad {algorithm}", **style)
    for peer, marker in zip(PEERS, "sD", strict=True):
        medians = {row["bytes"]: row[f"{peer}_median_s"] for row in rows}
        points = [(size, median_s) for size, median_s in medians.items() if median_s is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, linestyle="--", label=title_of(peer))
    for names, bounds in _bounds_of(rows).items():
        label = f"bound of {names}" if names else "bound"
        axes.plot(*zip(*bounds, strict=True), color="0.5" if names else "black", linestyle=":", label=label)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds (median)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
