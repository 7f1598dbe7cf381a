"""What memory training takes, said before it is taken."""

from __future__ import annotations

import platform
import zlib

import numpy as np

from telegrad import Communicator
from telegrad.linear.settings import TrainingSettings

_GIB = 2**30


def bytes_needed(features: int, nnz: int, settings: TrainingSettings, *, alone: bool = False) -> int:
    """What a rank with ``nnz`` entries takes beside its rows. ``alone``: only features that occur have a weight."""
    occurring = min(features, nnz)
    weighted = occurring if alone else features
    adagrad = settings.optimizer == "adagrad"
    owes = settings.l1 > 0 or (adagrad and settings.l2 > 0)
    paid = (8 if adagrad else 4) if owes else 0  # the step of the last touch, and AdaGrad's pace then
    if settings.optimizer == "coordinate_descent":
        needed = weighted * (4 + 8) + nnz * 8  # weights, beginnings of columns; rows and values by column
    else:
        # weights, sums of squares, and at the end the model; sums of a batch
        needed = weighted * (4 + (4 if adagrad else 0) + paid + 4) + occurring * 4
        if not alone:
            # copies, and what they are worth then; what occurs; places instead of indices
            needed += occurring * (4 + paid + (4 if owes else 0) + 4) + nnz * 4
    # in the end every feature's weight, and places instead of indices; the numbering's bit and a half are left out
    return needed + (features * 4 + nnz * 4 if alone else 0)


def check_memory(
    features: int, nnz: int, settings: TrainingSettings, comm: Communicator | None, *, alone: bool
) -> None:
    """Raises ``ValueError`` on every rank if the ranks of some machine need more than it has free."""
    place = zlib.crc32(platform.node().encode())
    own = np.array([place, bytes_needed(features, nnz, settings, alone=alone), available_bytes()], np.int64)
    every = own[None] if comm is None else comm.all_gather(own)
    for one in np.unique(every[:, 0]):
        ranks = every[every[:, 0] == one]
        needed, free = int(ranks[:, 1].sum()), int(ranks[:, 2].min())
        if 0 <= free < needed:
            raise ValueError(
                f"n_features={features}: {len(ranks)} ranks of one machine need {needed / _GIB:.1f} GiB beside their "
                f"rows, of which {free / _GIB:.1f} are free: hash features into fewer, or use fewer ranks"
            )


def available_bytes() -> int:
    """Of this machine, or -1 where it does not say."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return -1
