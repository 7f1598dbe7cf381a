"""The hook's counters, and figures of each compressed tensor in each step for files and TensorBoard. Figures are off
unless ``DDPState`` is given a telemetry.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from telegrad.compress import Observation
from telegrad.compress.arguments import checked_count
from telegrad.ddp.bucket import Bits, ParameterSpan

if TYPE_CHECKING:
    import torch

    from telegrad.communicator import Communicator
    from telegrad.communicator.topk import TopkReport


@dataclass(slots=True)
class DDPStats:
    """Sums over all buckets so far, of this rank. Bytes on the wire are in ``Communicator.stats()``."""

    buckets: int = 0
    elements: int = 0  # of all buckets
    dense_elements: int = 0  # reduced densely
    wanted: int = 0  # entries at exactly the density (the sum of k)
    selected: int = 0  # entries that were sent sparsely
    # Of collectives whose sums keep a part ("oktopk", "gtopk", "bounded"), without dropped steps:
    kept: int = 0  # entries that the sums have kept
    overflow: int = 0  # of this rank's selected entries, those that did not fit into messages; they wait
    words_sent: int = 0  # an index is a word, a value is one; counts are none
    words_received: int = 0
    nonfinite_buckets: int = 0  # had NaN or infinity in them here, or made a residual overflow
    clipped_steps: int = 0  # in which this rank scaled its gradient down (clip_norm)
    skipped_steps: int = 0  # dropped on all ranks (nonfinite="skip")
    discarded_passes: int = 0  # gradients cleared before an optimizer stepped; residuals are as before the pass
    hook_s: float = 0.0  # time in the hook on the thread of the backward pass, most of it selection

    def add_sum(self, report: TopkReport) -> None:
        """Of a sum that keeps a part."""
        self.kept += report.selected
        self.overflow += report.overflow
        self.words_sent += report.words_sent
        self.words_received += report.words_received

    @property
    def selected_to_wanted(self) -> float:
        """selected / wanted; 1 for exact top-k."""
        return self.selected / self.wanted if self.wanted else 1.0


FORMAT, VERSION = "telegrad-telemetry", 1
_TOTALS = ("bytes_sent", "kept", "words_sent", "words_received")
_STEP = ("step", "unix_s", "dropped", "elements", "dense_elements", "element_bytes", *_TOTALS)
"""Of a record, as a line has it."""


@dataclass(slots=True)
class StepRecord:
    """One backward pass of one rank. ``bytes_sent``: by its communicator, from when it joined until this pass began.
    ``kept``, ``words_sent`` and ``words_received``: as in ``DDPStats``, by then: only before a pass are all sums over,
    so that what two records differ by is that of whole steps. DiLoCo's steps are its rounds, and have a ``round``:
    norms of this replica's ``move``, of the ``average``, and of their difference, the ``drift``. An exchange takes
    ``seconds``, of which training ``waited`` some."""

    step: int
    rank: int
    world_size: int
    tensors: list[Observation] = field(default_factory=list)
    elements: int = 0  # of all buckets
    dense_elements: int = 0  # of these, not compressed
    element_bytes: int = 4
    dropped: bool = False
    bytes_sent: int = 0
    kept: int = 0
    words_sent: int = 0
    words_received: int = 0
    unix_s: float = 0.0
    round: dict[str, float] | None = None

    @classmethod
    def begin(cls, step: int, comm: Communicator, stats: DDPStats) -> Self:
        """Of the pass that begins now."""
        return cls(
            step,
            comm.rank,
            comm.world_size,
            bytes_sent=comm.stats()["bytes_sent"],
            kept=stats.kept,
            words_sent=stats.words_sent,
            words_received=stats.words_received,
        )

    def add(self, buffer: Bits | torch.Tensor, dense: tuple[ParameterSpan, ...]) -> None:
        """A bucket, and which of its members are summed densely."""
        self.element_bytes = buffer.itemsize
        self.elements += buffer.nbytes // buffer.itemsize
        self.dense_elements += sum(member.size for member in dense)

    def close(self, *, dropped: bool) -> None:
        """The pass is over, on this rank."""
        self.dropped, self.unix_s = dropped, time.time()


class Telemetry(Protocol):
    """Where records go. Only every ``every``-th step is observed."""

    every: int

    def write(self, record: StepRecord) -> None:
        """Called once for an observed step, on any thread, never by two at once; must be short. After an ``OSError``,
        which becomes a warning, it is not called again."""


class JsonLines:
    """Appends to a file, one JSON object a line: first ``{"kind": "run", …}``, then one ``"step"`` for each step. Where
    steps go back, as those of another state do, there is a ``"run"`` line again.

    ``path``: a file of such lines goes on. ``every``: observes steps 0, every, 2·every, …. A step holds
    ``"tensors"``: lists in the order of ``"columns"`` in the ``"run"`` line; norms are of unscaled gradients. Draw it
    with ``telegrad report FILE``. Raises ``OSError`` where it cannot be opened, and ``ValueError`` where it holds
    something else."""

    COLUMNS = (*Observation._fields,)

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        self.every = checked_every(every)
        if Path(path).is_file():  # a terminal or a pipe has nothing to go on from
            _check_is_telemetry(Path(path))
            _drop_unfinished_line(Path(path))
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (it stays open)
        self._last: StepRecord | None = None
        self._error: OSError | None = None

    def write(self, record: StepRecord) -> None:
        """One line, flushed: a job that is killed leaves whole steps. Raises ``OSError`` where it cannot be written, as
        once the file is closed; after the first such error the file is, and each call raises it."""
        if self._error is not None:
            raise self._error
        if self._file.closed:
            raise OSError("this JsonLines is closed: keep it open until the training ends")
        try:
            self._write(record)
        except OSError as error:
            self._error = error
            with contextlib.suppress(OSError):  # what is left in its buffer, which cannot be written either
                self._file.close()
            raise

    def _write(self, record: StepRecord) -> None:
        if self._last is None or _begins_anew(self._last, record):
            about = {"kind": "run", "format": FORMAT, "version": VERSION}
            self._line(about | {"rank": record.rank, "world_size": record.world_size, "columns": self.COLUMNS})
        self._last = record
        step = {"kind": "step", **{name: getattr(record, name) for name in _STEP}}
        step["tensors"] = [[_json_number(value) for value in one] for one in record.tensors]
        self._line(step if record.round is None else {**step, "round": record.round})
        self._file.flush()

    def _line(self, value: dict[str, Any]) -> None:
        self._file.write(json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoard:
    """Writes scalars for TensorBoard: ``telegrad/<figure>/<tensor>`` for each tensor, of the figures ``selected_to_k``,
    ``compression``, ``residual_to_gradient`` and ``threshold``, and ``telegrad/bytes_sent``, ``kept``, ``words_sent``,
    ``words_received`` and ``dropped`` (0 or 1).

    ``writer``: a ``torch.utils.tensorboard.SummaryWriter``, or the folder for a new one, which needs the package
    ``tensorboard``; without that ``ImportError`` is raised.
    """

    def __init__(self, writer: Any, *, every: int = 10) -> None:
        self.every = checked_every(every)
        if isinstance(writer, (str, Path)):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "telegrad.ddp.TensorBoard needs tensorboard: pip install tensorboard, or use JsonLines"
                ) from error
            writer = SummaryWriter(str(writer))
        elif not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"writer is a {type(writer).__name__}: give a folder, or a torch.utils.tensorboard.SummaryWriter"
            )
        self._writer = writer

    def write(self, record: StepRecord) -> None:
        """All scalars of one step."""
        for one in record.tensors:
            for figure, value in figures_of(one).items():
                if value is not None and math.isfinite(value):
                    self._writer.add_scalar(f"telegrad/{figure}/{one.name}", value, record.step)
        for total in _TOTALS:
            self._writer.add_scalar(f"telegrad/{total}", getattr(record, total), record.step)
        for figure, value in (record.round or {}).items():
            self._writer.add_scalar(f"telegrad/round/{figure}", value, record.step)
        self._writer.add_scalar("telegrad/dropped", int(record.dropped), record.step)


def figures_of(one: Observation) -> dict[str, float | None]:
    """What is shown of a tensor; ``None``: there is no such figure."""
    return {
        "selected_to_k": one.selected / one.k,
        "compression": one.elements / one.selected if one.selected else None,
        "residual_to_gradient": one.residual_norm / one.gradient_norm if one.gradient_norm else None,
        "threshold": one.threshold,
    }


def check_telemetry(telemetry: object) -> None:
    """Raises ``TypeError`` unless it is ``None`` or records can be given to it."""
    if telemetry is not None and not (hasattr(telemetry, "every") and callable(getattr(telemetry, "write", None))):
        raise TypeError(
            f"telemetry is a {type(telemetry).__name__}: give a telegrad.ddp.JsonLines(path) or TensorBoard(folder)"
        )


def write_record(telemetry: Telemetry, record: StepRecord) -> Telemetry | None:
    """Returns where the next record goes: nowhere after an ``OSError``, as a full disk must not end the training."""
    try:
        telemetry.write(record)
    except OSError as error:
        warnings.warn(f"telemetry ends at step {record.step}: {error}", RuntimeWarning, stacklevel=3)
        return None
    return telemetry


def _begins_anew(last: StepRecord, record: StepRecord) -> bool:
    """Whether ``record`` is of another state than ``last``, or of one that was loaded; a dropped step is run again."""
    if (record.rank, record.world_size) != (last.rank, last.world_size):
        return True
    return record.step < last.step or (record.step == last.step and not last.dropped)


_BEGINNING = json.dumps({"kind": "run", "format": FORMAT}, separators=(",", ":"))[:-1].encode()


def _check_is_telemetry(path: Path) -> None:
    with path.open("rb") as file:
        beginning = file.read(len(_BEGINNING))  # fewer where a job was killed at once
    if not _BEGINNING.startswith(beginning):
        raise ValueError(f"{str(path)!r} holds something else than telemetry: give a path that is free, or remove it")


def _drop_unfinished_line(path: Path) -> None:
    """What a job that was killed had begun to write would spoil the line that comes next."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            last = file.read(end - start).rfind(b"\n")
            if last >= 0:
                end = start + last + 1
                break
            end = start
        file.truncate(end)


def checked_every(every: int) -> int:
    """``every`` if it is at least 1; else ``TypeError`` or ``ValueError``."""
    if checked_count(every, "every") < 1:
        raise ValueError(f"every={every} must be at least 1: 1 observes every step")
    return int(every)


def _json_number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
