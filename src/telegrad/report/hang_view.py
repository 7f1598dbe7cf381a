"""How a verdict on a hang looks: a sentence and a table for people, a dictionary for machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from telegrad.report.hang import HangVerdict, told_ranks, told_seconds
from telegrad.report.hang_files import Operation
from telegrad.report.hang_lanes import Lane

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
