"""How the rows of ``telegrad bench allreduce`` look: as a table and as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from telegrad.bench.plan import text_of

Row = Mapping[str, Any]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per size and algorithm; the fastest algorithm of a size is bold."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("size", justify="right")
    table.add_column("algorithm")
    for name in ("median", "min", "p90", "busbw", "sent/rank", "bound", "Gloo", "ratio", "wrong"):
        table.add_column(name, justify="right")
    fastest: dict[int, float] = {}
    for row in rows:
        fastest[row["bytes"]] = min(row["median_s"], fastest.get(row["bytes"], row["median_s"]))
    previous = None
    for row in rows:
        if previous not in (None, row["bytes"]):
            table.add_section()
        ratio = row["ratio_to_gloo"]
        table.add_row(
            text_of(row["bytes"]) if row["bytes"] != previous else "",
            row["algorithm"],
            duration(row["median_s"]),
            duration(row["min_s"]),
            duration(row["p90_s"]),
            f"{row['busbw_bytes_per_s'] / 1e9:.2f} GB/s",
            text_of(row["wire_bytes"]),
            text_of(row["bound_bytes"]),
            duration(row["gloo_median_s"]),
            "–" if ratio is None else f"{ratio:.2f}",
            str(row["wrong"]),
            style="bold" if row["median_s"] == fastest[row["bytes"]] else None,
        )
        previous = row["bytes"]
    return table


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Median time against size, a curve per algorithm and one for Gloo, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        curves.setdefault(f"telegrad {row['algorithm']}", []).append((row["bytes"], row["median_s"]))
    gloo = sorted({(row["bytes"], row["gloo_median_s"]) for row in rows if row["gloo_median_s"] is not None})
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name)
    if gloo:
        axes.plot(*zip(*gloo, strict=True), marker="s", markersize=4, color="black", linestyle="--", label="Gloo")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="seconds (median)", title=title)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def duration(seconds: float | None) -> str:
    """``18.2 µs``, ``5.40 ms``, ``1.2 s``; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
