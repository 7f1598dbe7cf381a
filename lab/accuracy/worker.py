"""One of the processes that do a study's runs: each takes the next run that nobody has, until there is none. Needs
torch.

A run's files lie in one folder: ``NAME.json`` is the result of one that is over, ``NAME.npz`` where a running or a
killed one is, ``NAME.lock`` is locked by the process that has it; the kernel unlocks it whatever the process dies of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.accuracy.job import Place
from lab.accuracy.problems import open_problem
from lab.accuracy.runs import Run
from lab.accuracy.training import Training

_TELL_EACH_S = 0.5
_TIMED_STEPS = 3


def rank_main(place: str, runs: str) -> None:
    """What the launcher calls in each process, with JSON. Messages go to standard output, one JSON object a line."""
    torch.set_num_threads(1)
    for run in _runs(runs):
        do(run, Place.from_json(place))


def do(run: Run, place: Place) -> None:
    """Trains ``run`` and writes its result, unless it is there or somebody is at it."""
    result = place.result_of(run)
    if result.exists():
        return
    with claimed(place.lock_of(run)) as ours:
        if not ours or result.exists():
            return
        problem = open_problem(run.task, place.data, place.texts)
        with Training(run, problem, place.checkpoint_of(run)) as training:
            _tell(kind="begin", run=run.name, step=training.step)
            told_s = time.monotonic()

            def on_step(training: Training) -> None:
                nonlocal told_s
                if time.monotonic() - told_s >= _TELL_EACH_S:
                    told_s = time.monotonic()
                    _tell(kind="step", run=run.name, step=training.step)

            training.go_on(on_step)
            found = {"run": run.to_dict(), **training.result()}
        beside = result.with_suffix(".new")
        beside.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        beside.replace(result)
        place.checkpoint_of(run).unlink(missing_ok=True)
        _tell(kind="end", run=run.name, step=run.steps)


def time_steps(place: str, runs: str) -> None:
    """Says how many seconds a step of each run takes here, from the fastest of a few, with its share of the held-out
    figures. On cores: of computing time, which programs that run beside it change little.
    """
    torch.set_num_threads(1)
    own = Place.from_json(place)
    for run in _runs(runs):
        short = dataclasses.replace(run, steps=_TIMED_STEPS + 1)
        problem = open_problem(run.task, own.data, own.texts)
        took_s: list[float] = []
        clock = time.process_time if run.device == "cpu" else time.perf_counter
        with Training(short, problem, own.folder / "none.npz") as training:
            for _ in range(short.steps):
                started_s = clock()
                training.train_step()
                took_s.append(clock() - started_s)
            inputs, targets = (one.to(run.device) for one in problem.batch(short, 0, 0))
            with torch.no_grad():
                started_s = clock()
                float(problem.loss(training.model, inputs, targets))
                sample_s = (clock() - started_s) / len(inputs)
        samples = (run.evaluations - 1) * problem.judged(final=False) + problem.judged(final=True)
        _tell(kind="timed", run=run.name, step_s=min(took_s[1:]) + sample_s * samples / run.steps)


def _runs(text: str) -> Sequence[Run]:
    return [Run.from_dict(fields) for fields in json.loads(text)]


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether the lock on ``path`` is ours, for as long as the context lasts."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        path.unlink(missing_ok=True)  # who has opened it meanwhile finds the result
    finally:
        os.close(descriptor)


def _tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)
