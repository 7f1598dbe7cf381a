"""One run of the study: from its first weights, or from where a killed one was, to its result. Needs torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lab.accuracy import checkpoint
from lab.accuracy.one_process import OneProcess, checksum
from lab.accuracy.problems import Problem
from lab.accuracy.rivals import TorchHook
from lab.accuracy.runs import METHODS, Run
from telegrad.errors import NonFiniteGradient


class Training:
    """``saved``: the checkpoint of this run; it goes on from there if the file exists. Use it in a ``with`` statement.

    ``points`` are the held-out figures so far, each a dict with ``step``, the ``loss`` and for a classifier the
    ``accuracy`` (percent), ``training_loss`` (a mean since the last point), ``sent_bytes`` (payload by one rank since
    the start, a mean over ranks), ``loss_on_the_way`` (of the last point: the loss on the samples of all other points,
    which the end has more of), ``reduced_density`` (share of the compressed entries that the averaged gradient has,
    a mean since the last point), ``selected`` (entries sent as a multiple of those asked for) and ``travelled`` (the
    share of all entries that ranks have sent since the start, dense ones included). ``diverged``: at
    which step a gradient or a loss was not finite; the run ends there.
    """

    def __init__(self, run: Run, problem: Problem, saved: Path) -> None:
        method, task = METHODS[run.method], problem.task
        self._run, self._problem, self._saved = run, problem, saved
        torch.manual_seed(run.seed)
        self.model = problem.model(run.size, run.device)
        self._optimizer = problem.optimizer(self.model, momentum=not method.takes_momentum)
        self._ranks: OneProcess | TorchHook
        if method.is_torchs:
            self._ranks = TorchHook(self.model, run.ranks, method.rank)
        else:
            options = method.arguments(task, density=run.density, steps=run.steps, optimizer=self._optimizer)
            self._ranks = OneProcess(self.model, run.ranks, options)
        self._clip = None if method.clips_locally(task) else task.clip
        self.step = 0
        self.points: list[dict[str, float]] = []
        self.diverged: int | None = None
        self.seconds = 0.0
        self._since: dict[str, float] = {"steps": 0, "loss": 0.0, "reduced_density": 0.0}
        if saved.exists():
            try:
                self._load(checkpoint.load(saved))
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._ranks.close()

    @property
    def over(self) -> bool:
        return self.diverged is not None or self.step == self._run.steps

    def go_on(self, on_step: Callable[[Training], None] = lambda training: None) -> None:
        """Trains to the end. At each evaluation a checkpoint is written."""
        evaluations = self._run.evaluation_steps()
        while not self.over:
            started_s = time.perf_counter()
            self.train_step()
            if self.diverged is None and self.step in evaluations:
                self._evaluate()
            self.seconds += time.perf_counter() - started_s
            if self.step in evaluations and not self.over:
                checkpoint.save(self._saved, self._state())
            on_step(self)

    def result(self) -> dict[str, Any]:
        """What is kept of the run when it is over."""
        return {
            "parameters": sum(one.numel() for one in self.model.parameters()),
            "compressed_parameters": self._ranks.compressed_elements,
            "points": self.points,
            "diverged": self.diverged,
            "seconds": self.seconds,
            "weights_crc32": checksum(self.model.parameters()),
        }

    def train_step(self) -> None:
        """One step of all ranks. Where a gradient is not finite, ``diverged`` says so instead."""
        run = self._run
        for group in self._optimizer.param_groups:
            group["lr"] = run.learning_rate_at(self.step)
        losses = 0.0
        try:
            for rank in range(run.ranks):
                inputs, targets = self._problem.batch(run, self.step, rank)
                self._optimizer.zero_grad(set_to_none=True)
                loss = self._problem.loss(self.model, inputs.to(run.device), targets.to(run.device))
                loss.backward()  # type: ignore[no-untyped-call]
                self._ranks.take(rank)
                losses += float(loss.detach()) / run.ranks
            self._ranks.average()
        except NonFiniteGradient:
            self.diverged = self.step
            return
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._since["steps"] += 1
        self._since["loss"] += losses
        self._since["reduced_density"] += self._ranks.reduced_density

    def _evaluate(self) -> None:
        self.model.eval()
        found = self._problem.held_out(self.model, final=self.step == self._run.steps)
        if self.step == self._run.steps:
            found["loss_on_the_way"] = self._problem.held_out(self.model, final=False)["loss"]
        self.model.train()
        if not math.isfinite(found["loss"]):
            self.diverged = self.step
            return
        sent, (travelled, entries) = self._ranks.sent_bytes(), self._ranks.travelled()
        self.points.append(
            {
                "step": self.step,
                **found,
                "training_loss": self._since["loss"] / self._since["steps"],
                "sent_bytes": sum(sent) / len(sent),
                "reduced_density": self._since["reduced_density"] / self._since["steps"],
                "selected": self._ranks.selected(),
                "travelled": travelled / entries,
            }
        )
        self._since = dict.fromkeys(self._since, 0.0)

    def _state(self) -> dict[str, Any]:
        return {
            "run": self._run.to_json(),
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "ranks": self._ranks.state_dict(),
            "points": self.points,
            "seconds": self.seconds,
        }

    def _load(self, state: dict[str, Any]) -> None:
        if state["run"] != self._run.to_json():
            raise ValueError(f"{self._saved} is of another run ({state['run']}): remove it, and this run begins anew")
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._ranks.load_state_dict(state["ranks"])
        self.step, self.points, self.seconds = state["step"], state["points"], state["seconds"]
