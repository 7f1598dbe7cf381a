"""The settings of a training, and the problem that all ranks agree on: features, targets, held-out rows and memory."""

from __future__ import annotations

import contextlib
import math
import platform
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import Communicator, SparseVector, _core
from telegrad.communicator.operands import checked_flag, checked_integer, checked_number
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
from telegrad.linear.model import LinearModel
from telegrad.linear.rows import MOST_FEATURES, U32, Rows, squared_lengths

# Settings. The rows of a step depend on these alone, not on the number of ranks.

OPTIMIZERS = ("auto", "newton", "dual", "sgd", "adagrad")
SECOND_ORDER = ("newton", "dual")
"""They choose their steps themselves, and end at the tolerance."""

_INTEGERS = {
    "threads": "an int of at least 1",
    **dict.fromkeys(("epochs", "batch"), "an int of at least 1, or None"),
    "seed": "an int, 0 or more",
}
_NUMBERS = {
    **dict.fromkeys(("l2", "l1", "decay"), "a finite number, 0 or more"),
    "learning_rate": "a finite number above 0, or None",
    "held_out": "a number from 0 to below 1",
    "tol": "a finite number above 0",
}
_EPOCHS, _MOST_EPOCHS, _BATCH = 10, 1000, 1000  # of first-order optimizers, of the others at most; rows of a step
_MOST_COUNT = 1 << 40  # beyond any data's; places of rows are 64-bit integers
_MOST_THREADS = 1024  # so that a slip takes none from the machine's other processes


