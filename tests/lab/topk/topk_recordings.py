"""Gradients as if recorded: a few large entries that all ranks share, and noise."""

from __future__ import annotations

import numpy as np

from lab.topk.recording import Recorder, Recording

SIZES = {"a": 3000, "b": 500, "c": 20}


def recording(count: int = 8) -> Recording:
    common = np.random.default_rng(0).standard_t(3, sum(SIZES.values()))
    recorder = Recorder("lstm", 5, SIZES, count)
    for row in range(count):
        noise = np.random.default_rng(row + 1).standard_t(3, common.size)
        recorder.take(row, (0.01 * (common + noise)).astype(np.float32))
    return recorder.recording()
