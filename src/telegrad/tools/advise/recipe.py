"""How a whole job is trained with compressed gradients: what each optimizer needs, and what accuracy that costs.

A recipe says how many first steps are dense, the density, and who applies the momentum. Its accuracy comes from the
study in docs/results/accuracy.md. That study trained small models, so a figure of it is no promise for a large one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAMILIES = ("vision", "language")


@dataclass(frozen=True)
class Recipe:
    """``density``: the one that the study judges for this optimizer. ``dense_share``: of all steps, the first ones.
    ``momentum``: of an SGD whose momentum telegrad applies, 0 for none. ``title``: as torch names the optimizer."""

    optimizer: str
    title: str
    density: float
    dense_share: float = 0.0
    momentum: float = 0.0

    def dense_steps(self, steps: int) -> int:
        """The first steps of a job of so many that send all values. Raises ``ValueError`` for a job of none."""
        if steps < 1:
            raise ValueError(f"steps={steps} must be at least 1: the optimizer steps of the whole job")
        return math.floor(steps * self.dense_share + 1e-9)  # a tenth of 30 is 3, and not 2.9999999999999996

    def share_of(self, steps: int | None) -> float:
        """Which share of the steps is dense; ``None``: the job is long. Raises ``ValueError`` as ``dense_steps``."""
        return self.dense_share if steps is None else self.dense_steps(steps) / steps

    def options(self, steps: int | None) -> str:
        """Arguments for DDPState that go with ``compress=``. Without ``steps`` they name ``total_steps``."""
        said = []
        if self.dense_share:
            count = f"total_steps // {round(1 / self.dense_share)}" if steps is None else str(self.dense_steps(steps))
            said.append(f"warmup=telegrad.Warmup(steps={count})")
        if self.momentum:
            said += [f"momentum=telegrad.Momentum({self.momentum:g})", "optimizer=optimizer"]
        return ", ".join(said)


RECIPES = {
    one.optimizer: one
    for one in (
        Recipe("adamw", "AdamW", 0.01, dense_share=0.1),
        Recipe("adam", "Adam", 0.01, dense_share=0.1),
        Recipe("sgd", "SGD", 0.01),
        Recipe("sgd-momentum", "SGD with momentum", 0.001, dense_share=0.1, momentum=0.9),
    )
}
"""By the optimizer's name. See docs/how-to/adamw.md and docs/how-to/sgd-momentum.md."""


def recipe_of(optimizer: str) -> Recipe:
    """Raises ``ValueError`` for a name that is none of ``RECIPES``."""
    if optimizer not in RECIPES:
        raise ValueError(f"optimizer={optimizer!r} is not known: use one of {', '.join(RECIPES)}")
    return RECIPES[optimizer]


ACCURACY_SOURCE = "benchmarks/results/2026-11-23-accuracy.json"
"""4 ranks, 3,000 steps, models of 77 to 167 thousand parameters: docs/results/accuracy.md."""
LOW_RANK_SOURCE = "benchmarks/results/2026-11-28-adamw.json"
"""4 ranks, 120 steps, no dense first ones, a GPT of 5.3 million parameters: docs/results/adamw.md."""


@dataclass(frozen=True)
class AccuracyRow:
    """``loss``: by how much a compressed run ends behind dense training, percent of the loss (language) or points of
    top-1 accuracy (vision); below 0 it ends ahead. ``method``: the study's name of what is compressed and how;
    ``density``: of entries, ``None`` where none are selected; ``steps``: of its training; ``source``: its rows."""

    task: str
    family: str
    optimizer: str
    scheme: str
    method: str
    density: float | None
    loss: float
    seeds: int
    steps: int = 3000
    source: str = ACCURACY_SOURCE

    @property
    def text(self) -> str:
        """``loss +1.4 %``, ``top-1 -0.15 points``."""
        if self.family == "language":
            return f"loss {self.loss:+.1f} %"
        return f"top-1 {-self.loss:+.2f} points"

    def text_at(self, density: float) -> str:
        """``text``, and the row's density if it is another one than this."""
        return self.text if self.density in (density, None) else f"{self.text} at {self.density:g}"

    @property
    def page(self) -> str:
        """That shows it."""
        return "docs/results/" + ("accuracy.md" if self.source == ACCURACY_SOURCE else "adamw.md")

    @property
    def about(self) -> str:
        """On what it was measured."""
        seeds = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        how = self.method if self.density is None else f"density {self.density:g}"
        return f"{self.task}, {recipe_of(self.optimizer).title}, {how}, {seeds}, {self.steps:,} steps"


