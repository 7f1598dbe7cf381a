"""Dense sums as telegrad bench allreduce measures them, with rounding wires, ranks dealt out to nodes, and a summary.

The summary tells in a few numbers of each network whether the automatic choice is as fast as the better peer, as the
best of our own, and as the link allows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress, TaskID

from telegrad import Communicator
from telegrad.communicator.operands import WIRES
from telegrad.launch import LaunchError
from telegrad.tools.bench.allreduce import Contender, Vector, measure, result_count_of, rows_of, run
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.plan import (
    ALGORITHMS,
    PEERS,
    AllreducePlan,
    Measured,
    check_nodes,
    is_alternative,
    is_slower,
    payload_bytes_per_s,
    rate_bytes_per_s,
    text_of,
    title_of,
    why_missing,
)
from telegrad.tools.cli.bench import panel_of, picture_title, table_of, title_of_sums
from telegrad.tools.cli.options import JobTimeout, RowsFile, among, blaming, byte_sizes, networks_of
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, table_console, write_result
from telegrad.tools.report.figures import dated, draw
from telegrad.tuning import calibrate

Row = dict[str, Any]
ShownRow = Mapping[str, Any]

INTERLEAVED = ", interleaved"
"""Behind an algorithm's name: among ranks whose neighbours live on other nodes."""

# What each rank runs


@dataclass(frozen=True)
class DenseSumsPlan(AllreducePlan):
    """``wires``: sums in messages that round, beside the algorithms. ``interleaved``: every algorithm also in an order
    in which neighbours live apart."""

    wires: tuple[str, ...] = ()
    interleaved: bool = False


WIRE_BITS = {"bf16": 16, "f16": 16, "int8": 8 + 1 / 8, "qsgd8": 8 + 1 / 32, "qsgd4": 4 + 1 / 32, "qsgd2": 2 + 1 / 32}
WIRE_BITS |= {"e3m0": 4 + 1 / 32, "codebook2": 2 + 1 / 8}
"""Of a value in a message, with its part of a scale (docs/explanation/algorithms.md, "Encoded values")."""

_ROUNDING = {"bf16": 2**-8, "f16": 2**-11, "int8": 1 / 254, "qsgd8": 1 / 127, "qsgd4": 1 / 7, "qsgd2": 1.0}
_ROUNDING |= {"e3m0": 1 / 4, "codebook2": 2.0}
_ADDING = 2**-20  # of float32's own additions

assert set(WIRE_BITS) == set(_ROUNDING) == set(WIRES)


class EncodedSums:
    """Sums of normally distributed values, others on each rank."""

    def __init__(self, communicator: Communicator, elements: int) -> None:
        self._communicator = communicator
        self._values = np.random.default_rng(communicator.rank).standard_normal(elements, np.float32)
        self._sum = np.empty_like(self._values)

    def call(self, wire: str) -> Callable[[Vector], object]:
        """Sums as many values as the vector that it is given has; what that holds does not matter."""
        return lambda x: self._communicator.all_reduce(self._values[: x.size], wire=wire, out=self._sum[: x.size])

    def contender(self, wire: str) -> Contender:
        """The sum of that wire."""
        return Contender(wire, self.call(wire), True, self._communicator, lambda elements: self.wrong(wire, elements))

    def wrong(self, wire: str, elements: int) -> int:
        """How many values of the last sum are further off than roundings can be, on this rank; all of them where ranks
        do not have the same bits."""
        communicator, values, found = self._communicator, self._values[:elements], self._sum[:elements].copy()
        digests = communicator.all_gather(np.array([zlib.crc32(found.data)], np.int64))
        if digests.min() != digests.max():
            return elements
        exact = np.empty_like(values)
        communicator.all_reduce(values, out=exact)
        largest = float(communicator.all_gather(np.array([np.abs(values).max()])).max())
        most = communicator.world_size * (_ROUNDING[wire] + _ADDING) * largest + _ROUNDING[wire] * np.abs(exact).max()
        return int(np.count_nonzero(~(np.abs(found - exact) <= most * (1 + _ROUNDING[wire]))))


def interleaved(communicator: Communicator) -> Communicator:
    """The same ranks, dealt out to the nodes in turn."""
    nodes = communicator.nodes
    place = nodes[: communicator.rank].count(nodes[communicator.rank])
    dealt = communicator.split(0, key=place)  # of equal places the nodes' order counts
    assert dealt is not None
    return dealt


def rank_main(plan_json: str) -> None:
    """One rank, as that of ``telegrad bench allreduce``."""
    plan = DenseSumsPlan.from_json(plan_json)

    def more(communicator: Communicator, elements: int) -> list[Contender]:
        contenders = []
        if plan.interleaved:
            dealt = interleaved(communicator)
            if plan.calibrates:
                calibrate(dealt, keep=False)
            contenders += [Contender.of_ours(name, dealt, INTERLEAVED) for name in plan.algorithms]
        if plan.wires:
            sums = EncodedSums(communicator, elements)
            contenders += [sums.contender(wire) for wire in plan.wires]
        return contenders

    measure(plan, more)


