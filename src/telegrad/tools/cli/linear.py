"""``telegrad linear``: linear models on LIBSVM files, trained among ranks."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from telegrad.errors import TransportError
from telegrad.launch import LaunchError, RanksTimedOut
from telegrad.linear import LOSSES, LinearModel, TrainingSettings, read_libsvm
from telegrad.linear.data import ContradictingBase, LibsvmFormat, ZeroBased
from telegrad.linear.job import Job, is_rank_of_another_launcher, join_other_launcher, writes_files
from telegrad.linear.job import run as run_rank
from telegrad.linear.losses import are_classes, area_under_curve, is_classification, label_counts, losses_of, signed
from telegrad.linear.peers import L1_SOLVERS, PEERS, SOLVERS, compared
from telegrad.linear.problem import OPTIMIZERS, SECOND_ORDER
from telegrad.linear.rows import Rows
from telegrad.tools.bench.machine import describe_machine
from telegrad.tools.bench.netlab import NetlabError
from telegrad.tools.bench.plan import run_ranks
from telegrad.tools.cli.interrupts import ended_by_interrupt
from telegrad.tools.cli.options import bad_setting, networks_of, refuse_given
from telegrad.tools.cli.outputs import (
    check_all_writable,
    check_writable,
    counting,
    drawn,
    sharing,
    table_console,
    write_result,
    written,
)
from telegrad.tools.report.figures import bars, dated, duration, picture, seconds_across

Optimizer = Annotated[
    str,
    typer.Option(
        help=f"One of {', '.join(OPTIMIZERS)}. [bold]auto[/]: [bold]newton[/], for both hinges [bold]dual[/], which "
        "need no learning rate and end within --tol of the optimum; for the hinge with --l1 or --l2 0 adagrad. An "
        "option that one optimizer alone has chooses that one. [bold]adagrad[/] gives rare features longer steps, and "
        "often needs fewer epochs."
    ),
]
L2 = Annotated[float, typer.Option("--l2", help="λ of mean loss + λ/2·|w|²: pulls all weights towards 0.")]
L1 = Annotated[
    float, typer.Option("--l1", help="λ of λ·Σ|w_i|, also in the objective: makes weights of no use exactly 0.")
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Rows of all ranks together in a step of sgd or adagrad; larger ones need fewer sums, but more epochs. "
        "Default: 1,000.",
        show_default=False,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Of the first step. Default: of sgd what the rows' lengths make safe, often slow; of adagrad 0.1.",
        show_default=False,
    ),
]
Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap",
        help="Compute the next gradient while ranks' sum travels: faster where the network is slow; each gradient then "
        "lacks the step before.",
    ),
]
Threads = Annotated[
    int, typer.Option(help="Of each rank. Ranks times threads should not exceed the cores; no result depends on them.")
]


class ZeroBasedOption(enum.StrEnum):
    """What ``zero_based`` is called here."""

    auto = "auto"
    true = "true"
    false = "false"

    @property
    def value_in_python(self) -> ZeroBased:
        return "auto" if self is self.auto else self is self.true


def zero_based_option(index_base: int) -> str:
    """How this command is told that a file's first feature is ``index_base``."""
    return f"--zero-based {'false' if index_base else 'true'}"


_FIELDS = {field.name for one in (TrainingSettings, LibsvmFormat) for field in dataclasses.fields(one)}
_OF_PYTHON = {
    "overlap=True": "--overlap",
    "strict=False": "--skip-damaged",
    "zero_based=True": "--zero-based true",
    "zero_based=False": "--zero-based false",
    ", or None": ", or left out",
}


def bad_option(error: ValueError) -> typer.BadParameter:
    """What is wrong with a setting, said of the option."""
    return bad_setting(error, _FIELDS, in_options)


