"""Which of all ranks' rows a step sees.

Ranks hold consecutive rows of one numbering, in the order of ranks; who is held out and what is in a batch is drawn by
these numbers, so that it is the same however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

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