ACCURACY = tuple(
    AccuracyRow(task, family, optimizer, scheme, method, density, loss, seeds)
    for task, family, optimizer, scheme, method, density, loss, seeds in (
        ("vgg", "vision", "sgd", "topk", "reused", 0.01, -0.71, 1),
        ("vgg", "vision", "sgd", "topk", "reused", 0.001, 0.06, 3),
        ("vgg", "vision", "sgd", "allgather", "topka", 0.001, 0.09, 1),
        ("vgg", "vision", "sgd", "oktopk", "oktopk", 0.001, -0.05, 1),
        ("resnet", "vision", "sgd", "topk", "reused", 0.01, -0.52, 1),
        ("resnet", "vision", "sgd", "topk", "reused", 0.001, -0.09, 3),
        ("resnet", "vision", "sgd", "allgather", "topka", 0.001, -0.01, 1),
        ("resnet", "vision", "sgd", "oktopk", "oktopk", 0.001, 1.47, 1),
        ("vgg-momentum", "vision", "sgd-momentum", "topk", "momentum", 0.01, 0.38, 1),
        ("vgg-momentum", "vision", "sgd-momentum", "topk", "momentum", 0.001, 0.15, 3),
        ("lstm", "language", "sgd", "topk", "reused", 0.01, 0.5, 3),
        ("lstm", "language", "sgd", "topk", "reused", 0.001, 7.2, 1),
        ("lstm", "language", "sgd", "allgather", "topka", 0.01, 0.9, 1),
        ("lstm", "language", "sgd", "oktopk", "oktopk", 0.01, 3.3, 1),
        ("gpt", "language", "adamw", "topk", "reused", 0.01, 1.4, 3),
        ("gpt", "language", "adamw", "topk", "reused", 0.001, 4.5, 1),
        ("gpt", "language", "adamw", "allgather", "topka", 0.01, 1.3, 1),
        ("gpt", "language", "adamw", "oktopk", "oktopk", 0.01, 3.3, 1),
    )
)
"""Rounded as the page rounds them; a test compares them with the rows of ``ACCURACY_SOURCE``."""

LOW_RANK_ACCURACY = AccuracyRow("demo", "language", "adamw", "lowrank", "rank 8", None, 0.4, 3, 120, LOW_RANK_SOURCE)
"""Its values travelled in 32 bits. See ``LOW_RANK_SOURCE``."""

_AS = {"adam": "adamw"}
_SUMMED_AS = {"allgather": ("allgather", "topk")}  # both sum all entries of all ranks


def expected_loss(
    scheme: str, optimizer: str, family: str, density: float, steps: int | None = None
) -> AccuracyRow | None:
    """The row of the study that is nearest to this: the same scheme and optimizer (Adam counts as AdamW, gathered
    entries as summed ones), then the same family, then the nearest density, of several the worst. ``None``: the study
    has no such run, or a job of so many ``steps`` is less than a third as long as the study's."""
    found = _nearest(scheme, _AS.get(optimizer, optimizer), family, density)
    return None if found is None or (steps is not None and 3 * steps < found.steps) else found


def _nearest(scheme: str, trained: str, family: str, density: float) -> AccuracyRow | None:
    if scheme == LOW_RANK_ACCURACY.scheme:
        return LOW_RANK_ACCURACY if trained == LOW_RANK_ACCURACY.optimizer else None
    schemes = _SUMMED_AS.get(scheme, (scheme,))
    found = [one for one in ACCURACY if one.scheme in schemes and one.optimizer == trained]
    found = [one for one in found if one.family == family] or found
    if not found:
        return None
    apart = [round(abs(math.log(density / (one.density or 1))), 9) for one in found]
    return max((one for one, far in zip(found, apart, strict=True) if far == min(apart)), key=lambda one: one.loss)
