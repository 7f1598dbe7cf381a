"""A StepReport as one HTML file: numbers, what they say, the time line as SVG. Nothing is loaded from elsewhere."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from telegrad.synchronizer.merge_plan import in_ms

if TYPE_CHECKING:
    from telegrad.synchronizer.step_report import GroupReport, StepReport

_LEFT, _WIDTH, _ROW, _TOP = 150, 760, 34, 24
_STYLE = (
    "body{font:14px/1.45 system-ui,sans-serif;margin:2rem;max-width:960px;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}svg text{font:12px system-ui,sans-serif}"
    ".waits{fill:#d0d0d0}.sum{fill:#1f77b4}.predicted{fill:#f0a35e}.end{stroke:#444;stroke-dasharray:4 3}"
)


def page_of(report: StepReport) -> str:
    """The whole file."""
    whose = "the rank whose step takes longest" if report.of_slowest else "this rank only"
    title = f"Backward pass of rank {report.rank} of {report.ranks}"
    head = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(whose)}; groups: "
        f"{escape(report.scheme)}; medians over {report.passes} passes; {report.bytes:,} bytes of gradients</p>"
        f"<p><strong>{escape(report.suggestion)}</strong></p>"
    )
    body = (_numbers(report) + _picture(report) + _groups(report)) if report.passes else ""
    return f"{head}{body}</body></html>\n"


def _numbers(report: StepReport) -> str:
    rows = (
        ("backward pass", report.backward_s, report.predicted_backward_s),
        ("exposed communication", report.exposed_s, report.predicted_exposed_s),
        ("all summed after", report.finish_s, report.predicted_finish_s),
        ("sums under way", report.network_s, report.predicted_network_s),
        ("step", report.step_s, None),
    )
    cells = "".join(
        f"<tr><td>{what}</td><td>{_number(seconds)}</td><td>{_number(predicted)}</td></tr>"
        for what, seconds, predicted in rows
    )
    return f"<table><tr><th>ms</th><th>measured</th><th>predicted</th></tr>{cells}</table>"


def _picture(report: StepReport) -> str:
    """A row for each group: measured above, predicted below."""
    longest_s = max(report.finish_s, report.predicted_finish_s or 0.0, *(one.finish_s for one in report.groups))
    scale = (_WIDTH - _LEFT - 10) / longest_s if longest_s > 0 else 0.0

    def x(seconds: float) -> float:
        return round(_LEFT + seconds * scale, 2)

    def bar(kind: str, begin_s: float, end_s: float, y: float, height: float) -> str:
        width = max(round((end_s - begin_s) * scale, 2), 1.0)
        return f"<rect class='{kind}' x='{x(begin_s)}' y='{y}' width='{width}' height='{height}'/>"

    height = _TOP + _ROW * len(report.groups) + 30
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' role='img' width='{_WIDTH}' height='{height}' "
        f"viewBox='0 0 {_WIDTH} {height}'>"
    ]
    for number, group in enumerate(report.groups):
        y = _TOP + _ROW * number
        parts.append(f"<text x='0' y='{y + 18}'>group {number}, {group.size / 1024:,.0f} KiB</text>")
        parts.append(f"<g><title>{escape(_told(group))}</title>")
        parts.append(bar("waits", group.ready_s, group.launched_s, y + 3, 12))
        parts.append(bar("sum", group.launched_s, group.finish_s, y + 3, 12))
        if group.predicted_start_s is not None and group.predicted_finish_s is not None:
            parts.append(bar("predicted", group.predicted_start_s, group.predicted_finish_s, y + 17, 7))
        parts.append("</g>")
    bottom = height - 26
    end = x(report.backward_s)
    parts.append(f"<line class='end' x1='{end}' y1='{_TOP - 6}' x2='{end}' y2='{bottom}'/>")
    parts.append(f"<text x='{end}' y='{_TOP - 10}' text-anchor='middle'>end of the backward pass</text>")
    parts.append(f"<text x='{_LEFT}' y='{height - 8}'>0</text>")
    parts.append(f"<text x='{_WIDTH - 5}' y='{height - 8}' text-anchor='end'>{in_ms(longest_s)}</text></svg>")
    legend = "<p>Blue: sums, as measured; grey: waiting to leave; orange: as predicted.</p>"
    return "".join(parts) + legend


def _groups(report: StepReport) -> str:
    rows = "".join(
        f"<tr><td>{number}: {escape(_span_of(group))}</td><td>{group.size:,}</td>"
        f"<td>{_number(group.ready_s)}</td><td>{_number(group.predicted_ready_s)}</td>"
        f"<td>{_number(group.launched_s)}</td><td>{_number(group.predicted_start_s)}</td>"
        f"<td>{_number(group.finish_s)}</td><td>{_number(group.predicted_finish_s)}</td></tr>"
        for number, group in enumerate(report.groups)
    )
    heads = "".join(f"<th>{one}</th>" for one in ("ready", "predicted", "leaves", "predicted", "summed", "predicted"))
    return f"<table><tr><th>group (ms)</th><th>bytes</th>{heads}</tr>{rows}</table>"


def _told(group: GroupReport) -> str:
    return f"{_span_of(group)}: leaves after {in_ms(group.launched_s)}, summed after {in_ms(group.finish_s)}"


def _span_of(group: GroupReport) -> str:
    return group.names[0] if len(group.names) == 1 else f"{group.names[0]} … {group.names[-1]} ({len(group.names)})"


def _number(seconds: float | None) -> str:
    """Of milliseconds, under a heading that says so."""
    return "–" if seconds is None else in_ms(seconds).removesuffix(" ms")
