"""Times as text, and panels of curves on logarithmic axes, for the tables and plots of several commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def duration(seconds: float | None) -> str:
    """``18.2 µs``, ``5.40 ms``, ``1.2 s``; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


# Times against what differs between them, on logarithmic axes: a panel for each thing, a curve for each contender.

_PANELS_PER_ROW = 3
_MARKERS = "osDv^Ppx"
_DOTTED = "auto"


@dataclass(frozen=True)
class Panel:
    """``curves``: by name, points (x, seconds); ``levels``: seconds that do not depend on x; ``base``: that of the
    horizontal axis."""

    across: str
    about: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    levels: Mapping[str, float] = field(default_factory=dict)
    base: int = 10


def draw(panels: Sequence[Panel], title: str, path: Path, *, seconds: str = "seconds") -> None:
    """All panels into one picture, a name in one colour; ``auto``, which lies on one of the others, is dotted.
    ``seconds``: what the vertical axis says. The format is that of the path's suffix; PNG without one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for panel in panels for name in (*panel.curves, *panel.levels)))
    looks: dict[str, dict[str, Any]] = {
        name: {"color": f"C{place % 10}", "marker": _MARKERS[place % len(_MARKERS)], "linewidth": 1}
        for place, name in enumerate(names)
    }
    looks |= {name: {"color": "black", "linestyle": ":", "linewidth": 2} for name in names if name == _DOTTED}
    across = min(_PANELS_PER_ROW, max(1, len(panels)))
    down = max(1, -(-len(panels) // across))
    figure, grid = pyplot.subplots(down, across, figsize=(6.5 * across, 5 * down), layout="constrained", squeeze=False)
    figure.suptitle(title)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for panel, axes in zip(panels, grid.flat, strict=False):
        for name, points in panel.curves.items():
            axes.plot(*zip(*sorted(points), strict=True), markersize=4, label=name, **looks[name])
        for name, level_s in panel.levels.items():
            axes.axhline(level_s, linestyle="--", linewidth=1, label=name, color=looks[name]["color"])
        axes.set_xscale("log", base=panel.base)
        some_time = any(second > 0 for points in panel.curves.values() for _, second in points)
        axes.set(yscale="log" if some_time else "linear", xlabel=panel.across, ylabel=seconds, title=panel.about)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")
    pyplot.close(figure)
