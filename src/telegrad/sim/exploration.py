"""Random programs under random faults, in virtual time: many seeds, spread over the cores of this machine.

Each seed is one simulation of some ranks: what they call, what their network costs and what goes wrong follow from it.
Every call must end, with the right bits or with an error that names the culprit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from telegrad import _core
from telegrad.sim.seed_processes import Died, Played, play_chunks, worker_command
from telegrad.sim.sweep import cores

RANKS = (2, 33)
"""The range of sizes that seeds are drawn from where nothing else is said."""
LAST_SEED = (1 << 64) - 1

_CHUNK_SEEDS = 250  # well below a second, so that progress is smooth and an interrupt is heard
_COUNTS = ("seeds", "operations", "results", "events", "hangs", "wrong", "wrong_errors", "errors_named")
_ALL_COUNTS = (*_COUNTS, "crashes")


@dataclass(frozen=True)
class Failure:
    """A seed that showed what must not be. ``what``: "hang", "wrong result" or "wrong error", and ``detail``: the
    worst finding, and the program, in lines of text; or "crash" or "endless", and how the process ended that played
    it."""

    seed: int
    what: str
    detail: str


@dataclass
class Exploration:
    """What some seeds showed.

    ``operations``: calls of all ranks; ``results``: successes of which every bit was compared; ``events``: of the
    simulated networks; ``hangs``, ``wrong``, ``wrong_errors``: seeds by the worst that they showed, where a seed
    that never ends is a hang; ``crashes``: seeds that ended their process; ``errors_named``:
    seeds in which something failed and every survivor named the culprit; ``troubles``: how many seeds had which.
    """

    seeds: int = 0
    operations: int = 0
    results: int = 0
    events: int = 0
    hangs: int = 0
    wrong: int = 0
    wrong_errors: int = 0
    errors_named: int = 0
    crashes: int = 0
    ranks_most: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What ``_core.explore`` returns."""
        found = json.loads(text)
        return cls(
            **{name: found[name] for name in (*_COUNTS, "ranks_most")},
            troubles=Counter(found["troubles"]),
            failures=[Failure(**one) for one in found["failures"]],
        )

    @classmethod
    def of_death(cls, death: Died) -> Self:
        """A seed that ended the process that played it."""
        endless = death.what == "endless"
        failures = [Failure(death.seed, death.what, death.detail)]
        return cls(seeds=1, hangs=int(endless), crashes=int(not endless), failures=failures)

    def add(self, other: Exploration) -> None:
        """Takes in what other seeds showed. Failures stay in the order of seeds."""
        for name in _ALL_COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ranks_most = max(self.ranks_most, other.ranks_most)
        self.troubles.update(other.troubles)
        if other.failures:
            self.failures = sorted([*self.failures, *other.failures], key=lambda failure: failure.seed)

    def to_dict(self) -> dict[str, Any]:
        """For a result file."""
        return {
            **{name: getattr(self, name) for name in (*_ALL_COUNTS, "ranks_most")},
            "troubles": dict(self.troubles),
            "failures": [vars(failure) for failure in self.failures],
        }


@dataclass(frozen=True)
class Replayed:
    """One seed again. ``program``: what was drawn, in lines of text; ``findings``: (what, detail), empty if all was
    well; ``errors``: what failing ranks said; ``trace``: one line per event of the network, ``trace_hash`` of it."""

    seed: int
    program: str
    findings: list[tuple[str, str]]
    errors: list[str]
    events: int
    trace_hash: int
    trace: str


def troubles() -> tuple[str, ...]:
    """The names of all that may go wrong."""
    return tuple(json.loads(_core.explore(0, 0, *RANKS))["troubles"])


def explore(
    first_seed: int = 0,
    seeds: int = 1000,
    *,
    ranks: tuple[int, int] = RANKS,
    only: str = "",
    jobs: int | None = None,
    on_progress: Callable[[int, Exploration], None] = lambda *_: None,
) -> Exploration:
    """Plays ``seeds`` seeds from ``first_seed`` on, each with a number of ranks in ``ranks`` (fewest, most).

    ``only``: the name of a trouble; other seeds are passed over. ``jobs`` processes share the work (default: one per
    core). A seed that crashes its process, or does not end, is a failure like others.
    ``on_progress(seeds looked at since the last call, all that was found so far)`` runs on this thread. Raises
    ``ValueError`` for a range of ranks outside 2 to 4,096, an unknown trouble, numbers below 0 (``jobs``: below 1), and
    seeds beyond ``LAST_SEED``.
    """
    if first_seed < 0 or seeds < 0:
        raise ValueError(f"first_seed={first_seed} and seeds={seeds} must not be negative")
    if first_seed + seeds > LAST_SEED + 1:
        raise ValueError(f"{seeds} seeds from {first_seed} go beyond {LAST_SEED}, the last: begin earlier")
    if jobs is None:
        jobs = cores()
    if jobs < 1:
        raise ValueError(f"jobs={jobs} must be at least 1: the processes that share the work")
    if only and only not in (known := troubles()):
        raise ValueError(f"only={only!r} is no trouble that the explorer knows: use {', '.join(known)}")
    _core.explore(first_seed, 0, *ranks, only)  # refuses bad arguments here rather than in every process
    end = first_seed + seeds
    chunks = [(begin, min(_CHUNK_SEEDS, end - begin)) for begin in range(first_seed, end, _CHUNK_SEEDS)]
    found = Exploration()

    for result in play_chunks(chunks, jobs, worker_command(ranks, only)):
        if isinstance(result, Played):
            for text in result.texts:
                found.add(Exploration.from_json(text))
        else:
            found.add(Exploration.of_death(result))
        on_progress(result.seeds, found)
    return found


def replay(seed: int, *, ranks: tuple[int, int] = RANKS) -> Replayed:
    """Plays one seed again, event by event as before, where ``ranks`` is what it was. Raises ``ValueError`` as
    ``explore`` does."""
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    if seed > LAST_SEED:
        raise ValueError(f"seed={seed} is beyond {LAST_SEED}, the last")
    text, trace_hash, trace = _core.replay(seed, *ranks)
    found = json.loads(text)
    findings = [(one["what"], one["detail"]) for one in found["findings"]]
    return Replayed(seed, found["program"], findings, found["failures"], found["events"], trace_hash, trace)