# The summary

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
        peers = {peer: auto[f"{peer}_median_s"] for peer in PEERS if auto.get(f"{peer}_median_s") is not None}
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


# The plot, and the command


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


def plot(rows: Sequence[ShownRow], title: str, path: Path) -> None:
    """As ``telegrad bench allreduce``; each wire has a bound of its own."""
    panels = []
    for network in dict.fromkeys(row["network"] for row in rows):
        there = [row for row in rows if row["network"] == network]
        panel = panel_of(there, network)
        curves = {name: points for name, points in panel.curves.items() if name != "bound"}
        for names, bounds in _bounds_of(there).items():
            curves[f"bound of {names}" if names else "bound"] = list(bounds)
        panels.append(replace(panel, curves=curves))
    draw(panels, title, path, seconds="time (median)")


def title(rows: Sequence[ShownRow]) -> str:
    """What a picture of these rows shows: whose algorithms are named."""
    wires = any(row["algorithm"].removesuffix(INTERLEAVED) not in ALGORITHMS for row in rows)
    return picture_title(rows).replace(
        "telegrad's algorithms", "telegrad's wires" if wires else "telegrad's algorithms"
    )


def command(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[
        str, typer.Option(help="shm, tcp, or a rate such as 1gbit; several with commas.")
    ] = "shm,tcp,1gbit",
    nodes: Annotated[
        int, typer.Option(min=1, help="On how many nodes the ranks live; of several also dealt out to them in turn.")
    ] = 1,
    sizes: Annotated[str, typer.Option(help="Lengths of the vector, separated by commas.")] = "4,64KiB,16MiB",
    algorithms: Annotated[str, typer.Option(help="Which of ours.")] = "auto",
    wires: Annotated[str, typer.Option(help=f"Which to round by, of {', '.join(WIRES)}; all, or none.")] = "none",
    peers: Annotated[str, typer.Option(help="Whom to measure beside us, or none.")] = ",".join(PEERS),
    samples: Annotated[int, typer.Option(min=3, help="Samples of each contender at each size.")] = 31,
    seconds: Annotated[float, typer.Option(min=0.01, help="About how long to measure on each network.")] = 120.0,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw time against size into this PNG file.")
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Sum a vector of floats in messages that round, or among ranks dealt out to nodes, and sum up what was measured.

    [bold]Example:[/] python -m lab dense-sums --network 1gbit --wires all --sizes 1MiB,16MiB --json rows.json
    """
    console = table_console()
    networks = networks_of([name.strip() for name in network.split(",")])
    lengths, chosen = byte_sizes(sizes), tuple(among(algorithms, ALGORITHMS, "--algorithms"))
    rounding = () if wires == "none" else tuple(among(wires, (*WIRES, "all"), "--wires"))
    rounding = WIRES if "all" in rounding else rounding
    with blaming("--nodes"):
        for name in networks:
            check_nodes(name, ranks, nodes)
    with blaming("--peers"):
        named = () if peers == "none" else tuple(peer for peer in peers.split(",") if why_missing(peer) is None)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    rows: list[Row] = []
    summaries: list[Row] = []
    for name in networks:
        plan = DenseSumsPlan(
            benchmark="allreduce",
            network=name,
            ranks=ranks,
            sizes=lengths,
            algorithms=chosen,
            peers=named,
            samples=samples,
            seconds=seconds,
            calibrates="auto" in chosen,
            nodes=nodes,
            wires=rounding,
            interleaved=nodes > 1,
        )
        total = result_count_of(plan) + len(lengths) * (len(rounding) + len(chosen) * plan.interleaved)
        with counting(console) as progress:
            task = progress.add_task(name, total=total)
            try:
                advance = partial(_advance, progress, task)
                found = run(plan, timeout_s=timeout, on_measured=advance, target="lab.dense_sums:rank_main")
            except (LaunchError, RuntimeError) as error:
                console.print(f"[red]{name}:[/] {error}", highlight=False)
                raise typer.Exit(1) from error
        there = [bounded(row) for row in rows_of(plan, found)]
        summary = summary_of(there)
        console.print(table_of(there, title_of_sums(ranks, nodes, name)))
        for line in lines_of(summary):
            console.print(line, highlight=False)
        rows += there
        summaries.append(asdict(summary))
    if json_file is not None:
        write_result(console, json_file, {"rows": rows, "summaries": summaries, "machine": describe_machine()})
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(rows, dated(title(rows)), plot_file)
    if any(row["wrong"] for row in rows):
        raise typer.Exit(1)


def _advance(progress: Progress, task: TaskID, one: Measured) -> None:
    progress.update(task, advance=not one.again)


def bounded(row: Mapping[str, Any]) -> Row:
    """With the bound of its wire."""
    share = WIRE_BITS.get(row["algorithm"], 32) / 32
    bound_s = row["bound_s"]
    return {**row, "bound_bytes": row["bound_bytes"] * share, "bound_s": bound_s and bound_s * share}
