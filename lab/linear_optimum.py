"""How long linear models on one rank take to an objective near the optimum, beside liblinear and scikit-learn.

All minimise mean loss + |w|²/(2·rows), C = 1, without a bias, which liblinear would regularise. Telegrad trains with
its defaults, which shows what these reach; its time is that of as many steps as first come near enough. Peers get
tolerances that shrink until one is near enough, and the time is that of this tolerance alone. A peer that no tolerance
brings there counts with the time of the last one, marked ``>``. Times are the processor's, of one thread, and the least
of several rounds in turn: other work on the machine changes them less than the clock's, or means.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.table import Table
from scipy import sparse

from lab.common.commands import end_with_rows
from lab.common.synthetic_rows import SHAPES, synthetic_rows
from telegrad.linear import Rows, TrainingSettings, peers, train
from telegrad.linear.peers import SOLVERS, Fit, liblinear, scikit_learn
from telegrad.tools.cli.outputs import table_console
from telegrad.tools.report.figures import duration

NEAR = 1e-3
_TOLERANCES = (1.0, 0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3, 1e-4, 1e-5, 1e-6)
_MOST_S = 2.0  # of one fit, behind which no smaller tolerance is tried
_MOST_DIRECT = 1000  # columns for which scikit-learn's newton-cholesky is tried


@dataclass(frozen=True)
class Task(peers.Task):
    """One set with one loss, of the columns that occur. ``matrix``: in float64, what peers get."""

    name: str
    rows: Rows


def _sets() -> Iterator[tuple[str, Callable[[], tuple[Any, Any]]]]:
    from sklearn.datasets import load_breast_cancer, load_digits

    random = np.random.default_rng(1)

    def digits() -> tuple[Any, Any]:
        found = load_digits()
        return found.data, found.target == 8

    def cancer(*, scaled: bool) -> tuple[Any, Any]:
        found = load_breast_cancer()
        data = (found.data - found.data.mean(0)) / found.data.std(0) if scaled else found.data
        return data, found.target

    def badly_scaled() -> tuple[Any, Any]:
        data = random.normal(size=(2000, 50)) * 10.0 ** random.uniform(-3, 3, 50)
        scores = data @ (random.normal(size=50) / np.abs(data).mean(0))
        return data, scores + 2 * random.normal(size=2000) > 0

    def separable() -> tuple[Any, Any]:
        data = random.normal(size=(1000, 20))
        return data, data @ random.normal(size=20) > 0

    def shape(name: str, rows: int) -> tuple[Any, Any]:
        made = synthetic_rows(SHAPES[name], 0, rows)
        return made.to_csr(), made.labels > 0

    yield "digits, 8 or not", digits
    yield "breast cancer", functools.partial(cancer, scaled=False)
    yield "breast cancer, scaled", functools.partial(cancer, scaled=True)
    yield "Debian packages", _packages
    yield "badly scaled", badly_scaled
    yield "separable", separable
    yield "URL's shape", functools.partial(shape, "url", 10_000)
    yield "Webspam's shape", functools.partial(shape, "webspam", 1000)


def _packages(most: int = 20_000) -> tuple[Any, Any]:
    """Descriptions of Debian's packages by tf-idf, and whether each is of a library."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    said = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True).stdout
    texts, labels = [], []
    for package in said.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in package.split("\n"):
            if line.startswith(" "):
                fields[name] += line
            else:
                name, _, value = line.partition(":")
                fields[name] = value
        text = next((value for key, value in fields.items() if key.startswith("Description")), "")
        if text and "Section" in fields:
            texts.append(text)
            labels.append(fields["Section"].strip().rpartition("/")[2] in ("libs", "libdevel"))
    chosen = np.random.default_rng(0).permutation(len(texts))[:most]
    matrix = TfidfVectorizer(sublinear_tf=True).fit_transform([texts[one] for one in chosen])
    return matrix, np.array(labels)[chosen]


def tasks(only: str = "") -> Iterator[Task]:
    """All sets whose names have ``only``, with all losses. A set that this machine lacks is left out."""
    for name, make in _sets():
        if only.lower() not in name.lower():
            continue
        try:
            data, labels = make()
        except (OSError, subprocess.CalledProcessError):
            continue
        matrix = sparse.csr_array(data, dtype=np.float32)
        matrix.eliminate_zeros()
        compact = sparse.csr_matrix(matrix.astype(np.float64)[:, np.unique(matrix.indices)])
        compact.sort_indices()
        rows = Rows.from_csr(compact, np.where(labels, 1, -1))
        for loss in SOLVERS:
            yield Task(loss, 1 / len(rows), compact, rows.labels, name, rows)


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """The processor's seconds, and what ``act`` gives."""
    began_s = time.process_time()
    found = act()
    return time.process_time() - began_s, found


@dataclass
class Reached:
    """``gap``: of the objective, against the optimum. ``seconds``: the least so far that ``fit`` has taken."""

    seconds: float
    gap: float
    how: str
    fit: Callable[[], Any]

    def again(self) -> None:
        if self.seconds < _MOST_S / 2:
            self.seconds = min(self.seconds, timed(self.fit)[0])

    @property
    def is_near(self) -> bool:
        return self.gap <= NEAR


