"""A selection whose entries have one sign, in plain numpy, for tests of how they travel."""

from __future__ import annotations

import numpy as np

from telegrad.compress import Residual


class OneSignedTopK:
    """The k largest at even calls, the k smallest at odd ones, none of the other sign; counts in ``entry.calls``."""

    same_sign = True

    def capacity(self, entry: Residual) -> int:
        return entry.k

    def select(
        self, entry: Residual, gradient: np.ndarray, indices: np.ndarray, values: np.ndarray, offset: int
    ) -> int:
        entry.values += gradient
        sign = np.float32(1 if entry.calls % 2 == 0 else -1)
        entry.calls += 1
        largest = np.argsort(-sign * entry.values, kind="stable")[: entry.k]
        chosen = np.sort(largest[sign * entry.values[largest] > 0])
        indices[: chosen.size] = chosen + offset
        values[: chosen.size] = entry.values[chosen]
        entry.values[chosen] = 0
        entry.peak = float(np.abs(entry.values).max())
        return chosen.size
