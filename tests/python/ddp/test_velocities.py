"""Velocities and gradients that are not finite, or that become so together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import ONE, REBUILT, SHAPES, Trainer, gradients_of, plain_sgd

from telegrad import Communicator
from telegrad.errors import NonFiniteGradient

OnRanks = Callable[..., list[Any]]
HUGE = {torch.float32: 2e38, torch.bfloat16: 2.5e38}
FEW = {"density": 0.01}
CASES = [("bias", FEW), ("hidden", FEW), ("hidden", {"compress": None}), ("embedding", {**FEW, "warmup_steps": 9})]


def _gradients(rank: int, step: int, name: str, value: float) -> dict[str, np.ndarray]:
    gradients = gradients_of(rank, step)
    if rank == 1:
        gradients[name][3:5] = value
    return gradients


@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_overflow_raises(
    on_ranks: OnRanks, name: str, options: dict[str, Any], nesterov: bool, dtype: torch.dtype
) -> None:
    """Of finite gradients; with Nesterov momentum already the first one may be too much."""
    together = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, dtype, momentum=0.9, nesterov=nesterov, masking=False, optimizer=plain_sgd, **options)
        if not nesterov:
            trainer.step(_gradients(comm.rank, 0, name, HUGE[dtype]), ONE)
        together.wait(60)
        before = trainer.memory()
        gradients = _gradients(comm.rank, 1, name, HUGE[dtype])
        if comm.rank == 1:
            with pytest.raises(NonFiniteGradient, match=f"the .* of '{name}' overflowed: 2 of .* entries") as caught:
                trainer.step(gradients, ONE)
            assert caught.value.parameter == name
            np.testing.assert_equal(trainer.memory(), before)
        else:
            with pytest.raises(RuntimeError, match="NonFiniteGradient: rank 1"):
                trainer.step(gradients, ONE)

    on_ranks(2, run)


@pytest.mark.parametrize("dtype", HUGE)
@pytest.mark.parametrize("value", ["huge", np.nan, -np.inf])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_sent_and_forgotten(
    on_ranks: OnRanks, name: str, options: dict[str, Any], value: float | str, dtype: torch.dtype
) -> None:
    """``nonfinite="send"``: others see it once; the entries that it hit train on."""
    number = HUGE[dtype] if value == "huge" else float(value)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, dtype, momentum=0.9, nonfinite="send", masking=False, optimizer=plain_sgd, **options)
        seen = []
        for step in range(8):
            bad = step in ((2, 3) if value == "huge" else (3,))
            gradients = _gradients(comm.rank, step, name, number) if bad else gradients_of(comm.rank, step)
            result = trainer.step(gradients, REBUILT)
            seen += [step] if not np.isfinite(result[name][3:5]).any() else []
            assert all(np.isfinite(result[other]).all() for other in SHAPES if other != name)
            memory = trainer.memory()
            assert all(np.isfinite(one["velocity"]).all() for one in memory["velocities"].values())
            assert all(np.isfinite(one["residual"]).all() for one in memory["parameters"].values())
        assert seen == [3]

    on_ranks(2, run)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_skipped(on_ranks: OnRanks, name: str, options: dict[str, Any], nesterov: bool) -> None:
    def run(comm: Communicator) -> None:
        settings = {"momentum": 0.9, "nesterov": nesterov, "masking": False, "optimizer": plain_sgd, **options}
        trainer, reference = Trainer(comm, nonfinite="skip", **settings), Trainer(comm, **settings)
        for step in range(6):
            expected = reference.step(gradients_of(comm.rank, step), REBUILT)
            if step == 3:
                before = trainer.memory()
                trainer.step(_gradients(comm.rank, step, name, np.inf), REBUILT)
                assert trainer.state.skipped
                np.testing.assert_equal(trainer.memory(), before)
            found = trainer.step(gradients_of(comm.rank, step), REBUILT)
            for other in SHAPES:
                np.testing.assert_array_equal(found[other], expected[other])

    on_ranks(2, run)
