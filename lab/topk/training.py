"""Training with what ranks have selected: gradients that are recorded from it, and a run with Ok-Topk. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lab.accuracy.one_process import OneProcess
from lab.accuracy.problems import Problem
from lab.accuracy.runs import Run
from lab.topk.recording import Recorder, Recording
from lab.topk.schemes import least_words, most_words, paper_words
from lab.topk.simulated import Row
from telegrad import TopK

_SAMPLES = {"fashion": 4, "text": 2}  # of a rank's mini-batch


def record(
    problem: Problem,
    *,
    count: int,
    steps: int,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> Recording:
    """``count`` gradients after ``steps`` steps of one process with the task's own batch and optimiser; ``on_step`` is
    called after each step and each gradient. The number of samples of a gradient is 4 images or 2 windows of text."""
    task = problem.task
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(seed)
        model = problem.model("small", "cpu")
        optimizer = problem.optimizer(model)
        run = Run(task.name, "dense", 1.0, seed, max(1, steps), task.batch, 1)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = task.learning_rate_at(step, 10 * steps)  # training goes on: no cosine to zero
            _backward(problem, model, run, step, 0)
            optimizer.step()
            on_step()
        each = Run(task.name, "dense", 1.0, seed + 1, 1, count * _SAMPLES[task.data], count)
        parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        recorder = Recorder(task.name, steps, {name: one.numel() for name, one in parameters.items()}, count)
        for rank in range(count):
            _backward(problem, model, each, 0, rank)
            flat = torch.cat(
                [
                    torch.zeros_like(one).flatten() if one.grad is None else one.grad.flatten()
                    for one in parameters.values()
                ]
            )
            recorder.take(rank, flat.numpy())
            on_step()
        return recorder.recording()
    finally:
        torch.set_num_threads(before)


def _backward(problem: Problem, model: torch.nn.Module, run: Run, step: int, rank: int) -> None:
    inputs, targets = problem.batch(run, step, rank)
    model.zero_grad(set_to_none=True)
    problem.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]


Floats = npt.NDArray[np.float64]


def train(
    problem: Problem,
    *,
    ranks: int,
    steps: int,
    density: float,
    seed: int = 0,
    xi_every: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> list[Row]:
    """A row for each step of ``ranks`` ranks over ``Communicator.local`` with ``TopK(combine="oktopk")``.

    ``local_deviation``: mean over ranks of |selected - k|/k; ``global_deviation``: |kept - k|/k; ``words_max``: the
    largest of all ranks' sent and received words. ``xi``: at every ``xi_every``-th step (0: never); it takes sums of
    all ranks' residuals.
    """
    task = problem.task
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = problem.model("small", "cpu")
    optimizer = problem.optimizer(model)
    run = Run(task.name, "oktopk", density, seed, steps, task.batch // ranks * ranks or ranks, ranks)
    options = {"compress": TopK(density=density, combine="oktopk")}
    rows: list[Row] = []
    try:
        with OneProcess(model, ranks, options) as players:
            last = [_counts(state.stats) for state in players.states]
            for step in range(steps):
                for group in optimizer.param_groups:
                    group["lr"] = task.learning_rate_at(step, steps)
                asked = xi_every > 0 and step % xi_every == 0
                sums = _Sums(players) if asked else None
                for rank in range(ranks):
                    inputs, targets = problem.batch(run, step, rank)
                    optimizer.zero_grad(set_to_none=True)
                    problem.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
                    players.take(rank)
                    if sums is not None:
                        sums.add(model)
                players.average()
                now = [_counts(state.stats) for state in players.states]
                row = _row(step, [two - one for one, two in zip(last, now, strict=True)])
                last = now
                if sums is not None:
                    row["xi"] = sums.xi(model, int(str(row["k"])))
                rows.append(row)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                on_step()
    finally:
        torch.set_num_threads(before)
    return rows


def averages(rows: Sequence[Row]) -> Row:
    """Over all steps: mean |selected - k|/k, local and global, and the largest share of the bound."""
    return {
        "steps": len(rows),
        "local_deviation": float(np.mean([row["local_deviation"] for row in rows])),
        "global_deviation": float(np.mean([row["global_deviation"] for row in rows])),
        "of_bound": max(float(str(row["of_bound"])) for row in rows),
    }


def _counts(stats: Any) -> npt.NDArray[np.int64]:
    return np.array([stats.wanted, stats.selected, stats.kept, stats.words_sent, stats.words_received], np.int64)


def _row(step: int, of_ranks: list[npt.NDArray[np.int64]]) -> Row:
    counts, ranks = np.array(of_ranks), len(of_ranks)
    k, selected, kept = int(counts[0, 0]), counts[:, 1], int(counts[0, 2])
    words, of_call = int(counts[:, 3:].max()), max(int(selected.max()), kept)
    return {
        "step": step,
        "ranks": ranks,
        "k": k,
        "selected": float(selected.mean()),
        "selected_max": int(selected.max()),
        "kept": kept,
        "local_deviation": float(np.abs(selected - k).mean() / k),
        "global_deviation": abs(kept - k) / k,
        "words_max": words,
        "bound_words": most_words(of_call, ranks),
        "of_bound": words / most_words(of_call, ranks),
        "paper_words": paper_words(k, ranks),
        "least_words": least_words(k, ranks),
    }


class _Sums:
    """Of all ranks' residuals and gradients, before they are selected from."""

    def __init__(self, players: OneProcess) -> None:
        held = [state.state_dict()["compressor"]["parameters"] for state in players.states]
        self._names = list(held[0])
        self._ranks = len(held)
        self._accumulated = sum(self._flat(one) for one in held)
        self._gradients: Floats = np.zeros_like(self._accumulated)

    def _flat(self, held: Any) -> Floats:
        return np.concatenate([np.asarray(held[name]["residual"], np.float64) for name in self._names])

    def _of(self, model: torch.nn.Module) -> Floats:
        grads = {name: one.grad for name, one in model.named_parameters()}
        return np.concatenate([np.asarray(grads[name].flatten(), np.float64) for name in self._names])  # type: ignore[union-attr]

    def add(self, model: torch.nn.Module) -> None:
        """One rank's gradients."""
        self._gradients += self._of(model)

    def xi(self, model: torch.nn.Module, k: int) -> float:
        """``model`` holds the averages. ‖Topk(mean of residual + gradient) − the average‖ / ‖mean gradient‖ over the
        compressed parameters. Source: Ok-Topk, Assumption 1 (Equation 5)."""
        mean = (self._accumulated + self._gradients) / self._ranks
        largest = np.zeros_like(mean)
        chosen = np.argpartition(np.abs(mean), mean.size - k)[mean.size - k :]
        largest[chosen] = mean[chosen]
        gradient = float(np.linalg.norm(self._gradients)) / self._ranks
        return float(np.linalg.norm(largest - self._of(model))) / gradient if gradient else 0.0
