"""``telegrad test``: a self-test of this installation, with real ranks."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from telegrad.communicator.rendezvous.joining import check_interface
from telegrad.tools.cli.doctor import line_of_outcome
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import blaming
from telegrad.tools.cli.outputs import counting
from telegrad.tools.doctor.selftest import CheckOutcome, SelfTest, as_json, checks_of, run


def selftest(
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, max=64, help="Processes to start here.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which all is given up.")] = 30.0,
    interface: Annotated[
        str | None,
        typer.Option(help="Network interface for TCP, such as eth0. Default: UCX chooses.", show_default=False),
    ] = None,
    as_json_text: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
) -> None:
    """Test this installation with real ranks on this machine.

    Over shared memory and over TCP: each collective against the known sum; a killed rank, which the others must name;
    a call that does not match, which all must refuse. Needs no torch. The exit status is 1 if anything is wrong.
    """
    with blaming("--interface"):
        check_interface(interface)
    wanted = SelfTest(ranks=ranks, timeout_s=timeout, interface=interface)
    console = Console(stderr=as_json_text)
    with ended_by_interrupt(console, "interrupted; all ranks are stopped"):
        outcomes = _run_with_progress(console, wanted, show=not as_json_text)
    wrong = sum(bool(outcome.fault) for outcome in outcomes)
    if as_json_text:
        typer.echo(json.dumps(as_json(outcomes, wanted), indent=1))
    else:
        console.print(
            f"[bold red]{wrong} of {len(outcomes)} are wrong[/]: telegrad doctor may know why"
            if wrong
            else f"[green]all {len(outcomes)} are right[/], {ranks} ranks",
            highlight=False,
        )
    if wrong:
        raise typer.Exit(1)


def _run_with_progress(console: Console, wanted: SelfTest, *, show: bool) -> list[CheckOutcome]:
    expected = checks_of(wanted)
    with counting(console) as progress:
        task = progress.add_task(expected[0][1], total=len(expected))
        done = 0

        def tell(outcome: CheckOutcome) -> None:
            nonlocal done
            done += 1
            if show:
                console.print(line_of_outcome(outcome), soft_wrap=True, highlight=False)
            following = expected[done][1] if done < len(expected) else ""
            progress.update(task, completed=done, description=following)

        return run(wanted, on_outcome=tell)
