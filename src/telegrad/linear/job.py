"""What each rank of ``telegrad linear train`` does, and how it finds the others.

That is under telegrad's own launcher, torchrun or mpiexec. Rank 0 says how it goes, in messages:
``{"kind": "rows" | "resumed" | "step" | "epoch" | "end", …}``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from telegrad import Communicator
from telegrad.communicator.texts import all_gather_text, own_error_first
from telegrad.launch import join
from telegrad.launch.joining import RANK
from telegrad.linear.data import DamagedLine, LibsvmFormat, read_libsvm
from telegrad.linear.losses import label_counts
from telegrad.linear.model import EpochReport, LinearModel
from telegrad.linear.problem import SECOND_ORDER, TrainingSettings
from telegrad.linear.rows import Rows
from telegrad.linear.training import gains_nothing, objective, train

_STEP_MESSAGE_S = 0.1
_MOST_DAMAGED = 8  # lines that are named
_NO_LINE = (1 << 63) - 1  # what is wrong is not a line
_MPI_RANKS = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")

Say = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Job:
    """``data``: a LIBSVM file that all ranks can read, ``model``: where rank 0 writes the model, ``partial`` what there
    is of it when the training is broken off."""

    data: str
    model: str
    format: LibsvmFormat
    settings: TrainingSettings
    cache: bool
    checkpoint: str | None = None
    checkpoint_every: int = 1

    @property
    def partial(self) -> Path:
        model = Path(self.model)
        return model.with_name(f"{model.stem}.partial{model.suffix}")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        form, settings = LibsvmFormat(**fields.pop("format")), TrainingSettings(**fields.pop("settings"))
        return cls(**fields, format=form, settings=settings)


def main(job_json: str) -> None:
    """What telegrad's launcher calls in each rank's process. Rank 0 prints its messages; a rank whose lines or labels
    are wrong prints ``{"kind": "error", "said"}`` and ends with status 1."""
    signal.signal(signal.SIGTERM, _interrupt_once)  # how the launcher breaks off: see ``Job.partial``
    with join() as comm:

        def say(message: dict[str, Any]) -> None:
            print(json.dumps(message), flush=True)

        try:
            run(Job.from_json(job_json), comm, say if comm.rank == 0 else lambda message: None)
        except (ValueError, OSError, ImportError) as error:
            say({"kind": "error", "said": str(error)})
            sys.exit(1)


def _interrupt_once(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # what is left is written undisturbed; who cannot wait kills
    raise KeyboardInterrupt


def is_rank_of_another_launcher() -> bool:
    """Has torchrun or mpiexec started this process as one of several ranks?"""
    if RANK in os.environ:
        return False
    return _has_torchrun() or any(name in os.environ for name in _MPI_RANKS)


def writes_files() -> bool:
    """Does this process write the files? Of another launcher's ranks only the first must be able to."""
    names = ("RANK",) if _has_torchrun() else _MPI_RANKS
    return not is_rank_of_another_launcher() or any(os.environ.get(name) == "0" for name in names)


def _has_torchrun() -> bool:
    return os.environ.keys() >= {"RANK", "WORLD_SIZE", "MASTER_ADDR"}


def join_other_launcher() -> Communicator:
    """A communicator of the ranks of torchrun or mpiexec. Raises ``ImportError`` without torch or mpi4py."""
    if _has_torchrun():
        return Communicator.from_torch()
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise ImportError("ranks under mpiexec need mpi4py: pip install 'telegrad[bench]'") from error
    return Communicator.from_mpi(MPI.COMM_WORLD, driver="ucx")


