"""What one run of ``telegrad bench training-step`` measures, as its ranks get it, and how its rows are judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from telegrad.bench.json_fields import JsonFields

Row = dict[str, Any]

WAYS = ("ddp-gloo", "ddp-telegrad", "wfbp", "single", "fixed", "greedy", "auto")
"""DistributedDataParallel with its own buckets, over Gloo and with telegrad's dense hook; and Synchronizers by plan."""

LEFT_OUT = 2
"""First steps of a turn: other ways have used the caches, and ranks may begin one early."""

SLOWER_SHARE, PREDICTED_SHARE = 0.05, 0.15
"""What ``auto`` may be slower than the best of the others, and what its prediction may be off."""

_OF_A_MEDIAN = 1.25 * 1.4826  # standard error of a median, by the median absolute deviation over √n
_FEWEST_ROUNDS = 3  # of which a spread says anything


@dataclass(frozen=True)
class TrainingStepPlan(JsonFields):
    """``rounds`` times each way trains ``steps`` steps after ``LEFT_OUT``, in orders of which every second one is the
    one before it backwards, after ``warmup`` steps of each and as many more as its plans take to be made and tried,
    which have these ``warmup_steps``. ``store``: a path at which Gloo's processes meet."""

    network: str
    ranks: int
    model: str
    ways: tuple[str, ...] = WAYS
    rounds: int = 8
    steps: int = 8
    warmup: int = 10
    calibrates: bool = True
    store: str = ""

    @property
    def blocks(self) -> int:
        """How often a way takes its turn, warming up included."""
        return len(self.ways) * (self.rounds + 1)


@dataclass(frozen=True)
class Verdict:
    """Of one model. ``ratio``: of auto's step to that of ``best``, the other way for which it is largest: the median
    over rounds, and ``error`` its standard error, ``None`` of fewer rounds than 3. ``off``: of auto's predicted step
    from its measured one, as a part of this; ``None`` where it made no plan."""

    model: str
    best: str
    ratio: float
    error: float | None
    off: float | None

    @property
    def is_as_fast(self) -> bool:
        return self.ratio <= 1 + SLOWER_SHARE

    @property
    def is_predicted(self) -> bool:
        return self.off is not None and abs(self.off) <= PREDICTED_SHARE


def verdicts_of(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """One for each model that has ``auto`` and another way."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        times = {row["way"]: row for row in rows if row["model"] == model}
        auto = times.pop("auto", None)
        if auto is None or not times:
            continue
        ratios = {way: np.array(auto["turns_s"]) / np.array(row["turns_s"]) for way, row in times.items()}
        best = max(ratios, key=lambda way: float(np.median(ratios[way])))
        ratio = float(np.median(ratios[best]))
        spread = float(np.median(np.abs(ratios[best] - ratio)))
        predicted_s, rounds = auto["predicted_s"], len(auto["turns_s"])
        found.append(
            Verdict(
                model,
                best,
                ratio,
                _OF_A_MEDIAN * spread / rounds**0.5 if rounds >= _FEWEST_ROUNDS else None,
                None if predicted_s is None else predicted_s / auto["median_s"] - 1,
            )
        )
    return found
