"""What the simulator predicts of a network, beside what collectives take there.

The simulator's costs are calibrated on the network laboratory. All measurements take their first sample, then all their
second, each time in another order: whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from telegrad import Communicator, SparseVector, _core
from telegrad.communicator.operands import formats_named
from telegrad.cost.network import CARD_BYTES
from telegrad.launch import LaunchError, join
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import JsonFields, Timing, run_job, text_of
from telegrad.tools.bench.sparse import largest_of_gradients
from telegrad.tools.cli.options import JobTimeout, byte_sizes, networks_of
from telegrad.tools.cli.outputs import check_all_writable, counting, drawn, write_result
from telegrad.tools.report.figures import (
    COLORS,
    GREY,
    LIGHT_GREY,
    TEXT_POINTS,
    counts_across,
    dated,
    duration,
    grid_of,
    key_of_marks,
    picture,
)
from telegrad.tuning.probes import (
    KINDS,
    Call,
    CostFit,
    Pairs,
    Probe,
    calls_of_sample,
    fit_costs,
    open_pairs,
    probes,
    timed_sample,
)

# What is measured

FEWEST_CALLS = 3
"""Of a sample of so many calls, or fewer, the first one counts: they are so long that there are but few."""
ENTRY_BYTES = 8
"""Of a sparse vector's entry in memory: a 4-byte index and a float."""

_ONE_WAY_BYTES = tuple(1 << power for power in range(15, 23))  # 32 KiB … 4 MiB, as collectives send
_EXCHANGE_BYTES = (32 << 10, 48 << 10, CARD_BYTES)
_MOST_BYTES_IN_BLOCKS = 32 << 20
ALLREDUCES = ("ring", "recursive_doubling", "rabenseifner")
OF_VECTORS = ("reduce_scatter", "reduce", "broadcast")
OF_BLOCKS = ("allgather", "gather", "scatter", "all_to_all")