def own(task: Task) -> tuple[Reached, Reached, float]:
    """The time to ``NEAR`` and that of the defaults, and the optimum: the lowest that small tolerances find."""

    def fit(**options: Any) -> Any:
        return train(task.rows, TrainingSettings(loss=task.loss, l2=task.l2, bias=False, **options))

    def reached(trained: Any) -> float:
        return task.objective(trained.model.weights.astype(np.float64))

    best = min(reached(fit(tol=1e-6)), reached(fit()), task.objective(liblinear(task)(1e-8)))
    default = fit()
    steps = next((one.epoch for one in default.epochs if one.objective <= best * (1 + NEAR)), len(default.epochs))

    def measured(act: Callable[[], Any]) -> Reached:
        seconds, trained = timed(act)
        return Reached(seconds, reached(trained) / best - 1, TrainingSettings(loss=task.loss).method, act)

    return measured(lambda: fit(epochs=steps)), measured(fit), best


def of_peer(task: Task, best: float, how: str, fit: Fit) -> Reached:
    """``fit(tolerance)`` gives weights."""
    for tolerance in _TOLERANCES:
        act = functools.partial(fit, tolerance)
        seconds, weights = timed(act)
        found = Reached(seconds, task.objective(weights) / best - 1, how, act)
        if found.is_near or seconds > _MOST_S:
            break
    return found


def solvers_of(task: Task) -> dict[str, Fit]:
    """Scikit-learn's, by name."""
    if task.loss == "logistic":
        names = ["lbfgs", "liblinear", "newton-cg"]
        names += ["newton-cholesky"] if task.matrix.shape[1] <= _MOST_DIRECT else []
        return {one: scikit_learn(task, one) for one in names}
    names = ["dual", "primal"] if task.loss == "squared_hinge" else ["dual"]
    return {f"LinearSVC, {one}": scikit_learn(task, one) for one in names}


def measured(task: Task, rounds: int) -> dict[str, Any]:
    """A row of figures."""
    near, default, best = own(task)
    lib = of_peer(task, best, f"-s {SOLVERS[task.loss]}", liblinear(task))
    every = [of_peer(task, best, how, fit) for how, fit in solvers_of(task).items()]
    for _ in range(rounds - 1):
        for one in (near, default, lib, *every):
            one.again()
    arrived = [one for one in every if one.is_near] or every
    peer = min(arrived, key=lambda one: one.seconds)
    row: dict[str, Any] = {"data": task.name, "loss": task.loss, "optimum": best, "wrong": 0}
    row |= {"rows": len(task.rows), "columns": task.matrix.shape[1], "entries": task.rows.nnz}
    for name, found in (("near", near), ("default", default), ("liblinear", lib), ("scikit_learn", peer)):
        row |= {f"{name}_s": found.seconds, f"{name}_gap": found.gap, f"{name}_how": found.how}
    return row


def _text(row: dict[str, Any], name: str) -> str:
    return f"{'> ' if row[f'{name}_gap'] > NEAR else ''}{duration(row[f'{name}_s'])}"


def command(
    rounds: Annotated[int, typer.Option(min=1, help="Of which each time is the least.")] = 5,
    only: Annotated[str, typer.Option(help="A part of the names of the sets to measure; all by default.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures here.")] = None,
) -> None:
    """Time linear models to 0.1 % above the optimum on one rank, beside liblinear and scikit-learn's best solver."""
    from threadpoolctl import threadpool_limits

    console = table_console()
    if importlib.util.find_spec("liblinear") is None:
        raise typer.BadParameter("liblinear is missing: pip install liblinear-official==2.50.0")
    rows = []
    with threadpool_limits(1):
        for task in tasks(only):
            rows.append(measured(task, rounds))
            times = ", ".join(_text(rows[-1], name) for name in ("near", "liblinear", "scikit_learn"))
            console.print(f"{task.name}, {task.loss}: {times}", style="dim", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    names = ("data", "loss", "gap by default", "telegrad", "liblinear", "scikit-learn", "its solver")
    for name in (*names, "x liblinear", "x scikit-learn"):
        table.add_column(name, justify="left" if name in ("data", "loss", "its solver") else "right")
    ratios: dict[str, list[float]] = {"liblinear": [], "scikit_learn": []}
    for row in rows:
        own_ratios = {peer: row["near_s"] / row[f"{peer}_s"] for peer in ratios}
        for peer, ratio in own_ratios.items():
            ratios[peer].append(ratio)
        cells = [row["data"], row["loss"], f"{row['default_gap']:.1e}"]
        cells += [_text(row, name) for name in ("near", "liblinear", "scikit_learn")]
        table.add_row(*cells, row["scikit_learn_how"], *(f"{ratio:.2f}" for ratio in own_ratios.values()))
    console.print(table)
    for loss in (None, *SOLVERS):
        chosen = [one for one, row in enumerate(rows) if loss in (None, row["loss"])]
        means = [math.exp(statistics.fmean(math.log(every[one]) for one in chosen)) for every in ratios.values()]
        console.print(f"{loss or 'all'}: {means[0]:.2f}x liblinear, {means[1]:.2f}x scikit-learn (geometric means)")
    end_with_rows(console, rows, json_file)
