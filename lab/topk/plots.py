"""``python -m lab topk`` as a picture, after the figures of Ok-Topk's paper: words against ranks with both
bounds, time and what it is made of, how far results fill in, selected entries over training (its Figure 6), ξ (Figure
5), balancing (Figure 7), weak scaling (Figures 8, 10 and 12). Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.topk.tables import last_calls, names_of, reduction_s
from telegrad.tools.report.figures import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    PART_COLORS,
    TEXT_POINTS,
    bars,
    counts_across,
    grid_of,
    key_of,
    log_ticks,
    looks_of,
    merged,
    name_lines,
    picture,
    seconds_across,
)

Row = Mapping[str, Any]
Draw = Callable[[Any], None]

_PARTS = {"selection_s": "selecting", "communication_s": "communication", "reduction_s": "adding"}
_ACROSS = 2
_HIGH = 2.7  # inches of a panel


def picture_title(result: Mapping[str, Any]) -> str:
    """What the picture of a result shows."""
    about = result["about"].get("gradients", "").partition(",")[0]
    if measured := result.get("measured"):
        return f"measured top-k allreduce of {measured[0]['n']:,} elements"
    if result.get("balancing") and not result.get("rows"):
        return "what Ok-Topk's balancing of slices saves, gradients of BERT's size"
    network = result["about"].get("network", "").partition(":")[0]
    return f"simulated top-k allreduce{', ' * bool(about)}{about}{', ' * bool(network)}{network}"


def plot(result: Mapping[str, Any], title: str, path: Path) -> None:
    """``result``: as the command writes it; parts that are missing are not drawn. PNG unless the path's suffix says
    otherwise."""
    panels, grids = panels_of(result), grids_of(result)
    down = -(-len(panels) // _ACROSS)
    heights = [*([_HIGH * down] if panels else []), *(grid.height for grid in grids.values())]
    with picture(path, title, height=0.8 + sum(heights)) as figure:
        blocks = iter(figure.subfigures(max(1, len(heights)), 1, squeeze=False, height_ratios=heights or [1]).flat)
        if panels:
            for (name, draw), axes in zip(panels.items(), grid_of(next(blocks), len(panels), _ACROSS), strict=True):
                draw(axes)
                axes.set_title(name)
        for (name, grid), block in zip(grids.items(), blocks, strict=True):
            _draw_grid(block, name, grid)
        if grids:
            key_of(figure, {part: PART_COLORS[part] for part in _shown_parts(grids)})


def panels_of(result: Mapping[str, Any]) -> dict[str, Draw]:
    """Panels of curves: by title, what draws it."""
    panels: dict[str, Draw] = {}
    recorded = [row for row in result.get("rows", ()) if row.get("gradients") == "recorded"]
    patterns = [row for row in result.get("rows", ()) if row.get("gradients", "recorded") != "recorded"]
    if recorded:
        panels["words of a rank, the most of any call"] = lambda axes: _draw_words(axes, recorded)
        panels["entries of the result"] = lambda axes: _draw_fill_in(axes, last_calls(recorded))
    for name in names_of(patterns):
        own = [row for row in patterns if row["scheme"] == name]
        panels[f"words on patterns, {name}"] = lambda axes, own=own: _draw_patterns(axes, own)  # type: ignore[misc]
    if training := result.get("training"):
        panels["entries over a training run"] = lambda axes: _draw_training(axes, training)
        if any("xi" in row for row in training):
            panels["ξ of Assumption 1 over a training run"] = lambda axes: _draw_xi(axes, training)
    weak: Sequence[Row] = result.get("weak_scaling", ())
    for model in dict.fromkeys(row["model"] for row in weak):
        rows = [row for row in weak if row["model"] == model]
        panels[f"weak scaling, {model}"] = lambda axes, rows=rows: _draw_weak(axes, rows)  # type: ignore[misc]
    return panels


@dataclass(frozen=True)
class Grid:
    """Panels of bars, ``across`` in a row, with the same bars from top to bottom in all: seconds by part and name."""

    across: int
    panels: Mapping[str, Mapping[str, Mapping[str, float]]]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for bars in self.panels.values() for name in bars))

    @property
    def height(self) -> float:
        return (0.75 + 0.17 * len(self.names)) * -(-len(self.panels) // self.across) + 0.25


def grids_of(result: Mapping[str, Any]) -> dict[str, Grid]:
    """What is drawn as bars, by title."""
    grids: dict[str, Grid] = {}
    recorded = [row for row in result.get("rows", ()) if row.get("gradients") == "recorded"]
    if recorded and len(names_of(recorded)) > 1:
        last = last_calls(recorded)
        ranks = sorted({row["ranks"] for row in last})
        chosen = ranks if len(ranks) <= 4 else [ranks[place * (len(ranks) - 1) // 3] for place in range(4)]
        panels = {f"{count:,} ranks": _parts_of([row for row in last if row["ranks"] == count]) for count in chosen}
        grids["time of the last call (virtual)"] = Grid(min(4, len(panels)), panels)
    if balancing := result.get("balancing"):
        grids["split and reduce (virtual time)"] = Grid(3, _reductions(balancing))
        grids["gathering the sum (virtual time)"] = Grid(3, _gatherings(balancing))
    measured: Sequence[Row] = result.get("measured", ())
    for network, ranks in dict.fromkeys((row["network"], row["ranks"]) for row in measured):
        rows = [row for row in measured if (row["network"], row["ranks"]) == (network, ranks)]
        panels = {
            f"density {density * 100:g} %": _parts_of([row for row in rows if row["density"] == density])
            for density in dict.fromkeys(row["density"] for row in rows)
        }
        grids[f"{network}, {ranks} ranks"] = Grid(min(4, len(panels)), panels)
    return grids


def _parts_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    return {row["scheme"]: {about: row[part] or 0.0 for part, about in _PARTS.items()} for row in rows}


def _reductions(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        found.setdefault(f"{row['ranks']:,} ranks", {})[f"{row['slices']} slices"] = {"communication": reduction_s(row)}
    return found


def _gatherings(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        own = found.setdefault(f"{row['ranks']:,} ranks", {})
        own[f"{row['slices']} slices, as they are"] = {"communication": row["gather_s"]}
        own[f"{row['slices']} slices, balanced first"] = {"communication": row["balanced_gather_s"]}
    return found


def _shown_parts(grids: Mapping[str, Grid]) -> list[str]:
    bars = [one for grid in grids.values() for panel in grid.panels.values() for one in panel.values()]
    return [part for part in _PARTS.values() if any(one.get(part) for one in bars)]


def _draw_grid(block: Any, name: str, grid: Grid) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    block.suptitle(name, fontsize=10, x=0.01, ha="left")
    for place, (axes, (title, found)) in enumerate(
        zip(grid_of(block, len(grid.panels), grid.across), grid.panels.items(), strict=True)
    ):
        seconds = {
            part: [found.get(one, {}).get(part, 0.0) for one in grid.names]
            for part in _PARTS.values()
            if any(part in one for one in found.values())
        }
        bars(axes, grid.names, seconds)
        axes.tick_params(labelleft=place % grid.across == 0)
        axes.set_title(title, fontsize=TEXT_POINTS)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(EngFormatter(unit="s", sep=" "))
        if place + grid.across >= len(grid.panels):
            axes.set_xlabel("time")


def _draw_words(panel: Any, rows: Sequence[Row]) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in names_of(rows):
        most: dict[int, float] = {}
        for row in rows:
            if row["scheme"] == name:
                most[row["ranks"]] = max(most.get(row["ranks"], 0.0), row["words_max"] / row["k"])
        curves[name] = sorted(most.items())
    ranks = sorted({row["ranks"] for row in rows})
    for most_k, dashes, about in ((6, "--", "6k(P-1)/P"), (2, ":", "2k(P-1)/P")):
        panel.plot(ranks, [most_k * (one - 1) / one for one in ranks], color=BLACK, linestyle=dashes, label=about)
    _draw_curves(panel, curves, xlabel="ranks", ylabel="words / k")


def _draw_fill_in(panel: Any, rows: Sequence[Row]) -> None:
    curves = {
        name: [(row["ranks"], row["fill_in"]) for row in rows if row["scheme"] == name]
        for name in names_of(rows)
        if name != "dense"
    }
    _draw_curves(panel, curves, xlabel="ranks", ylabel="entries / k")


def _draw_patterns(panel: Any, rows: Sequence[Row]) -> None:
    curves: dict[str, list[tuple[int, float]]] = {}
    for gradients in dict.fromkeys(row["gradients"] for row in rows):
        most: dict[int, float] = {}
        for row in rows:
            if row["gradients"] == gradients:
                most[row["ranks"]] = max(most.get(row["ranks"], 0.0), row["of_bound"])
        curves[gradients] = sorted(most.items())
    panel.axhline(1.0, color=BLACK, linewidth=1)
    _draw_curves(panel, curves, xlabel="ranks", ylabel="words / (6k' + 2E)")


def _draw_training(panel: Any, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in rows]
    for key, label, color in (("selected", "selected,\nmean of ranks", BLUE), ("kept", "kept", ORANGE)):
        panel.plot(steps, [row[key] / row["k"] for row in rows], linewidth=1, label=label, color=color)
    panel.axhline(1.0, color=BLACK, linewidth=1)
    panel.set(xlabel="step", ylabel="entries / k", ylim=(0, None))
    name_lines(panel)


def _draw_xi(panel: Any, rows: Sequence[Row]) -> None:
    points = [(row["step"], row["xi"]) for row in rows if "xi" in row]
    panel.plot(*zip(*points, strict=True), marker="o", color=BLUE)
    panel.set(xlabel="step", ylabel="ξ", ylim=(0, None))


def _draw_weak(panel: Any, rows: Sequence[Row]) -> None:
    curves = {
        name: [(row["ranks"], row["iteration_s"]) for row in rows if row["scheme"] == name] for name in names_of(rows)
    }
    ranks = sorted(row["ranks"] for row in rows)
    compute_s = rows[0]["compute_s"]
    panel.plot([ranks[0], ranks[-1]], [compute_s] * 2, color=GREY, linestyle=":", label="computation")
    _draw_curves(panel, curves, xlabel="ranks", ylabel="virtual time of an iteration")
    seconds_across(panel.yaxis)


def _draw_curves(panel: Any, curves: Mapping[str, Sequence[tuple[float, float]]], **says: str) -> None:
    """Against ranks, on logarithmic axes; what lies on each other is one line."""
    curves = {name: points for name, points in curves.items() if points}
    from matplotlib.ticker import StrMethodFormatter

    looks = looks_of(list(curves))
    for alike, points in merged(curves).items():
        panel.plot(*zip(*points, strict=True), label=",\n".join(alike), **looks[alike[0]].of_line())
    panel.set(yscale="log", **says)
    log_ticks(panel.yaxis)
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    counts_across(panel, sorted({x for points in curves.values() for x, _ in points}), most=6)
    name_lines(panel)
