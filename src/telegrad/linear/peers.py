"""Other programs for linear models, which fit the same objective on the same rows: for comparisons on one thread."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.linear.losses import losses_of, signed
from telegrad.linear.problem import Share, TrainingSettings
from telegrad.linear.rows import Rows
from telegrad.linear.training import train

Weights = npt.NDArray[np.float64]
Fit = Callable[[float | None], Weights]
"""Weights of the columns, by a tolerance of its own, or by its default."""

SOLVERS = {"logistic": 0, "squared_hinge": 2, "hinge": 3}
L1_SOLVERS = {"logistic": 6, "squared_hinge": 5}
"""liblinear's ``-s`` for each loss, with squares and with L1."""
_TIGHT = 1e-8  # liblinear's tolerance for an optimum to compare with


class NotConverged(UserWarning):
    """A program says that it ended before it met its tolerance."""


_ROUNDS, _PASSES = 100, 100  # of xgboost and Vowpal Wabbit, which have no tolerance that ends them surely


@dataclass(frozen=True)
class Task:
    """Minimise mean loss + ``l2``/2·|w|² + ``l1``·Σ|w_i|, where one of both is 0, without a bias. ``matrix``: scipy's
    CSR, float64; ``labels``: -1 and 1."""

    loss: str
    l2: float
    matrix: Any
    labels: Any
    l1: float = field(default=0.0, kw_only=True)

    def objective(self, weights: Weights) -> float:
        losses = losses_of(self.loss, self.matrix @ weights, self.labels)
        return float(losses.mean()) + self.l2 / 2 * float(weights @ weights) + self.l1 * float(np.abs(weights).sum())

    @property
    def c(self) -> float:
        """The inverse of the penalty, which peers call C."""
        return 1 / ((self.l1 or self.l2) * len(self.labels))


def liblinear(task: Task) -> Fit:
    """Raises ``ImportError`` without it, as all others here."""
    from liblinear import liblinear as library
    from liblinear import liblinearutil

    problem = liblinearutil.problem(np.asarray(task.labels, np.float64), task.matrix)

    def fit(tolerance: float | None) -> Weights:
        ends = "" if tolerance is None else f"-e {tolerance}"
        solver = (L1_SOLVERS if task.l1 else SOLVERS)[task.loss]
        asked, said = liblinearutil.parameter(f"-s {solver} -c {task.c!r} {ends}"), list[bytes]()
        asked.print_func = listening = library.PRINT_STRING_FUN(said.append)
        model = liblinearutil.train(problem, asked)
        del listening  # was needed until here
        if b"reaching max number of iterations" in b"".join(said):
            warnings.warn("liblinear reached its limit of iterations", NotConverged, stacklevel=2)
        weights = np.zeros(task.matrix.shape[1])
        weights[: model.nr_feature] = model.w[: model.nr_feature]
        return weights if model.get_labels()[0] == 1 else -weights

    return fit


