"""The command, and how fault trials look: one that failed, a table by kind of fault, and how long each survivor took to
hear of it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TextColumn
from rich.table import Table

from lab.common.commands import rank_range
from lab.faults.judge import (
    HANG,
    KILLED_LIMIT_S,
    LEFT,
    MISMATCH_LIMIT_S,
    SORTS,
    WRONG_CULPRIT,
    WRONG_ERROR,
    WRONG_SUM,
    Seen,
    Verdict,
    Violation,
)
from lab.faults.runs import run_trials
from lab.faults.trials import KINDS, LIVENESS_TIMEOUT_S, MISMATCHES, Options
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console, write_result
from telegrad.tools.report.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    dated,
    duration,
    key_of_marks,
    picture,
    seconds_across,
)

# Table and plot

_COLUMNS = {HANG: "hangs", WRONG_SUM: "wrong sums", WRONG_CULPRIT: "wrong culprit", WRONG_ERROR: "wrong error"}
_COLUMNS[LEFT] = "left behind"
_MOST_VIOLATIONS = 12


def table_of(verdicts: Sequence[Verdict], title: str) -> Table:
    """One line per kind of fault, and one for all: how many trials went wrong in which way, and seconds from the fault
    to the error over all survivors, beside the limit; at last the longest ``close()``."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("fault")
    table.add_column("trials", justify="right")
    table.add_column("violations")
    for name in ("p50", "p99", "max", "limit", "late", "close"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in KINDS:
        of_kind = [one for one in verdicts if one.trial.kind == kind]
        if of_kind:
            table.add_row(*_cells(kind, of_kind))
    table.add_section()
    table.add_row(*_cells("all", verdicts), style="bold")
    return table


def _cells(name: str, verdicts: Sequence[Verdict]) -> list[str]:
    times = sorted(time for one in verdicts for time in one.detected_s.values())
    limits = {one.limit_s for one in verdicts}
    counts = [sum(any(v.sort == sort for v in one.violations) for one in verdicts) for sort in SORTS]
    violations = [f"[red]{count} {_COLUMNS[sort]}[/]" for sort, count in zip(SORTS, counts, strict=True) if count]
    late = sum(one.late for one in verdicts)
    return [
        name,
        str(len(verdicts)),
        ", ".join(violations) or "0",
        *(duration(percentile(times, share) if times else None) for share in (0.5, 0.99, 1.0)),
        duration(limits.pop()) if len(limits) == 1 else "",
        f"[yellow]{late}[/]" if late else "0",
        duration(max((one.closed_s for one in verdicts if one.closed_s is not None), default=None)),
    ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def again(seed: int, options: Options) -> str:
    """The command that repeats one trial."""
    words = ["python", "-m", "lab", "faults", "--only", str(seed)]
    words += ["--ranks", f"{options.ranks[0]}..{options.ranks[1]}", "--network", ",".join(options.networks)]
    if options.kinds != KINDS:
        words += ["--kinds", ",".join(options.kinds)]
    if options.liveness_timeout_s != Options().liveness_timeout_s:
        words += ["--liveness", f"{options.liveness_timeout_s:g}"]
    return shlex.join(words)


def failed(verdict: Verdict, seen: Seen, options: Options) -> str:
    """Everything that one needs to know of a trial that went wrong, as plain lines."""
    lines = [f"trial {verdict.trial.seed}: {verdict.trial}"]
    lines += [f"  {violation}" for violation in verdict.violations[:_MOST_VIOLATIONS]]
    if len(verdict.violations) > _MOST_VIOLATIONS:
        lines.append(f"  … and {len(verdict.violations) - _MOST_VIOLATIONS} more")
    lines.append("  what the ranks said:")
    for rank in range(verdict.trial.size):
        end = next((line["ended"] for line in seen.said.get(rank, ()) if "ended" in line), None)
        if end is None:
            said = f"nothing of its end (exit status {seen.returncodes[rank]})"
        elif end["error"] is None:
            said = "no error"
        else:
            said = f"{end['error']}, peer {end.get('peer')}, in its call {end['at_call']}: {end['text']}"
        lines.append(f"    rank {rank}: {said}")
    if seen.where:
        lines += ["  where they were:", *(f"    {line}" for line in seen.where.splitlines())]
    return "\n".join([*lines, f"  again: {again(verdict.trial.seed, options)}"])


def title_of(trials: Sequence[Mapping[str, Any]]) -> str:
    """How many trials these rows of verdicts are, and where they ran."""
    ranks = [one["ranks"] for one in trials]
    networks = ", ".join(sorted({one["network"] for one in trials}))
    return f"{len(trials)} fault trials, {min(ranks)} to {max(ranks)} ranks over {networks}"


def plot(trials: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """A PNG with a row per kind of fault and a dot per survivor: seconds from the fault to its error. A bar marks the
    limit, ticks the median and the 99th percentile. ``trials``: rows of verdicts."""
    kinds = [kind for kind in KINDS if any(one["kind"] == kind and one["detected_s"] for one in trials)]
    networks = list(dict.fromkeys(one["network"] for one in trials))
    colors = dict(zip(networks, (BLUE, ORANGE, GREEN, PURPLE), strict=False))
    with picture(path, title, height=1.4 + 0.36 * max(1, len(kinds))) as figure:
        axes = figure.subplots()
        for row, kind in enumerate(kinds):
            of_kind = [one for one in trials if one["kind"] == kind]
            dots = [(time, one["network"]) for one in of_kind for time in one["detected_s"].values()]
            for network in networks:
                spots = [
                    (_drawn(time), row + (number * 0.618 % 1 - 0.5) * 0.6)  # apart, and alike in every drawing
                    for number, (time, own) in enumerate(dots)
                    if own == network
                ]
                if spots:
                    axes.plot(*zip(*spots, strict=True), ".", color=colors.get(network, GREY), alpha=0.5, markersize=4)
            times = sorted(time for time, _ in dots)
            for share, width in ((0.5, 2.5), (0.99, 1.2)):
                at = _drawn(percentile(times, share))
                axes.plot([at, at], [row - 0.4, row + 0.4], color=BLACK, linewidth=width)
            limit = of_kind[0]["limit_s"]
            if limit is not None:
                axes.plot([limit, limit], [row - 0.45, row + 0.45], color=VERMILION, linewidth=3)
        axes.set(xscale="log", xlabel="time from the fault (mismatch: from the last rank's call) to the error")
        seconds_across(axes.xaxis)
        axes.set_yticks(range(len(kinds)), [f"mismatch: {kind}" if kind in MISMATCHES else kind for kind in kinds])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        dot = {"linestyle": "", "marker": "o"}
        bar = {"linestyle": "", "marker": "|", "markersize": 12}
        marks: dict[str, dict[str, Any]] = {one: {"color": colors.get(one, GREY), **dot} for one in networks}
        marks["median"] = {"color": BLACK, "markeredgewidth": 2.5, **bar}
        marks["99th percentile"] = {"color": BLACK, "markeredgewidth": 1.2, **bar}
        marks["limit"] = {"color": VERMILION, "markeredgewidth": 3.0, **bar}
        key_of_marks(figure, marks)


def _drawn(time_s: float) -> float:
    """An error may come with the last call, and a logarithm has no zero."""
    return max(time_s, 1e-5)


def summary(verdicts: Sequence[Verdict]) -> str:
    """The answer in one line."""
    hangs, sums, culprits, errors, left = (
        sum(any(v.sort == sort for v in one.violations) for one in verdicts) for sort in SORTS
    )
    checked = sum(one.checked for one in verdicts)
    killed = sorted(time for one in verdicts if one.trial.kind == "kill" for time in one.detected_s.values())
    p99 = f"; killed: p99 {duration(percentile(killed, 0.99))} (limit {duration(KILLED_LIMIT_S)})" if killed else ""
    apart = sorted(time for one in verdicts if one.trial.is_mismatch for time in one.detected_s.values())
    most = f"; mismatch: at most {duration(apart[-1])} (limit {duration(MISMATCH_LIMIT_S)})" if apart else ""
    return (
        f"{len(verdicts)} trials, {checked} results checked: {hangs} hangs, {sums} with wrong sums, {culprits} with a "
        f"wrong culprit, {errors} with another wrong error, {left} with something left behind{p99}{most}"
    )


# The command

_SEEDS_APART = 1_000_000
_NETWORKS = ("shm", "tcp")


def command(
    trials: Annotated[int, typer.Option(min=1, help="How many to run, each with real processes.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="What the trials are drawn from.")] = 1,
    ranks: Annotated[str, typer.Option(help="Fewest and most processes of a trial: 2..8, or one number.")] = "2..8",
    network: Annotated[
        str, typer.Option(help="Over what they talk: shm, tcp or both, separated by commas.")
    ] = "shm,tcp",
    kinds: Annotated[str, typer.Option(help=f"Which faults, separated by commas: {', '.join(KINDS)}; or all.")] = "all",
    jobs: Annotated[int, typer.Option(min=1, help="Trials that run at a time.")] = 2,
    liveness: Annotated[
        float, typer.Option(min=0.5, help="liveness_timeout_s of trials with a frozen rank, in seconds.")
    ] = LIVENESS_TIMEOUT_S,
    only: Annotated[int | None, typer.Option(help="Run the one trial that has this seed.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="How often to run each trial: the timing is chance's.")] = 1,
    strict_times: Annotated[bool, typer.Option("--strict-times", help="Fail on times beyond the limits too.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all verdicts and the machine here.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the times to the error into this PNG file.")
    ] = None,
) -> None:
    """Let things go wrong at random moments of random collectives, and judge what every rank makes of it.

    A rank is killed, frozen, ends with an exception, aborts, or calls something else than the others. Nobody may hang,
    get a wrong sum, or blame the wrong rank; nothing may be left behind. A trial is drawn from its seed and can be
    repeated alone; chance remains in the timing. Ends with status 1 on any violation; times are judged with
    [bold]--strict-times[/] only, for they are the machine's too.
    """
    console = table_console()
    options = _checked(ranks, network, kinds, liveness)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = describe_machine()
    seeds = [only] if only is not None else [seed * _SEEDS_APART + number for number in range(trials)]
    seeds = [seed for seed in seeds for _ in range(repeat)]
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task("fault trials", total=len(seeds), latest="")

        def show(verdict: Verdict, seen: Seen) -> None:
            progress.update(task, advance=1, latest=str(verdict.trial))
            if verdict.violations:
                console.print(failed(verdict, seen, options), highlight=False, markup=False, soft_wrap=True)

        def show_left(violation: Violation) -> None:
            console.print(str(violation), highlight=False, markup=False, soft_wrap=True)

        verdicts = run_trials(seeds, options, jobs=jobs, on_verdict=show, on_left=show_left)
    networks = ", ".join(options.networks)
    title = f"{len(verdicts)} fault trials, {options.ranks[0]} to {options.ranks[1]} ranks over {networks}"
    console.print(table_of(verdicts, title))
    for verdict in verdicts:
        if verdict.late and verdict.limit_s is not None:
            slowest = max(verdict.detected_s.values())
            console.print(
                f"late: trial {verdict.trial.seed}, {slowest:.3f} s (limit {verdict.limit_s:g} s): {verdict.trial}",
                style="yellow",
                highlight=False,
                markup=False,
            )
    console.print(summary(verdicts), highlight=False)
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        rows = [verdict.row() for verdict in verdicts]
        write_result(console, json_file, {"trials": rows, "machine": machine}, what="verdicts")
    if plot_file is not None:
        with drawn(console, plot_file):
            plot([verdict.row() for verdict in verdicts], dated(title), plot_file)
    late = strict_times and any(verdict.late for verdict in verdicts)
    if late or any(verdict.violations for verdict in verdicts):
        raise typer.Exit(1)


def _checked(ranks: str, network: str, kinds: str, liveness_timeout_s: float) -> Options:
    chosen_ranks = rank_range(ranks, most=64, example="2..8")
    networks = tuple(name.strip() for name in network.split(","))
    chosen = KINDS if kinds == "all" else tuple(name.strip() for name in kinds.split(","))
    for names, known, option in ((networks, _NETWORKS, "--network"), (chosen, KINDS, "--kinds")):
        for name in names:
            if name not in known:
                raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(known)}", param_hint=option)
    return Options(chosen_ranks, networks, chosen, liveness_timeout_s)
