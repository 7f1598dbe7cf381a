"""Which runs make a study. Knows neither torch nor the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.accuracy.runs import DENSE, METHODS, TASKS, Run, Task, default_of

MAIN, BATCH, RANKS = "methods", "batch", "ranks"
SWEEPS = (BATCH, RANKS)

_BATCHES = (128, 256, 512, 1024, 2048)
_RANKS = (2, 4, 8, 16, 32)
SWEPT_TASK = "vgg"
"""Of sweeps, whatever the tasks are."""
_EVALUATIONS = {"small": 12, "large": 6}
_STEPS_SHARE = {BATCH: 8, RANKS: 10}  # their steps cost as many times more


@dataclass(frozen=True)
class Study:
    """``densities``: of the default method; the others have the one at which the task is judged, or all of these where
    that is not among them. ``seeds``: how many for dense training, and for the default method at the density at which
    the task is judged; the others have the first. ``batch``: samples per step instead of each task's own. ``sweeps``:
    of one CNN, dense and by the default method: ``"batch"``: samples per step from 128 to 2,048, at the smallest
    density, an eighth of the steps each; ``"ranks"``: 2 to 32 of them, each with as many samples as otherwise, a tenth
    of the steps. ``rates``: learning rates of the first seed, as multiples of each task's; the other seeds have the
    best of them. ``judged_only``: leaves the default method's other densities out.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    methods: tuple[str, ...] = tuple(METHODS)
    densities: tuple[float, ...] = (0.01, 0.001)  # descending
    seeds: int = 3
    all_seeds: bool = False
    steps: int = 3000
    ranks: int = 4
    batch: int | None = None
    sweeps: tuple[str, ...] = SWEEPS
    size: str = "small"
    device: str = "cpu"
    rates: tuple[float, ...] = (1.0,)
    judged_only: bool = False

    def parts(self, best: Mapping[tuple[str, str, float], float] | None = None) -> dict[str, list[Run]]:
        """The runs of each question; none twice. ``best``: the best rate by task, method and density, where it is known
        already; without it seeds beyond the first are told with the first rate, to be counted. Raises ``ValueError``
        for what cannot be."""
        best = best or {}
        main = [
            self._run(task, method, density, seed, rate=rate)
            for task in self.tasks
            for method in self.methods
            if METHODS[method].fits(TASKS[task])
            for density in self._densities(method)
            if self._is_judged(TASKS[task], method, density) or (_is_reference(task, method) and not self.judged_only)
            for seed in range(self._seeds(TASKS[task], method, density))
            for rate in (self.rates if seed == 0 else (best.get((task, method, density), self.rates[0]),))
        ]
        parts = {MAIN: main}
        for sweep in self.sweeps:
            parts[sweep] = self._swept(sweep)
        return parts

    def _swept(self, sweep: str) -> list[Run]:
        steps = max(1, self.steps // _STEPS_SHARE[sweep])
        batch = self.batch or TASKS[SWEPT_TASK].batch
        places = [(batch, self.ranks) for batch in _BATCHES] if sweep == BATCH else []
        if sweep == RANKS:
            places = [(batch // self.ranks * ranks, ranks) for ranks in _RANKS]
        wanted = (DENSE, default_of(TASKS[SWEPT_TASK])) if sweep == BATCH else (default_of(TASKS[SWEPT_TASK]),)
        methods = [name for name in wanted if name in self.methods]
        return [
            self._run(SWEPT_TASK, method, density, 0, steps=steps, batch=batch, ranks=ranks)
            for batch, ranks in places
            for method in methods
            for density in self._densities(method)[-1 if sweep == BATCH else 0 :]
        ]

    def _seeds(self, task: Task, method: str, density: float) -> int:
        """All for what is judged: the default method at one density, and dense training beside it."""
        many = self.all_seeds or _is_reference(task.name, method)
        return self.seeds if many and self._is_judged(task, method, density) else 1

    def _is_judged(self, task: Task, method: str, density: float) -> bool:
        return not METHODS[method].sparse or density == task.judged_at or task.judged_at not in self.densities

    def _densities(self, method: str) -> tuple[float, ...]:
        return self.densities if METHODS[method].sparse else (1.0,)

    def _run(
        self,
        task: str,
        method: str,
        density: float,
        seed: int,
        *,
        steps: int | None = None,
        batch: int | None = None,
        ranks: int | None = None,
        rate: float = 1.0,
    ) -> Run:
        return Run(
            task,
            method,
            density,
            seed,
            self.steps if steps is None else steps,
            batch or self.batch or TASKS[task].batch,
            ranks or self.ranks,
            evaluations=_EVALUATIONS[self.size],
            size=self.size,
            device=self.device,
            rate=rate,
        )


def in_order(parts: dict[str, list[Run]]) -> list[Run]:
    """All runs, such that an early end leaves the most: the first seed of dense training and of the default method,
    then the other methods, the sweeps, the other seeds, one after the other.
    """

    def rank(item: tuple[str, Run]) -> int:
        part, run = item
        if run.seed > 0:
            return 2 + run.seed
        if part != MAIN:
            return 2
        return 0 if _is_reference(run.task, run.method) else 1

    runs = sorted(((part, run) for part, of_part in parts.items() for run in of_part), key=rank)
    return list(dict.fromkeys(run for _, run in runs))


def _is_reference(task: str, method: str) -> bool:
    return method in (DENSE, default_of(TASKS[task]))
