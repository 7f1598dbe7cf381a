"""``telegrad simulate faults``: random programs under random faults, in virtual time, from seeds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table

from telegrad.cli.interrupts import ended_by_interrupt
from telegrad.cli.options import rank_range, refuse_given
from telegrad.cli.outputs import check_all_writable, say_file, written
from telegrad.cli.progress import counting
from telegrad.sim.exploration import LAST_SEED, RANKS, Exploration, explore, replay, troubles

_MOST_SEEDS = 100_000_000
_DEFAULT_RANKS = f"{RANKS[0]}..{RANKS[1]}"


def faults(
    context: typer.Context,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=_MOST_SEEDS, help="How many to play: one simulation each. --only passes over the others."
        ),
    ] = 10_000,
    ranks: Annotated[
        str, typer.Option(help="Fewest and most ranks of a simulation, as 2..33, or one number.")
    ] = _DEFAULT_RANKS,
    first_seed: Annotated[int, typer.Option(min=0, max=LAST_SEED, help="The first of them.")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes that share the work; default: one a core.")] = None,
    only: Annotated[str, typer.Option(help=f"Play only seeds with this trouble: {', '.join(troubles())}.")] = "",
    replay_seed: Annotated[
        int | None,
        typer.Option("--replay", min=0, max=LAST_SEED, help="Play this one seed again, and tell all about it."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(dir_okay=False, help="With --replay: write every event of the network here.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write what was found here.")] = None,
) -> None:
    """Explore random programs under random faults in virtual time.

    From each seed follow some ranks, what they call, what their network costs, and what goes wrong: a rank is killed,
    freezes or is slow, messages are late or damaged, ranks call different things, one gives up or leaves. Every call
    must end: with the right sum, bit by bit, or with an error that names the culprit, the same one on all survivors.
    Ends with status 1 if a seed shows anything else, crashes or never ends; each such seed is told with the command
    that replays it.
    """
    console = Console()
    lowest, highest = rank_range(ranks, most=4096, example=_DEFAULT_RANKS)
    _check_seeds(first_seed, seeds, only)
    check_all_writable({"--json": json_file, "--trace": trace})
    if trace is not None and replay_seed is None:
        raise typer.BadParameter("only one seed can be traced: give --replay SEED too", param_hint="--trace")
    if replay_seed is not None:
        refuse_given(context, ("seeds", "first_seed", "only"), "--replay plays one seed alone")
        _replay(console, replay_seed, (lowest, highest), trace, json_file)
        return
    began = time.monotonic()
    with (
        ended_by_interrupt(console, "stopped"),
        counting(console, TimeRemainingColumn(), TextColumn("{task.fields[bad]}")) as bar,
    ):
        task = bar.add_task("seeds", total=seeds, bad="")

        def show(count: int, found: Exploration) -> None:
            bar.update(task, advance=count, bad=f"{len(found.failures)} failures" if found.failures else "")

        try:
            found = explore(first_seed, seeds, ranks=(lowest, highest), only=only, jobs=jobs, on_progress=show)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    taken_s = time.monotonic() - began
    if not found.seeds and not found.failures:
        raise typer.BadParameter(
            f"none of the seeds {first_seed} to {first_seed + seeds - 1} has the trouble {only!r}: look at more",
            param_hint="--seeds",
        )
    for failure in found.failures:
        command = f"telegrad simulate faults --replay {failure.seed} --ranks {lowest}..{highest}"
        text = f"{failure.what}: {failure.detail.splitlines()[0]}\n  {command}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print(_table_of(found, f"{found.seeds:,} seeds from {first_seed}, {lowest} to {highest} ranks"))
    console.print(
        f"{found.hangs} hangs, {found.wrong} wrong results, {found.wrong_errors} wrong errors, "
        f"{found.crashes} crashes; {taken_s:.1f} s",
        highlight=False,
    )
    if json_file is not None:
        with written(console, json_file):
            json_file.write_text(json.dumps({**found.to_dict(), "first_seed": first_seed}, indent=1) + "\n")
        say_file(console, "found", json_file)
    if found.failures:
        raise typer.Exit(1)


def _replay(console: Console, seed: int, ranks: tuple[int, int], trace: Path | None, json_file: Path | None) -> None:
    try:
        _stop_if_it_dies(console, explore(seed, 1, ranks=ranks, jobs=1), json_file)
        again = replay(seed, ranks=ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    say(again.program)
    for message in again.errors:
        say(message, "dim")
    for what, detail in again.findings:
        say(f"{what}: {detail}", "red")
    say(
        f"{'nothing wrong' if not again.findings else f'{len(again.findings)} findings'}; {again.events:,} events, "
        f"trace {again.trace_hash:016x}",
    )
    if trace is not None:
        with written(console, trace):
            trace.write_text(again.trace)
        say(f"trace: {trace}")
    if json_file is not None:
        told = {
            "seed": seed,
            "program": again.program,
            "findings": [{"what": what, "detail": detail} for what, detail in again.findings],
            "errors": again.errors,
            "events": again.events,
            "trace_hash": f"{again.trace_hash:016x}",
        }
        with written(console, json_file):
            json_file.write_text(json.dumps(told, indent=1) + "\n")
        say(f"found: {json_file}")
    if again.findings:
        raise typer.Exit(1)


def _stop_if_it_dies(console: Console, found: Exploration, json_file: Path | None) -> None:
    """A seed that ended the process it was played in first: here it would end this one, and tell no more."""
    for failure in found.failures:
        if failure.what not in ("crash", "endless"):
            continue
        left_out = f"seed {failure.seed} was not played again: it would end this process too"
        console.print(
            f"{failure.what}: {failure.detail}\n{left_out}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        if json_file is not None:
            findings = [{"what": failure.what, "detail": failure.detail}]
            with written(console, json_file):
                json_file.write_text(json.dumps({"seed": failure.seed, "findings": findings}, indent=1) + "\n")
        raise typer.Exit(1)


def _table_of(found: Exploration, title: str) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, count in (
        ("calls of all ranks", found.operations),
        ("results compared bit by bit", found.results),
        ("seeds with an error, the culprit named", found.errors_named),
        ("events", found.events),
        ("hangs", found.hangs),
        ("wrong results", found.wrong),
        ("wrong errors", found.wrong_errors),
        ("crashes", found.crashes),
    ):
        table.add_row(name, f"{count:,}")
    return table


def _check_seeds(first_seed: int, seeds: int, only: str) -> None:
    if first_seed + seeds > LAST_SEED + 1:
        raise typer.BadParameter(
            f"{seeds} seeds from {first_seed} go beyond {LAST_SEED}, the last: begin earlier", param_hint="--first-seed"
        )
    if only and only not in (known := troubles()):
        raise typer.BadParameter(f"{only!r} is no trouble: use {', '.join(known)}", param_hint="--only")
