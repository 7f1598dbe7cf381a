"""``telegrad bench``: figures of this machine, beside those of peers in the same run.

``telegrad bench allreduce`` is here: dense sums beside those of Gloo and MPICH, its tables, its plot, and a summary of
how the automatic choice compares with the better peer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from telegrad.communicator.operands import WIRES
from telegrad.launch import LaunchError
from telegrad.linear.problem import available_bytes
from telegrad.tools.bench.allreduce import AllreduceOutcome, Row, result_count_of, rows_of, run
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import (
    ALGORITHMS,
    BOUND_FORMULA,
    PEERS,
    AllreducePlan,
    Measured,
    bus_factor,
    check_nodes,
    is_alternative,
    is_slower,
    payload_bytes_per_s,
    rate_bytes_per_s,
    text_of,
    title_of,
    why_missing,
)
from telegrad.tools.cli.bench_sparse import sparse
from telegrad.tools.cli.options import CalibratesFirst, JobTimeout, RowsFile, byte_sizes, networks_of
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, say_without, table_console, write_result
from telegrad.tools.report.figures import Panel, dated, draw, duration

# Tables, a plot, and a summary of each network in a few numbers.
# Is the automatic choice as fast as the better peer, as the best of our own, and as the link allows?

ShownRow = Mapping[str, Any]

PEER_SHARE, BEST_SHARE, SLACK_S = 0.10, 0.05, 2e-6
"""Slower than the better peer, or than our best algorithm, is what is so by more than this share and this time."""

_COMPARED_BYTES = 16 << 20
_BOUND_BYTES = 4 << 20


@dataclass(frozen=True)
class Worst:
    """The row in which ``auto`` takes the most times as long as ``other`` does."""

    bytes: int
    other: str
    ratio: float


@dataclass
class Summary:
    """``compared`` rows of ``auto`` have a peer, in ``as_fast`` it is no slower than the better one; ``chosen`` have
    another algorithm of ours beside them, in ``well_chosen`` it is no slower than the best of these. ``twice`` have the
    algorithm that was chosen beside them under its own name: the same calls, which in ``unlike`` of them take longer by
    as much, the one or the other: the scatter that no choice can be judged below.
    ``ratios_at_16mib``: to each peer. ``bound_shares``: bound over median by bytes, from 4 MiB up."""

    network: str
    ranks: int
    compared: int = 0
    as_fast: int = 0
    worst: Worst | None = None
    chosen: int = 0
    well_chosen: int = 0
    worst_choice: Worst | None = None
    twice: int = 0
    unlike: int = 0
    most_unlike: Worst | None = None
    ratios_at_16mib: dict[str, float] = field(default_factory=dict)
    bound_shares: dict[int, float] = field(default_factory=dict)


def summary_of(rows: Sequence[ShownRow]) -> Summary:
    """``rows``: those of one network and number of ranks, at least one."""
    found = Summary(rows[0]["network"], rows[0]["ranks"])
    for auto in (row for row in rows if row["algorithm"] == "auto"):
        size, median_s = auto["bytes"], auto["median_s"]
        peers = {peer: auto[f"{peer}_median_s"] for peer in PEERS if auto[f"{peer}_median_s"] is not None}
        own = {
            row["algorithm"]: row["median_s"]
            for row in rows
            if row["bytes"] == size and is_alternative(row["algorithm"])
        }
        if peers:
            best = min(peers, key=peers.__getitem__)
            found.compared += 1
            found.as_fast += not is_slower(median_s, peers[best], share=PEER_SHARE, slack_s=SLACK_S)
            found.worst = _worse(found.worst, Worst(size, best, median_s / peers[best]))
        if own:
            best = min(own, key=own.__getitem__)
            found.chosen += 1
            found.well_chosen += not is_slower(median_s, own[best], share=BEST_SHARE, slack_s=SLACK_S)
            found.worst_choice = _worse(found.worst_choice, Worst(size, best, median_s / own[best]))
        if auto["chosen"] in own:
            same_s = own[auto["chosen"]]
            longer_s, shorter_s = max(median_s, same_s), min(median_s, same_s)
            found.twice += 1
            found.unlike += is_slower(longer_s, shorter_s, share=BEST_SHARE, slack_s=SLACK_S)
            found.most_unlike = _worse(found.most_unlike, Worst(size, auto["chosen"], longer_s / shorter_s))
        if size == _COMPARED_BYTES:
            found.ratios_at_16mib = {peer: median_s / seconds for peer, seconds in peers.items()}
        if auto["bound_s"] is not None and size >= _BOUND_BYTES:
            found.bound_shares[size] = auto["bound_s"] / median_s
    return found


def _worse(one: Worst | None, other: Worst) -> Worst:
    return other if one is None or other.ratio > one.ratio else one


def lines_of(summary: Summary) -> list[str]:
    """What ``summary`` says, a sentence per line; nothing about what was not measured."""
    slack = f"{SLACK_S * 1e6:g} µs"
    lines = []
    if summary.worst is not None:
        lines.append(
            f"auto within {PEER_SHARE:.0%} or {slack} of the better peer: {summary.as_fast} of {summary.compared} "
            f"rows; worst {_text_of(summary.worst)}"
        )
    if summary.ratios_at_16mib:
        times = (f"{1 / ratio:.2f}x as fast as {title_of(peer)}" for peer, ratio in summary.ratios_at_16mib.items())
        lines.append(f"auto at 16 MiB: {', '.join(times)}")
    if summary.worst_choice is not None:
        lines.append(
            f"auto within {BEST_SHARE:.0%} or {slack} of our best algorithm: {summary.well_chosen} of {summary.chosen} "
            f"rows; worst {_text_of(summary.worst_choice)}"
        )
    if summary.most_unlike is not None:
        so = ": so two measurements of one thing differ" if summary.unlike else ""
        lines.append(
            f"the algorithm that auto chose, under its own name: apart by more than that in {summary.unlike} of "
            f"{summary.twice} rows, at most {_text_of(summary.most_unlike)}{so}"
        )
    rate, payload = rate_bytes_per_s(summary.network), payload_bytes_per_s(summary.network)
    if summary.bound_shares and rate and payload:
        shares = (
            f"{share:.1%} ({share * payload / rate:.1%} of the line rate) at {text_of(size)}"
            for size, share in summary.bound_shares.items()
        )
        lines.append(f"auto, share of the bound: {', '.join(shares)}")
    return lines


def _text_of(worst: Worst) -> str:
    other = title_of(worst.other) if worst.other in PEERS else worst.other
    return f"{worst.ratio:.2f}x as long as {other} at {text_of(worst.bytes)}"


_AGAIN = "*"


def table_of(rows: Sequence[ShownRow], title: str) -> Table:
    """The rows of one network: a line for each of ours and for each peer, by size. What is fastest is bold."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("algorithm", no_wrap=True)
    present = [peer for peer in PEERS if any(row[f"{peer}_median_s"] is not None for row in rows)]
    ratios = [f"to\n{title_of(peer)}" for peer in present]
    for name in ("median", "p90", "algbw\nGB/s", "busbw\nGB/s", "sent/\nrank", "of\nbound", *ratios, "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    for size, group in itertools.groupby(rows, key=lambda row: int(row["bytes"])):
        lines = [*_lines_of(list(group), present)]
        fastest = min(seconds for seconds, _ in lines)
        for number, (seconds, cells) in enumerate(lines):
            shown = "" if number else text_of(size)
            table.add_row(shown, *cells, style="bold" if seconds == fastest else None)
        table.add_section()
    if any(row["measured_again"] for row in rows):
        table.caption = f"{_AGAIN} auto looked slow here: measured again at the end, with more samples"
        table.caption_justify = "left"
    return table


def _lines_of(group: Sequence[ShownRow], present: Sequence[str]) -> Iterator[tuple[float, list[str]]]:
    """Median and cells of each contender at one size."""
    for row in group:
        bound_s = row["bound_s"]
        yield (
            row["median_s"],
            [
                _name_of(row) + (_AGAIN if row["measured_again"] else ""),
                *_speed(row, row["median_s"], row["p90_s"]),
                text_of(row["wire_bytes"]),
                _share(row["median_s"], bound_s),
                *(_ratio(row[f"ratio_to_{peer}"]) for peer in present),
                str(row["wrong"]),
            ],
        )
    for peer in present:
        row = group[0]  # all of a size have the same
        median_s, p90_s = row[f"{peer}_median_s"], row[f"{peer}_p90_s"]
        if median_s is None:
            continue
        yield (
            median_s,
            [
                title_of(peer),
                *_speed(row, median_s, p90_s),
                "–",
                _share(median_s, row["bound_s"]),
                *("–" for _ in present),
                str(row[f"{peer}_wrong"]),
            ],
        )


def _name_of(row: ShownRow) -> str:
    return f"{row['algorithm']} ({row['chosen']})" if row["chosen"] else row["algorithm"]


def _speed(row: ShownRow, median_s: float, p90_s: float) -> list[str]:
    algbw = row["bytes"] / median_s
    busbw = algbw * bus_factor(row["ranks"])
    return [duration(median_s), duration(p90_s), *(f"{each / 1e9:.4f}" for each in (algbw, busbw))]


def _share(seconds: float, bound_s: float | None) -> str:
    return "–" if bound_s is None else f"{bound_s / seconds:.1%}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def plot(rows: Sequence[ShownRow], title: str, path: Path) -> None:
    """Median time against size, as PNG: a panel per network, in it a curve per algorithm and one per peer."""
    networks = dict.fromkeys(row["network"] for row in rows)
    draw(
        [_panel_of([row for row in rows if row["network"] == network], network) for network in networks],
        title,
        path,
        seconds="time (median)",
    )


def _bounds_of(rows: Sequence[ShownRow]) -> dict[str, list[tuple[int, float]]]:
    """Size and bound in seconds, of full floats by ``""`` and of wires that send less by their names: such that round
    to as many bits share a line."""
    by_bits: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        points = {(row["bytes"], row["bound_s"]) for row in rows if row["algorithm"] == name}
        if bounds := tuple(sorted((size, bound) for size, bound in points if bound is not None)):
            by_bits.setdefault(bounds, []).append(name)
    return {
        ", ".join(name for name in names if name not in ALGORITHMS): list(bounds) for bounds, names in by_bits.items()
    }


def _panel_of(rows: Sequence[ShownRow], network: str) -> Panel:
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["algorithm"], []).append((row["bytes"], row["median_s"]))
    for peer in PEERS:
        medians = {row["bytes"]: row[f"{peer}_median_s"] for row in rows}
        points = [(size, median_s) for size, median_s in medians.items() if median_s is not None]
        if points:
            curves[title_of(peer)] = points
    for names, bounds in _bounds_of(rows).items():
        curves[f"bound of {names}" if names else "bound"] = list(bounds)
    return Panel("bytes", network, curves, base=2)


