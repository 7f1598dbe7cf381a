"""``telegrad doctor`` and ``telegrad env``: what works on this machine and how to mend the rest; what it is.

Both must work where the compiled core does not load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from telegrad.tools.doctor import host, installation, transports
from telegrad.tools.doctor.host import as_text, describe_environment
from telegrad.tools.doctor.installation import Check, Finding, Status, as_json, is_usable, run_checks
from telegrad.tools.report.figures import duration

if TYPE_CHECKING:
    from telegrad.tools.doctor.selftest import CheckOutcome

_SLACK_S = 5.0  # so that what a check waits for itself is told by the check

CHECKS: tuple[Check, ...] = (
    Check("core", installation.core, timeout_s=20.0, essential=True, mend="install telegrad again: pip install ."),
    Check("ranks", transports.ranks, timeout_s=transports.MEETING_S + _SLACK_S, essential=True),
    Check("shared memory", transports.shared_memory, timeout_s=transports.MEETING_S + _SLACK_S),
    Check("tcp", transports.tcp, timeout_s=transports.MEETING_S * transports.MOST_INTERFACES + _SLACK_S),
    Check("rdma", transports.rdma, timeout_s=transports.MEETING_S + 15.0),
    Check("single copy", transports.single_copy, timeout_s=15.0),
    Check("/dev/shm", host.shared_memory_size),
    Check("pages", host.pages),
    Check("limits", host.limits),
    Check("cores", host.cores),
    Check("interfaces", host.network_interfaces),
    Check(
        "host name",
        host.host_name,
        timeout_s=8.0,
        mend="name resolution hangs, and jobs will: look at /etc/resolv.conf, add this host to /etc/hosts",
    ),
    Check("name server", host.name_server, timeout_s=4.0, mend=f"{host.NAMES_WAIT}: {host.NAMES_MEND}"),
    Check("gpu", installation.gpu, timeout_s=15.0),
    Check("torch", installation.torch, timeout_s=installation.TORCH_S + _SLACK_S),
    Check("mpi", installation.mpi, timeout_s=15.0),
    Check("laboratory", host.laboratory, timeout_s=20.0),
    Check("extras", installation.extras),
)


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

    with console.status("") as status:
        findings = run_checks(
            CHECKS,
            on_begin=lambda name: status.update(f"looking at {name}"),
            on_finding=lambda finding: console.print(line_of(finding), soft_wrap=True, highlight=False),
        )
    console.print(summary_of(findings))
    return findings


def env(as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False) -> None:
    """Describe the installation and the machine, for a bug report.

    Of the environment it shows only UCX_*, TELEGRAD_*, GLOO_*, NCCL_SOCKET*, MASTER_*, and the ranks' and Slurm's
    numbers. Addresses of the network interfaces are in it.
    """
    described = describe_environment()
    typer.echo(json.dumps(described, indent=1) if as_json else as_text(described))


# Findings of `telegrad doctor` and `telegrad test` as text: a line each, and the remedy below it.

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
