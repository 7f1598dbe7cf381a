"""``telegrad doctor`` and ``telegrad env``: what works on this machine and how to mend the rest; what it is.

Both must come where the compiled core does not load.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from telegrad.tools.doctor import host, installation, transports
from telegrad.tools.doctor.environment import as_text, describe_environment
from telegrad.tools.doctor.finding import Check, Finding, as_json, is_usable, run_checks

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
    Check("interfaces", host.interfaces),
    Check(
        "host name",
        host.host_name,
        timeout_s=8.0,
        mend="name resolution hangs, and jobs will: look at /etc/resolv.conf, add this host to /etc/hosts",
    ),
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
    from telegrad.tools.report.findings import line_of, summary_of

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