def in_options(said: str) -> str:
    """What an error says of Python's arguments, as it is to be said of this command's options."""
    for python, option in _OF_PYTHON.items():
        said = said.replace(python, option)
    said = said.replace("n_features=", "features=").replace("timeout_s=", "--timeout ")
    said = re.sub(
        rf"\b({'|'.join(_FIELDS)})=('[^']*'|[^\s,:;]+)",
        lambda found: f"{_option(found[1])} {found[2].strip(chr(39))}",
        said,
    )
    words = "|".join(name for name in _FIELDS if "_" in name)
    # not as a part of a file's name
    return re.sub(rf"(?<![\w/.-])({words})(?![\w/]|\.\w)", lambda found: _option(found[1]), said)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def table_of(epochs: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The messages ``"epoch"`` of ``telegrad.linear.job``. Columns that no epoch has are left out."""
    table = _table(title)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "epoch": lambda one: str(one["epoch"]),
        "loss": lambda one: loss_text(one["loss"]) if math.isnan(one["objective"]) else "",
        "objective": lambda one: _or_blank(one["objective"], "{:.6g}"),
        "gap": lambda one: _or_blank(100 * one["gap"], "{:.2g} %"),
        "held-out\nloss": lambda one: "" if math.isnan(one["held_out_loss"]) else loss_text(one["held_out_loss"]),
        "accuracy": lambda one: _or_blank(100 * one["accuracy"], "{:.2f} %"),
        "AUC": lambda one: _or_blank(one["auc"], "{:.4f}"),
        "compute": lambda one: duration(one["compute_s"]),
        "commun-\nication": lambda one: duration(one["comm_s"]),
        "1,000\nentries\na step": lambda one: f"{one['entries'] / one['steps'] / 1e3:,.4g}" if one["steps"] else "",
    }
    shown = {name: [cell(one) for one in epochs] for name, cell in columns.items()}
    shown = {name: cells for name, cells in shown.items() if any(cells)}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    return table


def _table(title: str) -> Table:
    """Whose columns are close together, as there are many, and few terminals have more than 80."""
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": 0, "header_style": "bold"}
    return Table(title=title, title_justify="left", **look)


def _or_blank(value: float, text: str) -> str:
    return "" if math.isnan(value) else text.format(value)


def loss_text(loss: float) -> str:
    """Short, also where a training has diverged."""
    return f"{loss:.5f}" if abs(loss) < 1e5 else f"{loss:.4g}"


def _plot(epochs: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """The objective over seconds, or the loss of optimizers that do not tell the objective."""
    seconds = np.cumsum([one["compute_s"] + one["comm_s"] for one in epochs])
    name = "loss" if math.isnan(epochs[-1]["objective"]) else "objective"
    with picture(path, title, height=3.2) as figure:
        axes = figure.add_subplot()
        axes.plot(seconds, [one[name] for one in epochs], marker="o", markersize=3)
        axes.set_ylabel(name)
        axes.set_yscale("log")
        axes.set_xlabel("time of training")
        seconds_across(axes.xaxis, logarithmic=False)


_STILL_FALLS = 1e-3  # of the loss in an epoch: worth a word

app = typer.Typer(
    help="Linear models on sparse data: logistic regression, support vector machines, ridge regression.",
    no_args_is_help=True,
)

_Data = Annotated[
    Path,
    typer.Argument(exists=True, dir_okay=False, help="A LIBSVM file: label index:value …; also .gz, .bz2, .xz, .zst."),
]
_Features = Annotated[
    int | None, typer.Option(help="How many there are; more are an error. Default: as many as occur.")
]
_ZeroBased = Annotated[
    ZeroBasedOption,
    typer.Option(
        help="Whether the file's first feature is 0 (true) or 1 (false). auto: as a comment above the rows says; "
        "without one, 0 if that is among the indices of the first 16 MiB."
    ),
]
_Strict = Annotated[
    bool, typer.Option("--strict/--skip-damaged", help="Stop at a damaged line, or leave such lines out.")
]
_Json = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures and the machine here.")]
_Cache = Annotated[bool, typer.Option(help="Keep the rows in a binary file beside DATA, for the next time.")]


@app.command("train")
def train_command(
    context: typer.Context,
    data: _Data,
    loss: Annotated[str, typer.Option(help=f"One of {', '.join(LOSSES)}.")] = "logistic",
    ranks: Annotated[int, typer.Option(min=1, max=256, help="Processes to start on this machine.")] = 4,
    model: Annotated[Path, typer.Option(dir_okay=False, help="Where the model goes (npz).")] = Path("model.npz"),
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="Keep here, epoch by epoch, what the training goes on from when the same command is given again after "
            "it was broken off, or with more --epochs. It is a model's file, too.",
        ),
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Epochs from one checkpoint to the next.")] = 1,
    optimizer: Optimizer = "auto",
    l2: L2 = 1e-6,
    l1: L1 = 0.0,
    tol: Annotated[
        float, typer.Option(help="Newton and dual end when the objective is this part above the optimum, at most.")
    ] = 1e-4,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Passes over the data, by default 10. Of newton and dual: steps at most, by default 1,000.",
            show_default=False,
        ),
    ] = None,
    batch: Batch = None,
    learning_rate: LearningRate = None,
    decay: Annotated[float, typer.Option(help="Step t has the learning rate / (1 + decay·t).")] = 0.0,
    bias: Annotated[bool, typer.Option(help="Whether there is one; it is not regularised.")] = True,
    held_out: Annotated[float, typer.Option(help="The share of rows to judge the model by.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of who is held out, and of the order of rows.")] = 0,
    overlap: Overlap = False,
    threads: Threads = 1,
    features: _Features = None,
    zero_based: _ZeroBased = ZeroBasedOption.auto,
    strict: _Strict = True,
    cache: _Cache = True,
    network: Annotated[
        str,
        typer.Option(
            help="Over what ranks talk: [bold]shm[/] (shared memory), [bold]tcp[/] (loopback), or a rate such as "
            "[bold]1gbit[/] (one network namespace per rank; needs root)."
        ),
    ] = "shm",
    json_file: _Json = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the objective over seconds into this PNG file.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which the job is given up.")] = 86_400.0,
) -> None:
    """Train a linear model among ranks, which sum their sparse gradients without loss.

    Each rank reads its own lines of [bold]DATA[/]. Newton and dual give the same bits on any number of ranks,
    all else the same but for rounding.
    Labels are -1 and 1 or 0 and 1; numbers for [bold]squared_error[/]. [bold]compute[/] and [bold]communication[/] are
    rank 0's, the latter with its waiting for others. Under torchrun or mpiexec their ranks train, and --ranks,
    --network and --timeout have no effect. docs/reference/linear.md says more."""
    console = table_console()
    try:
        settings = TrainingSettings(
            **{one.name: context.params[one.name] for one in dataclasses.fields(TrainingSettings)}
        )
        form = LibsvmFormat(features, zero_based.value_in_python, strict)
        kept = None if checkpoint is None else str(checkpoint.resolve())
        job = Job(str(data.resolve()), str(model.resolve()), form, settings, cache, kept, checkpoint_every)
    except ValueError as error:
        raise bad_option(error) from error
    if settings.method not in SECOND_ORDER:  # whose settings refuse all
        refuse_given(context, ("tol",), f"--optimizer {settings.method} has none")
    if checkpoint is None:
        refuse_given(context, ("checkpoint_every",), "without --checkpoint there is none")
    networks_of([network])
    if not data.is_file():
        raise typer.BadParameter(
            f"{data} is no regular file, of which ranks could read parts: write it to one", param_hint="DATA"
        )
    outputs = {"--model": model, "--checkpoint": checkpoint, "--json": json_file, "--plot": plot_file}
    if writes_files():
        check_all_writable(outputs)
    for option, output in outputs.items():
        _check_apart(output, option, data)
    _check_checkpoint(checkpoint, job.partial)
    left = _Left(job)
    if is_rank_of_another_launcher():
        said = _as_one_rank(console, job, left)
    else:
        with ended_by_interrupt(console, lambda: f"interrupted; {left.said() or 'no model is written'}"):
            said = _as_launcher(console, job, ranks, network, timeout, left)
    if said is None:
        return
    about, end = said["rows"], said["end"]
    title = f"{loss}, {_counted(about['rows'], 'row')} of {about['nnz'] / max(about['rows'], 1):,.1f} entries, "
    title += f"{_counted(about['features'], 'feature')}, {_counted(about['ranks'], 'rank')}, {_steps_of(settings)}"
    console.print(table_of(said["epochs"], title))
    with_held_out = ", held-out ones too," if settings.held_out else ""
    console.print(
        f"read in {about['read_s']:.2f} s; objective on all rows{with_held_out} {end['objective']:.6g}", highlight=False
    )
    if about["damaged"]:
        left_out = f"{_counted(about['damaged'], 'damaged line')} left out"
        console.print(left_out, style="yellow", highlight=False)
        _print_damaged(console, about["first_damaged"])
    if about["weighted"]:
        weighted = "rows have weights, as lines begin with label:weight; a line without a label would be read so, too"
        console.print(weighted, highlight=False, soft_wrap=True)
    if is_classification(loss) and about["positive"] in (0, about["rows"]):
        only = "1" if about["positive"] else "-1 or 0"
        console.print(
            f"all labels are {only}: a model of one class tells nothing apart", style="yellow", highlight=False
        )
    if end["diverged"]:
        console.print(_divergence(settings, end), style="red", highlight=False, soft_wrap=True)
    else:
        if end["no_better_than_no_weights"]:
            console.print(_no_better_than_no_weights(settings, end), style="yellow", highlight=False, soft_wrap=True)
        elif settings.method in SECOND_ORDER and not end["converged"]:
            console.print(_ended_early(said["epochs"], end), style="yellow", highlight=False, soft_wrap=True)
        elif end["last_fall"] > _STILL_FALLS:
            console.print(_still_falls(settings, end), style="yellow", highlight=False, soft_wrap=True)
        console.print(f"model: {model}", highlight=False, soft_wrap=True)
    if checkpoint is not None and checkpoint.exists():
        console.print(f"checkpoint: {checkpoint}", highlight=False, markup=False, soft_wrap=True)
    if plot_file is not None:
        with drawn(console, plot_file):
            _plot(said["epochs"], dated(title), plot_file)
    if json_file is not None:
        asked = {name: value for name, value in dataclasses.asdict(settings).items() if name != "epochs"}
        asked |= {"optimizer": settings.method, "batch": settings.rows_a_step}
        figures = {"data": data.name, **asked, **about, "epochs": said["epochs"], **end}
        write_result(console, json_file, {**_without_nan(figures), "machine": describe_machine()}, what="figures")
    if end["diverged"]:
        raise typer.Exit(1)


@app.command("predict")
def predict_command(
    data: _Data,
    model: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A model of telegrad linear train.")],
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write a prediction for each row here, one a line.")
    ] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Write scores instead of classes.")] = False,
    features: _Features = None,
    zero_based: Annotated[
        ZeroBasedOption | None,
        typer.Option(
            help="Whether the file's first feature is 0 (true) or 1 (false). Default: as in the model's training data. "
            "Another is an error, and only a model that does not say needs this option.",
            show_default=False,
        ),
    ] = None,
    strict: _Strict = True,
    cache: _Cache = True,
) -> None:
    """Predict with a trained model, and say how well that fits the file's labels.

    Features that the model does not know have no weight. Classes are written as -1 and 1, whichever labels the model
    was trained with."""
    console = Console()
    if scores and out is None:
        raise typer.BadParameter("it says what --out has: name that file too", param_hint="--scores")
    check_writable(out, "--out")
    _check_apart(out, "--out", data, model)
    try:
        found = LinearModel.load(model)
        rows = _rows_for(console, found, model, data, zero_based, features=features, strict=strict, cache=cache)
    except (ValueError, ImportError, OSError) as error:
        _fail(console, str(error))
    values = found.scores(rows)
    predictions = values if scores else found.predict(rows)
    if out is not None:
        with written(console, out):
            np.savetxt(out, predictions, fmt="%.9g" if scores or not is_classification(found.loss) else "%d")
        console.print(f"predictions: {out}", highlight=False, soft_wrap=True)
    text = _counted(len(rows), "row")
    if rows.damaged:
        text += f", {_counted(rows.damaged, 'damaged line')} left out"
    if is_classification(found.loss) and not are_classes(len(rows), *label_counts(rows.labels)):
        text += "; labels are neither -1 and 1 nor 0 and 1: nothing to compare with"
    elif len(rows):
        targets = signed(rows.labels) if is_classification(found.loss) else rows.labels
        text += f"; mean loss {(loss := losses_of(found.loss, values, targets).mean()):.5f}"
        if is_classification(found.loss):
            right, area = ((values > 0) == (targets > 0)).mean(), area_under_curve(values, targets)
            text += f", accuracy {100 * right:.2f} %" + ("" if math.isnan(area) else f", AUC {area:.4f}")
            if loss > losses_of(found.loss, 0.0, 1.0):
                text += "; a model of zeros does better: is the first feature 0 or 1 as in training? See --zero-based"
    console.print(text, highlight=False)
    _print_damaged(console, rows.first_damaged)


@app.command("compare")
def compare_command(
    context: typer.Context,
    data: _Data,
    loss: Annotated[str, typer.Option(help=f"One of {', '.join(SOLVERS)}.")] = "logistic",
    l2: L2 = 1e-6,
    l1: Annotated[float, typer.Option("--l1", help="λ of λ·Σ|w_i| in place of --l2, for peers that know it.")] = 0.0,
    tol: Annotated[float, typer.Option(help="Of telegrad; peers have their own defaults.")] = 1e-4,
    held_out: Annotated[float, typer.Option(help="The share of rows to judge models by.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of who is held out.")] = 0,
    features: _Features = None,
    zero_based: _ZeroBased = ZeroBasedOption.auto,
    strict: _Strict = True,
    cache: _Cache = True,
    json_file: _Json = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", dir_okay=False, help="Draw the seconds into this PNG file.")
    ] = None,
) -> None:
    """Compare with the other programs for linear models that are installed, on your rows.

    Each fits once, on one thread, the rows that are not held out, with its own default tolerance. All minimise the same
    objective: the bias is the weight of one more feature, and is regularised, as liblinear has it. [bold]seconds[/] are
    those of the fit alone, with the rows in memory; Vowpal Wabbit's are also those of reading text. [bold]above the
    best[/] is above the least objective of all and of liblinear with a tight tolerance, if installed."""
    console = table_console()
    if loss not in SOLVERS:
        raise typer.BadParameter(f"{loss} is none of {', '.join(SOLVERS)}", param_hint="--loss")
    if l1:
        refuse_given(context, ("l2",), "peers have one penalty, which is --l1 here")
        l2 = 0.0
        if loss not in L1_SOLVERS:
            raise typer.BadParameter(f"{loss} is none of {', '.join(L1_SOLVERS)} for --l1", param_hint="--loss")
    elif not l2:
        raise typer.BadParameter("0 must be above 0: peers have no objective without a penalty", param_hint="--l2")
    check_all_writable({"--json": json_file, "--plot": plot_file})
    _check_apart(json_file, "--json", data)
    _check_apart(plot_file, "--plot", data)
    try:
        settings = TrainingSettings(loss=loss, l2=l2, l1=l1, tol=tol, held_out=held_out, seed=seed, bias=False)
    except ValueError as error:
        raise bad_option(error) from error
    peers = [peer for peer in PEERS if loss in (peer.l1_losses if l1 else peer.losses)]
    found: list[dict[str, Any]] = []
    with ended_by_interrupt(console, lambda: "interrupted"), counting(console) as bar:
        task = bar.add_task("reading", total=2 + sum(peer.is_installed for peer in peers))
        try:
            base = zero_based.value_in_python
            rows = read_libsvm(data, features=features, zero_based=base, strict=strict, cache=cache)
            found = compared(rows, settings, peers, lambda name: bar.update(task, description=name, advance=1))
        except (ValueError, ImportError, OSError) as error:
            _fail(console, str(error))
    title = f"{loss}, {_counted(found[0]['rows'], 'row')} and {found[0]['held_out']:,} held out, one thread each"
    table = _table(title)
    table.add_column("program", no_wrap=True)
    for name in ("objective", "above\nthe best", "con-\nverged", "held-out\naccuracy", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        converged = {True: "yes", False: "no"}.get(one["converged"], "")
        cells = [f"{one['objective']:.6g}", f"{100 * one['above']:.3g} %", converged]
        table.add_row(one["program"], *cells, _or_blank(100 * one["accuracy"], "{:.2f} %"), f"{one['seconds']:.3g}")
    console.print(table)
    for peer in peers:
        if not peer.is_installed:
            said = f"{peer.name} is not installed: pip install {peer.package}"
            console.print(said, style="dim", highlight=False, soft_wrap=True)
    if plot_file is not None:
        with drawn(console, plot_file), picture(plot_file, dated(title), height=1 + 0.35 * len(found)) as figure:
            axes, seconds = figure.add_subplot(), [one["seconds"] for one in found]
            texts = [f"{duration(one['seconds'])}, {100 * one['above']:.2g} % above the best" for one in found]
            bars(axes, [one["program"] for one in found], {"computing": seconds}, texts)
            axes.set_xlabel("time of the fit")
            seconds_across(axes.xaxis, logarithmic=False)
    if json_file is not None:
        figures = {"data": data.name, "loss": loss, "l2": l2, "l1": l1, "tol": tol, "rows": _without_nan(found)}
        write_result(console, json_file, {**figures, "machine": describe_machine()})


def _rows_for(
    console: Console, found: LinearModel, model: Path, data: Path, asked: ZeroBasedOption | None, **options: Any
) -> Rows:
    """The rows to predict for, whose first feature is the model's. Raises ``BadParameter`` if the user asks for another
    base than the model's, and ``ValueError`` if the data say that they have another: each weight would meet its
    neighbour's feature, which nothing but bad predictions would show."""
    if found.index_base is None:
        rows = read_libsvm(data, zero_based="auto" if asked is None else asked.value_in_python, **options)
        if asked is None and rows.index_base is not None:
            console.print(
                f"{model} does not say whether the indices that it was trained on begin with 0 or 1: "
                f"{zero_based_option(rows.index_base)} is taken, as in {data.name}; give that option to agree",
                style="yellow",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        return rows
    known = zero_based_option(found.index_base)
    if asked not in (None, ZeroBasedOption.auto) and asked.value_in_python != (found.index_base == 0):
        raise typer.BadParameter(
            f"{asked.value} is not that of {model}, which was trained with {known}: leave the option "
            f"out, and if features of the data begin with {1 - found.index_base}, renumber them from "
            f"{found.index_base}",
            param_hint="--zero-based",
        )
    try:
        return read_libsvm(data, zero_based=found.index_base == 0, **options)
    except ContradictingBase as error:
        guess = ", which was guessed" if found.base_is_guessed else ""
        raise ValueError(
            f"{data}: a comment above the rows means {zero_based_option(error.base)}, but {model} was trained with "
            f"{known}{guess}: train again with {zero_based_option(error.base)} if that is right for both files, else "
            f"renumber the features of {data.name} from {found.index_base} and correct the comment"
        ) from error


def _steps_of(settings: TrainingSettings) -> str:
    if settings.method in SECOND_ORDER:
        return "Newton's method" if settings.method == "newton" else "dual method"
    text = f"batches of {settings.rows_a_step:,}" + (", overlapped" if settings.overlap else "")
    return text if settings.method == "sgd" else f"{text}, {settings.method}"


def _better_rate(settings: TrainingSettings, better: str) -> str:
    if settings.learning_rate is not None:
        return f"try {better} --learning-rate than {settings.learning_rate:g}, or leave it out"
    return f"try {better} --learning-rate than 0.1" if settings.method == "adagrad" else "scale the features"


def _no_better_than_no_weights(settings: TrainingSettings, end: dict[str, Any]) -> str:
    without, reached = end["objective_without_weights"], end["objective"]
    remedy = _better_rate(settings, end["better_rate"])
    if end["converged"]:
        remedy = f"no other is, with these features and --l2 {settings.l2:g}"
        remedy += f" --l1 {settings.l1:g}" if settings.l1 else ""
    elif settings.learning_rate is None and settings.method != "adagrad":
        remedy += ", or give more --epochs"
    if settings.l1 and not end["converged"]:
        remedy += f", or a lower --l1 than {settings.l1:g}"
    said = f"the model is no better than one without weights (objective {reached:.6g}, without weights {without:.6g})"
    return f"{said}: {remedy}"


def _divergence(settings: TrainingSettings, end: dict[str, Any]) -> str:
    remedy = _better_rate(settings, "a lower")
    reached = f"objective {end['objective']:.6g}, with no weights {end['objective_at_zero']:.6g}"
    return f"the training has diverged ({reached}), so no model is written: {remedy}"


def _still_falls(settings: TrainingSettings, end: dict[str, Any]) -> str:
    said = f"the loss still fell by {100 * end['last_fall']:.2g} % an epoch when the training ended: give more --epochs"
    faster = f"a larger --learning-rate (it was {end['first_learning_rate']:.3g})"
    if settings.method == "sgd":
        return f"{said}, a smaller --batch, {faster} or --optimizer adagrad"
    return f"{said}, a smaller --batch or {faster}"


def _ended_early(epochs: Sequence[Mapping[str, Any]], end: dict[str, Any]) -> str:
    return (
        f"{_counted(len(epochs), 'step')} ended the training when the objective was up to about "
        f"{100 * end['gap']:.3g} % above the optimum: give more --epochs"
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _print_damaged(console: Console, lines: Sequence[str]) -> None:
    for text in lines:
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


class _Left:
    """What a training that is broken off leaves, if anything."""

    def __init__(self, job: Job) -> None:
        self._files = {"the model so far: ": job.partial}
        if job.checkpoint is not None:
            self._files["the same command goes on from "] = Path(job.checkpoint)
        self._before = {text: _state_of(path) for text, path in self._files.items()}

    def said(self) -> str:
        """Of the files that are new."""
        found = ((text, path, _state_of(path)) for text, path in self._files.items())
        return "; ".join(f"{text}{path}" for text, path, state in found if state not in (None, self._before[text]))


def _state_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


class _Shown:
    """What rank 0 has said so far, and a bar that shows it; a line for each epoch where there can be no bar."""

    def __init__(self, bar: Progress) -> None:
        self.said: dict[str, Any] = {"epochs": []}
        self._seconds = 0.0
        self.error: str | None = None
        self._bar = bar
        self._task = bar.add_task("reading", total=1.0, what="")

    def take(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "epoch":
            self.said["epochs"].append(message)
            self._seconds += message["compute_s"] + message["comm_s"]
            what = f"epoch {message['epoch']}: " + self._reached(message)
            if self._bar.console.is_terminal:
                self._bar.update(self._task, what=what)
            else:
                self._bar.console.print(what, highlight=False)
        elif kind == "step":
            self._bar.update(self._task, description="training", completed=message["done"])
        elif kind == "resumed":
            self.said["epochs"] += message["epochs"]
            count = _counted(len(message["epochs"]), "epoch")
            self._bar.console.print(f"the checkpoint has {count}: these are not trained again", highlight=False)
        elif kind == "error":
            self.error = self.error or message["said"]
        else:
            self.said[kind] = message

    def _reached(self, epoch: dict[str, Any]) -> str:
        parts = [f"loss {loss_text(epoch['loss'])}"]
        if not math.isnan(epoch["gap"]):
            parts = [f"objective {epoch['objective']:.6g}", f"gap {100 * epoch['gap']:.3g} %"]
        if not math.isnan(epoch["held_out_loss"]):
            parts.append(f"held-out {loss_text(epoch['held_out_loss'])}")
        if not math.isnan(epoch["accuracy"]):
            parts.append(f"accuracy {100 * epoch['accuracy']:.2f} %")
        return ", ".join([*parts, f"{self._seconds:.1f} s"])


def _as_launcher(console: Console, job: Job, ranks: int, network: str, timeout_s: float, left: _Left) -> dict[str, Any]:
    shown = None
    try:
        with sharing(console) as bar:
            shown = _Shown(bar)

            def take(rank: int, line: str) -> None:
                if line.startswith('{"kind"'):
                    shown.take(json.loads(line))

            run_ranks("telegrad.linear.job:main", network, ranks, [job.to_json()], take, timeout_s=timeout_s)
        return shown.said
    except (LaunchError, NetlabError) as error:
        files = f"\n{left.said()}" if left.said() else ""
        if shown is None or not (shown.error or shown.said["epochs"]):
            _fail(console, str(error) + files)
        if shown.error is None and isinstance(error, RanksTimedOut):
            # where ranks were tells nothing of a training that went on
            at = f"epoch {len(shown.said['epochs']) + 1} of {job.settings.most_epochs}"
            _fail(
                console,
                f"ranks were in {at} after {timeout_s:g} s: give more time (--timeout), or fewer --epochs{files}",
            )
        _fail(console, (shown.error or str(error)) + files)


def _as_one_rank(console: Console, job: Job, left: _Left) -> dict[str, Any] | None:
    """What is to be shown, on rank 0, which also says what is left of a training that is broken off."""
    try:
        with join_other_launcher() as comm:
            if comm.rank:
                run_rank(job, comm, lambda message: None)
                return None
            try:
                with sharing(console) as bar:
                    shown = _Shown(bar)
                    run_rank(job, comm, shown.take)
                    return shown.said
            except BaseException:
                if said := left.said():
                    console.print(said, style="yellow", highlight=False, soft_wrap=True)
                raise
    except (ValueError, OSError, ImportError, TransportError) as error:
        _fail(console, str(error))


def _check_apart(path: Path | None, option: str, *others: Path) -> None:
    """Raises ``BadParameter`` if writing ``path`` would destroy one of the ``others``, or a cache of rows."""
    if path is None:
        return
    if any(path.resolve() == one.resolve() for one in others) or path.suffix == ".rows":
        raise typer.BadParameter(f"{path} is read by this command: name another file", param_hint=option)


def _check_checkpoint(path: Path | None, partial: Path) -> None:
    """Raises ``BadParameter`` for one that cannot be read again. ``partial``: see ``Job``."""
    if path is None:
        return
    if path.resolve() == partial.resolve():
        raise typer.BadParameter(
            f"{path} is where Ctrl-C leaves the model so far: name another file", param_hint="--checkpoint"
        )
    if path.exists() and not path.is_file():
        raise typer.BadParameter(
            f"{path} is no regular file, from which the training could go on: name one", param_hint="--checkpoint"
        )


def _fail(console: Console, said: str) -> NoReturn:
    console.print(in_options(said), style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1)


def _without_nan(value: Any) -> Any:
    """``value`` with ``None`` for NaN and infinities, which JSON has not."""
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