@dataclass(frozen=True)
class TrainingSettings:
    """Options of ``train``. Objective: mean loss + ``l2``/2·|w|² + ``l1``·Σ|w_i|; the bias is not regularised.

    - ``loss``: see ``LOSSES``. ``optimizer``: see ``OPTIMIZERS``. ``"auto"`` is ``"newton"``, for both hinges with
      ``l2`` alone ``"dual"``, and for the hinge with ``l1`` AdaGrad. An option that one optimizer alone has chooses
      that one. ``"dual"`` descends by coordinates where that is fast, and all ranks' rows together are so few that each
      takes them all. Both have the same bits for any number of ranks.
    - ``tol``: Newton and the dual method end when the objective is estimated to be no more than this part above the
      optimum. ``epochs``: passes, by default 10; of Newton and the dual method steps, at most, by default 1,000.
    - ``batch``: rows of all ranks together in a step of SGD or AdaGrad, by default 1,000. ``held_out``: the share of
      rows that are not trained on.
    - ``learning_rate``: of the first step; step t has ``learning_rate / (1 + decay·t)``. ``None``: 0.1 with AdaGrad;
      with SGD a rate that no batch makes diverge (docs/reference/linear.md).
    - ``overlap``: a step's sum travels while the next gradient is computed, by weights that lack it.
    - ``threads``: of each rank, at most 1024; no result depends on them.

    Raises ``TypeError`` for a value of another type, ``ValueError`` for a value out of range."""

    loss: str = "logistic"
    l2: float = 1e-6
    epochs: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    decay: float = 0.0
    bias: bool = True
    held_out: float = 0.0
    seed: int = 0
    optimizer: str = "auto"
    l1: float = 0.0
    overlap: bool = False
    threads: int = 1
    tol: float = 1e-4

    def __post_init__(self) -> None:
        is_classification(self.loss)
        self._take_python_s()
        for name in ("epochs", "batch", "threads"):
            if getattr(self, name) is None:
                continue
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
            if name != "threads" and getattr(self, name) > _MOST_COUNT:
                raise ValueError(f"{name}={getattr(self, name)} must be at most {_MOST_COUNT}")
        if self.threads > _MOST_THREADS:
            raise ValueError(f"threads={self.threads} must be at most {_MOST_THREADS}: more than cores are of no use")
        for name in ("l2", "l1", "decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                wanted = _INTEGERS.get(name) or _NUMBERS[name]
                raise ValueError(f"{name}={getattr(self, name)} must be {wanted}")
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate} must be a finite number above 0, or None")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must be from 0 to below 1: a share of the rows")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r} does not exist: use one of {', '.join(OPTIMIZERS)}")
        if not 0 < self.tol < math.inf:
            raise ValueError(f"tol={self.tol} must be a finite number above 0: a part of the objective")
        if self.method in SECOND_ORDER:
            self._check_second_order()

    @property
    def method(self) -> str:
        """The optimizer, which ``"auto"`` leaves to the other options."""
        if self.optimizer != "auto":
            return self.optimizer
        if self.batch is not None or self.learning_rate is not None or self.decay or self.overlap:
            return "sgd"
        if self.l2 and not self.l1 and self.loss in ("hinge", "squared_hinge"):
            return "dual"
        return "adagrad" if self.loss == "hinge" else "newton"

    @property
    def most_epochs(self) -> int:
        """How many epochs there are, at most."""
        return self.epochs or (_MOST_EPOCHS if self.method in SECOND_ORDER else _EPOCHS)

    @property
    def rows_a_step(self) -> int:
        """``batch``, or its default."""
        return self.batch or _BATCH

    def _check_second_order(self) -> None:
        name = f"optimizer={self.method!r}"
        is_hinge = self.loss == "hinge"
        if self.method == "dual" and self.loss not in ("hinge", "squared_hinge"):
            raise ValueError(f"{name} is not for loss={self.loss!r}: leave it out, which chooses one that is")
        if is_hinge and self.method == "newton":
            raise ValueError(f"{name} is not for loss='hinge': use 'dual', or leave it out")
        if self.method == "dual" and not self.l2:
            raise ValueError(f"l2=0 is not for {name}: give more, or use {'adagrad' if is_hinge else 'newton'!r}")
        if self.method == "dual" and self.l1:
            instead = "'squared_hinge', or 'adagrad'" if is_hinge else "'newton', or leave it out"
            raise ValueError(f"l1={self.l1} is not for {name} with loss={self.loss!r}: use {instead}")
        for option in ("batch", "learning_rate", "decay", "overlap"):
            if value := getattr(self, option):
                raise ValueError(f"{option}={value} is not for {name}, whose steps follow from the data: leave it out")

    def _take_python_s(self) -> None:
        """Python's int, float or bool in each field, so that ranks which mean the same compare alike."""
        taken: dict[str, int | float] = {}
        for name, wanted in _INTEGERS.items():
            if wanted.endswith("None") and getattr(self, name) is None:
                continue
            taken[name] = checked_integer(getattr(self, name), name, wanted)
        for name, wanted in _NUMBERS.items():
            if name != "learning_rate" or self.learning_rate is not None:
                taken[name] = checked_number(getattr(self, name), name, wanted)
        for name in ("bias", "overlap"):
            taken[name] = checked_flag(getattr(self, name), name)
        for name, value in taken.items():
            object.__setattr__(self, name, value)  # as only this is left where the dataclass is frozen

    def rate_at(self, step: int, first: float) -> float:
        """Step's learning rate where the first is ``first``."""
        return first / (1 + self.decay * step)


# The memory that training needs, checked before it is allocated.

_GIB = 2**30
_SMALL = 2**24  # bytes that every machine has: to ask it takes longer than to train on so few rows
# of each of all ranks' rows, in ``Share``: its place in a random order or its number; whether it is trained on
_DRAWN = 8 + 1
_POOLED = 6 << 20  # entries of all ranks: up to here one rank's descent takes less time than its Newton steps
_GATHERED = 1 << 22  # entries of few rows of all ranks, for a descent on these
_EPOCH_ROW = 5 * 8  # of each own row: its numbers, and in an epoch its place, its order and where it comes

# of a control group the files with its limit and use, and how its counts of cached pages begin
_VERSION_2 = ("memory.max", "memory.current", "")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def pools(settings: TrainingSettings, entries: int, *, alone: bool) -> bool:
    """Does each of several ranks get the rows of all, to descend by the coordinates of the dual as one rank does?"""
    return settings.method == "dual" and not alone and entries <= _POOLED


