"""``telegrad doctor``: what of telegrad works on this machine, and how to mend the rest."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from telegrad.doctor.checks import CHECKS
from telegrad.doctor.finding import Finding, as_json, is_usable, run_checks


def doctor(
    as_json_text: Annotated[bool, typer.Option("--json", help="Print the findings as JSON and nothing else.")] = False,
) -> None:
    """Say what works here, and how to mend what does not: a line per check.

    [bold]OK[/]; [bold]note[/]: works, with a limit worth knowing; [bold]missing[/]: something optional is not here;
    [bold]failed[/]: the check itself broke; [bold]ERROR[/]: telegrad cannot be used. Only an ERROR makes the exit
    status 1. Starts a few short-lived processes; as root it builds a network namespace and removes it.
    """
    console = Console(stderr=as_json_text)
    if as_json_text:
        findings = run_checks(CHECKS)
        typer.echo(json.dumps(as_json(findings), indent=1))
    else:
        findings = _shown(console)
    if not is_usable(findings):
        raise typer.Exit(1)


def _shown(console: Console) -> list[Finding]:
    from telegrad.report.findings import line_of, summary_of

    with console.status("") as status:
        findings = run_checks(
            CHECKS,
            on_begin=lambda name: status.update(f"looking at {name}"),
            on_finding=lambda finding: console.print(line_of(finding), soft_wrap=True, highlight=False),
        )
    console.print(summary_of(findings))
    return findings