@dataclass(frozen=True)
class Measurement:
    """One thing whose time is taken. ``bytes``: of a rank's vector, or of a block where an operation moves one per
    rank; ``nnz``: entries of a sparse vector, None for a dense one; ``density``: what part of the vector they are;
    ``wire``: how messages hold them."""

    operation: str
    algorithm: str
    bytes: int
    density: float | None = None
    wire: str | None = None

    @property
    def nnz(self) -> int | None:
        """Entries of each rank, at least one; None where the vector is dense."""
        return None if self.density is None else max(1, int(self.bytes // 4 * self.density))

    @property
    def input_bytes(self) -> int:
        """What a rank brings: its vector, or the entries of it."""
        return self.bytes if self.nnz is None else self.nnz * ENTRY_BYTES


@dataclass(frozen=True)
class PredictionPlan(JsonFields):
    """``sizes`` in bytes; ``repetitions``: samples of each measurement, of at least ``sample_s`` seconds each."""

    network: str
    ranks: int
    sizes: tuple[int, ...]
    densities: tuple[float, ...] = (0.01, 0.1)
    repetitions: int = 9
    sample_s: float = 0.04

    @property
    def wire(self) -> str:
        """How sparse sums are sent: as a communicator does by itself that has no tuning."""
        return "blocked" if self.network == "shm" else "packed"


def calibration() -> list[Measurement]:
    """What the model's costs come from, whatever they will predict: one for each of ``calibration_probes()``, in the
    same order."""
    return [Measurement(probe.kind, "", probe.bytes) for probe in calibration_probes()]


def calibration_probes() -> list[Probe]:
    return probes(_ONE_WAY_BYTES, _EXCHANGE_BYTES)


def collectives_of(plan: PredictionPlan) -> list[Measurement]:
    """What is predicted: every collective at every size. Where an operation moves a block per rank, that is ``sizes``
    long, up to a total of 32 MiB."""
    blocks = [size for size in plan.sizes if size * plan.ranks <= _MOST_BYTES_IN_BLOCKS]
    return [
        *(Measurement("allreduce", algorithm, size) for algorithm in ALLREDUCES for size in plan.sizes),
        *(
            Measurement("sparse_allreduce", "split_allgather", size, density, plan.wire)
            for density in plan.densities
            for size in plan.sizes
        ),
        *(Measurement(operation, "", size) for operation in OF_VECTORS for size in plan.sizes),
        *(Measurement(operation, "", block) for operation in OF_BLOCKS for block in blocks),
    ]


def measurements_of(plan: PredictionPlan) -> list[Measurement]:
    """All, in the order in which ranks number them."""
    return [*calibration(), *collectives_of(plan)]


# What each rank runs

_TIMEOUT_S = 300.0
_JOIN_TIMEOUT_S = 120.0


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints ``{"index", "wrong"}`` and ``{"index", "calls"}`` for each measurement, and
    ``{"index", "seconds"}`` for each sample."""
    plan = PredictionPlan.from_json(plan_json)
    measurements = measurements_of(plan)
    with (
        join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as communicator,
        open_pairs(communicator, timeout_s=_TIMEOUT_S) as pairs,
    ):
        vector = np.zeros(max(one.bytes for one in measurements) // 4, np.float32)
        calls = [_call_of(one, communicator, pairs, vector) for one in measurements]
        for index, one in enumerate(measurements):
            _say(communicator, index=index, wrong=_count_wrong(one, communicator, vector))
        vector.fill(0)  # a sum of zeros stays one, however often it is taken
        counts = [calls_of_sample(timed_sample(communicator, call, 1).per_call_s, plan.sample_s) for call in calls]
        for index, count in enumerate(counts):
            _say(communicator, index=index, calls=count)
        for number in range(plan.repetitions):
            for index in map(int, np.random.default_rng(number).permutation(len(calls))):  # alike on all ranks
                call, count = calls[index], counts[index]
                taken = timed_sample(communicator, call, count, warm=count > FEWEST_CALLS)
                _say(communicator, index=index, seconds=taken.per_call_s)


def _say(communicator: Communicator, **what: float) -> None:
    if communicator.rank == 0:
        print(json.dumps(what), flush=True)


def _call_of(
    one: Measurement,
    communicator: Communicator,
    pairs: Pairs,
    vector: npt.NDArray[np.float32],
) -> Call:
    x = vector[: one.bytes // 4]
    if one.operation in KINDS:
        return pairs.call_of(Probe(one.operation, one.bytes), communicator, vector)
    if one.operation == "allreduce":
        return lambda: communicator.all_reduce(x, algorithm=one.algorithm)
    if one.operation == "sparse_allreduce":
        stream = _stream_of(one, communicator.rank)
        return lambda: communicator.all_reduce(stream, algorithm=one.algorithm, wire=one.wire)
    return _dense(one.operation, communicator, x).call


class _Dense(NamedTuple):
    """``call`` puts into ``result``, if this rank has one, what is ``expected`` where every rank's vector is its number
    plus one."""

    call: Call
    result: npt.NDArray[np.float32] | None
    expected: npt.NDArray[np.float32]


def _dense(operation: str, communicator: Communicator, x: npt.NDArray[np.float32]) -> _Dense:
    """``operation`` on vectors or blocks ``x``. Results have their memory beforehand: the first touch of a new page
    costs as much as its bytes do on a link."""
    ranks, rank, root = communicator.world_size, communicator.rank, 0
    every = np.arange(1, ranks + 1, dtype=np.float32)[:, None]
    blocks = np.zeros((ranks, x.size), np.float32) if operation in OF_BLOCKS else np.zeros(0, np.float32)
    at_root = rank == root
    match operation:
        case "broadcast":
            return _Dense(lambda: communicator.broadcast(x, root), x, every[root])
        case "reduce":
            total = np.zeros_like(x) if at_root else None
            return _Dense(lambda: communicator.reduce(x, root, out=total), total, every.sum(axis=0))
        case "reduce_scatter":
            counts = [x.size // ranks + (other < x.size % ranks) for other in range(ranks)]
            mine = np.zeros(counts[rank], np.float32)
            return _Dense(lambda: communicator.reduce_scatter(x, out=mine, counts=counts), mine, every.sum(axis=0))
        case "allgather":
            return _Dense(lambda: communicator.all_gather(x, out=blocks), blocks, every)
        case "gather":
            gathered = blocks if at_root else None
            return _Dense(lambda: communicator.gather(x, root, out=gathered), gathered, every)
        case "scatter":
            blocks += every
            scattered = blocks if at_root else None
            mine = np.zeros_like(x)
            return _Dense(lambda: communicator.scatter(scattered, mine, root), mine, every[rank])
        case "all_to_all":
            leaving = blocks + np.float32(rank + 1)
            return _Dense(lambda: communicator.all_to_all(leaving, out=blocks), blocks, every)
        case _:
            raise ValueError(f"operation={operation!r} is no dense collective that can be predicted")


def _stream_of(one: Measurement, rank: int) -> SparseVector:
    length = one.bytes // 4
    drawn = np.random.default_rng(rank).choice(length, one.nnz, replace=False, shuffle=False)
    indices = np.sort(drawn).astype(np.uint32)
    return SparseVector(indices, largest_of_gradients(indices.size, rank), length)


def _count_wrong(one: Measurement, communicator: Communicator, vector: npt.NDArray[np.float32]) -> int:
    """Values that a collective got wrong, over all ranks; 0 for what is no collective."""
    ranks, rank = communicator.world_size, communicator.rank
    x = vector[: one.bytes // 4]
    x.fill(rank + 1)
    if one.operation in KINDS:
        return 0
    if one.operation == "allreduce":
        communicator.all_reduce(x, algorithm=one.algorithm)
        wrong = int(np.count_nonzero(x != ranks * (ranks + 1) // 2))
    elif one.operation == "sparse_allreduce":
        expected = np.zeros(x.size, np.float32)
        for other in range(ranks):
            theirs = _stream_of(one, other)
            expected[theirs.indices] += theirs.values
        total = communicator.all_reduce(_stream_of(one, rank), algorithm=one.algorithm, wire=one.wire)
        expected[total.indices] -= total.values
        wrong = int(np.count_nonzero(expected))
    else:
        dense = _dense(one.operation, communicator, x)
        dense.call()
        wrong = 0 if dense.result is None else int(np.count_nonzero(dense.result != dense.expected))
    return int(communicator.all_gather(np.array([wrong], np.int64)).sum())


Row = dict[str, Any]


# The job, and predictions beside it


@dataclass(frozen=True)
class Measured:
    """What a job has found: ``times`` in seconds per call, by sample; how many ``calls`` one after another a sample
    has; how many values were ``wrong``."""

    times: Mapping[Measurement, list[float]]
    calls: Mapping[Measurement, int]
    wrong: Mapping[Measurement, int]


FEWEST_JUDGED_BYTES = 256 << 10
"""Of what a rank brings: below, latencies and the processor's share count more than the links that the model is of."""
WITHIN = 0.2
"""How far a judged prediction may be off, as a part of the measured time."""

_TARGET = "lab.predictions:rank_main"


def count_of(plan: PredictionPlan) -> int:
    """How many samples ``run`` will see."""
    return len(measurements_of(plan)) * plan.repetitions


def run(
    plan: PredictionPlan, *, timeout_s: float, on_sample: Callable[[Measurement], None] = lambda _: None
) -> Measured:
    """Measures all that ``plan`` asks for; ``on_sample`` is called as each sample comes. Raises ``RankFailed``,
    ``RanksTimedOut`` and ``NetlabError``."""
    measurements = measurements_of(plan)
    times: dict[Measurement, list[float]] = {one: [] for one in measurements}
    calls: dict[Measurement, int] = {}
    wrong: dict[Measurement, int] = {}

    def take(rank: int, line: str) -> None:
        if rank != 0 or not line.startswith("{"):
            return
        said = json.loads(line)
        one = measurements[said["index"]]
        if "wrong" in said:
            wrong[one] = said["wrong"]
        elif "calls" in said:
            calls[one] = said["calls"]
        else:
            times[one].append(said["seconds"])
            on_sample(one)

    run_job(_TARGET, plan, take, timeout_s=timeout_s)
    return Measured(times, calls, wrong)


def calibration_from(plan: PredictionPlan, times: Mapping[Measurement, list[float]]) -> CostFit:
    """The model's costs on the plan's network among its ranks."""
    medians = [Timing.of(times[one]).median_s for one in calibration()]
    return fit_costs(dict(zip(calibration_probes(), medians, strict=True)), plan.ranks)


def points_of(times: Mapping[Measurement, list[float]]) -> list[Row]:
    """What the calibration has measured: a row per kind and length of message."""
    return [{"kind": one.operation, "bytes": one.bytes, **asdict(Timing.of(times[one]))} for one in calibration()]


def predict(one: Measurement, ranks: int, costs: Mapping[str, float], calls: int) -> float:
    """Virtual seconds per call of the collective ``one``, size-only, as ``tuning.pairs.sample`` takes them: of the
    slowest rank in ``calls`` calls one after another, after one that does not count unless they are few. Raises
    ``ValueError`` for what is no collective."""

    formats = formats_named(one.wire or "blocked", "f32")

    def finish_s(count: int) -> npt.NDArray[np.float64]:
        outcome = _core.measure(
            one.operation,
            one.algorithm,
            ranks,
            one.bytes,
            nnz=one.nnz or 0,
            **formats._asdict(),
            calls=count,
            costs=dict(costs),
        )
        return np.asarray(outcome["finish_by_rank_s"])

    if calls <= FEWEST_CALLS:
        return float(finish_s(calls).max()) / calls
    return float((finish_s(1 + calls) - finish_s(1)).max()) / calls


def beta_exchange_s_per_byte(fit: CostFit, message_bytes: int) -> float:
    """Between measured lengths on a straight line over the logarithm of the length; beyond them as at the ends."""
    sizes, betas = zip(*fit.exchange, strict=True)
    return float(np.interp(math.log(max(1, message_bytes)), [math.log(size) for size in sizes], betas))


def costs_of(fit: CostFit, message_bytes: int) -> dict[str, float]:
    """As the simulator takes them. ``message_bytes``: of messages that two ranks send to each other at once. That a
    cost per byte depends on the length is what parameterised LogP adds to LogP: Kielmann, Bal, Verstoep, "Fast
    measurement of LogP parameters for message passing platforms", IPDPS workshops 2000, §2.
    """
    return {
        "alpha_s": fit.alpha_s,
        "beta_s_per_byte": fit.beta_s_per_byte,
        "beta_exchange_s_per_byte": beta_exchange_s_per_byte(fit, message_bytes),
        "gamma_s_per_byte": fit.gamma_s_per_byte,
    }


def rows_of(plan: PredictionPlan, measured: Measured, calibration: CostFit) -> list[Row]:
    """A row per collective, with ``ratio``: the predicted time over the median of the measured ones."""
    return [_row(plan, one, measured, calibration) for one in collectives_of(plan)]


def _row(plan: PredictionPlan, one: Measurement, measured: Measured, calibration: CostFit) -> Row:
    timing, calls = Timing.of(measured.times[one]), measured.calls[one]
    predicted_s = predict(one, plan.ranks, costs_of(calibration, min(one.bytes, CARD_BYTES)), calls)
    ratio = predicted_s / timing.median_s
    return {
        "op": one.operation,
        "algorithm": one.algorithm,
        "network": plan.network,
        "ranks": plan.ranks,
        "bytes": one.bytes,
        "density": one.density,
        "nnz": one.nnz,
        "wire": one.wire,
        "input_bytes": one.input_bytes,
        "calls": calls,
        "predicted_s": predicted_s,
        "median_s": timing.median_s,
        "min_s": timing.min_s,
        "p90_s": timing.p90_s,
        "ratio": ratio,
        "judged": one.input_bytes >= FEWEST_JUDGED_BYTES,
        "within": abs(ratio - 1) <= WITHIN,
        "wrong": measured.wrong[one],
    }


def worst_of(rows: Iterable[Mapping[str, object]]) -> Mapping[str, object] | None:
    """The row whose prediction is furthest off; None without rows."""
    return max(rows, key=lambda row: abs(float(str(row["ratio"])) - 1), default=None)


# Table and plot

_MARKERS = "osDv^P"
_NAME_COLUMNS = 20  # longer names take several lines: so the table fits 80 columns


def name_of(row: Mapping[str, Any]) -> str:
    """A collective by name: ``allreduce ring``, ``sparse_allreduce split_allgather 1 %``."""
    percent = "" if row["density"] is None else f"{row['density'] * 100:.4g} %"
    return " ".join(part for part in (row["op"], row["algorithm"], percent) if part)


def costs_text(calibration: CostFit) -> str:
    """The calibrated costs in one line."""
    exchange = [beta for _, beta in calibration.exchange]
    return (
        f"α {duration(calibration.alpha_s)} (an empty round: {duration(calibration.round_s)}), "
        f"β {calibration.beta_s_per_byte * 1e9:.3f} ns/B ({8e-9 / calibration.beta_s_per_byte:.3f} Gbit/s), "
        f"β in exchange {min(exchange) * 1e9:.3f} … {max(exchange) * 1e9:.3f} ns/B, by length, "
        f"γ {calibration.gamma_s_per_byte * 1e9:.3f} ns/B"
    )


def table_of(rows: Sequence[Row], title: str) -> Table:
    """One line per collective and size. Dim: not judged. Red: judged, and further off than it may be."""
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = "brings: what a rank brings, of a sparse vector its entries; --json has min and p90 too"
    table.caption_justify = "left"
    table.add_column("collective", width=_NAME_COLUMNS)
    for name in ("size", "brings", "predicted", "measured", "ratio", "wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        name = name_of(row)
        if previous not in (None, name):
            table.add_section()
        style = "dim" if not row["judged"] else None if row["within"] else "red"
        table.add_row(
            name if name != previous else "",
            text_of(row["bytes"]),
            text_of(row["input_bytes"]),
            *(duration(row[field]) for field in ("predicted_s", "median_s")),
            f"{row['ratio']:.3f}",
            str(row["wrong"]),
            style=style,
        )
        previous = name
    return table


def picture_title(rows: Sequence[Row]) -> str:
    """What the picture of these rows shows."""
    return f"predicted over measured time of collectives, {', '.join(dict.fromkeys(row['network'] for row in rows))}"


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Predicted over measured time against bytes: a panel per collective, a line per number of ranks, hollow where not
    judged, with the band in which a prediction counts as right; as PNG."""
    names = list(dict.fromkeys(map(name_of, rows)))
    ranks = sorted({row["ranks"] for row in rows})
    colors = dict(zip(ranks, COLORS, strict=False))
    most = 1.05 * max(1 + 1.5 * WITHIN, *(row["ratio"] for row in rows))
    across = 3
    down = -(-len(names) // across)
    with picture(path, title, height=0.7 + 1.75 * down) as figure:
        for place, (name, axes) in enumerate(zip(names, grid_of(figure, len(names), across), strict=True)):
            own = [row for row in rows if name_of(row) == name]
            axes.axhspan(1 - WITHIN, 1 + WITHIN, color=LIGHT_GREY, alpha=0.5, linewidth=0)
            axes.axhline(1.0, color=GREY, linewidth=0.8)
            for count in ranks:
                points = sorted((row["bytes"], row["ratio"], row["judged"]) for row in own if row["ranks"] == count)
                if not points:
                    continue
                color, marker = colors[count], _MARKERS[ranks.index(count) % len(_MARKERS)]
                axes.plot([size for size, _, _ in points], [ratio for _, ratio, _ in points], color=color, linewidth=1)
                for size, ratio, is_judged in points:
                    face = color if is_judged else "white"
                    axes.plot([size], [ratio], marker=marker, color=color, markerfacecolor=face, markersize=5)
            sizes = sorted({row["bytes"] for row in own})
            counts_across(axes, sizes, [text_of(size) for size in sizes], most=4)
            axes.set_ylim(0, most)
            axes.set_title("\n".join(textwrap.wrap(name, 26)), fontsize=TEXT_POINTS)
            if place % across == 0:
                axes.set_ylabel("predicted / measured")
            if place + across >= len(names):
                axes.set_xlabel("size of the vector")
        marks: dict[str, dict[str, Any]] = {
            f"{count} ranks": {"color": colors[count], "marker": _MARKERS[place % len(_MARKERS)]}
            for place, count in enumerate(ranks)
        }
        marks[f"within {WITHIN * 100:.0f} %"] = {"color": LIGHT_GREY, "alpha": 0.5, "linewidth": 8}
        marks["not judged"] = {"color": GREY, "marker": "o", "markerfacecolor": "white", "linestyle": ""}
        key_of_marks(figure, marks)


# The command


def command(
    ranks: Annotated[
        str, typer.Option(help="How many processes to start; several, one job after the other: 4,8. Even numbers.")
    ] = "4,8",
    network: Annotated[
        str,
        typer.Option(
            help="Over what they talk: a rate such as [bold]1gbit[/] (one network namespace per rank, links shaped by "
            "tc; needs root), [bold]tcp[/] (loopback) or [bold]shm[/] (shared memory)."
        ),
    ] = "1gbit",
    sizes: Annotated[
        str, typer.Option(help="Lengths of a rank's vector (in allgather: of its block), separated by commas.")
    ] = "256KiB,1MiB,4MiB,16MiB",
    repetitions: Annotated[int, typer.Option(min=3, help="Samples of each measurement; the median counts.")] = 9,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write all rows, the costs, the machine and the commit here."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", "--plot-file", dir_okay=False, help="Draw predicted against measured: a PNG file."),
    ] = None,
    timeout: JobTimeout = 900.0,
) -> None:
    """Calibrate the cost model on a network, then compare its predictions with what collectives take there.

    The four costs α, β, β in exchange and γ come from messages between pairs of ranks and from additions, all pairs at
    once, and are the same for every collective. [bold]ratio[/] is the predicted time over the measured median: above 1
    the prediction is too slow. Times are those of calls one after another on busy links. Rows in which a rank brings
    less than 256 KiB (a sparse vector's entries count 8 bytes each) are shown dim and not judged; judged ones that are
    further off than 20 % are red.
    """
    console = Console()
    plans = _checked(ranks, network, sizes, repetitions)
    check_all_writable({"--json": json_file, "--plot": plot_file})
    machine = describe_machine()
    rows: list[Row] = []
    calibrations: list[dict[str, Any]] = []
    for plan in plans:
        try:
            measured = _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError) as error:
            console.print(f"[red]{plan.ranks} ranks, {plan.network}:[/] {error}", highlight=False)
            raise typer.Exit(1) from error
        calibration = calibration_from(plan, measured.times)
        found = rows_of(plan, measured, calibration)
        console.print(f"{plan.ranks} ranks, {plan.network}: {costs_text(calibration)}", highlight=False)
        console.print(table_of(found, f"predicted and measured, {plan.ranks} ranks, {plan.network}"))
        rows += found
        calibrations.append(
            {"ranks": plan.ranks, "network": plan.network, **asdict(calibration), "points": points_of(measured.times)}
        )
    _say_worst(console, rows)
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        result = {"rows": rows, "calibrations": calibrations, "within": WITHIN, "machine": machine}
        write_result(console, json_file, result)
    if plot_file is not None:
        with drawn(console, plot_file):
            plot(rows, dated(picture_title(rows)), plot_file)
    if wrong_values := sum(int(str(row["wrong"])) for row in rows):
        console.print(f"[red]{wrong_values} values are wrong[/]")
        raise typer.Exit(1)


def _checked(ranks: str, network: str, sizes: str, repetitions: int) -> list[PredictionPlan]:
    networks_of([network])
    sizes_in_bytes = byte_sizes(sizes)
    try:
        counts = [int(count) for count in ranks.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{ranks!r} are no numbers: write them like 4,8", param_hint="--ranks") from error
    for count in counts:
        if count < 2 or count % 2:
            raise typer.BadParameter(
                f"{count} ranks cannot be calibrated in pairs: use even numbers from 2 up", param_hint="--ranks"
            )
    return [PredictionPlan(network, count, sizes_in_bytes, repetitions=repetitions) for count in counts]


def _run_with_progress(console: Console, plan: PredictionPlan, timeout_s: float) -> Measured:
    with counting(console, TextColumn("{task.fields[latest]}")) as progress:
        description = f"{plan.ranks} ranks over {plan.network}"
        task = progress.add_task(description, total=count_of(plan), latest="starting ranks")

        def show(one: Measurement) -> None:
            latest = f"{one.operation} {one.algorithm} {text_of(one.bytes)}"
            progress.update(task, advance=1, latest=latest)

        return run(plan, timeout_s=timeout_s, on_sample=show)


def _say_worst(console: Console, rows: list[Row]) -> None:
    judged = [row for row in rows if row["judged"]]
    right = sum(bool(row["within"]) for row in judged)
    least = text_of(FEWEST_JUDGED_BYTES)
    if judged:
        console.print(f"{right} of {len(judged)} predictions from {least} up are within {WITHIN * 100:.0f} %")
    else:
        console.print(f"no prediction was judged: all are of less than {least}")
    for name, among in (("worst", judged), ("worst below", [row for row in rows if not row["judged"]])):
        row = worst_of(among)
        if row is not None:
            where = f"{name_of(row)}, {text_of(int(str(row['bytes'])))}, {row['ranks']} ranks"
            console.print(f"{name}: ratio {row['ratio']:.3f} ({where})")
