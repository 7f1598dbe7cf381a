"""What all ranks agree on before they train: features, targets, who is held out, what memory it takes."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, _core
from telegrad.linear.losses import (
    CURVATURE_BOUND,
    F32,
    F64,
    are_classes,
    area_under_curve,
    is_classification,
    label_counts,
    least_loss_of_classes,
    losses_of,
    signed,
)
from telegrad.linear.memory import check_memory
from telegrad.linear.model import LinearModel
from telegrad.linear.rows import MOST_FEATURES, U32, Rows, squared_lengths
from telegrad.linear.settings import TrainingSettings

U64 = npt.NDArray[np.uint64]

_HELD_OUT, _EPOCH = 0, 1  # streams of random numbers of one seed


class Share:
    """One rank's rows, ``count`` of ``total`` from number ``first``: those held out, and those of every batch."""

    def __init__(self, first: int, count: int, total: int, *, held_out: float, seed: int) -> None:
        self._seed = seed
        trained = np.ones(total, np.bool_)
        drawn = np.random.default_rng([seed, _HELD_OUT]).permutation(total)
        trained[drawn[: round(held_out * total)]] = False
        del drawn  # of all ranks' rows, as the next one
        numbers = np.cumsum(trained)  # among those that are trained on, from 1
        own = trained[first : first + count]
        self.trained_total = int(trained.sum())
        self._numbers = numbers[first : first + count][own] - 1
        self.trained: U64 = np.flatnonzero(own).astype(np.uint64)
        """This rank's rows that are trained on, from its first as 0."""
        self.held_out: U64 = np.flatnonzero(~own).astype(np.uint64)
        """This rank's rows that are held out, from its first as 0."""

    def batches(self, epoch: int, size: int) -> Iterator[tuple[U64, int]]:
        """This rank's rows of each batch, from its first as 0, and how many rows the batch has among all ranks."""
        place = np.random.default_rng([self._seed, _EPOCH, epoch]).permutation(self.trained_total)[self._numbers]
        order = np.argsort(place)
        rows, steps = self.trained[order], -(-self.trained_total // size)
        borders = np.searchsorted(place[order], np.arange(steps + 1) * size)
        for step in range(steps):
            yield rows[borders[step] : borders[step + 1]], min(size, self.trained_total - step * size)


EXTRA = 2  # behind the features in a gradient: the bias and the loss

_ADAGRAD_RATE = 0.1

I64 = np.ndarray[tuple[int], np.dtype[np.int64]]


class Problem:
    """One rank's rows and what it knows of the others'. Raises ``ValueError`` on every rank for labels that are not two
    classes, and where there is no row to train on, too many features or threads, or too little memory.

    ``loss_at_zero``: the objective where all weights are 0. ``loss_without_weights``: that of the best model that has a
    bias alone, if settings have one, of the rows to train on. ``index_base``: that of all ranks' rows, ``None`` if they
    do not have the same; ``base_is_guessed`` if that of some rank is. Raises ``ValueError`` on every rank where ranks'
    rows differ in it and one of them is guessed.

    Features that this rank's rows have are numbered anew, rising, so that what is read at random fits better into
    caches: ``view`` has the numbers, from 0, instead. ``alone``: nobody else's sums or changes come, so that no other
    feature needs a weight: then these are all the ``features`` there are, and ``model`` knows where they belong among
    ``all_features``. Otherwise ``numbering`` tells; coordinate descent among ranks, whose blocks are of features, has
    none.
    """

    def __init__(
        self,
        rows: Rows,
        settings: TrainingSettings,
        comm: Communicator | None,
        *,
        alone: bool,
        checkpoint_every: int | None = None,
    ) -> None:
        self.rows, self.settings, self.comm = rows, settings, comm
        self._told = _told_by(settings) | {"checkpoint_every": checkpoint_every}
        self.rank, self.world_size = (comm.rank, comm.world_size) if comm else (0, 1)
        self.is_classification = is_classification(settings.loss)
        self.features, counts, self.index_base, self.base_is_guessed = self._agree()
        self.total = int(counts.sum())
        first = int(counts[: self.rank].sum())
        check_memory(
            self.features,
            rows.nnz,
            settings,
            comm,
            rows=int(counts[self.rank]),
            total=self.total,
            alone=alone,
            with_checkpoints=checkpoint_every is not None,
        )
        self.share = Share(first, len(rows), self.total, held_out=settings.held_out, seed=settings.seed)
        if self.share.trained_total == 0:
            remedy = "give more, or a smaller held_out" if self.total else "give data that have some"
            raise ValueError(f"of {self.total} rows none is left to train on: {remedy}")
        self.targets: F32 = signed(rows.labels) if self.is_classification else np.ascontiguousarray(rows.labels)
        self.loss_at_zero = self._loss_at_zero()
        self.loss_without_weights = self._loss_without_weights()
        self.first_rate = settings.learning_rate or self._default_rate(counts)
        # A safe rate is one of whole batches: the rows of a shorter last one weigh more in its mean.
        self._whole_batch = 0
        if settings.optimizer == "sgd" and settings.learning_rate is None:
            self._whole_batch = self._most_rows_of_a_step()
        self.all_features = self.features
        self._used: U32 | None = None
        self.numbering: _core.Numbering | None = None
        self._numbered = rows  # whose memory the view is of
        if alone or settings.optimizer != "coordinate_descent":
            # others' sums may have features behind the last of these rows
            numbering = _core.Numbering(rows.indices.ctypes.data, rows.nnz, self.features)
            self._numbered = _in_places(rows, numbering)
            if alone:
                self._used = np.empty(numbering.size, np.uint32)
                numbering.write_features(self._used.ctypes.data)
                self.features = numbering.size
            else:
                self.numbering = numbering
        self.view = self._numbered.view()
        self.loss = getattr(_core.Loss, settings.loss)
        self.team = self._start_team()

    def rate_at(self, step: int, rows: int) -> float:
        """The learning rate of ``step``, counted from 0 over all epochs, in which all ranks have ``rows``."""
        rate = self.settings.rate_at(step, self.first_rate)
        return rate * rows / self._whole_batch if self._whole_batch else rate

    def _most_rows_of_a_step(self) -> int:
        return min(self.settings.batch, self.share.trained_total)

    def _default_rate(self, counts: I64) -> float:
        """Of SGD 1/L, or 1/(2L) where gradients come a step late; L bounds the curvature of every batch's mean loss.

        The curvature of a row's loss is at most κ·(|x|² + 1), with the bias's 1; of a mean at most the mean of these,
        which no batch has above that of as many longest rows. A step of at most 1/L makes no two models differ more
        than before, whichever batches come; nor does the penalties' proximal step, whatever they are. With a delay of
        one step an error along a curvature c follows z² = z - ηc, whose complex roots have |z|² = ηc: at η = 1/L it
        need not fall, and of batches that differ some orders make it grow; at half of that it falls along every c above
        0, and no order of batches is known that makes it grow, though that is not proven.
        """
        if self.settings.optimizer == "adagrad":
            return _ADAGRAD_RATE
        if self.settings.optimizer == "coordinate_descent":
            return 0.0  # has none
        # the hinge has no curvature; 1 serves for a first learning rate
        curvature = CURVATURE_BOUND.get(self.settings.loss, 1.0) * (self._longest_mean(counts) + 1)
        return 1 / ((2 if self.settings.overlap else 1) * curvature)

    def _longest_mean(self, counts: I64) -> float:
        """The mean squared length of as many longest rows of all ranks as a step has; the same bits for all P.
        ``counts``: every rank's rows."""
        count = self._most_rows_of_a_step()
        longest: F64 = np.sort(squared_lengths(self.rows))[::-1][:count]
        if self.comm is not None:
            sizes = np.minimum(counts, count).tolist()
            every = self.comm.all_gather(np.ascontiguousarray(longest), counts=sizes)
            longest = np.sort(every)[::-1][:count]
        return float(np.add.accumulate(longest)[-1]) / count

    def _loss_at_zero(self) -> float:
        """Mean loss of all ranks' rows where all weights are 0, hence also the objective."""
        own = np.array([losses_of(self.settings.loss, np.zeros(len(self.rows)), self.targets).sum()])
        if self.comm is not None:
            self.comm.all_reduce(own)
        return float(own[0]) / self.total

    def _loss_without_weights(self) -> float:
        targets, rows = self.targets[self.share.trained.astype(np.int64)].astype(np.float64), self.share.trained_total

        def mean_of(values: F64) -> float:
            own = np.array([values.sum()])
            if self.comm is not None:
                self.comm.all_reduce(own)
            return float(own[0]) / rows

        if not self.settings.bias:
            return mean_of(losses_of(self.settings.loss, np.zeros(targets.size), targets))
        if self.is_classification:
            return least_loss_of_classes(self.settings.loss, mean_of((targets > 0).astype(np.float64)))
        return mean_of((targets - mean_of(targets)) ** 2) / 2

    def _start_team(self) -> _core.Team:
        team: _core.Team | None = None
        with contextlib.suppress(RuntimeError):
            team = _core.Team(self.settings.threads)
        own = np.array([0 if team else self.settings.threads], np.int64)
        every = own[None] if self.comm is None else self.comm.all_gather(own)
        for rank in np.flatnonzero(every[:, 0]):
            raise ValueError(f"threads={every[rank, 0]} of rank {rank} are more than its system can start: use fewer")
        assert team is not None
        return team

    def _agree(self) -> tuple[int, I64, int | None, bool]:
        """The number of features, every rank's rows, ``index_base`` and ``base_is_guessed``."""
        labels = self.rows.labels
        kinds = label_counts(labels)
        told = [zlib.crc32(repr(value).encode()) for value in self._told.values()]
        base = -1 if self.rows.index_base is None else self.rows.index_base
        about = [self.rows.n_features, len(labels), base, int(self.rows.base_is_guessed)]
        own = np.array([*about, *kinds, *told], np.int64)
        every = own[None] if self.comm is None else self.comm.all_gather(own)
        self._check_alike(every[:, len(about) + len(kinds) :])
        features, counts = int(every[:, 0].max()), every[:, 1]
        found = every[counts > 0]
        bases, is_guessed = set(found[:, 2].tolist()), bool(found[:, 3].any())
        minus, zero, plus = every[:, len(about) : len(about) + len(kinds)].sum(0)
        if self.is_classification and not are_classes(counts.sum(), minus, zero, plus):
            raise ValueError(
                f"labels are not two classes for loss={self.settings.loss!r}: {self._first_other_label(counts)}of "
                f"{counts.sum()} rows {minus} have -1, {zero} have 0, {plus} have 1; make them -1 and 1 or 0 and "
                "1, or use loss='squared_error' for numbers"
            )
        if is_guessed and {0, 1} <= bases:
            zero, one = (int(np.flatnonzero((counts > 0) & (every[:, 2] == base))[0]) for base in (0, 1))
            raise ValueError(
                f"rows of rank {zero} have index_base=0 and rows of rank {one} index_base=1, and some ranks have "
                "guessed theirs from their own file: give read_libsvm zero_based=True or False on every rank"
            )
        if features + EXTRA > MOST_FEATURES:
            raise ValueError(
                f"{features} features are more than the {MOST_FEATURES - EXTRA} that a model can be trained on "
                "(the bias and the loss are summed as two more): hash them"
            )
        return features, counts, bases.pop() if bases in ({0}, {1}) else None, is_guessed

    def _first_other_label(self, counts: I64) -> str:
        """Of all ranks' rows the first label that no class has, if there is one. Called on all ranks."""
        others = np.flatnonzero(~np.isin(self.rows.labels, (-1, 0, 1)))[:1]
        own = np.array([*others, *self.rows.labels[others]] if others.size else [-1, 0], np.float64)
        every = own[None] if self.comm is None else self.comm.all_gather(own)
        for rank in np.flatnonzero(every[:, 0] >= 0):
            row, label = every[rank].tolist()
            return f"row {int(counts[:rank].sum() + row)} (from 0) has {label:g}, and "
        return ""

    def _check_alike(self, digests: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        for rank, column in zip(*np.nonzero(digests != digests[0]), strict=True):
            name, value = [*self._told.items()][column]
            raise ValueError(
                f"{name} of rank {rank} is another than that of rank 0 (here it is {value!r}): give all ranks the same"
            )

    def model(self, weights: F32, bias: float) -> LinearModel:
        """Of weights of ``features``, in an array that may become the model's."""
        base = (self.index_base, self.base_is_guessed and self.index_base is not None)
        return LinearModel(self.of_all(weights), bias, self.settings.loss, *base)

    def of_all(self, own: F32) -> F32:
        """Of all ranks' features what ``own`` has of ``features``; the same array if these are all."""
        if self._used is None:
            return own
        every = np.zeros(self.all_features, np.float32)
        every[self._used] = own
        return every

    def of_own(self, every: F32) -> F32:
        """The other way."""
        return every if self._used is None else np.ascontiguousarray(every[self._used])

    def on_held_out(self, model: LinearModel) -> tuple[float, float, float]:
        """Mean loss, accuracy and area under the curve."""
        nan = float("nan")
        rows = self.share.held_out.astype(np.int64)
        scores, targets = model.scores(self.rows)[rows], self.targets[rows]
        if self.comm is not None:
            lengths = self.comm.all_gather(np.array([rows.size], np.int64))[:, 0].tolist()
            scores, targets = (self.comm.all_gather(one, counts=lengths) for one in (scores, targets))
        loss = float(losses_of(self.settings.loss, scores, targets).mean())
        if not self.is_classification:
            return loss, nan, nan
        return loss, float(((scores > 0) == (targets > 0)).mean()), area_under_curve(scores, targets)


def _in_places(rows: Rows, numbering: _core.Numbering) -> Rows:
    places = np.empty(rows.nnz, np.uint32)
    numbering.renumber(rows.indices.ctypes.data, places.ctypes.data, rows.nnz)
    return replace(rows, indices=places, n_features=numbering.size)


def _told_by(settings: TrainingSettings) -> dict[str, Any]:
    """What all ranks must have alike, which is all but the threads."""
    names = [one.name for one in fields(settings) if one.name != "threads"]
    return {f"settings.{name}": getattr(settings, name) for name in names}
