"""The hook on buckets made by hand, over ranks in threads: what arrives, what stays, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, SMALL, Bucket, Trainer, gradients_of

import telegrad
from telegrad import Communicator

OnRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("selection", ["topk", "reused"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_not_applied_waits_in_the_residuals(on_ranks: OnRanks, size: int, selection: str) -> None:
    steps = 12

    def run(comm: Communicator) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        trainer = Trainer(comm, select=selection)
        applied = {name: np.zeros(np.prod(shape), np.float64) for name, shape in SHAPES.items()}
        for step in range(steps):
            # DDP rebuilds its buckets after the first step
            for name, mean in trainer.step(gradients_of(comm.rank, step), ONE if step == 0 else REBUILT).items():
                applied[name] += mean
        assert trainer.state.step == steps
        return applied, {name: trainer.residual(name) for name in LARGE}

    outcomes = on_ranks(size, run)
    for name in SHAPES:
        total = sum(gradients_of(rank, step)[name].astype(np.float64) for rank in range(size) for step in range(steps))
        applied = outcomes[0][0][name]
        for other, _ in outcomes[1:]:
            np.testing.assert_array_equal(other[name], applied)
        waiting = sum(residuals[name] for _, residuals in outcomes) if name in LARGE else 0.0
        np.testing.assert_array_equal(applied * size + waiting, total)


@pytest.mark.parametrize("options", [{"compress": None}, {"density": 1.0}, {"warmup_steps": 3}])
def test_all_of_it_at_once(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    def run(comm: Communicator) -> list[dict[str, np.ndarray]]:
        trainer = Trainer(comm, **options)
        return [trainer.step(gradients_of(comm.rank, step), ONE if step == 0 else REBUILT) for step in range(3)]

    for steps in on_ranks(2, run):
        for step, result in enumerate(steps):
            for name in SHAPES:
                expected = (gradients_of(0, step)[name] + gradients_of(1, step)[name]) / 2
                np.testing.assert_array_equal(result[name], expected)


def test_after_the_warm_up_it_is_sparse(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> list[int]:
        trainer = Trainer(comm, warmup_steps=2, select="topk")
        steps = [trainer.step(gradients_of(comm.rank, step), REBUILT) for step in range(4)]
        assert trainer.state.stats.selected == trainer.state.stats.wanted == 2 * (60 + 50)
        return [np.count_nonzero(step["embedding"]) for step in steps]

    for counts in on_ranks(2, run):
        assert min(counts[:2]) > 1000
        assert max(counts[2:]) <= 120


def test_small_tensors_are_exact(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> dict[str, np.ndarray]:
        return Trainer(comm).step(gradients_of(comm.rank, 0), ONE)

    for result in on_ranks(2, run):
        for name in SMALL:
            np.testing.assert_array_equal(result[name], (gradients_of(0, 0)[name] + gradients_of(1, 0)[name]) / 2)


def test_bfloat16_rounding_errors_stay_in_the_residual(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[np.ndarray, np.ndarray]:
        trainer = Trainer(comm, torch.bfloat16, select="topk")
        applied = np.zeros(1200)
        for step in range(8):
            applied += trainer.step(gradients_of(comm.rank, step), REBUILT)["embedding"]
        return applied, trainer.residual("embedding")

    outcome = on_ranks(1, run)[0]
    given = sum(torch.from_numpy(gradients_of(0, step)["embedding"]).bfloat16().double().numpy() for step in range(8))
    np.testing.assert_array_equal(outcome[0] + outcome[1], given)
    for applied, residual in (pair := on_ranks(2, run)):
        np.testing.assert_array_equal(applied, pair[0][0])
        assert np.isfinite(residual).all()


def test_an_unused_parameter_keeps_its_residual(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        trainer.step(gradients_of(comm.rank, 0), REBUILT)
        before = trainer.residual("hidden")
        gradients = gradients_of(comm.rank, 1)
        gradients["hidden"][:] = 0
        result = trainer.step(gradients, REBUILT)
        assert not result["hidden"].any()
        np.testing.assert_array_equal(trainer.residual("hidden"), before)

    on_ranks(2, run)


def test_statistics(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, select="topk")
        for step in range(3):
            trainer.step(gradients_of(comm.rank, step), REBUILT)
        stats = trainer.state.stats
        assert stats.buckets == 9
        assert stats.elements == 3 * (1200 + 16 + 1000 + 7 + 3)
        assert stats.dense_elements == 3 * (16 + 7 + 3)
        assert stats.wanted == stats.selected == 3 * (60 + 50)
        assert stats.selected_to_wanted == 1
        assert stats.nonfinite_buckets == 0
        assert stats.hook_s > 0

    on_ranks(2, run)


def test_an_unknown_parameter_fails_on_all_ranks(on_ranks: OnRanks) -> None:
    both_have_one = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        both_have_one.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank == 0:
            trainer.parameters["hidden"] = torch.nn.Parameter(torch.zeros(SHAPES["hidden"]))
            with pytest.raises(
                ValueError, match=r"bucket 0 holds a parameter of shape \(20, 50\) that DDPState does not"
            ):
                trainer.step(gradients_of(0, 0), ONE)
        else:
            with pytest.raises(RuntimeError, match="PeerFailed: .*ValueError: bucket 0 holds a parameter"):
                trainer.step(gradients_of(1, 0), ONE)

    on_ranks(2, run)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(1000, dtype=torch.float16), "'hidden' has dtype torch.float16, .*: use model.float"),
        (torch.zeros(1000, dtype=torch.float64), "'hidden' has dtype torch.float64, .* after the model was converted"),
        (torch.zeros(1000, device="meta"), "the gradient of 'hidden' is on meta: train on the CPU or on CUDA"),
    ],
)
def test_buffers_that_cannot_be_reduced(on_ranks: OnRanks, buffer: torch.Tensor, message: str) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        bucket = Bucket([trainer.parameters["hidden"]], buffer, 0, False)
        with pytest.raises(TypeError, match=message):
            telegrad.ddp_hook(trainer.state, bucket)  # type: ignore[arg-type]
        assert isinstance(trainer.state.failure, TypeError)

    on_ranks(1, run)