# The command.

_SIZES = ",".join(text_of(4**power).replace(" ", "") for power in range(1, 14))
_VECTORS = 2  # of each rank: its own, and what it receives


def allreduce(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[
        str,
        typer.Option(
            help="Over what they talk, separated by commas: [bold]shm[/] (shared memory), [bold]tcp[/] (loopback), or "
            "a rate such as [bold]1gbit[/] (one network namespace per rank, links shaped by tc; needs root)."
        ),
    ] = "shm,tcp,1gbit",
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            help="On how many nodes the ranks live, neighbours together (only with a rate): ranks of one share a link "
            "and memory.",
        ),
    ] = 1,
    interleaved: Annotated[
        bool,
        typer.Option(
            "--interleaved/--no-interleaved",
            help="Of more than one node: measure each algorithm also among the same ranks, dealt out to the nodes in "
            "turn.",
        ),
    ] = True,
    sizes: Annotated[
        str, typer.Option(help="Lengths of the vector, from 4 bytes up, separated by commas: 4,64KiB,16MiB.")
    ] = _SIZES,
    algorithms: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"Which of ours to measure, separated by commas: {', '.join(ALGORITHMS)} (all, by default; "
            "two_level of more than one node).",
        ),
    ] = None,
    wires: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"Measure sums in messages that round, too, separated by commas: {', '.join(WIRES)}; or all (none, by "
            "default).",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            "--peers",
            "--peer",
            help="Whom to measure beside us, in the same processes and in turn, separated by commas: gloo (needs "
            "torch), mpich (needs mpi4py over MPICH); or none.",
        ),
    ] = ",".join(PEERS),
    samples: Annotated[
        int, typer.Option(min=3, help="Samples of each contender at each size (fewer where one takes long).")
    ] = 31,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="About how long to measure on each network, all sizes together.")
    ] = 120.0,
    calibrates: CalibratesFirst = True,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw time against size into this PNG file.")
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Sum a vector of floats over all ranks: our algorithms, Gloo and MPICH, interleaved, in the same processes.

    A sample is a barrier and then some calls one after another; its time is that of the slowest rank. [bold]algbw[/] is
    size/time, [bold]busbw[/] that times 2(P−1)/P, as nccl-tests have them. [bold]sent/rank[/] is what our counters say,
    [bold]of bound[/] the share of what the network's links allow at best. [bold]to …[/] is our median over the peer's:
    below 1 we are faster. [bold]wrong[/] counts values that differ from the true sum, with
    [bold]--wires[/] by more than roundings can. Rows where the automatic choice
    looks worse than it should are measured again at the end of a network's run, all contenders in turn.
    """
    console = table_console()
    networks, sizes_in_bytes, chosen = _checked(network, ranks, nodes, sizes, algorithms)
    rounding = _checked_wires(wires)
    named = [] if peers == "none" else [name.strip() for name in peers.split(",")]
    check_all_writable({"--json": json_file, "--plot": plot_file})
    try:
        missing = {name: why for name in named if (why := why_missing(name)) is not None}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peers") from error
    say_without(console, missing)

    machine = describe_machine()
    rows: list[Row] = []
    summaries: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for name in networks:
        plan = AllreducePlan(
            benchmark="allreduce",
            network=name,
            ranks=ranks,
            sizes=sizes_in_bytes,
            algorithms=chosen,
            peers=tuple(peer for peer in named if peer not in missing),
            samples=samples,
            seconds=seconds,
            calibrates=calibrates and "auto" in chosen,
            nodes=nodes,
            interleaved=interleaved and nodes > 1,
            wires=rounding,
        )
        try:
            outcome = _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{name}:[/] {error}", highlight=False)
            failed.append({"network": name, "error": str(error)})
            continue
        say_without(console, outcome.missing)
        found = rows_of(plan, outcome, missing)
        summary = summary_of(found)
        summaries.append(asdict(summary))
        console.print(table_of(found, _title(ranks, nodes, name)))
        for line in lines_of(summary):
            console.print(line, highlight=False)
        rows += found
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        result = {
            "rows": rows,
            "failed": failed,
            "summaries": summaries,
            "peer_missing": missing,
            "bound_s": BOUND_FORMULA,
            "machine": machine,
        }
        write_result(console, json_file, result)
    if plot_file is not None and rows:
        with drawn(console, plot_file):
            plot(rows, dated(picture_title(rows)), plot_file)
    if wrong := sum(int(str(row["wrong"])) for row in rows):
        console.print(f"[red]{wrong} values are wrong[/]")
    if wrong or failed:
        raise typer.Exit(1)


def picture_title(rows: Sequence[ShownRow]) -> str:
    """What a picture of these rows shows: whose algorithms are named."""
    wires = any(row["algorithm"] not in ALGORITHMS for row in rows)
    peers = [title_of(peer) for peer in PEERS if any(row[f"{peer}_median_s"] is not None for row in rows)]
    whose = ", ".join(["telegrad's wires" if wires else "telegrad's algorithms", *peers])
    return f"{_title(rows[0]['ranks'], rows[0]['nodes'])}: {whose}"


def _title(ranks: int, nodes: int, network: str = "") -> str:
    on = f" on {nodes} nodes" if nodes > 1 else ""
    return f"all_reduce, {ranks} ranks{on}" + (f", {network}" if network else "")


def _checked(
    network: str, ranks: int, nodes: int, sizes: str, algorithms: str | None
) -> tuple[list[str], tuple[int, ...], tuple[str, ...]]:
    networks = networks_of([name.strip() for name in network.split(",")])
    for name in networks:
        try:
            check_nodes(name, ranks, nodes)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--nodes") from error
    sizes_in_bytes = byte_sizes(sizes)
    needed, free = _VECTORS * max(sizes_in_bytes) * ranks, available_bytes()
    if 0 <= free < needed:
        raise typer.BadParameter(
            f"{ranks} ranks with vectors of {text_of(max(sizes_in_bytes))} need {text_of(needed)} of memory, of which "
            f"{text_of(free)} are free: use shorter ones, or fewer ranks",
            param_hint="--sizes",
        )
    known = ALGORITHMS
    usual = ",".join(name for name in known if nodes > 1 or name != "two_level")
    chosen = tuple(name.strip() for name in (usual if algorithms is None else algorithms).split(","))
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(known)}", param_hint="--algorithms")
    return networks, sizes_in_bytes, chosen


def _checked_wires(wires: str | None) -> tuple[str, ...]:
    if wires is None or wires == "all":
        return () if wires is None else WIRES
    chosen = tuple(dict.fromkeys(name.strip() for name in wires.split(",")))
    for name in chosen:
        if name not in WIRES:
            raise typer.BadParameter(f"{name!r} does not exist: use {', '.join(WIRES)}, or all", param_hint="--wires")
    return chosen


def _run_with_progress(console: Console, plan: AllreducePlan, timeout_s: float) -> AllreduceOutcome:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        task = progress.add_task(
            f"all_reduce over {plan.network}", total=result_count_of(plan), latest="starting ranks"
        )

        def show(one: Measured) -> None:
            latest = f"{text_of(one.size)} {one.contender}: {duration(one.timing.median_s)}"
            progress.update(task, advance=not one.again, latest=latest + (" (again)" if one.again else ""))

        return run(plan, timeout_s=timeout_s, on_measured=show)


app = typer.Typer(help="Measure telegrad on this machine, beside a peer in the same run.", no_args_is_help=True)
for command in (allreduce, sparse):
    app.command()(command)
