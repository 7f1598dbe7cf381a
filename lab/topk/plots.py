"""``python -m lab topk`` as a picture, after the figures of Ok-Topk's paper: words against ranks with both
bounds, time and what it is made of, how far results fill in, selected entries over training (its Figure 6), ξ (Figure
5), balancing (Figure 7), weak scaling (Figures 8, 10 and 12). Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.topk.tables import last_calls, names_of, reduction_s

Row = Mapping[str, Any]
Draw = Callable[[Any], None]

_ACROSS = 3
_MARKERS = "osDv^Ppx"
_PARTS = (("selection_s", "selection"), ("communication_s", "communication"), ("reduction_s", "reduction"))


def plot(result: Mapping[str, Any], title: str, path: Path) -> None:
    """``result``: as the command writes it; parts that are missing are not drawn. PNG unless the path's suffix says
    otherwise."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = panels_of(result)
    down = max(1, -(-len(panels) // _ACROSS))
    figure = Figure(figsize=(6.2 * _ACROSS, 4.6 * down), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.subplots(down, _ACROSS, squeeze=False)
    for panel, draw in zip(grid.flat, panels.values(), strict=False):
        draw(panel)
    for name, panel in zip(panels, grid.flat, strict=False):
        panel.set_title(name)
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=7)
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    figure.savefig(path, dpi=110, format=None if path.suffix else "png")


def panels_of(result: Mapping[str, Any]) -> dict[str, Draw]:
    """By title, what draws it."""
    panels: dict[str, Draw] = {}
    recorded = [row for row in result.get("rows", ()) if row.get("gradients") == "recorded"]
    patterns = [row for row in result.get("rows", ()) if row.get("gradients", "recorded") != "recorded"]
    if recorded:
        panels["words of a rank, the most of any call"] = lambda panel: _draw_words(panel, recorded)
        panels["time of the last call (virtual)"] = lambda panel: _draw_parts(panel, last_calls(recorded))
        panels["entries of the result"] = lambda panel: _draw_fill_in(panel, last_calls(recorded))
    if patterns:
        panels["words on patterns, the most of any call"] = lambda panel: _draw_patterns(panel, patterns)
    if training := result.get("training"):
        panels["entries over a training run"] = lambda panel: _draw_training(panel, training)
        if any("xi" in row for row in training):
            panels["ξ of Assumption 1"] = lambda panel: _draw_xi(panel, training)
    weak: Sequence[Row] = result.get("weak_scaling", ())
    for model in dict.fromkeys(row["model"] for row in weak):
        rows = [row for row in weak if row["model"] == model]
        panels[f"weak scaling, {model}"] = lambda panel, rows=rows: _draw_weak(panel, rows)  # type: ignore[misc]
    if balancing := result.get("balancing"):
        panels["split and reduce (virtual)"] = lambda panel: _draw_reductions(panel, balancing)
        panels["gathering the sum (virtual)"] = lambda panel: _draw_gatherings(panel, balancing)
    measured: Sequence[Row] = result.get("measured", ())
    for key in dict.fromkeys((row["network"], row["ranks"], row["density"]) for row in measured):
        rows = [row for row in measured if (row["network"], row["ranks"], row["density"]) == key]
        about = f"measured: {key[1]} ranks, {key[0]}, density {key[2]:g}"
        panels[about] = lambda panel, rows=rows: _draw_measured(panel, rows)  # type: ignore[misc]
    return panels


def _draw_words(panel: Any, rows: Sequence[Row]) -> None:
    for place, name in enumerate(names_of(rows)):
        most: dict[int, float] = {}
        for row in rows:
            if row["scheme"] == name:
                most[row["ranks"]] = max(most.get(row["ranks"], 0.0), row["words_max"] / row["k"])
        _curve(panel, sorted(most.items()), name, place)
    ranks = sorted({row["ranks"] for row in rows})
    for most_k, look, about in ((6, "--", "6k(P-1)/P"), (2, ":", "2k(P-1)/P")):
        panel.plot(ranks, [most_k * (one - 1) / one for one in ranks], color="black", linestyle=look, label=about)
    panel.set(yscale="log", xlabel="ranks", ylabel="words in k")
    _count_axis(panel, ranks)


def _draw_parts(panel: Any, rows: Sequence[Row]) -> None:
    """Bars of each scheme side by side, at up to four numbers of ranks."""
    ranks = sorted({row["ranks"] for row in rows})
    chosen = ranks if len(ranks) <= 4 else [ranks[place * (len(ranks) - 1) // 3] for place in range(4)]
    names = names_of(rows)
    width = 0.85 / len(names)
    for group, count in enumerate(chosen):
        for place, name in enumerate(names):
            row = next((one for one in rows if one["scheme"] == name and one["ranks"] == count), None)
            if row is None:
                continue
            at, bottom = group + (place - (len(names) - 1) / 2) * width, 0.0
            for alpha, (part, _) in zip((0.35, 1.0, 0.65), _PARTS, strict=True):
                height = row[part] or 0.0
                panel.bar(at, height, width, bottom=bottom, color=f"C{place}", alpha=alpha)
                bottom += height
    for place, name in enumerate(names):
        panel.bar(0, 0, color=f"C{place}", label=name)
    panel.set_xticks(range(len(chosen)), [f"{one:,}" for one in chosen])
    panel.set(xlabel="ranks; from below: selection (light), communication, reduction", ylabel="seconds")


def _draw_fill_in(panel: Any, rows: Sequence[Row]) -> None:
    for place, name in enumerate(names_of(rows)):
        if name == "dense":
            continue
        _curve(panel, sorted((row["ranks"], row["fill_in"]) for row in rows if row["scheme"] == name), name, place)
    panel.set(yscale="log", xlabel="ranks", ylabel="entries in k")
    _count_axis(panel, [row["ranks"] for row in rows])


def _draw_patterns(panel: Any, rows: Sequence[Row]) -> None:
    for place, gradients in enumerate(dict.fromkeys(row["gradients"] for row in rows)):
        for name, look in zip(names_of(rows), ("-", "--", ":", "-."), strict=False):
            most: dict[int, float] = {}
            for row in rows:
                if row["scheme"] == name and row["gradients"] == gradients:
                    most[row["ranks"]] = max(most.get(row["ranks"], 0.0), row["of_bound"])
            points = sorted(most.items())
            if points:
                label = f"{gradients}, {name}"
                panel.plot(*zip(*points, strict=True), linestyle=look, color=f"C{place}", marker=".", label=label)
    panel.axhline(1.0, color="black", linewidth=1)
    panel.set(yscale="log", xlabel="ranks", ylabel="of 6k'+2P")
    _count_axis(panel, [row["ranks"] for row in rows])


def _draw_training(panel: Any, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in rows]
    panel.plot(steps, [row["selected"] / row["k"] for row in rows], linewidth=1, label="local: selected/k, mean")
    panel.plot(steps, [row["kept"] / row["k"] for row in rows], linewidth=1, label="global: kept/k")
    panel.axhline(1.0, color="black", linewidth=1)
    panel.set(xlabel="step", ylabel="in k", ylim=(0, None))


def _draw_xi(panel: Any, rows: Sequence[Row]) -> None:
    points = [(row["step"], row["xi"]) for row in rows if "xi" in row]
    panel.plot(*zip(*points, strict=True), marker=".", label="ξ")
    panel.set(xlabel="step", ylabel="ξ", ylim=(0, None))


def _draw_weak(panel: Any, rows: Sequence[Row]) -> None:
    for place, name in enumerate(names_of(rows)):
        _curve(panel, sorted((row["ranks"], row["iteration_s"]) for row in rows if row["scheme"] == name), name, place)
    ranks = [row["ranks"] for row in rows]
    panel.axhline(rows[0]["compute_s"], color="black", linestyle=":", label="computation alone")
    panel.set(yscale="log", xlabel="ranks", ylabel="seconds of an iteration (virtual)")
    _count_axis(panel, ranks)


def _draw_reductions(panel: Any, rows: Sequence[Row]) -> None:
    bars = {f"{name} slices": [one for one in rows if one["slices"] == name] for name in _slices_of(rows)}
    _draw_bars(panel, {name: [(one["ranks"], reduction_s(one)) for one in own] for name, own in bars.items()})


def _draw_gatherings(panel: Any, rows: Sequence[Row]) -> None:
    bars: dict[str, list[tuple[int, float]]] = {}
    for name in _slices_of(rows):
        own = [one for one in rows if one["slices"] == name]
        bars[f"{name} slices, as they are"] = [(one["ranks"], one["gather_s"]) for one in own]
        bars[f"{name} slices, balanced first"] = [(one["ranks"], one["balanced_gather_s"]) for one in own]
    _draw_bars(panel, bars)


def _slices_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["slices"] for row in rows))


def _draw_bars(panel: Any, bars: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Side by side, by number of ranks."""
    ranks = sorted({count for points in bars.values() for count, _ in points})
    width = 0.85 / len(bars)
    for place, (label, points) in enumerate(bars.items()):
        at = [ranks.index(count) + (place - (len(bars) - 1) / 2) * width for count, _ in points]
        panel.bar(at, [seconds for _, seconds in points], width, label=label, color=f"C{place}")
    panel.set_xticks(range(len(ranks)), [f"{one:,}" for one in ranks])
    panel.set(xlabel="ranks", ylabel="seconds")


def _draw_measured(panel: Any, rows: Sequence[Row]) -> None:
    ordered = sorted(rows, key=lambda row: -float(row["median_s"]))
    names, left = [row["scheme"] for row in ordered], [0.0] * len(ordered)
    for place, (part, about) in enumerate(_PARTS):
        widths = [row[part] for row in ordered]
        panel.barh(names, widths, left=left, color=f"C{place}", label=about)
        left = [one + width for one, width in zip(left, widths, strict=True)]
    panel.set(xlabel="seconds")


def _curve(panel: Any, points: Sequence[tuple[float, float]], name: str, place: int) -> None:
    look = {"color": f"C{place % 10}", "marker": _MARKERS[place % len(_MARKERS)], "markersize": 4, "linewidth": 1}
    if points:
        panel.plot(*zip(*points, strict=True), label=name, **look)


def _count_axis(panel: Any, counts: Sequence[int]) -> None:
    ticks = sorted(set(counts))
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [f"{count:,}" for count in ticks], fontsize=8)
    panel.minorticks_off()