def scikit_learn(task: Task, solver: str = "") -> Fit:
    """``solver``: of logistic regression; ``"dual"`` or ``"primal"`` of a machine. Default: scikit-learn's own."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    options: dict[str, Any] = {"C": task.c, "fit_intercept": False, "max_iter": 1000, "random_state": 0}
    if task.loss == "logistic":
        make, options = LogisticRegression, options | ({"solver": solver} if solver else {})
        if task.l1:  # as releases from 1.8 on are told, and earlier ones
            options |= {"l1_ratio": 1.0} if make().penalty == "deprecated" else {"penalty": "l1"}
    else:
        dual = solver == "dual" if solver else "auto"
        make, options = LinearSVC, {**options, "loss": task.loss, "dual": dual}
        options |= {"penalty": "l1", "dual": False} if task.l1 else {}

    def fit(tolerance: float | None) -> Weights:
        ends = {} if tolerance is None else {"tol": tolerance}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found: Weights = make(**options, **ends).fit(task.matrix, task.labels).coef_[0]
        if any(issubclass(one.category, ConvergenceWarning) for one in said):
            warnings.warn("scikit-learn reached max_iter", NotConverged, stacklevel=2)
        return found

    return fit


def xgboost(task: Task) -> Fit:
    """Its bias, which it always has, counts as a part of the last column, which must be 1 in all rows."""
    import xgboost as package

    data = package.DMatrix(task.matrix, label=np.asarray(task.labels) > 0)
    options = {"booster": "gblinear", "objective": "binary:logistic", "reg_lambda": task.l2, "base_score": 0.5}
    options["reg_alpha"] = task.l1

    def fit(tolerance: float | None) -> Weights:
        model = package.train({**options, "nthread": 1, "verbosity": 0}, data, num_boost_round=_ROUNDS)
        said = json.loads(model.get_dump(dump_format="json")[0])
        weights = np.array(said["weight"], np.float64).reshape(-1)
        weights[-1] += said["bias"][0]
        return weights

    return fit


def vowpal_wabbit(task: Task) -> Fit:
    """By BFGS; its time is also that of reading a file of text."""
    from vowpalwabbit import Workspace

    rows, columns = task.matrix.shape
    bits = max(int(columns).bit_length() + 1, 10)

    def lines() -> Any:
        for row, label in enumerate(task.labels):
            begin, end = task.matrix.indptr[row], task.matrix.indptr[row + 1]
            pairs = zip(task.matrix.indices[begin:end], task.matrix.data[begin:end], strict=True)
            yield f"{int(label)} | " + " ".join(f"{index}:{value:.9g}" for index, value in pairs) + "\n"

    def fit(tolerance: float | None) -> Weights:
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "rows"
            with text.open("w") as file:
                file.writelines(lines())
            said = f"-d {text} --cache_file {text}.cache -k --bfgs --passes {_PASSES} --holdout_off --noconstant "
            said += f"--loss_function logistic --l2 {task.l2 * rows!r} -b {bits} --quiet"
            model = Workspace(said)
            weights = np.array([model.get_weight(one) for one in range(columns)], np.float64)
            model.finish()
        return weights

    return fit


@dataclass(frozen=True)
class Program:
    """``prepare`` makes what fits; ``package``: what pip installs; ``module``: what it is found by; ``l1_losses``: that
    it knows with L1; ``tells``: does it say that it has not converged?"""

    name: str
    package: str
    module: str
    losses: Sequence[str]
    prepare: Callable[[Task], Fit]
    l1_losses: Sequence[str] = ()
    tells: bool = False

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


PEERS = (
    Program("liblinear", "liblinear-official", "liblinear", tuple(SOLVERS), liblinear, tuple(L1_SOLVERS), tells=True),
    Program("scikit-learn", "scikit-learn", "sklearn", tuple(SOLVERS), scikit_learn, ("squared_hinge",), tells=True),
    *(
        Program(
            f"scikit-learn, {solver}",
            *("scikit-learn", "sklearn"),
            (),
            partial(scikit_learn, solver=solver),
            ("logistic",),
            tells=True,
        )
        for solver in ("liblinear", "saga")
    ),
    Program("Vowpal Wabbit", "vowpalwabbit", "vowpalwabbit", ("logistic",), vowpal_wabbit),
    Program("XGBoost, gblinear", "xgboost", "xgboost", ("logistic",), xgboost, ("logistic",)),
)


def compared(
    rows: Rows, settings: TrainingSettings, peers: Sequence[Program], on_fit: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Telegrad's figures and those of the installed ``peers``, each fitted once. Columns that occur get a weight, and
    one more that is always 1. ``on_fit`` is called with the name before each. ``"above"``: the least objective of these
    and of liblinear with a tight tolerance, if installed. ``"converged"``: ``None`` of those that do not tell. Raises
    ``ValueError`` for rows that ``train`` refuses, or that have weights."""
    from scipy import sparse

    if rows.weights is not None:
        raise ValueError("rows have weights, which some of the programs do not know: leave the weights out")
    matrix = rows.to_csr()
    matrix.eliminate_zeros()
    one = np.ones((len(rows), 1), np.float32)
    matrix = sparse.csr_array(sparse.hstack([matrix[:, np.unique(matrix.indices)], one], format="csr"))
    share = Share(0, len(rows), len(rows), held_out=settings.held_out, seed=settings.seed)
    kept, held_out = share.trained.astype(np.int64), share.held_out.astype(np.int64)
    own = Rows.from_csr(matrix[kept], rows.labels[kept])
    on_fit("telegrad")
    began_s = time.perf_counter()
    trained = train(own, replace(settings, held_out=0.0))
    seconds = time.perf_counter() - began_s
    wide, labels = sparse.csr_matrix(matrix.astype(np.float64)), signed(rows.labels)
    task = Task(settings.loss, settings.l2, wide[kept], labels[kept], l1=settings.l1)
    about, found = {"rows": kept.size, "held_out": held_out.size}, list[dict[str, Any]]()

    def judge(name: str, seconds: float, weights: Weights, converged: bool | None) -> None:
        right = (wide[held_out] @ weights > 0) == (labels[held_out] > 0)
        figures = {"objective": task.objective(weights), "accuracy": float(right.mean()) if right.size else math.nan}
        found.append({"program": name, **about, **figures, "seconds": seconds, "converged": converged})

    judge("telegrad", seconds, trained.model.weights.astype(np.float64), trained.converged)
    for peer in (one for one in peers if one.is_installed):
        on_fit(peer.name)
        fit = peer.prepare(task)
        with contextlib.ExitStack() as one_thread:
            if importlib.util.find_spec("threadpoolctl"):  # comes with scikit-learn, which alone has threads by default
                one_thread.enter_context(importlib.import_module("threadpoolctl").threadpool_limits(1))
            said = one_thread.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            began_s = time.perf_counter()
            weights = fit(None)
            seconds = time.perf_counter() - began_s
            ended = not any(issubclass(one.category, NotConverged) for one in said)
            judge(peer.name, seconds, weights, ended if peer.tells else None)
    best = min(one["objective"] for one in found)
    if any(peer.prepare is liblinear and peer.is_installed for peer in peers):
        on_fit("liblinear, tightly")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConverged)
            best = min(best, task.objective(liblinear(task)(_TIGHT)))
    return [{**one, "above": one["objective"] / best - 1 if best else 0.0} for one in found]