def bytes_needed(
    features: int,
    nnz: int,
    settings: TrainingSettings,
    *,
    rows: int = 0,
    total: int = 0,
    alone: bool = False,
    with_checkpoints: bool = False,
    most_occurring: int = MOST_FEATURES,
    classes: int = 1,
) -> int:
    """What a rank with ``rows`` of ``total`` rows and ``nnz`` entries takes at most beside its rows. ``alone``: only
    features that occur have a weight. ``most_occurring``: at most so many do in rows of all ranks."""
    if settings.method in SECOND_ORDER:
        pooled = 0
        if pools(settings, most_occurring, alone=alone):
            alone, rows, nnz = True, total, most_occurring
            pooled = nnz * 8 + rows * (2 * 8 + 3 * 4)
        occurring = min(features, nnz if alone else most_occurring)
        # numbers for each feature and class, one of them of uneven rows; the model, a bound; of rows numbers, scores,
        # what is of a loss; places
        needed = occurring * ((8 * 11 + 4) * classes + 8 + 4) + rows * (2 * 8 + 4 + 7 * 8 * classes)
        needed += pooled + nnz * 4 + features * 4 * classes
        if settings.l1:  # places of features, those that may move, and their entries
            needed += occurring * (4 + 4 + 7 * 8) + nnz * 8 + rows * 8
        if settings.method == "dual" and most_occurring <= _POOLED:
            # weights and their correction; of rows numbers, places, kinks
            needed += occurring * 2 * 8 + rows * (6 * 8 + 4 + 2 * 8)
        elif settings.method == "dual" and settings.loss == "hinge":
            # rows that each rank gathers, and their places; their features' weights; what is of each row
            gathered = min(most_occurring, _GATHERED)
            needed += gathered * (8 + 4 * 8) + rows * 6 * 8 + total * gathered // max(most_occurring, 1) * (14 * 8 + 4)
        return max(needed + with_checkpoints * (features + occurring * 12 + total * 8), total * _DRAWN)
    # all ranks' rows in the order of an epoch, or, before anything else is held, who is held out
    held = rows * 4 + nnz * 4 * alone + _held(features, nnz, settings, rows, total, alone=alone)
    if with_checkpoints:
        # of all features sums of squares, and what is finite; of weights and sums that are not 0 which ones, and copies
        sums = 2 if settings.method == "adagrad" else 1
        held += features * (4 * (sums - 1) + 1) + min(features, nnz if alone else features) * 12 * sums
    return max(held, total * _DRAWN)


def _held(features: int, nnz: int, settings: TrainingSettings, rows: int, total: int, *, alone: bool) -> int:
    occurring = min(features, nnz)
    weighted = occurring if alone else features
    adagrad = settings.method == "adagrad"
    owes = settings.l1 > 0 or (adagrad and settings.l2 > 0)
    paid = (8 if adagrad else 4) if owes else 0  # the step of the last touch, and AdaGrad's pace then
    needed = total * 8 + rows * _EPOCH_ROW
    # weights, sums of squares, and at the end the model; sums of a batch
    needed += weighted * (4 + (4 if adagrad else 0) + paid + 4) + occurring * 4
    if not alone:
        # what weights are worth then; what occurs; places instead of indices
        needed += occurring * ((4 if owes else 0) + 4) + nnz * 4
    # in the end every feature's weight, and which ones occur; the numbering's two bits are left out
    return needed + (features * 4 + occurring * 4 if alone else 0)


def check_memory(needed: int, features: int, comm: Communicator | None) -> None:
    """Raises ``ValueError`` on every rank if the ranks of some machine need more than it has free. ``needed``: bytes of
    this rank."""
    if comm is None and needed < _SMALL:
        return
    place = zlib.crc32(platform.node().encode())
    own = np.array([place, needed, available_bytes()], np.int64)
    every = own[None] if comm is None else comm.all_gather(own)
    for one in np.unique(every[:, 0]):
        ranks = every[every[:, 0] == one]
        needed, free = int(ranks[:, 1].sum()), int(ranks[:, 2].min())
        if 0 <= free < needed:
            raise ValueError(
                f"{features} features: {len(ranks)} ranks of one machine need {needed / _GIB:.1f} GiB beside their "
                f"rows, of which {free / _GIB:.1f} are free: hash features into fewer, or use fewer ranks"
            )


def available_bytes(root: Path = Path("/")) -> int:
    """Of this machine, or what the control groups of this process leave of it; -1 where none says. ``root``: where
    ``proc`` and ``sys`` are."""
    return min([*_of_machine(root), *_of_control_groups(root)], default=-1)


def _of_machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


