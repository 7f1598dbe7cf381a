"""Linear models as scikit-learn's estimators, fitted by one rank or by all ranks of a communicator.

Needs scikit-learn, which ``telegrad.linear`` imports only when one of these is asked for."""

from __future__ import annotations

import functools
import inspect
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from telegrad import Communicator
from telegrad.communicator.operands import checked_flag, checked_number
from telegrad.communicator.texts import all_gather_text, own_error_first
from telegrad.linear.losses import F32, is_classification, losses_of
from telegrad.linear.model import LinearModel, State
from telegrad.linear.problem import SECOND_ORDER, TrainingSettings
from telegrad.linear.rows import Rows, squared_lengths
from telegrad.linear.training import EVEN, gains_nothing, objective, train, train_further, train_softmax

try:
    from scipy import sparse
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils import check_random_state
    from sklearn.utils.extmath import safe_sparse_dot, softmax
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise ImportError("estimators need scikit-learn: pip install 'telegrad[estimators]'") from error

F64 = npt.NDArray[np.float64]
_Checked = tuple[Any, Any, Any, TrainingSettings]
"""Rows, classes or numbers, the rows' weights or ``None``, and what they are trained with."""

_CONVERGED = 1e-3  # above the optimum
_ROWS_A_STEP = 100  # of partial_fit, whose callers may have but few
_STEPS = 100  # at most, to find the optimum for a comparison
# of the hinge without penalty: l2 by the mean squared length of rows; one of them suffices, whatever columns' scales
_SMALL_L2 = (1e-6, 1e-10, 1e-14, 1e-18)
# rows of the latest calls of partial_fit that are judged; parts of zero weights' loss: of one row, of rows before their
# own step
_JUDGED, _FEW, _UNSEEN = 100, 10, 1.5
_HUGE = 1e9  # a loss, so that Inf does not stay
# of the objective of a model without weights, and of that of zeros: float32 weights are no more exact
_NEGLIGIBLE, _NEGLIGIBLE_OF_ZEROS = 1e-6, 1e-9


@dataclass(frozen=True)
class _Fitted:
    """One model, or that of all classes, and by what part of the optimum it is above it, at least. ``without``: the
    objective of a model without weights, ``reached`` of this one; ``ended_by``: tol, max_iter or rounding, for a
    warning; ``better_rate``: to try if that is no better, empty where there is none; ``is_early``: max_iter came before
    tol, so that ``gap`` may be an estimate that is too low."""

    weights: F32
    bias: Any
    epochs: int
    gap: float
    reached: float
    without: float
    ended_by: str
    better_rate: str = ""
    is_early: bool = False


_INSTEAD = {  # of arguments that scikit-learn's estimators have and these lack
    "solver": "optimizer= chooses the method, and the default needs no choice",
    "dual": "leave it out, the method follows from the loss",
    "n_jobs": "give each rank of comm= a part of the rows",
    "verbose": "leave it out; telegrad linear train shows how a training goes",
    "warm_start": "use partial_fit, which goes on from a model",
    "multi_class": "leave it out, each class is told from the rest",
    "positive": "use scikit-learn's, which can bound coefficients",
}


