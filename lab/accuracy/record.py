"""Trains a model of the study for some steps, then takes the gradients of many ranks. Needs torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lab.accuracy.problems import Problem
from lab.accuracy.recording import Recorder, Recording
from lab.accuracy.runs import Run

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
