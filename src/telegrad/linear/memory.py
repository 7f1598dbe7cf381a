"""What memory training takes, said before it is taken."""

from __future__ import annotations

import contextlib
import platform
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from telegrad import Communicator
from telegrad.linear.settings import TrainingSettings

_GIB = 2**30
_DRAWN = (
    8 + 1
)  # of each of all ranks' rows, in ``Share``: its place in a random order or its number; whether it is trained on
_EPOCH_ROW = 5 * 8  # of each own row: its numbers, and in an epoch its place, its order and where it comes

# of a control group the files with its limit and use, and how its counts of cached pages begin
_VERSION_2 = ("memory.max", "memory.current", "")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def bytes_needed(
    features: int,
    nnz: int,
    settings: TrainingSettings,
    *,
    rows: int = 0,
    total: int = 0,
    alone: bool = False,
    with_checkpoints: bool = False,
) -> int:
    """What a rank with ``rows`` of ``total`` rows and ``nnz`` entries takes at most beside its rows. ``alone``: only
    features that occur have a weight."""
    # all ranks' rows in the order of an epoch, or, before anything else is held, who is held out
    held = rows * 4 + nnz * 4 * alone + _held(features, nnz, settings, rows, total, alone=alone)
    if with_checkpoints:
        # of all features sums of squares, and what is finite; of weights and sums that are not 0 which ones, and copies
        sums = 2 if settings.optimizer == "adagrad" else 1
        held += features * (4 * (sums - 1) + 1) + min(features, nnz if alone else features) * 12 * sums
    return max(held, total * _DRAWN)


def _held(features: int, nnz: int, settings: TrainingSettings, rows: int, total: int, *, alone: bool) -> int:
    occurring = min(features, nnz)
    weighted = occurring if alone else features
    adagrad = settings.optimizer == "adagrad"
    owes = settings.l1 > 0 or (adagrad and settings.l2 > 0)
    paid = (8 if adagrad else 4) if owes else 0  # the step of the last touch, and AdaGrad's pace then
    if settings.optimizer == "coordinate_descent":
        # weights, beginnings of columns; rows and values by column; of rows numbers twice, scores, targets, counts
        needed = weighted * (4 + 8) + nnz * 8 + rows * (8 + 8 + 8 + 4 + 4)
        # at first which columns there are; then these, in the order of a pass, and at the end the model
        needed += max(weighted * (8 + 1) + occurring * 8, weighted * (4 + 8 + 4))
    else:
        needed = total * 8 + rows * _EPOCH_ROW
        # weights, sums of squares, and at the end the model; sums of a batch
        needed += weighted * (4 + (4 if adagrad else 0) + paid + 4) + occurring * 4
        if not alone:
            # what weights are worth then; what occurs; places instead of indices
            needed += occurring * ((4 if owes else 0) + 4) + nnz * 4
    # in the end every feature's weight, and which ones occur; the numbering's two bits are left out
    return needed + (features * 4 + occurring * 4 if alone else 0)


def check_memory(
    features: int,
    nnz: int,
    settings: TrainingSettings,
    comm: Communicator | None,
    *,
    rows: int,
    total: int,
    alone: bool,
    with_checkpoints: bool,
) -> None:
    """Raises ``ValueError`` on every rank if the ranks of some machine need more than it has free."""
    place = zlib.crc32(platform.node().encode())
    needed = bytes_needed(
        features, nnz, settings, rows=rows, total=total, alone=alone, with_checkpoints=with_checkpoints
    )
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