def _of_control_groups(root: Path) -> Iterator[int]:
    """What each group that this process is in, and each around it, may still take."""
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        # a container may see its own group in the place of the top one, and yet be told its path outside
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            yield from _room(folder, *names)
            if folder == top:
                break


def _room(folder: Path, limit: str, used: str, cached: str) -> Iterator[int]:
    # OSError where there is no such group, ValueError for "max"
    with contextlib.suppress(OSError, ValueError):
        free = int((folder / limit).read_text()) - int((folder / used).read_text())
        # pages of files count as used, but make room: MemAvailable counts them likewise
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name in (f"{cached}active_file", f"{cached}inactive_file"):
                free += int(count)
        yield max(free, 0)


U64 = npt.NDArray[np.uint64]

_HELD_OUT, _EPOCH = 0, 1  # streams of random numbers of one seed


class Share:
    """One rank's rows, ``count`` of ``total`` from number ``first``: those held out, and those of every batch."""

    def __init__(self, first: int, count: int, total: int, *, held_out: float, seed: int) -> None:
        self._seed = seed
        trained = np.ones(total, np.bool_)
        if held_out:
            drawn = np.random.default_rng([seed, _HELD_OUT]).permutation(total)
            trained[drawn[: round(held_out * total)]] = False
            del drawn  # of all ranks' rows, as the next one
        numbers = np.cumsum(trained)  # among those that are trained on, from 1
        own = trained[first : first + count]
        self.trained_total = int(trained.sum())
        self._numbers = numbers[first : first + count][own] - 1
        self.trained_first = int(numbers[first] - own[0]) if count else 0
        """How many rows before this rank's are trained on."""
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


_LEAST_SPLIT = 4096  # features, of which dense sums take hardly more than their latencies
_SAVES = 0.7  # of the bytes of dense sums, so that the work of sorting is worth it


