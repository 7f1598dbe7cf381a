"""What the ranks of test_trainers.py do with Accelerate, on two ranks."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from typing import Any

import accelerate_ddp as example
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from lightning_program import comm_text
from varied_options import objects_of

import telegrad
from telegrad import Communicator


class Training:
    """As the example. ``batches``: of a step. ``options``: of DDPState; none: DDP alone."""

    def __init__(self, comm: Communicator, batches: int, **options: Any) -> None:
        handlers = [DistributedDataParallelKwargs(bucket_cap_mb=1)]
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=batches, kwargs_handlers=handlers)
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(network, optimizer, example.batches())
        if options:
            self.state = telegrad.DDPState(comm, self.model, **objects_of(**options))
            self.model.register_comm_hook(self.state, telegrad.ddp_hook)
            self.accelerator.register_for_checkpointing(telegrad.ddp.GatheredState(self.state))

    def epoch(self) -> list[float]:
        losses = []
        for inputs, targets in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.cross_entropy(self.model(inputs), targets)
                losses.append(loss.item())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses


def accelerate_trains_and_resumes(comm: Communicator) -> None:
    plain, dense = Training(comm, 2), Training(comm, 2, compress=None)
    assert plain.epoch() == dense.epoch()
    assert plain.epoch() == dense.epoch()
    assert dense.state.step == 32, "a step of two batches must be one sum"

    for option in ({"feedback": "steps"}, {"momentum": 0.9}):  # the wrapped SGD is as good as what prepare() was given
        telegrad.DDPState(comm, plain.model, **objects_of(optimizer=plain.optimizer, **option))

    folder = comm_text(comm, tempfile.mkdtemp())
    options = {"density": 0.05, "small_elements": 64}
    first = Training(comm, 2, **options)
    first.epoch()
    first.accelerator.save_state(folder)
    second = Training(comm, 2, **options)
    second.accelerator.load_state(folder)
    assert second.state.step == 16
    assert first.epoch() == second.epoch()
    for name, held in first.state.state_dict()["compressor"]["parameters"].items():
        assert held["residual"].any()
        other = second.state.state_dict()["compressor"]["parameters"][name]
        assert torch.equal(held["residual"], other["residual"])


def accelerate_example_learns_as_plain_ddp(comm: Communicator) -> None:
    said = io.StringIO()
    plain = Training(comm, 1)
    losses = [loss for _ in range(5) for loss in plain.epoch()]
    with contextlib.redirect_stdout(said), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "end_training", lambda _: None)  # it would end the process group of this job
        example.main(comm_text(comm, tempfile.mkdtemp()))
    if comm.rank == 0:
        (first, last) = map(float, re.findall(r"[\d.]+\b", said.getvalue()))
        of_plain = sum(losses[-8:]) / 8
        assert abs(last - of_plain) < 0.1, (last, of_plain)
        assert last < first / 2


SCENARIOS = [accelerate_trains_and_resumes, accelerate_example_learns_as_plain_ddp]
