"""How the findings of ``telegrad doctor`` and ``telegrad test`` look: a line each, and below it what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from telegrad.tools.doctor.finding import Finding, Status, is_usable
from telegrad.tools.report.durations import duration

if TYPE_CHECKING:  # it needs the compiled core, the doctor must not
    from telegrad.tools.doctor.selftest import CheckOutcome

_SHOWN: dict[Status, tuple[str, str]] = {
    "ok": ("OK", "green"),
    "note": ("note", "yellow"),
    "missing": ("missing", "yellow"),
    "failed": ("failed", "red"),
    "error": ("ERROR", "bold red"),
}
_STATUS_WIDTH = 8
_CHECK_WIDTH = 15
_NETWORK_WIDTH = 15
_OUTCOME_WIDTH = 27


def line_of(finding: Finding) -> Text:
    """Its line, and one with the remedy where there is any."""
    word, style = _SHOWN[finding.status]
    line = Text.assemble((f"{word:<{_STATUS_WIDTH}}", style), (f"{finding.check:<{_CHECK_WIDTH}}", "bold"))
    line.append(f" {finding.text}")
    if finding.mend and finding.status != "ok":
        line.append(f"\n{'':<{_STATUS_WIDTH + _CHECK_WIDTH}} → {finding.mend}", style="dim")
    return line


def summary_of(findings: Sequence[Finding]) -> Text:
    """The last line: can telegrad be used?"""
    if not is_usable(findings):
        count = sum(finding.status == "error" for finding in findings)
        return Text(f"telegrad cannot be used here: mend the {count} ERROR above first", style="bold red")
    broken = [finding.check for finding in findings if finding.status == "failed"]
    if broken:
        return Text(f"telegrad can be used here; not all could be looked at: {', '.join(broken)}", style="yellow")
    return Text("telegrad can be used here", style="green")


def line_of_outcome(outcome: CheckOutcome) -> Text:
    """``OK  tcp  broadcast  1.2 ms``, or what is wrong."""
    word, style = ("wrong", "bold red") if outcome.fault else ("OK", "green")
    line = Text.assemble((f"{word:<{_STATUS_WIDTH}}", style), f"{outcome.network:<{_NETWORK_WIDTH}}")
    line.append(f" {outcome.check:<{_OUTCOME_WIDTH}}", style="bold")
    line.append(f" {outcome.fault or duration(outcome.took_s)}")
    return line