class _Linear(BaseEstimator):
    """What all have in common. Subclasses have the arguments."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        init: Any = cls.__init__

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name in (given.keys() & _INSTEAD.keys()) - inspect.signature(init).parameters.keys():
                raise TypeError(f"{cls.__name__} has no {name}={given[name]!r}: {_INSTEAD[name]}")
            init(self, *args, **given)

        setattr(cls, "__init__", checked)  # noqa: B010

    comm: Communicator | None
    random_state: Any
    max_iter: int | None
    tol: float
    optimizer: str
    batch: int | None
    learning_rate: float | None
    decay: float
    fit_intercept: bool

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __sklearn_clone__(self) -> Self:
        arguments = self.get_params(deep=False)  # a communicator is shared, not copied
        return type(self)(**{k: v if k == "comm" else clone(v, safe=False) for k, v in arguments.items()})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "comm": None}  # it ends with its process

    def _agree(self, look: Callable[[], tuple[_Checked, dict[str, Any]]]) -> tuple[_Checked, list[dict[str, Any]]]:
        """This rank's rows, targets and settings, and what every rank says, JSON, of its own, as ``look`` finds them.
        Raises on every rank what is wrong on any."""
        if self.comm is not None and not isinstance(self.comm, Communicator):
            raise TypeError(f"comm={self.comm!r} must be a telegrad Communicator, or None")
        failed: Exception | None = None
        own: dict[str, Any] = {}
        try:
            checked, said_of_data = look()
            X, _, _, settings = checked  # noqa: N806
            own = {"rows": X.shape[0], "features": X.shape[1], "seed": settings.seed, **said_of_data}
            own["settings"] = self._told()
            text = json.dumps(own) if self.comm is not None else ""
        except Exception as error:  # whatever it is: the others wait for what this rank says
            failed = error
            text = json.dumps({"error": str(error) or type(error).__name__})
        every = [own]
        if self.comm is not None:
            with own_error_first(failed):
                every = [json.loads(one) for one in all_gather_text(self.comm, text)]
        if failed is not None:
            raise failed
        _check_alike(every)
        return checked, every

    def _settings(self, loss: str) -> TrainingSettings:
        """Of this rank, but for the penalty. Raises ``ValueError`` and ``TypeError`` for what cannot be."""
        if self.max_iter is not None and not (
            isinstance(self.max_iter, (int, np.integer)) and not isinstance(self.max_iter, bool) and self.max_iter >= 1
        ):
            raise ValueError(f"max_iter={self.max_iter!r} must be an int of at least 1, or None")
        try:
            random = check_random_state(self.random_state)
        except ValueError as error:
            wanted = "an int from 0 to 4294967295, a numpy RandomState, or None"
            raise ValueError(f"random_state={self.random_state!r} must be {wanted}") from error
        given = {name: getattr(self, name) for name in ("batch", "learning_rate", "decay", "optimizer", "tol")}
        bias = checked_flag(self.fit_intercept, "fit_intercept")
        settings = TrainingSettings(loss, epochs=self.max_iter, bias=bias, **given)
        if self.random_state is None and settings.method in SECOND_ORDER:
            return settings
        return replace(settings, seed=int(random.randint(np.iinfo(np.int32).max)))

    def _fitted(self, rows: Rows, settings: TrainingSettings) -> _Fitted:
        """One model of ``rows``."""
        trained = train(rows, settings, self.comm)
        reached = objective(trained.model, rows, settings.l2, self.comm, settings.l1)
        if trained.diverged_to(reached):
            raise ValueError(self._divergence(settings))
        negligible = max(_NEGLIGIBLE * trained.loss_without_weights, _NEGLIGIBLE_OF_ZEROS * trained.loss_at_zero)
        gap = 0.0
        if settings.method in SECOND_ORDER:
            last = trained.epochs[-1]  # whose weights were not yet float32
            above = reached - last.objective * (1 - last.gap)
            # an error of 0 is reached only but for rounding
            least = 0.0 if settings.l2 and is_classification(settings.loss) else _NEGLIGIBLE_OF_ZEROS
            gap = max(last.gap, above / reached) if above > least * trained.loss_at_zero else 0.0
        elif negligible > 0:
            above = reached - (best := self._least(rows, settings, negligible))
            gap = above / max(best, negligible) if above > negligible else 0.0
        without, rate = trained.loss_to_beat, trained.better_rate(reached) if trained.first_rate else ""
        model, epochs = trained.model, len(trained.epochs)
        is_within = trained.converged and gap <= max(_CONVERGED, 2 * settings.tol)  # else float32 weights lost it
        ended_by, is_early = self._ended_by(settings, epochs, is_within)
        return _Fitted(model.weights, model.bias, epochs, gap, reached, without, ended_by, rate, is_early)

    def _least(self, rows: Rows, settings: TrainingSettings, negligible: float) -> float:
        """The objective that a training which finds the optimum reaches. The dual method needs an ``l2``: without one
        it gets so small a one that it adds next to nothing to the loss. Called by all ranks."""
        l1, bias, tol = settings.l1, settings.bias, _CONVERGED / 10
        if settings.loss != "hinge" or settings.l2:
            alike = TrainingSettings(settings.loss, settings.l2, _STEPS, l1=l1, bias=bias, tol=tol)
            return train(rows, alike, self.comm).epochs[-1].objective
        sums = np.array([squared_lengths(rows).sum(), len(rows)])
        if self.comm is not None:
            self.comm.all_reduce(sums)
        least = math.inf
        for l2 in _SMALL_L2 if sums[0] else ():
            alike = TrainingSettings(settings.loss, l2 * float(sums[0] / sums[1]), _STEPS, bias=bias, tol=tol)
            least = min(least, objective(train(rows, alike, self.comm).model, rows, 0.0, self.comm))
            if least <= negligible:
                break
        return least

    def _divergence(self, settings: TrainingSettings) -> str:
        """With a remedy that helps this optimizer."""
        scale = "scale X" if is_classification(settings.loss) else "scale X and y"
        if settings.method in SECOND_ORDER:
            return f"the training diverges by rounding: {scale}"
        if self.learning_rate is not None:
            return f"learning_rate={self.learning_rate} diverges: use a smaller one, or None"
        if settings.method == "adagrad":
            return f"the training diverges with learning_rate=None, which is 0.1: {scale}"
        return f"the training diverges with learning_rate=None, which is safe but for rounding: {scale}"

    def _ended_by(self, settings: TrainingSettings, epochs: int, converged: bool) -> tuple[str, bool]:
        """Also whether that was before ``tol``, if the method has one."""
        if settings.method not in SECOND_ORDER:
            return f"max_iter={epochs}", False
        if converged:
            return f"tol={self.tol}", False
        return f"max_iter={epochs}" if epochs >= settings.most_epochs else "rounding", epochs >= settings.most_epochs

    def _warn_of(self, models: list[_Fitted]) -> None:
        """Called by ``fit``, whose caller the warning names."""
        worse = [one for one in models if one.gap >= _CONVERGED and gains_nothing(one.reached, one.without)]
        farthest = max(model.gap for model in models)
        if worse:
            more = {"tol": ", or give a smaller tol", "max_iter": ", or give more max_iter"}
            remedy = "scale X" + more.get(worse[0].ended_by.partition("=")[0], "")
            if worse[0].better_rate and self.learning_rate is not None:
                remedy = f"use {worse[0].better_rate} learning_rate than {self.learning_rate:g}, or None, or scale X"
            said = f"the fit is no better than a model without weights: its objective is {worse[0].reached:.4g}, "
            said += f"without weights {worse[0].without:.4g}; {remedy}"
            warnings.warn(said, ConvergenceWarning, stacklevel=3)
        elif farthest >= _CONVERGED:
            last = max((model for model in models if model.gap == farthest), key=lambda model: model.epochs)
            ended, rate = last.ended_by, "another learning_rate, or " if last.better_rate else "or "
            remedies = {"tol": "give a smaller one, or ", "max_iter": f"give more, {rate}"}
            remedy = remedies.get(ended.partition("=")[0], "")
            said = f"{ended} ended the training, and the objective may be {100 * farthest:,.3g} % above the optimum, "
            said += f"which is more than {100 * _CONVERGED:g} %: {remedy}scale X"
            warnings.warn(said, ConvergenceWarning, stacklevel=3)
        elif early := [model for model in models if model.is_early]:
            said = f"{early[0].ended_by} ended the training before tol={self.tol:g}: give more, or scale X"
            warnings.warn(said, ConvergenceWarning, stacklevel=3)

    def _told(self) -> dict[str, str]:
        """What all ranks must have alike: of ``random_state`` rank 0's counts."""
        given = self.get_params(deep=False)
        return {name: repr(value) for name, value in given.items() if name not in ("comm", "random_state")}

    def _scores(self, X: Any) -> F64:  # noqa: N803
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", reset=False)  # noqa: N806
        return np.asarray(safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_)


