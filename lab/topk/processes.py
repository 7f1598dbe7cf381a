"""All parts of a simulation, over all cores. Each part is simulated by itself, so how many processes there are changes
no result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.topk.balancing import Balancing, balancing_rows
from lab.topk.recording import Recording
from lab.topk.simulated import RECORDED, Part, Row, SimulatedPlan, simulate
from lab.topk.weak_scaling import MODELS, Model, weak_scaling
from telegrad.tools.sim.measure import call_in_processes

_recording: Recording | None = None  # of a process that was started here


@dataclass(frozen=True)
class Simulated:
    """``rows``: of calls, by gradients, ranks, scheme and call; ``weak_scaling``: by model, ranks and scheme;
    ``balancing``: by ranks and slices."""

    rows: list[Row]
    weak_scaling: list[Row]
    balancing: list[Row]


Work = Part | Model | Balancing


def tasks_of(plan: SimulatedPlan, weak_ranks: Sequence[int], balanced_ranks: Sequence[int] = ()) -> list[Work]:
    """What ``simulate_all`` does, the longest first."""
    return [*(reversed(MODELS) if weak_ranks else ()), *plan.parts(), *map(Balancing, balanced_ranks)]


def simulate_all(
    plan: SimulatedPlan,
    weak_ranks: Sequence[int],
    recording: Recording,
    file: Path,
    *,
    processes: int,
    balanced_ranks: Sequence[int] = (),
    on_done: Callable[[str], None] = lambda about: None,
) -> Simulated:
    """``file``: where ``recording`` is saved, for the processes; with one, nothing is read from it. ``weak_ranks``: of
    the paper's models (none: not at all); ``balanced_ranks``: of what balancing spares. ``on_done`` is called with what
    is over. Raises ``ValueError`` for less than one process, and what a simulation raises; then, and on Ctrl-C, the
    other processes are ended."""
    if processes < 1:
        raise ValueError(f"processes={processes} must be at least 1")
    tasks = tasks_of(plan, weak_ranks, balanced_ranks)
    found: dict[Work, list[Row]] = {}

    def keep(task: Work, rows: list[Row]) -> None:
        found[task] = rows
        on_done(about(task))

    if processes == 1:
        for task in tasks:
            keep(task, _rows(plan, tuple(weak_ranks), task, recording))
    else:
        work = functools.partial(_in_process, plan, tuple(weak_ranks))
        call_in_processes(work, tasks, min(processes, len(tasks)), keep, prepare=functools.partial(_load, file))
    places = {name: place for place, name in enumerate(plan.schemes)}
    gradients = {name: place for place, name in enumerate((RECORDED, *plan.patterns))}
    rows = [row for task, of_task in found.items() if isinstance(task, Part) for row in of_task]
    rows.sort(
        key=lambda row: (
            gradients[str(row["gradients"])] * 10**9
            + int(str(row["ranks"])) * 10**4
            + places[str(row["scheme"])] * 100
            + int(str(row["call"]))
        )
    )
    return Simulated(
        rows,
        [row for model in MODELS if model in found for row in found[model]],
        [row for ranks in balanced_ranks for row in found[Balancing(ranks)]],
    )


def about(task: Work) -> str:
    """What it is, in a few words."""
    return f"weak scaling, {task.name}" if isinstance(task, Model) else task.about


def _rows(plan: SimulatedPlan, weak_ranks: tuple[int, ...], task: Work, recording: Recording) -> list[Row]:
    if isinstance(task, Part):
        return simulate(plan, task, recording)
    if isinstance(task, Balancing):
        return balancing_rows(task.ranks, recording, plan.network)
    return weak_scaling(task, weak_ranks, plan.schemes, recording, plan.network)


def _load(file: Path) -> None:
    global _recording
    _recording = Recording.load(file)


def _in_process(plan: SimulatedPlan, weak_ranks: tuple[int, ...], task: Work) -> list[Row]:
    assert _recording is not None
    return _rows(plan, weak_ranks, task, _recording)
