"""Does a loss still fall when a training ends? This module must not know of rows, ranks or weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WINDOW = 10  # epochs whose mean is compared


def last_fall(losses: Sequence[float]) -> float:
    """By what part the loss has fallen in an epoch in the end, where ``losses`` are that at the zero weights and those
    of all epochs, finite: the mean of the last 10 epochs (or of half of all losses) against that of as many before. 0
    unless that is more than three times what by chance it could be, as batches in random order make losses uneven."""
    window = min(_WINDOW, len(losses) // 2)
    before, after = losses[-2 * window : -window], losses[-window:]
    fall = np.mean(before) - np.mean(after)
    chance = np.sqrt((np.var(before, ddof=1) + np.var(after, ddof=1)) / window) if window > 1 else 0.0
    return float(fall / np.mean(before)) / window if fall > 3 * chance else 0.0
