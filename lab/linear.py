"""Epochs of linear models with dense and with sparse allreduces of gradients.

All schemes of an optimiser take the same steps on the same rows, one scheme after the other in the same processes. Each
makes two passes; the second counts. A whole epoch is more of the same: its time is scaled up, and the row says from how
many steps.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lab.common.coordinate_descent import CoordinateDescent, SparseGather
from lab.common.ngrams import hashed_ngrams
from lab.common.stdlib_task import stdlib_pieces
from lab.common.synthetic_rows import SHAPES, synthetic_rows
from telegrad import Communicator, SparseVector
from telegrad.launch import LaunchError, join
from telegrad.linear import EpochReport, Rows, TrainingSettings, objective, read_libsvm, train
from telegrad.linear.losses import are_classes, label_counts
from telegrad.linear.model import Pass
from telegrad.tools.bench.machine import describe_machine, machine_text
from telegrad.tools.bench.plan import PEERS, JsonFields, peers_store, run_job, start_peers, why_missing
from telegrad.tools.bench.sparse import entropy_bits
from telegrad.tools.cli.options import CalibratesFirst, JobTimeout, RowsFile, among, networks_of
from telegrad.tools.cli.outputs import (
    check_all_writable,
    counting,
    drawn,
    say_without,
    table_console,
    write_result,
    written,
)
from telegrad.tools.report.figures import PART_COLORS, bars, dated, duration, key_of, picture, seconds_across
from telegrad.tuning import calibrate

# What is measured

TEXT = "stdlib"
DATA = (*SHAPES, TEXT)
_BY_ALGORITHM = ("split_allgather", "recursive_doubling")
SGD_SCHEMES = (
    "gloo-dense",
    "mpich-dense",
    "telegrad-dense",
    "telegrad-sparse",
    *(f"telegrad-{name}" for name in _BY_ALGORITHM),
)
CD_SCHEMES = ("cd-dense", "cd-sparse")
"""Coordinate descent, whose changes ranks gather as whole slices of the model or as entries."""
SCHEMES = (*SGD_SCHEMES, *CD_SCHEMES)


@dataclass(frozen=True)
class LinearPlan(JsonFields):
    """``data``: one of ``DATA``, or a LIBSVM file. ``rows``: of each rank in a step; ``steps``: of a pass; ``columns``:
    how many are not empty in all rows of a made-up set, or ``None`` for as many as published; ``network``: as
    ``open_network`` knows it. Raises ``ValueError`` for what does not exist."""

    data: str
    network: str
    ranks: int
    schemes: tuple[str, ...]
    rows: int = 1000
    steps: int = 3
    columns: int | None = None
    calibrates: bool = True
    store: str = ""

    def __post_init__(self) -> None:
        if self.data not in DATA and not Path(self.data).is_file():
            raise ValueError(f"data={self.data!r} does not exist: use {', '.join(DATA)} or a LIBSVM file")
        for scheme in self.schemes:
            if scheme not in SCHEMES:
                raise ValueError(f"scheme {scheme!r} does not exist: use {', '.join(SCHEMES)}")
        if self.columns is not None:
            if self.data not in SHAPES:
                raise ValueError(f"columns={self.columns} is for made-up rows, but data={self.data!r} is real")
            _ = dataclasses.replace(SHAPES[self.data], columns=self.columns).popularity

    @property
    def name(self) -> str:
        """Of the data, in rows and tables."""
        return self.data if self.data in DATA else Path(self.data).name

    @property
    def peers(self) -> tuple[str, ...]:
        dense = (scheme for scheme in self.schemes if scheme.endswith("-dense"))
        names = (scheme.removesuffix("-dense") for scheme in dense)
        return tuple(name for name in names if name in PEERS)


def default_schemes(data: str) -> tuple[str, ...]:
    """All, but coordinate descent with URL's shape alone, as in the paper: a pass has a step for each 100 columns of a
    rank, and a dense one moves the whole model."""
    return SCHEMES if data == "url" else SGD_SCHEMES


def algorithm_of(scheme: str) -> str | None:
    """Of a sparse sum of gradients; ``None`` for a dense scheme."""
    kind = scheme.partition("-")[2]
    return None if kind == "dense" else "auto" if kind == "sparse" else kind


# The rows

_PIECE_BYTES = 1024  # of source, so that there are enough for three steps of 8 ranks

About = dict[str, Any]


def rows_of(plan: LinearPlan, comm: Communicator) -> tuple[Rows, About]:
    """This rank's rows, ``plan.rows`` for each step if there are so many, and what is said of the data in results.

    ``scaled_to_rows``: in an epoch. ``non_empty_columns``: of all these rows, expected where they are made up and
    counted where they are real. ``columns_met``: of those in the steps. All ranks have as many rows. Raises
    ``ValueError``, ``OSError`` and ``ImportError`` for a file that cannot be read, or whose labels are not two classes.
    """
    want = plan.rows * plan.steps
    if plan.data in SHAPES:
        shape = SHAPES[plan.data]
        if plan.columns is not None:
            shape = dataclasses.replace(shape, columns=plan.columns)
        rows = synthetic_rows(shape, comm.rank * want, (comm.rank + 1) * want)
        law = shape.popularity
        about: About = {"synthetic": True, "exponent": law.exponent, "non_empty_columns": shape.columns}
        about |= {"scaled_to_rows": shape.rows, "columns_expected": round(law.columns(want * comm.world_size))}
    else:
        rows = _text_rows(comm) if plan.data == TEXT else read_libsvm(plan.data, rank=comm.rank, world_size=plan.ranks)
        every = comm.all_gather(np.array([len(rows), rows.n_features, *label_counts(rows.labels)], np.int64))
        if not are_classes(*every[:, [0, 2, 3, 4]].sum(0).tolist()):
            raise ValueError(f"{plan.data}: labels are not two classes: they must be -1 and 1 or 0 and 1")
        rows = dataclasses.replace(rows, n_features=int(every[:, 1].max()))
        about = {"synthetic": False, "scaled_to_rows": int(every[:, 0].sum())}
        about["non_empty_columns"] = columns_of(rows, comm)
        least = int(every[:, 0].min())
        if least == 0:
            raise ValueError(f"{plan.data} has too few rows for {plan.ranks} ranks: {every[:, 0].sum()}")
        each = min(plan.rows, least)
        rows = rows.part(0, each * min(plan.steps, least // each))
    return rows, {**about, "features": rows.n_features, "columns_met": columns_of(rows, comm)}


def _text_rows(comm: Communicator) -> Rows:
    pieces, labels = stdlib_pieces(_PIECE_BYTES)
    first, last = (len(pieces) * rank // comm.world_size for rank in (comm.rank, comm.rank + 1))
    return hashed_ngrams(pieces[first:last], labels[first:last])


def columns_of(rows: Rows, comm: Communicator) -> int:
    """How many features some rank's rows have."""
    indices = np.unique(rows.indices)
    mine = SparseVector.trusted(indices, np.ones(indices.size, np.float32), rows.n_features)
    total: SparseVector = comm.all_reduce(mine, "max")
    return int(np.count_nonzero(total.memory(0.0)[1] > 0))


