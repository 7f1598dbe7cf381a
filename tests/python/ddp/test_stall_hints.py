"""A rank that waits in a backward pass says what the others have most likely forgotten."""

from __future__ import annotations

import time

import numpy as np
import pytest
from handmade_buckets import SHAPES, Trainer

from telegrad import Communicator

torch = pytest.importorskip("torch")
PATIENCE_S = 60.0
GRADIENTS = {name: np.ones(int(np.prod(shape)), np.float32) for name, shape in SHAPES.items()}


def told(capfd: pytest.CaptureFixture[str]) -> str:
    until = time.monotonic() + PATIENCE_S
    while not (said := capfd.readouterr().err):
        assert time.monotonic() < until
        time.sleep(0.02)
    return said


def one_bucket(trainer: Trainer) -> torch.futures.Future[torch.Tensor]:
    return trainer.start(GRADIENTS, list(SHAPES), 0, last=True)[1]


def test_a_rank_without_the_hook_and_one_with_fewer_batches_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TELEGRAD_STALL_S", "2")
    one, two = Communicator.local(2)
    with one, two:
        first, second = Trainer(one), Trainer(two)
        pending = one_bucket(first)
        assert "; does rank 1 call ddp.register_comm_hook(state, telegrad.ddp_hook)?; " in told(capfd)
        one_bucket(second).wait()
        pending.wait()
        pending = one_bucket(first)
        assert "; if rank 1 has fewer batches, train inside `with ddp.join():` on all ranks; " in told(capfd)
        one_bucket(second).wait()
        pending.wait()
