"""Runs the measured part: starts the ranks on their network, and turns what they say into rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Self

from lab.topk.simulated import Row
from telegrad.tools.bench.plan import Timing, run_job


@dataclass(frozen=True)
class MeasuredPlan:
    """``file``: of recorded gradients, of which ``blocks`` side by side make a rank's vector. ``calls``: of selection
    with residuals, whose streams the schemes get in turn."""

    network: str
    ranks: int
    density: float
    schemes: tuple[str, ...]
    file: str
    blocks: int = 16
    calls: int = 4
    samples: int = 15
    seconds: float = 20.0
    calibrates: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of ``to_json``."""
        fields = json.loads(text)
        return cls(**{**fields, "schemes": tuple(fields["schemes"])})


_TARGET = "lab.topk.ranks:rank_main"

ABOUT = {
    "median_s": "of one call, the slowest rank's, without selection; messages as calibrated for the network",
    "selection_s": "measured apart, one rank at a time: the median call on one recorded gradient, times the number of "
    "gradients side by side, the slowest rank's",
    "reduction_s": "measured apart: the scheme's additions by numpy; inside a call the engine may overlap them with "
    "messages",
    "communication_s": "median_s less reduction_s",
    "total_s": "median_s + selection_s",
    "words_max": "as counted by the scheme in its first call; null where it does not count",
}
"""What the fields of a row mean, for result files."""


@dataclass
class Outcome:
    """By scheme: seconds of each sample; ranks with a wrong result; words and bytes of the first call by the rank that
    moved most; seconds of selection and additions apart."""

    times: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)
    words_max: dict[str, int | None] = field(default_factory=dict)
    wire_bytes: dict[str, int] = field(default_factory=dict)
    apart: dict[str, tuple[float, float]] = field(default_factory=dict)


def run(plan: MeasuredPlan, *, timeout_s: float, on_sample: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measures all that ``plan`` asks for; ``on_sample`` is called as each sample comes. Raises ``RankFailed``,
    ``RanksTimedOut`` and ``NetlabError``."""
    outcome = Outcome()

    def take(rank: int, line: str) -> None:
        if rank != 0 or not line.startswith("{"):
            return
        said = json.loads(line)
        if "apart" in said:
            outcome.apart = {name: (own[0], own[1]) for name, own in said["apart"].items()}
        elif "seconds" in said:
            outcome.times.setdefault(said["name"], []).append(said["seconds"])
            on_sample(said["name"])
        else:
            outcome.wrong[said["name"]] = said["wrong"]
            outcome.words_max[said["name"]] = said["words_max"]
            outcome.wire_bytes[said["name"]] = said["wire_bytes"]

    run_job(_TARGET, plan, take, timeout_s=timeout_s)
    return outcome


def rows_of(plan: MeasuredPlan, outcome: Outcome, elements: int) -> list[Row]:
    """A row for each scheme; ``elements``: of a recorded gradient."""
    n = elements * plan.blocks
    timings = {name: Timing.of(outcome.times[name]) for name in plan.schemes}
    totals = {name: timings[name].median_s + outcome.apart[name][0] for name in plan.schemes}
    best_s = min(timing.median_s for timing in timings.values())
    rows: list[Row] = []
    for name, timing in timings.items():
        selection_s, reduction_s = outcome.apart[name]
        rows.append(
            {
                "scheme": name,
                "network": plan.network,
                "ranks": plan.ranks,
                "n": n,
                "density": plan.density,
                "k": max(1, round(plan.density * n)),
                "median_s": timing.median_s,
                "min_s": timing.min_s,
                "p90_s": timing.p90_s,
                "samples": len(outcome.times[name]),
                "times_of_best": timing.median_s / best_s,
                "selection_s": selection_s,
                "reduction_s": reduction_s,
                "communication_s": max(0.0, timing.median_s - reduction_s),
                "total_s": totals[name],
                "words_max": outcome.words_max[name],
                "wire_bytes": outcome.wire_bytes[name],
                "wrong": outcome.wrong[name],
            }
        )
    return rows
