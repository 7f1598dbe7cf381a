"""What one run of ``telegrad bench training-step`` measures, as its ranks get it, and how its rows are judged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

Row = dict[str, Any]

WAYS = ("ddp-gloo", "ddp-telegrad", "wfbp", "single", "fixed", "greedy", "auto")
"""DistributedDataParallel with its own buckets, over Gloo and with telegrad's dense hook; and Synchronizers by plan."""

PLANNING_BLOCKS = 6
"""``warmup_steps`` passes that "auto" takes until it keeps a plan: two before it plans, up to four that are tried."""

SLOWER_SHARE, PREDICTED_SHARE = 0.05, 0.15
"""What ``auto`` may be slower than the best of the others, and what its prediction may be off."""


@dataclass(frozen=True)
class TrainingStepPlan:
    """``rounds`` times each way trains ``steps`` steps and one more that is left out, in another order each time,
    after ``warmup`` steps of each and one, in which plans are made, made once more and tried. ``store``: a path at
    which Gloo's processes meet."""

    network: str
    ranks: int
    model: str
    ways: tuple[str, ...] = WAYS
    rounds: int = 8
    steps: int = 4
    warmup: int = 59
    calibrates: bool = True
    store: str = ""

    @property
    def blocks(self) -> int:
        """How often a way takes its turn, warming up included."""
        return len(self.ways) * (self.rounds + 1)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "ways": tuple(fields["ways"])})


@dataclass(frozen=True)
class Verdict:
    """Of one model. ``ratio``: of auto's median step to that of ``best``, the fastest of the other ways. ``off``: of
    auto's predicted step from its measured one, as a part of this; ``None`` where it made no plan."""

    model: str
    best: str
    ratio: float
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
        best = min(times, key=lambda way: float(times[way]["median_s"]))
        predicted_s = auto["predicted_s"]
        found.append(
            Verdict(
                model,
                best,
                auto["median_s"] / times[best]["median_s"],
                None if predicted_s is None else predicted_s / auto["median_s"] - 1,
            )
        )
    return found