# What each rank runs

_TIMEOUT_S, _JOIN_TIMEOUT_S = 300.0, 120.0
_L2 = 1e-6
COORDINATES = 100  # of a rank in a step, as in SparCML

Row = dict[str, Any]
Vector = npt.NDArray[np.float32]


class DenseSum:
    """Gradients as dense vectors, which ``all_reduce`` sums in place. ``seconds``: of each sum so far."""

    def __init__(self, n: int, all_reduce: Callable[[Vector], object]) -> None:
        self._vector = np.zeros(n, np.float32)
        self._all_reduce = all_reduce
        self.seconds: list[float] = []

    def prepare(self, gradient: SparseVector) -> Vector:
        self._vector[:] = 0
        self._vector[gradient.raw_indices] = gradient.raw_values
        return self._vector

    def sum(self, prepared: Vector) -> SparseVector:
        began_s = time.perf_counter()
        self._all_reduce(prepared)
        self.seconds.append(time.perf_counter() - began_s)
        return SparseVector.trusted(None, prepared, prepared.size)


class AlgorithmSum:
    """Gradients as they are, summed by one algorithm. ``seconds`` and ``entries``: of each sum so far."""

    def __init__(self, comm: Communicator, algorithm: str) -> None:
        self._comm, self._algorithm = comm, algorithm
        self.seconds: list[float] = []
        self.entries: list[int] = []

    def prepare(self, gradient: SparseVector) -> SparseVector:
        return gradient

    def sum(self, prepared: SparseVector) -> SparseVector:
        began_s = time.perf_counter()
        total: SparseVector = self._comm.all_reduce(prepared, algorithm=self._algorithm)
        self.seconds.append(time.perf_counter() - began_s)
        self.entries.append(total.nnz)
        return total