def _check_alike(every: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(every):
        if said.get("error"):
            raise ValueError(f"rank {rank}: {said['error']}")
    for name, value in every[0]["settings"].items():
        for rank, said in enumerate(every):
            if said["settings"][name] != value:
                other = said["settings"][name]
                raise ValueError(f"{name} is {other} on rank {rank} and {value} on rank 0: give all ranks the same")
    features = [said["features"] for said in every]
    if len(set(features)) > 1:
        raise ValueError(f"X has {features} features by rank: give all ranks as many")


def _rows_of(X: Any, labels: Any, weights: Any) -> Rows:  # noqa: N803
    return replace(Rows.from_csr(sparse.csr_array(X), labels), weights=weights)


def _weights_of(X: Any, given: Any) -> F32 | None:  # noqa: N803
    """``sample_weight``, checked. Raises ``ValueError`` for negative ones, and what scikit-learn refuses."""
    if given is None:
        return None
    found = _check_sample_weight(given, X, dtype=np.float32, ensure_non_negative=True)
    return np.ascontiguousarray(found)


def _sorted_classes(y: Any, name: str = "y") -> tuple[Any, Any]:
    """And the place of each row's. Raises ``TypeError`` for classes that have no order."""
    try:
        found, places = np.unique(y, return_inverse=True)
    except TypeError as error:
        types = " and ".join(sorted({type(one).__name__ for one in y}))
        raise TypeError(
            f"{name} has values of types {types}, which have no order: make all text, or all numbers"
        ) from error
    return found, places


def _told_classes(found: Any, comm: Communicator | None) -> list[Any]:
    """As JSON can have them. Raises ``TypeError`` for others, if there are other ranks."""
    classes: list[Any] = found.tolist()
    for one in classes if comm is not None else []:
        if not isinstance(one, (str, int, float)):
            raise TypeError(f"y has a {type(one).__name__}, which no rank can tell others: give text or numbers")
    return classes


def _check_types(every: list[dict[str, Any]]) -> None:
    """Raises ``TypeError``, on every rank, where some ranks' classes are text and others' are not."""
    types = ["text" if isinstance(said["classes"][0], str) else "numbers" for said in every]
    for rank, own in enumerate(types):
        if own != types[0]:
            raise TypeError(f"y has {own} on rank {rank} and {types[0]} on rank 0: give all ranks the same")


def _common_dtype(own: np.dtype[Any], every: list[str]) -> np.dtype[Any] | None:
    """What holds the classes of all ranks, whose ``y`` have these dtypes: their own if they have the same, and the
    longest text; ``None`` leaves it to numpy."""
    if len(set(every)) == 1:
        return own
    dtypes = [np.dtype(one) for one in every]
    return np.result_type(*dtypes) if all(one.kind == "U" for one in dtypes) else None


def _as_after(state: State, times: float) -> State:
    """AdaGrad's, as if it had seen ``times`` as many rows. Features with a weight that these rows lack get the mean."""
    assert state.squares is not None
    squares, seen = state.squares, state.squares > 0
    if seen.any():
        squares = np.where(seen | (state.model.weights == 0), squares, squares[seen].mean())
    return replace(state, squares=squares * np.float32(times), bias_squares=state.bias_squares * times)


def _n_iter(own: Any, steps: list[int]) -> Any:
    return max(steps) if isinstance(own, LinearSVC) else np.array(steps, np.int32)  # as scikit-learn has it


class _Classifier(ClassifierMixin, _Linear, ABC):
    """``C``: λ is 1/(C·the sum of the rows' weights). Classes are one against the rest, or a softmax's."""

    C: float
    penalty: str
    l1_ratio: float | None = None
    class_weight: Any
    intercept_scaling: float | None
    _is_softmax = False
    _states: list[State] | None = None  # of SGD or AdaGrad, between two calls of partial_fit
    _passes = _rows = 0  # of partial_fit
    _judged = 0  # of its latest rows, and each model's mean loss of these
    _recent: Any = 0.0

    @abstractmethod
    def _loss(self) -> str:
        """Its name. Raises ``ValueError`` for one that cannot be."""

    def _has_softmax(self, settings: TrainingSettings) -> bool:
        """For more than two classes. Raises ``ValueError`` for what cannot be."""
        return False

    @property
    def _l1_share(self) -> float:
        """Of the penalty. Raises ``ValueError`` and ``TypeError`` for what cannot be."""
        if self.penalty not in ("l1", "l2"):
            remedy = "'l2' or 'l1': l1_ratio= mixes both, and C=math.inf is without any"
            if getattr(self, "loss", None) == "hinge":
                remedy = "'l2' for loss='hinge': a large C such as 1e6 makes it next to none"
            raise ValueError(f"penalty={self.penalty!r} must be {remedy}")
        share = float(self.penalty == "l1")
        if self.l1_ratio is None:
            return share
        if not 0 <= checked_number(self.l1_ratio, "l1_ratio", "a number from 0 to 1, or None") <= 1:
            raise ValueError(f"l1_ratio={self.l1_ratio} must be from 0 to 1, or None")
        if share and self.l1_ratio != 1:
            raise ValueError(f"l1_ratio={self.l1_ratio} is not for penalty='l1': leave one of them out")
        return float(self.l1_ratio)

    def _check_settings(self) -> TrainingSettings:
        """But for the penalty."""
        if not checked_number(self.C, "C", "a number above 0") > 0:
            raise ValueError(f"C={self.C} must be above 0")
        scaling = self.intercept_scaling
        if scaling is not None and not checked_number(scaling, "intercept_scaling", "a number above 0") > 0:
            raise ValueError(f"intercept_scaling={scaling} must be above 0, or None")
        if not (self.class_weight in (None, "balanced") or isinstance(self.class_weight, dict)):
            raise ValueError(f"class_weight={self.class_weight!r} must be a dict, 'balanced' or None")
        for one, weight in self.class_weight.items() if isinstance(self.class_weight, dict) else ():
            if not 0 <= checked_number(weight, f"class_weight[{one!r}]", "a finite number, 0 or more") < math.inf:
                raise ValueError(f"class_weight[{one!r}]={weight} must be a finite number, 0 or more")
        settings = self._settings(self._loss())
        self._has_softmax(settings)
        return settings

    def _penalised(self, settings: TrainingSettings, total: float, seed: int) -> TrainingSettings:
        """``total``: of all rows' weights."""
        strength, share = 1 / (self.C * total) if total > 0 else 1.0, self._l1_share
        if math.isinf(strength):
            raise ValueError(f"C={self.C} is too small: no float holds the penalty 1/(C·rows); use a larger one")
        is_hinge = settings.loss == "hinge"
        if not strength and settings.method == "dual" and (is_hinge or settings.optimizer == "dual"):
            by = f"loss={settings.loss!r} with optimizer={self.optimizer!r}, which needs a penalty"
            instead = "loss='squared_hinge', or optimizer='adagrad'" if is_hinge else "or optimizer='newton'"
            raise ValueError(f"C={self.C} is not for {by}: use a large number such as 1e6, {instead}")
        bias = settings.bias and self.intercept_scaling is None
        return replace(settings, l2=(1 - share) * strength, l1=share * strength, seed=seed, bias=bias)

    def _with_intercept(self, X: Any) -> Any:  # noqa: N803
        """``X``, with a column for an intercept that is regularised."""
        if self.intercept_scaling is None or not self.fit_intercept:
            return X
        column = np.full((X.shape[0], 1), self.intercept_scaling, np.float32)
        return sparse.hstack([X, column], format="csr") if sparse.issparse(X) else np.hstack([X, column])

    def _take(self, weights: Any, biases: Any) -> None:
        """Of all classes, or of the second of two."""
        self.coef_, self.intercept_ = np.ascontiguousarray(weights), np.array(biases, np.float64)
        if self.intercept_scaling is not None and self.fit_intercept:
            self.intercept_ = self.intercept_scaling * self.coef_[:, -1].astype(np.float64)
            self.coef_ = np.ascontiguousarray(self.coef_[:, :-1])

    def _labels(self, y: Any) -> list[F32]:
        """-1 and 1, of each model of one class against the rest."""
        own = self.classes_[1:] if self.classes_.size == 2 else self.classes_
        return [np.where(y == one, np.float32(1), np.float32(-1)) for one in own]

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """Trains on further rows, for data that come in parts: one pass of AdaGrad, or of SGD if ``optimizer`` or one
        of its options says so, in steps of ``batch`` rows of all ranks, by default 100. The coefficients of earlier
        calls, or of ``fit``, and AdaGrad's sums stay. λ is 1/(C·rows of all calls). Several classes are one against the
        rest. After ``fit`` by another optimizer AdaGrad first sums the squared gradients of these rows at that model,
        times the rows of ``fit`` for each of them, so that its steps are as short as if it had seen all those rows.
        ``classes``: all that there will be; the first call needs them. With ``comm`` all ranks call it, each with
        its own rows. Raises as ``fit``, and ``ValueError`` for other classes than before, ``sample_weight``,
        ``class_weight`` and other optimizers. Warns where ``fit`` found a softmax, and (``ConvergenceWarning``) if the
        mean loss of these rows, and of as many before that they are 100, is above that of zero weights."""
        begins = not hasattr(self, "classes_")

        def look() -> tuple[_Checked, dict[str, Any]]:
            settings = self._check_settings()
            for name, given in (("class_weight", self.class_weight), ("sample_weight", sample_weight)):
                if given is not None:
                    named = f"{name}={given!r}" if name == "class_weight" else name
                    raise ValueError(
                        f"{named} is not for partial_fit, whose optimizers know no weights: use fit, or None"
                    )
            if settings.method not in ("sgd", "adagrad"):
                if self.optimizer != "auto":
                    raise ValueError(f"optimizer={self.optimizer!r} is not for partial_fit: use 'adagrad' or 'sgd'")
                settings = replace(settings, optimizer="adagrad")
            if begins and classes is None:
                raise ValueError("classes=None at the first call of partial_fit: give all classes that y will have")
            rows, own = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32, reset=begins)
            present, _ = _sorted_classes(own)
            check_classification_targets(own)
            known = self.classes_ if classes is None else _sorted_classes(classes, "classes")[0]
            if not begins and not np.array_equal(known, self.classes_):
                raise ValueError(f"classes={known.tolist()} differ from those before: {self.classes_.tolist()}")
            if known.size < 2:
                raise ValueError(f"classes={known.tolist()} must be at least two")
            unknown = np.setdiff1d(present, known)
            if unknown.size:
                raise ValueError(f"y has {unknown.tolist()[0]!r}, which is not in classes={known.tolist()}")
            settings = replace(settings, epochs=1, batch=settings.batch or _ROWS_A_STEP)
            said = {"classes": known.tolist(), "passes": self._passes, "rows before": self._rows}
            return (rows, own, known, settings), said

        (X, y, known, settings), every = self._agree(look)  # noqa: N806
        for name in ("classes", "passes", "rows before"):
            if any(said[name] != every[0][name] for said in every):
                raise ValueError(f"{name} are {[said[name] for said in every]} by rank: give all ranks the same")
        if begins:
            self.classes_ = known
        if self._is_softmax:
            text = (
                f"fit with multi_class={self.multi_class!r} found a softmax, but partial_fit tells one class from the"
            )
            warnings.warn(f"{text} rest: accuracy may fall; fit with multi_class='ovr' first", stacklevel=2)
        states: list[State | None] = [*(self._states or self._fitted_states())]
        new = sum(said["rows"] for said in every)
        total = self._rows + new
        settings = self._penalised(settings, total, every[0]["seed"])
        rows = _rows_of(self._with_intercept(X), np.zeros(X.shape[0]), None)
        found, losses, of_models = [], [], self._labels(y)
        for labels, state in zip(of_models, states, strict=True):
            if state is not None and state.squares is None and settings.method == "adagrad" and new:
                own_rows = replace(rows, labels=labels)
                state, _ = train_further(own_rows, settings, self.comm, state, self._passes, moves=False)
                state = _as_after(state, self._rows / new)
            state, loss = train_further(replace(rows, labels=labels), settings, self.comm, state, self._passes)
            found.append(state)
            losses.append(loss)
        if not all(state.is_finite for state in found):
            raise ValueError(self._divergence(settings))
        ends = [
            objective(state.model, replace(rows, labels=labels), 0.0, self.comm)
            for state, labels in zip(found, of_models, strict=True)
        ]
        self._judge([[end, end if new >= _JUDGED else loss] for end, loss in zip(ends, losses, strict=True)], new)
        self._states, self._rows, self._passes, self._is_softmax = found, total, self._passes + 1, False
        self._take(np.stack([one.model.weights for one in found]), [one.model.bias for one in found])
        self.n_iter_ = _n_iter(self, [self._passes])
        return self

    def _judge(self, losses: list[list[float]], count: int) -> None:
        """Warns if the latest rows, ``count`` of all ranks and some before, are told worse than by zero weights.
        ``losses``: of each model the mean at the end, and, if these rows are few, that before their own step."""
        before = min(self._judged, max(_JUDGED - count, 0))
        self._judged = before + count
        latest = np.minimum(np.array(losses), _HUGE)
        self._recent = (before * self._recent + count * latest) / self._judged if before else latest
        margin, at_zero = _FEW / self._judged - _FEW / _JUDGED, float(losses_of(self._loss(), 0.0, 1.0))
        if (self._recent > (np.array([1, _UNSEEN]) + max(EVEN, margin)) * at_zero).any():
            said = f"the latest rows of partial_fit have a mean loss above that of zero weights, {at_zero:.4g}: scale X"
            lower = "" if self.learning_rate is None else ", or use a lower learning_rate"
            warnings.warn(said + lower, ConvergenceWarning, stacklevel=3)  # the same text each time, to be shown once

    def _fitted_states(self) -> list[State | None]:
        """Of each model, from which ``partial_fit`` goes on."""
        if not hasattr(self, "coef_"):
            return [None] * (1 if self.classes_.size == 2 else self.classes_.size)
        scaled = self.intercept_scaling is not None and self.fit_intercept
        states: list[State | None] = []
        for weights, bias in zip(self.coef_.astype(np.float32), self.intercept_.tolist(), strict=True):
            every = np.append(weights, np.float32(bias / self.intercept_scaling)) if scaled else weights
            model = LinearModel(np.ascontiguousarray(every), 0.0 if scaled else bias, self._loss())
            states.append(State(model))
        return states

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """``X``: (rows, features), dense or sparse; ``y``: the class of each; ``sample_weight``: of each, 0 or more.
        With ``comm`` all ranks call it, each with its own rows; a class may be missing on some. Raises ``ValueError``,
        on every rank, for what scikit-learn refuses, fewer than two classes with weights above 0, ``C`` that is not
        above 0 or too small, and settings that cannot be or diverge; ``TypeError`` on a rank whose own arguments are of
        a wrong type, and on every rank if ``y`` is text on some ranks only."""

        def look() -> tuple[_Checked, dict[str, Any]]:
            settings = self._check_settings()
            if math.isinf(self.C):
                self._penalised(settings, 1.0, 0)
            rows, classes = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32)
            found, places = _sorted_classes(classes)
            check_classification_targets(classes)
            weights = _weights_of(rows, sample_weight)
            said = {"classes": _told_classes(found, self.comm), "dtype": classes.dtype.str}
            said["counts"] = np.bincount(places, weights, found.size).tolist()
            return (rows, classes, weights, settings), said

        (X, y, weights, settings), every = self._agree(look)  # noqa: N806
        _check_types(every)
        counts: dict[Any, float] = {}
        for said in every:
            for one, count in zip(said["classes"], said["counts"], strict=True):
                counts[one] = counts.get(one, 0.0) + count
        found = sorted(counts)
        self.classes_ = np.array(found, _common_dtype(y.dtype, [said["dtype"] for said in every]))
        if self.classes_.size < 2:
            raise ValueError(f"y has 1 class, {self.classes_.tolist()[0]!r}: at least two are needed")
        total = sum(counts.values())
        shares = counts
        if self.class_weight is not None:
            balanced = {one: total / (len(found) * count) if count else 1.0 for one, count in counts.items()}
            of_class = balanced if self.class_weight == "balanced" else self.class_weight
            unknown = [one for one in of_class if one not in counts]
            if unknown and not of_class.keys() >= counts.keys():
                raise ValueError(f"class_weight has {unknown[0]!r}, which is no class of y: {found}")
            factors = np.array([of_class.get(one, 1.0) for one in found], np.float32)
            own = factors[np.searchsorted(self.classes_, y)]
            weights = own if weights is None else own * weights
            shares = {one: float(factor) * counts[one] for factor, one in zip(factors, found, strict=True)}
            total = sum(shares.values())
        weighed = [one for one, share in shares.items() if share > 0]
        if len(weighed) == 1:
            raise ValueError(f"y has 1 class, {weighed[0]!r}, with weights above 0: at least two are needed")
        settings = self._penalised(settings, total, every[0]["seed"])
        rows = _rows_of(self._with_intercept(X), np.zeros(X.shape[0]), weights)
        self._is_softmax = self.classes_.size > 2 and self._has_softmax(settings)
        self._states, self._rows, self._passes, self._judged = None, sum(said["rows"] for said in every), 0, 0
        if self._is_softmax:
            labels = np.searchsorted(self.classes_, y).astype(np.float32)
            models = [self._fitted_softmax(replace(rows, labels=labels), settings)]
            self._take(models[0].weights, models[0].bias)
        else:
            of_none = _Fitted(np.zeros(rows.n_features, np.float32), -1.0, 0, 0.0, 0.0, 1.0, "tol")
            is_hinge = settings.bias and settings.loss != "logistic"  # of a class without weight that is the optimum
            models = [
                of_none if is_hinge and one not in weighed else self._fitted(replace(rows, labels=labels), settings)
                for one, labels in zip(found if len(found) > 2 else found[1:], self._labels(y), strict=True)
            ]
            self._take(np.stack([model.weights for model in models]), [model.bias for model in models])
        self.n_iter_ = _n_iter(self, [model.epochs for model in models])
        self._warn_of(models)
        return self

    def _fitted_softmax(self, rows: Rows, settings: TrainingSettings) -> _Fitted:
        found = train_softmax(rows, self.classes_.size, settings, self.comm)
        ended_by, is_early = self._ended_by(settings, found.steps, found.converged)
        of_end = (found.objective, found.loss_without_weights, ended_by)
        return _Fitted(found.weights, found.biases, found.steps, found.gap, *of_end, is_early=is_early)

    def decision_function(self, X: Any) -> F64:  # noqa: N803
        """The score of each row, (rows,) for two classes, else (rows, classes)."""
        scores = self._scores(X)
        return scores[:, 0] if self.classes_.size == 2 else scores

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """The class of each row."""
        scores = self.decision_function(X)
        return np.asarray(self.classes_[(scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)])


