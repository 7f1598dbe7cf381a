"""Dense sums in messages that round, for ``telegrad bench allreduce``: of what, and how far off they may be."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from telegrad import Communicator
from telegrad.comm.encoded import WIRES

Vector = npt.NDArray[np.float32]

WIRE_BITS = {"bf16": 16, "f16": 16, "int8": 8 + 1 / 8, "qsgd8": 8 + 1 / 32, "qsgd4": 4 + 1 / 32, "qsgd2": 2 + 1 / 32}
"""Of a value in a message, with its part of a scale (docs/algorithms.md, "Encoded values")."""

_ROUNDING = {"bf16": 2**-8, "f16": 2**-11, "int8": 1 / 254, "qsgd8": 1 / 127, "qsgd4": 1 / 7, "qsgd2": 1.0}
_ADDING = 2**-20  # of float32's own additions

assert set(WIRE_BITS) == set(_ROUNDING) == set(WIRES)


class EncodedSums:
    """Sums of normally distributed values, others on each rank."""

    def __init__(self, communicator: Communicator, elements: int) -> None:
        self._communicator = communicator
        self._values = np.random.default_rng(communicator.rank).standard_normal(elements, np.float32)
        self._sum = np.empty_like(self._values)

    def call(self, wire: str) -> Callable[[Vector], object]:
        """Sums as many values as the vector that it is given has; what that holds does not matter."""
        return lambda x: self._communicator.all_reduce(self._values[: x.size], wire=wire, out=self._sum[: x.size])

    def wrong(self, wire: str, elements: int) -> int:
        """How many values of the last sum are further off than roundings can be, on this rank; all of them where ranks
        do not have the same bits."""
        communicator, values, found = self._communicator, self._values[:elements], self._sum[:elements].copy()
        digests = communicator.all_gather(np.array([zlib.crc32(found.data)], np.int64))
        if digests.min() != digests.max():
            return elements
        exact = np.empty_like(values)
        communicator.all_reduce(values, out=exact)
        largest = float(communicator.all_gather(np.array([np.abs(values).max()])).max())
        most = communicator.world_size * (_ROUNDING[wire] + _ADDING) * largest + _ROUNDING[wire] * np.abs(exact).max()
        return int(np.count_nonzero(~(np.abs(found - exact) <= most * (1 + _ROUNDING[wire]))))