def run(job: Job, comm: Communicator, say: Say) -> None:
    """Reads this rank's lines, trains, and writes the model on rank 0 if it has not diverged. ``say`` gets the
    messages. What is wrong with the data is a ``ValueError`` on every rank, the same one."""
    began_s = time.perf_counter()
    rows = _read(job, comm)
    read_s = time.perf_counter() - began_s
    positive = label_counts(rows.labels)[2]
    own = [len(rows), rows.nnz, rows.damaged, positive, int(rows.weights is not None), rows.n_features]
    every = comm.all_gather(np.array(own, np.int64))
    count, entries, damaged, positive, weighted, _ = every.sum(0).tolist()
    about = {
        "rows": count,
        "nnz": entries,
        "damaged": damaged,
        "weighted": weighted,
        "features": int(every[:, 5].max()),
    }
    # ranks have the file's lines in their own order
    lines = [line for said in all_gather_text(comm, json.dumps(rows.first_damaged)) for line in json.loads(said)]
    about |= {"positive": positive, "first_damaged": lines[:_MOST_DAMAGED]}
    if count == 0:
        remedy = f"all of its {damaged} lines are damaged; {lines[0]}" if damaged else "give data that have some"
        raise ValueError(f"{job.data} has no rows: {remedy}")
    say({"kind": "rows", **about, "read_s": read_s, "ranks": comm.world_size})

    epochs = said_s = 0.0
    has_begun = resumed = False

    def on_step(step: int, steps: int) -> None:
        nonlocal said_s, has_begun
        has_begun = True
        if (now_s := time.perf_counter()) - said_s > _STEP_MESSAGE_S:
            said_s = now_s
            if job.settings.method not in SECOND_ORDER:
                say({"kind": "step", "done": (epochs + step / steps) / job.settings.most_epochs})

    def on_epoch(report: EpochReport) -> None:
        nonlocal epochs
        epochs += 1
        say({"kind": "epoch", **dataclasses.asdict(report)})
        if 0 < report.gap < 1:  # a bar that follows the gap's digits, as nobody knows how many steps there will be
            done = min(math.log(report.gap) / math.log(min(job.settings.tol, 0.5)), 1.0)
            say({"kind": "step", "done": max(done, epochs / job.settings.most_epochs)})

    def on_resume(reports: list[EpochReport]) -> None:
        nonlocal epochs, resumed
        epochs += len(reports)
        resumed = True
        say({"kind": "resumed", "epochs": [dataclasses.asdict(report) for report in reports]})

    def on_break_off(model: LinearModel) -> None:
        if comm.rank == 0 and has_begun and np.isfinite(model.bias) and np.isfinite(model.weights).all():
            with contextlib.suppress(OSError):  # what ended the training is to be heard: maybe that the disk is full
                model.save(job.partial)

    trained = train(
        rows,
        job.settings,
        comm,
        on_epoch=on_epoch,
        on_step=on_step,
        on_break_off=on_break_off,
        checkpoint=job.checkpoint,
        checkpoint_every=job.checkpoint_every,
        on_resume=on_resume,
    )
    reached = objective(trained.model, rows, job.settings.l2, comm, job.settings.l1)
    of_trained = reached
    if job.settings.held_out:
        of_trained = objective(trained.model, rows, job.settings.l2, comm, job.settings.l1, without=trained.held_out)
    diverged = trained.diverged_to(of_trained)
    if comm.rank == 0 and not diverged:
        try:
            trained.model.save(job.model)
            if resumed:  # the model of the moment when it was broken off
                job.partial.unlink(missing_ok=True)
        except OSError as error:
            raise OSError(f"cannot write the model to {job.model}: {error.strerror or error}") from error
    end = {"objective": reached, "objective_at_zero": trained.loss_at_zero, "bias": trained.model.bias}
    fall = 0.0 if diverged or job.settings.method in SECOND_ORDER else trained.last_fall
    end |= {"first_learning_rate": trained.first_rate, "last_fall": fall}
    end |= {"converged": trained.converged, "gap": trained.epochs[-1].gap}
    end["objective_without_weights"] = trained.loss_without_weights
    end["no_better_than_no_weights"] = gains_nothing(of_trained, trained.loss_to_beat)
    say({"kind": "end", **end, "better_rate": trained.better_rate(reached), "diverged": diverged})


def _read(job: Job, comm: Communicator) -> Rows:
    """This rank's rows. Where some rank's cannot be read, every rank raises what is wrong with the first damaged line
    of all, or else what the lowest rank says: whoever comes first, the user reads the same."""
    rows: Rows | None = None
    line, said = 0, ""
    try:
        rows = read_libsvm(
            job.data, **dataclasses.asdict(job.format), rank=comm.rank, world_size=comm.world_size, cache=job.cache
        )
    except DamagedLine as error:
        line, said = error.line, str(error)
    except (ValueError, OSError, ImportError) as error:
        line, said = _NO_LINE, str(error)
    with own_error_first(ValueError(said) if said else None):
        lines = comm.all_gather(np.array([line], np.int64))[:, 0]
        failed = np.flatnonzero(lines)
        every = all_gather_text(comm, said) if failed.size else []
    if every:
        raise ValueError(every[failed[np.argmin(lines[failed])]])
    assert rows is not None
    return rows