class LogisticRegression(_Classifier):
    """Logistic regression on the rows of all ranks of ``comm``, by default by Newton's method.

    Minimised is mean log(1 + exp(-y·score)) + |w|²/(2·C·rows), as by scikit-learn's of the same name. The intercept is
    not regularised, unless ``intercept_scaling`` is a number: then it is that times the weight of a feature that always
    is that number, as liblinear has it.

    ``multi_class``: ``"auto"`` minimises, for more than two classes, the loss of their softmax, as scikit-learn's does
    (``"multinomial"``). With another optimizer than Newton's method, and in ``partial_fit``, each class is told from
    the rest (``"ovr"``), as with an L1 penalty. Two classes are one logistic regression in any case.

    ``penalty="l1"`` has Σ|w_i|/(C·rows) in place of the squares. ``l1_ratio`` is the share of Σ|w_i| in both together,
    as scikit-learn has it from 1.8 on: 1 is L1 alone.

    ``class_weight``: by class, or ``"balanced"``; rows of a class weigh so much, of missing ones 1. With it, and with
    ``optimizer="newton"`` or ``"dual"``, ``partial_fit`` raises ``ValueError``. So these fail those of scikit-learn's
    checks that call it: ``check_estimators_partial_fit_n_features``, ``check_fit_score_takes_y`` and
    ``check_n_features_in_after_fitting``. A dict also fails where ``y`` has other classes. ``tol``, ``batch``,
    ``learning_rate``, ``decay`` and ``optimizer``: see ``TrainingSettings``, and ``max_iter``: its ``epochs``.
    ``random_state``: of the order of rows. ``None``: the same one in each fit by ``"newton"`` or ``"dual"``.
    ``n_iter_``: how many there were, of each model. ``comm``: a Communicator, whose ranks all call
    ``fit`` with their own rows, or ``None``. It is shared by clones, and not pickled. With several ranks a search such
    as ``GridSearchCV`` cannot work, as each rank scores its own folds and may choose other arguments than the rest.

    SGD and AdaGrad know no weights of rows: with them ``fit`` raises ``ValueError`` for ``sample_weight`` and
    ``class_weight``. So these fail scikit-learn's checks of weights (``check_sample_weight*`` and
    ``check_class_weight*``) and no other. That weights are as good as repeated rows could not hold in any case:
    repeated rows come into other batches.

    ``fit`` warns (``ConvergenceWarning``) if the objective may be more than 0.1 % above the optimum, or is no better
    than without weights. After SGD or AdaGrad a training by Newton's method finds the optimum."""

    def __init__(
        self,
        *,
        C: float = 1.0,  # noqa: N803
        penalty: str = "l2",
        l1_ratio: float | None = None,
        fit_intercept: bool = True,
        intercept_scaling: float | None = None,
        class_weight: Any = None,
        tol: float = 1e-4,
        max_iter: int | None = None,
        optimizer: str = "auto",
        multi_class: str = "auto",
        batch: int | None = None,
        learning_rate: float | None = None,
        decay: float = 0.0,
        random_state: Any = None,
        comm: Communicator | None = None,
    ) -> None:
        self.C, self.penalty, self.l1_ratio = C, penalty, l1_ratio
        self.fit_intercept, self.intercept_scaling = fit_intercept, intercept_scaling
        self.class_weight, self.tol, self.max_iter = class_weight, tol, max_iter
        self.optimizer, self.multi_class, self.batch = optimizer, multi_class, batch
        self.learning_rate, self.decay, self.random_state, self.comm = learning_rate, decay, random_state, comm

    def _loss(self) -> str:
        return "logistic"

    def _has_softmax(self, settings: TrainingSettings) -> bool:
        if self.multi_class not in ("auto", "multinomial", "ovr"):
            raise ValueError(f"multi_class={self.multi_class!r} must be 'auto', 'multinomial' or 'ovr'")
        if self.multi_class == "multinomial" and self._l1_share:
            raise ValueError("multi_class='multinomial' is not for an L1 penalty: use 'ovr', or penalty='l2'")
        if self.multi_class == "multinomial" and settings.method != "newton":
            raise ValueError(
                f"multi_class='multinomial' is not for optimizer={settings.method!r}: use 'newton' without batch, "
                "learning_rate and decay, or 'ovr'"
            )
        return self.multi_class != "ovr" and settings.method == "newton" and not self._l1_share

    def predict_proba(self, X: Any) -> F64:  # noqa: N803
        """(rows, classes): the softmax of the scores. Of one class against the rest each one's own probability, divided
        by their sum."""
        scores = self.decision_function(X)
        if self._is_softmax:
            return np.asarray(softmax(scores))
        chance = np.exp(-np.logaddexp(0, -scores))
        if chance.ndim == 1:
            return np.stack([np.exp(-np.logaddexp(0, scores)), chance], axis=1)
        total = chance.sum(axis=1, keepdims=True)
        even = np.full_like(chance, 1 / chance.shape[1])
        return np.asarray(np.divide(chance, total, out=even, where=total > 0))

    def predict_log_proba(self, X: Any) -> F64:  # noqa: N803
        """The logarithm of ``predict_proba``."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))


class LinearSVC(_Classifier):
    """A linear support vector machine, ``loss`` ``"squared_hinge"`` or ``"hinge"``; all else as LogisticRegression. For
    scikit-learn's, whose intercept is regularised, set ``intercept_scaling=1``. ``penalty="l1"`` is for the former.
    The hinge with ``C=math.inf`` is for ``optimizer`` ``"adagrad"`` and ``"sgd"`` alone: else ``fit`` raises
    ``ValueError``."""

    def __init__(
        self,
        *,
        penalty: str = "l2",
        loss: str = "squared_hinge",
        C: float = 1.0,  # noqa: N803
        fit_intercept: bool = True,
        intercept_scaling: float | None = None,
        class_weight: Any = None,
        tol: float = 1e-4,
        max_iter: int | None = None,
        optimizer: str = "auto",
        batch: int | None = None,
        learning_rate: float | None = None,
        decay: float = 0.0,
        random_state: Any = None,
        comm: Communicator | None = None,
    ) -> None:
        self.penalty, self.loss, self.C = penalty, loss, C
        self.fit_intercept, self.intercept_scaling = fit_intercept, intercept_scaling
        self.class_weight, self.tol, self.max_iter = class_weight, tol, max_iter
        self.optimizer, self.batch = optimizer, batch
        self.learning_rate, self.decay, self.random_state, self.comm = learning_rate, decay, random_state, comm

    def _loss(self) -> str:
        if self.loss not in ("hinge", "squared_hinge"):
            raise ValueError(f"loss={self.loss!r} must be 'hinge' or 'squared_hinge'")
        if self.loss == "hinge" and self._l1_share:
            raise ValueError("penalty='l1' is not for loss='hinge': use 'squared_hinge', or penalty='l2'")
        return self.loss


class Ridge(RegressorMixin, _Linear):
    """Least squares with ``alpha``·|w|², as scikit-learn's of the same name; all else as LogisticRegression."""

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        fit_intercept: bool = True,
        tol: float = 1e-4,
        max_iter: int | None = None,
        optimizer: str = "auto",
        batch: int | None = None,
        learning_rate: float | None = None,
        decay: float = 0.0,
        random_state: Any = None,
        comm: Communicator | None = None,
    ) -> None:
        self.alpha, self.fit_intercept, self.tol, self.max_iter = alpha, fit_intercept, tol, max_iter
        self.optimizer, self.batch = optimizer, batch
        self.learning_rate, self.decay, self.random_state, self.comm = learning_rate, decay, random_state, comm

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        """``X``: (rows, features), dense or sparse; ``y``: a number for each row, and its ``sample_weight``. With
        ``comm`` all ranks call it, each with its own rows. Raises ``ValueError``, on every rank, for what scikit-learn
        refuses, an ``alpha`` that is negative or not finite, and settings that cannot be or diverge; ``TypeError`` on a
        rank whose own arguments are of a wrong type."""

        def look() -> tuple[_Checked, dict[str, Any]]:
            if not 0 <= checked_number(self.alpha, "alpha", "a number, 0 or more") < math.inf:
                raise ValueError(f"alpha={self.alpha} must be finite, 0 or more")
            settings = self._settings("squared_error")
            rows, numbers = validate_data(self, X, y, accept_sparse="csr", dtype=np.float32, y_numeric=True)
            with np.errstate(over="ignore"):
                numbers = numbers.astype(np.float32)
            if not np.isfinite(numbers).all():
                raise ValueError("y has numbers that float32 cannot hold: scale or remove them")
            weights = _weights_of(rows, sample_weight)
            weight = len(numbers) if weights is None else float(weights.sum())
            return (rows, numbers, weights, settings), {"weight": weight}

        (X, y, weights, settings), every = self._agree(look)  # noqa: N806
        total = sum(said["weight"] for said in every)
        settings = replace(settings, l2=self.alpha / total if total else 0.0, seed=every[0]["seed"])
        model = self._fitted(_rows_of(X, y, weights), settings)
        self.coef_, self.intercept_, self.n_iter_ = model.weights, model.bias, np.array([model.epochs], np.int32)
        self._warn_of([model])
        return self

    def predict(self, X: Any) -> F64:  # noqa: N803
        """The number of each row."""
        return self._scores(X)