class _Received:
    """The bytes that this rank receives in the second pass."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._before = comm, 0

    def begin_second(self, epoch: int) -> None:
        """After each ``epoch``, from 1."""
        if epoch == 1:
            self._before = self._comm.stats()["bytes_received"]

    def bytes(self) -> int:
        return self._comm.stats()["bytes_received"] - self._before


def rank_main(plan_json: str) -> None:
    """One rank. Rank 0 prints a row as JSON for each scheme; a rank whose data are wrong prints ``{"error"}`` and ends
    with status 1."""
    plan = LinearPlan.from_json(plan_json)
    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_JOIN_TIMEOUT_S) as comm:
        if plan.calibrates:
            calibrate(comm, keep=False)
        try:
            rows, about = rows_of(plan, comm)
        except (ValueError, OSError, ImportError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            sys.exit(1)
        peers = start_peers(plan, comm)
        sums: dict[str, Callable[[Vector], object]] = {p.name: p.all_reduce for p in peers}
        sums["telegrad"] = comm.all_reduce
        for scheme in plan.schemes:
            name = scheme.partition("-")[0]
            if scheme in CD_SCHEMES:
                row = _descent(plan, comm, rows, about, dense=scheme.endswith("-dense"))
            elif name in sums:
                row = _gradients(plan, comm, rows, about, algorithm_of(scheme), sums[name], counts=name == "telegrad")
            else:
                continue
            if comm.rank == 0:
                print(json.dumps({"scheme": scheme, "calibrated": plan.calibrates, **about, **row}), flush=True)
        for peer in peers:
            comm.barrier()
            peer.close()


def _gradients(
    plan: LinearPlan,
    comm: Communicator,
    rows: Rows,
    about: About,
    algorithm: str | None,
    all_reduce: Callable[[Vector], object],
    *,
    counts: bool,
) -> Row:
    """SGD, whose gradients are summed densely by ``all_reduce``, or by a sparse ``algorithm``."""
    batch = min(plan.rows, len(rows)) * plan.ranks
    sparse = None if algorithm is None else AlgorithmSum(comm, algorithm)
    aggregation = sparse or DenseSum(rows.n_features + 2, all_reduce)
    received = _Received(comm)
    comm.barrier()
    settings = TrainingSettings(l2=_L2, epochs=2, batch=batch)
    trained = train(
        rows, settings, comm, aggregation=aggregation, on_epoch=lambda report: received.begin_second(report.epoch)
    )
    row = _times(comm, trained.epochs[-1], aggregation.seconds, received.bytes() if counts else None)
    n, in_epoch = rows.n_features + 2, about["scaled_to_rows"] / batch
    total = float(np.mean(sparse.entries[-row["steps"] :])) if sparse else None
    return {
        "optimizer": "sgd",
        "rows_a_step": batch,
        **row,
        "epoch_s": row["step_s"] * in_epoch,
        "comm_s": row["step_comm_s"] * in_epoch,
        "entries_of_sum": total,
        "bound_bytes": 2 * (plan.ranks - 1) / plan.ranks * 4 * n
        if total is None
        else (total - row["entries_a_rank"]) * _entry_bytes(total / n),
        "objective": objective(trained.model, rows, _L2, comm),
    }


Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]


class DenseGather:
    """Whole slices of the model's change as dense vectors, the paper's other way: for comparisons.

    ``all_gather(slice, lengths)`` returns all ranks' slices as one float32 vector of all features; ``lengths`` are the
    elements of each rank's, which are this rank's own ``slice.size`` at its rank. By default it is telegrad's own.
    """

    def __init__(
        self,
        comm: Communicator,
        all_gather: Callable[[Floats, list[int]], Floats] | None = None,
    ) -> None:
        self._rank = comm.rank
        self._all_gather = all_gather or (lambda x, lengths: comm.all_gather(x, counts=lengths))

    def prepare(self, indices: Indices, changes: Floats, slices: list[int]) -> tuple[Floats, list[int]]:
        lengths = np.diff(slices).tolist()
        own = np.zeros(lengths[self._rank], np.float32)
        own[indices - np.uint32(slices[self._rank])] = changes
        return own, lengths

    def gather(self, prepared: tuple[Floats, list[int]]) -> tuple[Indices, Floats]:
        changes = self._all_gather(*prepared)
        indices = np.flatnonzero(changes).astype(np.uint32)
        return indices, changes[indices]


def _descent(plan: LinearPlan, comm: Communicator, rows: Rows, about: About, *, dense: bool) -> Row:
    """Coordinate descent on the rows of one step of SGD: a pass has a step for each block of the columns they have. In
    an epoch, computing grows with the rows, and communication with the columns."""
    rows = rows.part(0, min(plan.rows, len(rows)))
    columns, n = columns_of(rows, comm), rows.n_features
    received = _Received(comm)
    comm.barrier()
    gathering = DenseGather(comm) if dense else SparseGather(comm)
    descent = CoordinateDescent(rows, TrainingSettings(l2=_L2), comm, gathering, COORDINATES)
    for epoch in range(2):
        last = descent.epoch(epoch)
        received.begin_second(epoch + 1)
    row = _times(comm, last, None, received.bytes())
    comm_s = row["steps"] * row["step_comm_s"] * about["non_empty_columns"] / columns
    compute_s = row["steps"] * (row["step_s"] - row["step_comm_s"]) * about["scaled_to_rows"] / (len(rows) * plan.ranks)
    others = COORDINATES * (plan.ranks - 1)
    return {
        "optimizer": "coordinate_descent",
        "rows_a_step": len(rows) * plan.ranks,
        **row,
        "epoch_s": compute_s + comm_s,
        "comm_s": comm_s,
        "entries_of_sum": None,
        "bound_bytes": 4 * n * (plan.ranks - 1) / plan.ranks
        if dense
        else others * _entry_bytes(COORDINATES * plan.ranks / n),
        "objective": objective(descent.model(), rows, _L2, comm),
    }


def _times(comm: Communicator, last: EpochReport | Pass, sums_s: list[float] | None, received: int | None) -> Row:
    """Of a step of the second pass: the slowest rank's time, and the communication of the rank that waited least for
    others in each step (without ``sums_s``, each sum's seconds: in all of them)."""
    own = np.array([last.compute_s + last.comm_s, last.comm_s, last.entries, received or 0], np.float64) / last.steps
    every = comm.all_gather(own)
    comm_s = every[:, 1].min()
    if sums_s is not None:
        comm_s = comm.all_gather(np.array(sums_s[-last.steps :], np.float64)).min(0).mean()
    return {
        "steps": last.steps,
        "step_s": float(every[:, 0].max()),
        "step_comm_s": float(comm_s),
        "entries_a_rank": float(every[:, 2].mean()),
        "received_bytes": None if received is None else float(every[:, 3].max()),
    }


def _entry_bytes(density: float) -> float:
    """What an entry needs at least: sign and digits of its value, whose exponent may be packed, and its index."""
    return (24 + entropy_bits(density)) / 8


# The job

BOUND = (
    "What a rank must receive in a step: of a dense sum 2(P-1)/P*n values of 4 bytes; of a sparse one the K-k entries "
    "that it does not have, of 24 bits (exponents may be packed) and H(K/n)/(K/n) bits of index; of the allgather of "
    "coordinate descent (P-1)/P*n values, or the others' coordinates as such entries. received_bytes also has what "
    "coordinate descent sums to find its moves"
)
"""What ``bound_bytes`` means in result files."""


def run(plan: LinearPlan, *, timeout_s: float, on_row: Callable[[Row], None] = lambda _: None) -> list[Row]:
    """A row for each scheme that could run. ``step_s`` and ``step_comm_s``: of a step, of the slowest rank and of the
    rank that waited least for others; ``epoch_s`` and ``comm_s``: the same for as many rows (of coordinate descent,
    communication for as many columns) as the data have, scaled from ``steps``. ``received_bytes``: in a step, of the
    rank that received most, ``None`` for peers; ``bound_bytes``: see ``BOUND``. Raises ``RankFailed``,
    ``RanksTimedOut`` and ``NetlabError``, and ``ValueError`` for data that ranks cannot read or train on."""
    found: list[Row] = []
    errors: list[str] = []

    def take(rank: int, line: str) -> None:
        if line.startswith('{"error"'):
            errors.append(json.loads(line)["error"])
        if rank or not line.startswith('{"scheme"'):
            return
        place = {"op": "linear", "data": plan.name, "network": plan.network, "ranks": plan.ranks}
        found.append({**place, **json.loads(line)})
        on_row(found[-1])

    with peers_store() as store:
        own = dataclasses.replace(plan, store=store)
        try:
            run_job("lab.linear:rank_main", own, take, timeout_s=timeout_s, mpich="mpich" in plan.peers)
        except LaunchError as error:
            if errors:  # a rank has said what is wrong
                raise ValueError(errors[0]) from error
            raise
    return found


# Table and plot

_REFERENCES = ("gloo-dense", "cd-dense")


def schemes_table(rows: Sequence[Row], title: str) -> Table:
    """The rows of ``python -m lab linear`` of one data set and optimiser; ratios are to Gloo's dense sum, the
    dense allgather of coordinate descent, or the first scheme."""
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    reference = reference_of(rows)
    columns: dict[str, Callable[[Row], str]] = {
        "a step": lambda row: duration(row["step_s"]),
        "its\ncomm.": lambda row: duration(row["step_comm_s"]),
        "epoch": lambda row: duration(row["epoch_s"]),
        f"epoch to\n{reference['scheme']}": lambda row: f"{reference['epoch_s'] / row['epoch_s']:.1f}x",
        f"comm. to\n{reference['scheme']}": lambda row: f"{reference['comm_s'] / row['comm_s']:.1f}x",
        "MB\nreceived": lambda row: _megabytes(row["received_bytes"]),
        "MB\nbound": lambda row: _megabytes(row["bound_bytes"]),
        "bound\nby": bound_by,
    }
    table.add_column("scheme", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["scheme"], *(cell(row) for cell in columns.values()))
    return table


def about_data(rows: Sequence[Row]) -> str:
    """What is known of the columns of the rows' data, and what all schemes have reached."""
    row = rows[0]
    made = (
        f"made-up rows, exponent {row['exponent']:.3f}; {row['non_empty_columns']:,} non-empty columns expected in "
        f"{row['scaled_to_rows']:,} rows, {row['columns_expected']:,} in those of the steps"
        if row["synthetic"]
        else f"{row['scaled_to_rows']:,} rows with {row['non_empty_columns']:,} non-empty columns"
    )
    met = f"{row['columns_met']:,} of {row['features']:,} met"
    steps = f"{row['steps']} steps, {row['entries_a_rank']:,.0f} entries of a rank in each"
    reached = [f"{one['objective']:.6f}" for one in rows]
    said = reached[0] if len(set(reached)) == 1 else f"{min(reached)} to {max(reached)}"
    return f"{made}; {met}; {steps}; objective {said}"


def bound_by(row: Row) -> str:
    """What most of a step's time goes to."""
    return "comm." if row["step_comm_s"] > row["step_s"] / 2 else "compute"


def reference_of(rows: Sequence[Row]) -> Row:
    """The row, of one data set and optimiser, that ratios are to."""
    return next((row for row in rows if row["scheme"] in _REFERENCES), rows[0])


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """A panel for each data set and optimiser: a step's time by scheme, in communication and computation. The format is
    that of the path's suffix; PNG without one."""
    sets = by_data(rows)
    with picture(path, title, height=0.7 + sum(0.8 + 0.24 * len(alike) for alike in sets)) as figure:
        ratios = [2 + len(alike) for alike in sets]
        for axes, alike in zip(
            figure.subplots(len(sets), 1, squeeze=False, height_ratios=ratios).flat, sets, strict=True
        ):
            first = reference_of(alike)  # of whose epoch a step may be another part, in coordinate descent
            parts = {
                "communication": [row["step_comm_s"] for row in alike],
                "computing": [row["step_s"] - row["step_comm_s"] for row in alike],
            }
            texts = [f"{duration(row['step_s'])}, epoch {first['epoch_s'] / row['epoch_s']:.1f}x" for row in alike]
            bars(axes, [row["scheme"] for row in alike], parts, texts)
            seconds_across(axes.xaxis, logarithmic=False)
            axes.set(xlabel="time of a step", title=f"{title_of(alike[0])}; epoch: times as fast as {first['scheme']}")
        key_of(figure, {part: PART_COLORS[part] for part in parts})


def by_data(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each data set and optimiser, in the order of the first ones."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["data"], row["optimizer"]), []).append(row)
    return list(found.values())


def title_of(row: Row) -> str:
    """Of the table that a row is in."""
    return f"{row['data']}, {row['optimizer'].replace('_', ' ')}"


def _megabytes(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 1e6:.2f}" if count >= 1e6 else f"{count / 1e6:.3g}"


# The command


def command(
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    network: Annotated[str, typer.Option(help="shm, tcp, or a rate such as 1gbit (needs root).")] = "shm",
    data: Annotated[
        str,
        typer.Option(
            help="url, webspam: made-up rows in their shapes; stdlib: trigrams of Python's sources; or LIBSVM files. "
            "Several with commas."
        ),
    ] = ",".join(DATA),
    schemes: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"What to compare: {', '.join(SCHEMES)} (by default all, but coordinate descent on url alone).",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each rank in a step, or as many as there are.")] = 1000,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Steps of a pass, in coordinate descent for each block of columns; the second pass counts."
        ),
    ] = 3,
    columns: Annotated[
        int | None,
        typer.Option(min=1, help="Columns of a made-up set that any of all its rows has, instead of those published."),
    ] = None,
    calibrate: CalibratesFirst = True,
    json_file: RowsFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw a step's times into this PNG file.")
    ] = None,
    timeout: JobTimeout = 600.0,
) -> None:
    """Train logistic regression by SGD with dense and with sparse sums of the gradients, and by coordinate descent with
    dense and with sparse allgathers (cd-dense, cd-sparse).

    All schemes of one kind take the same steps. [bold]epoch[/] and its [bold]comm.[/] are scaled from the measured
    steps to as many rows as the data set has; [bold]to[/] the scheme at the columns' heads: how many times faster.
    [bold]MB received[/]: in a step, by the rank that received most; the [bold]bound[/] beside it is what a rank must
    receive at least. [bold]telegrad-sparse[/] is the automatic choice, [bold]telegrad-ALGORITHM[/] that one.
    """
    console = table_console()
    networks_of([network])
    named = None if schemes is None else tuple(among(schemes, SCHEMES, "--schemes"))
    wanted = SGD_SCHEMES if named is None else named
    missing = {
        peer: why for peer in ("gloo", "mpich") if f"{peer}-dense" in wanted and (why := why_missing(peer)) is not None
    }
    say_without(console, missing)
    plans = []
    for one in dict.fromkeys(part.strip() for part in data.split(",")):
        names = tuple(name for name in named or default_schemes(one) if name.removesuffix("-dense") not in missing)
        try:
            plans.append(LinearPlan(one, network, ranks, names, rows, steps, columns, calibrate))
        except ValueError as error:
            hint = "--columns" if "columns" in str(error) else "--data"
            raise typer.BadParameter(str(error), param_hint=hint) from error
    check_all_writable({"--json": json_file, "--plot": plot_file})
    found: list[Row] = []
    for plan in plans:
        try:
            found += _run_with_progress(console, plan, timeout)
        except (LaunchError, RuntimeError, ValueError) as error:
            said = _in_its_options(str(error))
            console.print(f"{plan.name}, {network}: {said}", style="red", highlight=False, markup=False)
            raise typer.Exit(1) from error
    title = f"logistic regression, {ranks} ranks over {network}"
    for alike in by_data(found):
        console.print(schemes_table(alike, f"{title_of(alike[0])}: {title}"))
        console.print(about_data(alike), style="dim", highlight=False, markup=False)
    machine = describe_machine()
    console.print(machine_text(machine), style="dim")
    if json_file is not None:
        with written(console, json_file):
            write_result(console, json_file, {"rows": found, "bound_bytes": BOUND, "machine": machine})
    if plot_file is not None and found:
        with drawn(console, plot_file):
            plot(found, dated(title), plot_file)


# what reading says of Python's arguments, which this command has no options for
_NOT_OPTIONS = {
    "; strict=False leaves out damaged lines": "; remove the line from the file that --data names",
    ": give zero_based=True if they begin with 0": (
        ": if they begin with 0, put the line '# Column indices are zero-based' above the rows of the file that --data "
        "names"
    ),
}


def _in_its_options(said: str) -> str:
    for python, here in _NOT_OPTIONS.items():
        said = said.replace(python, here)
    return said


def _run_with_progress(console: Console, plan: LinearPlan, timeout_s: float) -> list[Row]:
    with counting(console) as progress:
        task = progress.add_task(f"schemes, {plan.name}", total=len(plan.schemes))
        return run(plan, timeout_s=timeout_s, on_row=lambda _: progress.advance(task))
