"""How a verdict on a hang looks: a sentence and a table for people, a dictionary for machines, and a picture of the
last operations of each rank (needs matplotlib).
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from telegrad.tools.report.hang import HangVerdict, Lane, told_ranks, told_seconds
from telegrad.tools.report.hang_files import Operation

_LEFT_OUT_OF_TABLE = 64
_COLUMNS = ("rank", "host:pid", "done/calls", "operation", "since", "waits for", "sends to", "remark")
_ALWAYS = ("rank", "host:pid", "done/calls")
_WHOLE = ("rank", "host:pid", "done/calls", "operation", "since")
_STATES = {"running": "", "completed": ", done", "failed": ", failed"}
_NUMBERS = ("rank", "done/calls", "since")


def lines_of(verdict: HangVerdict) -> list[str]:
    """The sentence and what belongs to it, as plain lines without markup."""
    return [verdict.sentence + ".", *(f"{text}." for text in verdict.details), *(f"note: {n}" for n in verdict.notes)]


def table_of(verdict: HangVerdict) -> Table:
    """A line per rank; culprits are bold. Of more than 64 ranks, those of whom nothing is special are left out; so are
    columns in which nothing stands.
    """
    latest_s = max((lane.report.written_unix_s for lane in verdict.lanes if lane.report), default=0.0)
    shown = [lane for lane in verdict.lanes if verdict.world_size <= _LEFT_OUT_OF_TABLE or _special(lane, verdict)]
    rows = {lane.rank: _cells(lane, verdict, latest_s) for lane in shown}
    columns = [name for name in _COLUMNS if name in _ALWAYS or any(row[name] for row in rows.values())]
    table = Table(
        title=f"communicator {escape(verdict.communicator)}, {verdict.world_size} ranks",
        title_justify="left",
        caption_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name in _WHOLE, overflow="fold")
    for rank, row in rows.items():
        style = "bold red" if rank in verdict.culprits else None
        table.add_row(*(escape(row[name]) for name in columns), style=style)
    if len(shown) < len(verdict.lanes):
        table.caption = f"{len(verdict.lanes) - len(shown)} more ranks are as the others"
    return table


def _special(lane: Lane, verdict: HangVerdict) -> bool:
    ordinary = lane.rank not in verdict.culprits and lane.report is not None
    return not ordinary or lane.rank in verdict.waiting[:8]


def _cells(lane: Lane, verdict: HangVerdict, latest_s: float) -> dict[str, str]:
    report = lane.report
    row = dict.fromkeys(_COLUMNS, "")
    row["rank"] = str(lane.rank)
    row["host:pid"] = f"{lane.host or '?'}:{lane.pid if lane.pid is not None else '?'}"
    called = f"{'' if lane.exact else '≥ '}{lane.called}"
    row["done/calls"] = f"{report.completed if report else '?'}/{called}"
    if report is None:
        row["operation"] = "no report" + (f", {lane.state}" if lane.state else "")
        return row
    if operation := last_of(lane, verdict.tag):
        row["operation"] = f"{operation.tag} {operation.operation}" + _STATES[operation.state]
        row["since"] = told_seconds(operation.called_s_ago)
        row["waits for"] = _few(operation.waits_for)
        row["sends to"] = _few(operation.sends_to)
    remarks = [report.failure.error] if report.failure else []
    if _age(lane, latest_s) >= 1:
        remarks.append(f"written {told_seconds(_age(lane, latest_s))} earlier")
    row["remark"] = ", ".join(remarks)
    return row


def _age(lane: Lane, latest_s: float) -> float:
    return latest_s - lane.report.written_unix_s if lane.report else 0.0


def _few(ranks: Sequence[int]) -> str:
    return told_ranks(ranks).split(" ", 1)[1] if ranks else ""


def last_of(lane: Lane, tag: int | None) -> Operation | None:
    """What the rank says of the operation in question, else its last one."""
    if lane.report is None:
        return None
    stuck = lane.report.at(tag) if tag is not None else None
    return stuck or (lane.report.operations[-1] if lane.report.operations else None)


def as_json(current: Sequence[HangVerdict], stale: Sequence[HangVerdict], notes: Sequence[str]) -> dict[str, Any]:
    """``verdicts`` (the latest communicator first), ``earlier_jobs`` and ``notes``; version 1."""
    return {
        "kind": "telegrad hang verdict",
        "version": 1,
        "verdicts": [_verdict_as_json(one) for one in current],
        "earlier_jobs": [_verdict_as_json(one) for one in stale],
        "notes": list(notes),
    }


def _verdict_as_json(verdict: HangVerdict) -> dict[str, Any]:
    return {
        "communicator": verdict.communicator,
        "world_size": verdict.world_size,
        "verdict": verdict.kind,
        "culprits": verdict.culprits,
        "tag": verdict.tag,
        "call": verdict.call,
        "waiting": verdict.waiting,
        "sentence": verdict.sentence,
        "details": verdict.details,
        "notes": verdict.notes,
        "ranks": [_lane_as_json(lane, verdict.tag) for lane in verdict.lanes],
    }


def _lane_as_json(lane: Lane, tag: int | None) -> dict[str, Any]:
    operation = last_of(lane, tag)
    failure = lane.report.failure if lane.report else None
    return {
        "rank": lane.rank,
        "host": lane.host,
        "pid": lane.pid,
        "report": lane.report.why if lane.report else None,
        "called_at_least": lane.called,
        "called_is_exact": lane.exact,
        "completed": lane.report.completed if lane.report else None,
        "state_by_peers": lane.state,
        "heard_s_ago": lane.heard_s_ago,
        "failure": {"error": failure.error, "peer": failure.peer, "message": failure.message} if failure else None,
        "operation": {
            "tag": operation.tag,
            "call": operation.call,
            "state": operation.state,
            "called_s_ago": operation.called_s_ago,
            "waits_for": list(operation.waits_for),
            "sends_to": list(operation.sends_to),
        }
        if operation
        else None,
    }


_COLOURS = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#e377c2", "#7f7f7f")
_STUCK = "#d62728"


def plot(verdict: HangVerdict, path: Path, most_operations: int = 24) -> None:
    """Writes a PNG: a lane per rank with its last operations against the time at which they ran, by the ranks' own
    clocks. A bar that ends in red did not end before its rank's report.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = verdict.lanes
    figure = Figure(figsize=(12, 1.8 + 0.28 * min(len(lanes), 256)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    latest_s = max((lane.report.written_unix_s for lane in lanes if lane.report), default=0.0)
    bars = [(lane, bar) for lane in lanes for bar in _bars(lane, latest_s, most_operations)]
    first_s = min((begin_s for _, (_, begin_s, _) in bars), default=-1.0)
    thinnest_s = max(-first_s, 1e-6) / 400  # so that a short operation is seen at all
    names = sorted({operation.operation for _, (operation, _, _) in bars})
    colours = {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}
    for lane, (operation, begin_s, end_s) in bars:
        over = operation.state == "completed"
        axes.barh(
            lane.rank,
            max(end_s - begin_s, thinnest_s),
            left=begin_s,
            height=0.7,
            color=colours[operation.operation] if over else "white",
            edgecolor="white" if over else _STUCK,
            linewidth=0.5 if over else 1.5,
            hatch=None if over else "////",
        )
        if operation.tag == verdict.tag:
            text = f"{operation.tag}: {operation.operation}"
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.annotate(
                text,
                (begin_s, lane.rank),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                bbox=ground,
            )
    handles = [Patch(color=colours[name], label=name) for name in names]
    handles.append(Patch(facecolor="white", edgecolor=_STUCK, hatch="////", label="not complete"))
    for lane in lanes:
        if lane.report is None:
            axes.text(first_s, lane.rank, "no report", va="center", fontsize=8, color=_STUCK)
    axes.set_yticks([lane.rank for lane in lanes], [_lane_name(lane) for lane in lanes], fontsize=8)
    for label, lane in zip(axes.get_yticklabels(), lanes, strict=True):
        label.set_color(_STUCK if lane.rank in verdict.culprits else "black")
    axes.set(xlabel="seconds before the latest report", xlim=(1.02 * first_s, -0.01 * first_s))
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_title(_wrapped(verdict.sentence), fontsize=9, loc="left")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(handles=handles, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110, format="png")


def _bars(lane: Lane, latest_s: float, most: int) -> list[tuple[Operation, float, float]]:
    """Operations with their begin and end, in seconds relative to ``latest_s``."""
    report = lane.report
    if report is None:
        return []
    written_s = report.written_unix_s - latest_s
    bars = []
    for operation in report.operations[-most:]:
        begin_s = written_s - operation.called_s_ago
        ended = operation.took_s is not None and operation.state != "running"
        bars.append((operation, begin_s, begin_s + (operation.took_s or 0.0) if ended else written_s))
    return bars


def _lane_name(lane: Lane) -> str:
    return f"rank {lane.rank}" + (f" ({lane.host})" if lane.host else "")


def _wrapped(text: str) -> str:
    return "\n".join(line.replace("$", r"\$") for line in textwrap.wrap(text, 140)[:4])
