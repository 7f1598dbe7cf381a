"""Does a study's runs on all cores, and keeps their results. Knows neither torch nor the terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lab.accuracy.fashion import read_fashion
from lab.accuracy.runs import TASKS, Run
from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools.demo.job import Corpus

Result = Mapping[str, Any]

_SOURCES = "data.json"


@dataclass(frozen=True)
class Place:
    """``folder``: for the runs' files. ``data``: Fashion-MNIST, None for where Debian has it. ``texts``: the corpus."""

    folder: Path
    texts: Path
    data: Path | None = None

    def result_of(self, run: Run) -> Path:
        return self.folder / f"{run.name}.json"

    def checkpoint_of(self, run: Run) -> Path:
        return self.folder / f"{run.name}.npz"

    def lock_of(self, run: Run) -> Path:
        return self.folder / f"{run.name}.lock"

    def to_json(self) -> str:
        return json.dumps({name: value and str(value) for name, value in dataclasses.asdict(self).items()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**{name: value and Path(value) for name, value in json.loads(text).items()})


def prepare(place: Place, runs: Sequence[Run], library: Path | None = None) -> None:
    """Makes the folder, and the text from ``library`` (default: Python's own) if a run needs it; looks at the images if
    one needs them. Raises ``DataMissing``, ``FileNotFoundError`` or ``ValueError`` for data that are not there or no
    good, and ``ValueError`` where the folder's runs saw other data: results must not be mixed.
    """
    kinds = {TASKS[run.task].data for run in runs}
    if "fashion" in kinds:
        read_fashion(place.data)
    check_sources(place, library)
    place.folder.mkdir(parents=True, exist_ok=True)
    (place.folder / _SOURCES).write_text(json.dumps(_sources(place, library)) + "\n")
    if kinds - {"fashion"} and not (place.texts / "held_out.bin").exists():
        place.texts.mkdir(parents=True, exist_ok=True)
        Corpus.prepare(place.texts, library)


def check_sources(place: Place, library: Path | None) -> None:
    """Raises ``ValueError`` where the folder's runs saw other data."""
    file, own = place.folder / _SOURCES, _sources(place, library)
    if not file.exists():
        return
    before = json.loads(file.read_text())
    if before != own:
        raise ValueError(
            f"the runs in {place.folder} were made with {_told(before)}, not with {_told(own)}: give these again, or "
            "choose another folder with --out"
        )


def _sources(place: Place, library: Path | None) -> dict[str, str | None]:
    return {"data": _absolute(place.data), "library": _absolute(library)}


def _told(sources: Mapping[str, str | None]) -> str:
    """As the command's options."""
    options = (("--data", sources.get("data")), ("--text", sources.get("library")))
    given = [f"{option} {path}" for option, path in options if path is not None]
    return " ".join(given) or "neither --data nor --text"


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())


def missing(place: Place, runs: Sequence[Run]) -> list[Run]:
    """Those that are not over."""
    return [run for run in runs if not place.result_of(run).exists()]


def results(place: Place, runs: Sequence[Run]) -> list[Result]:
    """Of those that are over. Raises ``ValueError`` naming a file that is damaged."""
    found: list[Result] = []
    for run in runs:
        path = place.result_of(run)
        if not path.exists():
            continue
        try:
            result = json.loads(path.read_text())
            if not isinstance(result, dict) or result.get("run") != run.to_dict():
                raise ValueError("it is of another run")
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it, and the run is done anew") from error
        found.append(result)
    return found


def train(
    place: Place,
    runs: Sequence[Run],
    jobs: int,
    *,
    timeout_s: float,
    on_message: Callable[[int, Mapping[str, Any]], None] = lambda worker, message: None,
) -> None:
    """Does the ``runs`` that are not over, ``jobs`` at a time. ``on_message(worker, message)`` hears of ``begin``,
    ``step`` and ``end`` (``kind``) of a ``run`` (its name), with its ``step``. Raises ``RankFailed`` with a process's
    last words, ``RanksTimedOut``.
    """
    _start("rank_main", place, missing(place, runs), jobs, timeout_s, on_message)


def time_steps(place: Place, runs: Sequence[Run], *, timeout_s: float) -> dict[str, float]:
    """Seconds that a step of each run takes on one core of this machine, by the run's name."""
    found: dict[str, float] = {}
    alike: dict[tuple[object, ...], Run] = {}
    for run in runs:
        alike.setdefault(_costs_like(run), run)

    def take(_: int, message: Mapping[str, Any]) -> None:
        if message["kind"] == "timed":
            found[message["run"]] = message["step_s"]

    _start("time_steps", place, list(alike.values()), 1, timeout_s, take)
    return {run.name: found[alike[_costs_like(run)].name] for run in runs}


def _costs_like(run: Run) -> tuple[object, ...]:
    return run.task, run.method, run.batch, run.ranks, run.size, run.device, run.steps, run.evaluations


def _start(
    function: str,
    place: Place,
    runs: Sequence[Run],
    jobs: int,
    timeout_s: float,
    on_message: Callable[[int, Mapping[str, Any]], None],
) -> None:
    if not runs:
        return

    def take(worker: int, line: str) -> None:
        if line.startswith('{"kind"'):
            on_message(worker, json.loads(line))

    with Ranks(
        f"lab.accuracy.worker:{function}",
        min(jobs, len(runs)),
        timeout_s=timeout_s,
        arguments=[place.to_json(), json.dumps([dataclasses.asdict(run) for run in runs])],
        environment=SINGLE_THREADED,
        on_line=take,
    ) as workers:
        workers.wait()
