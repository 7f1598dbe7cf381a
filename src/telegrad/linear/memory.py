"""What memory training takes, said before it is taken."""

from __future__ import annotations

import platform
import zlib

import numpy as np

from telegrad import Communicator
from telegrad.linear.settings import TrainingSettings

_GIB = 2**30


def bytes_needed(features: int, nnz: int, settings: TrainingSettings, *, alone: bool = False) -> int:
    """What a rank with ``nnz`` entries takes beside its rows. ``alone``: it has places for features that occur."""
    if alone:
        # a bit and a half for every feature, in the end its weight; and places instead of indices
        return features * 4 + nnz * 4 + bytes_needed(min(features, nnz), nnz, settings)
    owes = settings.l1 > 0 or (settings.optimizer == "adagrad" and settings.l2 > 0)
    match settings.optimizer:
        case "coordinate_descent":
            return features * (4 + 8) + nnz * 8  # weights, beginnings of columns; rows and values by column
        case "adagrad":
            each = (
                4 + 4 + 4 + (8 if owes else 0)
            )  # weights, sums of a batch and of squares; pace and step of last touch
        case _:
            each = 4 + 4 + (4 if owes else 0)
    return features * (each + 4)  # and at the end the model


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