@dataclass(frozen=True)
class Shared:
    """Which of a rank's features other ranks' rows have, too, and who owns these: rank feature mod world size.

    ``counted``: of each of this rank's features 1 if this is the first rank that has it, whose part sums over features
    take. ``own``: places of the shared ones among this rank's, by owner; ``own_counts``: how many of each owner.
    ``arriving``: of those that come here, by rank, their places among the ``owned`` ones; ``counts``: how many of each
    rank. ``occurring``: how many features any rank's rows have. ``saves``: are these clearly fewer bytes than dense
    sums?"""

    counted: npt.NDArray[np.uint8]
    own: npt.NDArray[np.int64]
    own_counts: I64
    arriving: npt.NDArray[np.int64]
    counts: I64
    owned: int
    occurring: int
    saves: bool

    @staticmethod
    def among(features: U32, comm: Communicator) -> Shared:
        """Of this rank's ``features``, rising. Called by all ranks."""
        ranks = comm.world_size
        owners = features % np.uint32(ranks)
        order = np.argsort(owners, kind="stable")
        sent = np.bincount(owners, minlength=ranks)
        received = comm.all_gather(sent)[:, comm.rank]
        lengths: dict[str, Any] = {"send_counts": sent.tolist(), "receive_counts": received.tolist()}
        arrived = comm.all_to_all(features[order], **lengths)
        distinct, first, places, times = np.unique(arrived, return_index=True, return_inverse=True, return_counts=True)
        is_shared = times > 1
        flags = is_shared[places].astype(np.uint8)  # and 2 for one rank's
        flags[first] += 2
        lengths = {"send_counts": received.tolist(), "receive_counts": sent.tolist()}
        told = np.empty(features.size, np.uint8)
        told[order] = comm.all_to_all(flags, **lengths)
        kept = (flags & 1).astype(bool)
        own = order[(told[order] & 1).astype(bool)]
        every = comm.all_gather(np.array([distinct.size, own.size], np.int64)).sum(0)
        occurring = int(every[0])
        return Shared(
            told // np.uint8(2),
            own,
            np.bincount(owners[own], minlength=ranks),
            (np.cumsum(is_shared) - 1)[places[kept]],
            np.bincount(np.repeat(np.arange(ranks), received)[kept], minlength=ranks),
            int(is_shared.sum()),
            occurring,
            occurring > _LEAST_SPLIT and int(every[1]) < _SAVES * ranks * occurring,
        )

    def lists(self, of_feature: int, more: int) -> tuple[I64, list[int], I64, list[int], int]:
        """For ``of_feature`` numbers of each feature and ``more`` behind all: the places of what this rank sends, how
        many to each owner, the places where it sums what arrives, how many from each rank, and how many places."""

        def laid_out(places: I64, counts: I64, features: int) -> tuple[I64, list[int]]:
            behind = features * of_feature + np.arange(more)
            parts = np.split(places, np.cumsum(counts)[:-1])
            each = [(one[:, None] * of_feature + np.arange(of_feature)).reshape(-1) for one in parts]
            return np.concatenate([np.append(one, behind) for one in each]), [one.size + more for one in each]

        sent = laid_out(self.own, self.own_counts, self.counted.size)
        return *sent, *laid_out(self.arriving, self.counts, self.owned), self.owned * of_feature + more


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
    ``all_features``. Otherwise ``numbering`` tells. Second-order optimizers number the features of all ranks' rows
    likewise, or with ``shared`` those of this rank's. ``used``: which these are; ``occurring``: how many any rank's
    rows have. ``may_split=False``: without ``shared``. ``descends``: for the hinge, are all ranks' rows few, and here?
    ``gathered``: if not, the part of them that each rank may take at a time. ``keeps_models``: models are asked for
    where not all ranks take part.
    ``classes``: above 1, labels are numbers of classes, from 0, and the loss is that of their softmax.
    """

    def __init__(
        self,
        rows: Rows,
        settings: TrainingSettings,
        comm: Communicator | None,
        *,
        alone: bool,
        checkpoint_every: int | None = None,
        classes: int = 1,
        keeps_models: bool = False,
        may_split: bool = True,
    ) -> None:
        self.classes = classes
        self.rows, self.settings, self.comm = rows, settings, comm
        self._told = _told_by(settings) | {"checkpoint_every": checkpoint_every, "classes": classes}
        self.rank, self.world_size = (comm.rank, comm.world_size) if comm else (0, 1)
        self.is_classification = is_classification(settings.loss) and classes == 1
        found = self._agree(keeps_models)
        self.features, counts, entries, any_weights, self.keeps_models, self.index_base, self.base_is_guessed = found
        self.total = int(counts.sum())
        first = int(counts[: self.rank].sum())
        needed = bytes_needed(
            self.features,
            rows.nnz,
            settings,
            rows=int(counts[self.rank]),
            total=self.total,
            alone=alone,
            with_checkpoints=checkpoint_every is not None,
            most_occurring=entries,
            classes=classes,
        )
        check_memory(needed, self.features, comm)
        self.share = Share(first, len(rows), self.total, held_out=settings.held_out, seed=settings.seed)
        if self.share.trained_total == 0:
            remedy = "give more, or a smaller held_out" if self.total else "give data that have some"
            raise ValueError(f"of {self.total} rows none is left to train on: {remedy}")
        self.targets: F32 = signed(rows.labels) if self.is_classification else np.ascontiguousarray(rows.labels)
        trained = self.share.trained.astype(np.int64)
        own_weight = trained.size if rows.weights is None else rows.weights[trained].sum(dtype=np.float64)
        self.trained_weight, weight = self._sums(own_weight, rows.total_weight)
        if any_weights and settings.method not in SECOND_ORDER:
            raise ValueError(
                f"rows have weights, which optimizer={settings.method!r} does not know: use 'newton', for the hinge "
                "'dual', or leave out the weights"
            )
        if not self.trained_weight > 0:
            raise ValueError("the weights of all rows to train on are 0: give some rows a weight above 0")
        self.loss_at_zero = self._loss_at_zero(weight)
        self.loss_without_weights = self._loss_without_weights()
        self.first_rate = 0.0
        if settings.method in ("sgd", "adagrad"):
            self.first_rate = settings.learning_rate or self._default_rate(counts)
        # A safe rate is one of whole batches: the rows of a shorter last one weigh more in its mean.
        self._whole_batch = 0
        if settings.method == "sgd" and settings.learning_rate is None:
            self._whole_batch = self._most_rows_of_a_step()
        self.all_features = self.features
        self.used: U32 | None = None
        self.numbering: _core.Numbering | None = None
        self.numbered = rows  # whose memory the view is of
        self.shared: Shared | None = None
        self.pooled = may_split and pools(settings, entries, alone=alone)
        # of what rows the view is; which of them are trained on, and their targets and weights
        self.solved: tuple[U64, F32, F32 | None] = (self.share.trained, self.targets, rows.weights)
        if self.pooled:
            self.numbered = rows = self._rows_of_all(first, counts)
            alone = True
        # others' sums may have features behind the last of these rows
        numbering = _core.Numbering(rows.indices.ctypes.data, rows.nnz, self.features)
        is_second = settings.method in SECOND_ORDER
        if not alone and is_second:
            own = np.empty(numbering.size, np.uint32)
            numbering.write_features(own.ctypes.data)
            assert comm is not None
            self.shared = Shared.among(own, comm) if may_split and not settings.l1 else None
            if self.shared is not None and not self.shared.saves:
                self.shared = None
            if self.shared is None:
                every = self.union(own)
                numbering = _core.Numbering(every.ctypes.data, every.size, self.features)
        if numbering.size < self.features:
            self.numbered = _in_places(rows, numbering)
        if alone or is_second:
            self.used = np.empty(numbering.size, np.uint32)
            numbering.write_features(self.used.ctypes.data)
            self.features = numbering.size
        else:
            self.numbering = numbering
        self.occurring = self.features if self.shared is None else self.shared.occurring
        self.view = self.numbered.view()
        self.descends = settings.method == "dual" and (self.pooled or self.world_size == 1) and entries <= _POOLED
        is_hinge = settings.loss == "hinge" and settings.method == "dual"
        self.gathered = min(_GATHERED / entries, 1.0) if is_hinge and not self.descends else 0.0
        # of each row one, and one number more
        self.dual_count = self.share.trained_total + 1 if is_hinge or self.descends else 0
        self.loss = getattr(_core.Loss, settings.loss)
        self.team = self._start_team()

    def rate_at(self, step: int, rows: int) -> float:
        """The learning rate of ``step``, counted from 0 over all epochs, in which all ranks have ``rows``."""
        rate = self.settings.rate_at(step, self.first_rate)
        return rate * rows / self._whole_batch if self._whole_batch else rate

    def union(self, own: U32) -> U32:
        """The features, rising, that are ``own`` on any rank."""
        assert self.comm is not None
        stream = SparseVector.trusted(own, np.ones(own.size, np.float32), self.features)
        total: SparseVector = self.comm.all_reduce(stream, "max")
        indices, values = total.memory(0.0)
        return np.flatnonzero(values > 0).astype(np.uint32) if indices is None else indices

    def _rows_of_all(self, first: int, counts: I64) -> Rows:
        """Also in ``solved``. ``first``: the number of this rank's first row."""
        assert self.comm is not None
        rows, gather = self.rows, self.comm.all_gather
        weights = np.ones(len(rows), np.float32) if rows.weights is None else rows.weights
        sizes, each = gather(np.array([rows.nnz, self.share.trained.size], np.int64)), counts.tolist()
        nnz, trained = sizes[:, 0].tolist(), sizes[:, 1].tolist()
        lengths = gather(np.diff(rows.offsets.astype(np.int64)), counts=each)
        targets, weights = gather(self.targets, counts=each), gather(weights, counts=each)
        chosen = gather(self.share.trained.astype(np.int64) + first, counts=trained)
        self.solved = chosen.astype(np.uint64), targets, weights
        offsets = np.append(0, np.cumsum(lengths)).astype(np.uint64)
        return Rows(offsets, gather(rows.indices, counts=nnz), gather(rows.values, counts=nnz), targets, self.features)

    def _most_rows_of_a_step(self) -> int:
        return min(self.settings.rows_a_step, self.share.trained_total)

    def _default_rate(self, counts: I64) -> float:
        """Of SGD 1/L, or 1/(2L) where gradients come a step late; L bounds the curvature of every batch's mean loss.

        The curvature of a row's loss is at most κ·(|x|² + 1), with the bias's 1; of a mean at most the mean of these,
        which no batch has above that of as many longest rows. A step of at most 1/L makes no two models differ more
        than before, whichever batches come; nor does the penalties' proximal step, whatever they are. With a delay of
        one step an error along a curvature c follows z² = z - ηc, whose complex roots have |z|² = ηc: at η = 1/L it
        need not fall, and of batches that differ some orders make it grow; at half of that it falls along every c above
        0, and no order of batches is known that makes it grow, though that is not proven.
        """
        if self.settings.method == "adagrad":
            return _ADAGRAD_RATE
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

    def _sums(self, *own: float) -> list[float]:
        """Of all ranks."""
        sums = np.array(own, np.float64)
        if self.comm is not None:
            self.comm.all_reduce(sums)
        return [float(one) for one in sums]

    def _loss_at_zero(self, weight: float) -> float:
        """Mean loss of all ranks' rows where all weights are 0, hence also the objective."""
        if self.classes > 1:
            return math.log(self.classes)
        if self.is_classification:  # alike for both
            return float(losses_of(self.settings.loss, 0.0, 1.0)) if weight else 0.0
        losses = self.rows.weighted(losses_of(self.settings.loss, np.zeros(len(self.rows)), self.targets))
        return self._sums(losses.sum())[0] / weight if weight else 0.0

    def _loss_without_weights(self) -> float:
        if self.is_classification and not self.settings.bias:
            return self.loss_at_zero
        trained = self.share.trained.astype(np.int64)
        targets = self.targets[trained].astype(np.float64)
        shares = np.ones(targets.size) if self.rows.weights is None else self.rows.weights[trained].astype(np.float64)

        def mean_of(values: F64) -> float:
            return self._sums(float((values * shares).sum()))[0] / self.trained_weight

        if self.classes > 1:
            each = [mean_of((targets == one).astype(np.float64)) for one in range(self.classes)]
            return -sum(one * math.log(one) for one in each if one > 0) if self.settings.bias else self.loss_at_zero
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

    def _agree(self, keeps_models: bool) -> tuple[int, I64, int, bool, bool, int | None, bool]:
        """The number of features, every rank's rows, all entries, whether any row has a weight, whether any rank wants
        models to be kept, ``index_base`` and ``base_is_guessed``."""
        labels = self.rows.labels
        kinds = label_counts(labels)
        told = [] if self.comm is None else [zlib.crc32(repr(value).encode()) for value in self._told.values()]
        base = -1 if self.rows.index_base is None else self.rows.index_base
        about = [self.rows.n_features, len(labels), base, int(self.rows.base_is_guessed)]
        about += [self.rows.nnz, int(self.rows.weights is not None), int(keeps_models)]
        own = np.array([*about, *kinds, *told], np.int64)
        every = own[None] if self.comm is None else self.comm.all_gather(own)
        self._check_alike(every[:, len(about) + len(kinds) :])
        features, counts = int(every[:, 0].max()), every[:, 1]
        found = every[counts > 0]
        bases, is_guessed = set(found[:, 2].tolist()), bool(found[:, 3].any())
        minus, zero, plus = every[:, len(about) : len(about) + len(kinds)].sum(0)
        any_weights, keeps = bool(every[:, 5].any()), bool(every[:, 6].any())
        if self.is_classification and not are_classes(counts.sum(), minus, zero, plus):
            lacking = "; a line 3:0.5 4:1 without a label is read as label 3 with the weight 0.5" if any_weights else ""
            raise ValueError(
                f"labels are not two classes for loss={self.settings.loss!r}: {self._first_other_label(counts)}of "
                f"{counts.sum()} rows {minus} have -1, {zero} have 0, {plus} have 1. Make them -1 and 1 or 0 and "
                f"1, or use loss='squared_error' for numbers{lacking}"
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
        base_of_all = bases.pop() if bases in ({0}, {1}) else None
        return features, counts, int(every[:, 4].sum()), any_weights, keeps, base_of_all, is_guessed

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
        """Of weights of all features, in an array that may become the model's."""
        base = (self.index_base, self.base_is_guessed and self.index_base is not None)
        return LinearModel(weights, bias, self.settings.loss, *base)

    def of_all(self, own: F32) -> F32:
        """Of all ranks' features what ``own`` has of ``features``; the same array if these are all."""
        if self.used is None:
            return own
        every = np.zeros(self.all_features, np.float32)
        every[self.used] = own
        return every

    def of_own(self, every: F32) -> F32:
        """The other way."""
        return every if self.used is None else np.ascontiguousarray(every[self.used])

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
