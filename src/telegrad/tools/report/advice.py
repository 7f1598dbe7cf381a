"""How ``telegrad advise`` shows what it found: a table, rows for JSON, and the timelines of all schemes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from telegrad.tools.advise.advice import Advice, Prediction
from telegrad.tools.advise.step import Step
from telegrad.tools.report.durations import duration

_COLORS = {
    "forward": "0.55",
    "backward": "0.8",
    "selecting": "C1",
    "unpacking": "C4",
    "on the network": "C0",
}
_LONGEST = 4.0  # shortest steps to be shown


def table_of(advice: Advice) -> Table:
    """A line for each scheme; the recommended one is bold."""
    ranks, nodes = advice.cluster.ranks, advice.cluster.nodes
    where = "1 node" if nodes == 1 else f"{nodes:,} nodes"
    title = escape(f"a training step of {advice.workload.model} on {ranks:,} ranks, {where}")
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    table.caption = "efficiency: of the samples a second that ranks without communication would have"
    table.caption_justify = "left"
    table.add_column("scheme", no_wrap=True)
    table.add_column("what it sends")
    for name in ("step", "over ddp", "efficiency", "samples/s", "network", "exposed", "select"):
        table.add_column(name, justify="right", no_wrap=True)
    first_s = advice.predictions[0].step.step_s
    for one in advice.predictions:
        step = one.step
        cells = [one.scheme.name, one.scheme.about, duration(step.step_s), f"{first_s / step.step_s:.2f}x"]
        cells += [f"{step.efficiency:.1%}", f"{one.samples_per_s:,.0f}", duration(step.communicate_s)]
        cells += [duration(step.exposed_s), duration(step.select_s) if step.select_s else "–"]
        table.add_row(*cells, style="bold" if one is advice.recommended else None)
    return table


def for_json(advice: Advice) -> dict[str, Any]:
    """All of it; seconds."""
    return {
        "model": advice.workload.model,
        "workload": advice.workload.trace.about,
        "samples": advice.workload.samples,
        "ranks": advice.cluster.ranks,
        "ranks_per_node": advice.cluster.ranks_per_node,
        "density": advice.density,
        "recommended": advice.recommended.scheme.name,
        "verdict": advice.verdict,
        "reasons": list(advice.reasons),
        "cautions": list(advice.cautions),
        "line": advice.line,
        "rows": [_row(one, advice.density) for one in advice.predictions],
    }


def _row(one: Prediction, density: float) -> dict[str, Any]:
    step = one.step
    return {
        "scheme": one.scheme.name,
        "about": one.scheme.about,
        "plan": one.scheme.plan,
        "compresses": one.scheme.compresses,
        "line": one.scheme.line(density),
        "step_s": step.step_s,
        "compute_s": step.compute_s,
        "exposed_s": step.exposed_s,
        "select_s": step.select_s,
        "communicate_s": step.communicate_s,
        "decompress_s": step.decompress_s,
        "efficiency": step.efficiency,
        "samples_per_s": one.samples_per_s,
        "groups": [group._asdict() for group in step.groups],
    }


def segments_of(step: Step) -> list[tuple[str, str, float, float]]:
    """What the processor and the network do: (lane, what, from, for) in seconds, the backward pass without what holds
    it up."""
    found = [("processor", "forward", 0.0, step.forward_s)]
    at = step.forward_s
    left = step.backward_s
    for group in step.groups:
        if group.selected_s <= group.ready_s:
            continue
        computed = min(left, group.ready_s - at)
        found.append(("processor", "backward", at, computed))
        found.append(("processor", "selecting", group.ready_s, group.selected_s - group.ready_s))
        left -= computed
        at = group.selected_s
    found.append(("processor", "backward", at, left))
    for group in step.groups:
        found.append(("network", "on the network", group.start_s, group.arrived_s - group.start_s))
        found.append(("processor", "unpacking", group.finish_s - group.decompress_s, group.decompress_s))
    return [one for one in found if one[3] > 0]


def plot(advice: Advice, title: str, path: Path) -> None:
    """The timelines of all schemes, the shortest at the top: above, the processor, below, the network. Steps of more
    than four times the shortest are cut off. The format is that of the path's suffix; PNG without one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    ordered = sorted(advice.predictions, key=lambda one: one.step.step_s)
    longest_s = min(ordered[-1].step.step_s, _LONGEST * ordered[0].step.step_s)
    figure, axes = pyplot.subplots(figsize=(11, 0.75 * len(ordered) + 1.6), layout="constrained")
    for place, one in enumerate(ordered):
        for lane, what, start_s, length_s in segments_of(one.step):
            for_s = min(length_s, longest_s - start_s)
            if for_s <= 0:
                continue
            bottom = place - 0.38 if lane == "processor" else place
            axes.broken_barh(
                [(start_s * 1e3, for_s * 1e3)],
                (bottom, 0.36),
                facecolor=_COLORS[what],
                edgecolor="white",
                linewidth=0.3 if lane == "network" else 0.0,
            )
        cut = one.step.step_s > longest_s
        axes.text(
            min(one.step.step_s, longest_s) * 1e3,
            place - 0.2,
            f" {duration(one.step.step_s)}" + (" →" if cut else ""),
            va="center",
            fontsize=8,
            weight="bold" if one is advice.recommended else "normal",
        )
    names = [one.scheme.name + ("  ✓" if one is advice.recommended else "") for one in ordered]
    axes.set_yticks(range(len(ordered)), names)
    axes.set(xlabel="ms from the start of the step", xlim=(0, longest_s * 1e3 * 1.12), title=title)
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.axvline(advice.workload.trace.compute_s * 1e3, color="0.3", linestyle=":", linewidth=1)
    figure.legend(
        handles=[Patch(color=color, label=what) for what, color in _COLORS.items()],
        loc="outside lower center",
        ncols=len(_COLORS),
        fontsize=8,
    )
    figure.savefig(path, dpi=130, format=None if path.suffix else "png")
    pyplot.close(figure)
