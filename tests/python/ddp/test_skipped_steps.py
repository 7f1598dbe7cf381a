"""``nonfinite="skip"``: a step with NaN or infinity on any rank never was, bitwise, on all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, Trainer, gradients_of, plain_sgd

from telegrad import Communicator
from telegrad.errors import TransportError

OnRanks = Callable[..., list[Any]]
STEPS = 7
BAD = 4  # this one is poisoned


def _poisoned(rank: int, poison: dict[int, str], value: float = np.nan) -> dict[str, np.ndarray]:
    gradients = gradients_of(rank, BAD)
    if rank in poison:
        gradients[poison[rank]][5] = value
    return gradients


def _state(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state.state_dict()
    del state["config"]
    return state


def assert_same(a: Any, b: Any) -> None:
    """Bitwise, through dictionaries and tensors."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (np.ndarray, torch.Tensor)):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))
    else:
        assert a == b


OPTIONS: list[dict[str, Any]] = [
    {"select": "topk"},
    {"select": "reused", "interval": 3},
    {"density": 1.0},
    {"compress": None},
    {"warmup_steps": 2},
    {"warmup_steps": BAD + 1},  # the dropped step is no warm-up step: one more follows
    {"warmup_steps": 6, "warmup": "falling"},
    {"clip_norm": 500.0},
    {"momentum": 0.9, "optimizer": plain_sgd},
    {"momentum": 0.9, "optimizer": plain_sgd, "nesterov": True, "clip_norm": 500.0},
    {"momentum": 0.9, "optimizer": plain_sgd, "compress": None},
    {"feedback": "steps", "optimizer": plain_sgd},
]
POISONS = [{1: "bias"}, {0: "embedding"}, {0: "hidden", 2: "embedding", 1: "norm"}]


@pytest.mark.parametrize(
    ("poison", "buckets", "dtype", "options"),
    [  # all pairs of two of them
        (poison, (ONE, REBUILT)[(row + column) % 2], (torch.float32, torch.bfloat16)[(row // 2 + column) % 2], options)
        for row, options in enumerate(OPTIONS)
        for column, poison in enumerate(POISONS)
    ],
)
def test_the_step_never_was(
    on_ranks: OnRanks, poison: dict[int, str], buckets: list[list[str]], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    def run(comm: Communicator) -> None:
        skipping = Trainer(comm, dtype, nonfinite="skip", **options)
        reference = Trainer(comm, dtype, nonfinite="raise", **options)
        for step in range(STEPS):
            if step == BAD:
                before = _state(skipping)
                for values in skipping.step(_poisoned(comm.rank, poison), buckets).values():
                    assert not values.any()
                assert skipping.state.skipped
                assert_same(_state(skipping), before)
                continue
            expected = reference.step(gradients_of(comm.rank, step), buckets)
            assert_same(skipping.step(gradients_of(comm.rank, step), buckets), expected)
            assert not skipping.state.skipped
            assert_same(_state(skipping), _state(reference))
        assert skipping.state.stats.skipped_steps == 1
        assert reference.state.stats.skipped_steps == 0
        assert skipping.state.step == reference.state.step == STEPS - 1
        assert (skipping.state.stats.nonfinite_buckets > 0) == (comm.rank in poison)
        assert skipping.state.failure is None
        if comm.rank in poison and buckets is ONE:  # it has sent nothing of that bucket
            assert skipping.state.stats.selected == reference.state.stats.selected

    on_ranks(3, run)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_many_in_a_row(on_ranks: OnRanks, value: float) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="skip")
        trainer.step(gradients_of(comm.rank, 0), REBUILT)
        before = _state(trainer)
        for _ in range(3):
            trainer.step(_poisoned(comm.rank, {1: "norm"}, value), REBUILT)
        assert_same(_state(trainer), before)
        assert trainer.state.stats.skipped_steps == 3

    on_ranks(2, run)


def test_a_skipped_first_step(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="skip")
        assert not trainer.state.skipped
        trainer.step(_poisoned(comm.rank, {0: "bias"}), ONE)
        assert trainer.state.skipped
        assert not any(trainer.residual(name).any() for name in LARGE)

    on_ranks(2, run)


def test_an_unused_parameter(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        skipping, reference = Trainer(comm, nonfinite="skip"), Trainer(comm)
        for step in range(4):
            gradients = gradients_of(comm.rank, step)
            if step % 2:
                gradients["hidden"][:] = 0
            assert_same(skipping.step(gradients, REBUILT), reference.step(gradients, REBUILT))
            skipping.step(_poisoned(comm.rank, {1: "embedding"}), REBUILT)
            assert_same(_state(skipping), _state(reference))

    on_ranks(2, run)


def test_a_residual_that_overflows(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="skip", select="topk")
        huge = gradients_of(comm.rank, 0)
        if comm.rank == 1:
            huge["hidden"][:200] = 3e38
        trainer.step(huge, REBUILT)
        assert not trainer.state.skipped
        before = _state(trainer)
        for values in trainer.step(huge, REBUILT).values():
            assert not values.any()
        assert trainer.state.skipped
        assert_same(_state(trainer), before)
        assert trainer.state.stats.nonfinite_buckets == (comm.rank == 1)

    on_ranks(2, run)


def test_state_saved_after_a_skipped_step_goes_on_bitwise(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        first, second = Trainer(comm, nonfinite="skip"), Trainer(comm, nonfinite="skip")
        first.step(gradients_of(comm.rank, 0), ONE)
        first.step(_poisoned(comm.rank, {1: "hidden"}), ONE)
        second.state.load_state_dict(first.state.state_dict())
        assert not second.state.skipped
        for step in range(1, 5):
            gradients = gradients_of(comm.rank, step)
            assert_same(first.step(gradients, REBUILT), second.step(gradients, ONE))

    on_ranks(2, run)


@pytest.mark.parametrize("when", ["in the middle", "before the verdict"])
@pytest.mark.parametrize("poison", [{}, {0: "hidden"}])
def test_a_failed_step_leaves_the_state_before_it(on_ranks: OnRanks, poison: dict[int, str], when: str) -> None:
    together = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="skip")
        trainer.step(gradients_of(comm.rank, 0), REBUILT)
        before = _state(trainer)
        together.wait(60)
        gradients = _poisoned(comm.rank, poison)
        if comm.rank == 1:
            trainer.start(gradients, REBUILT[0], 0, False)
            if when == "in the middle":
                together.wait(60)
            comm.abort("lost its mind")
            if when == "in the middle":
                together.wait(60)
            assert_same(_state(trainer), before)
            return
        futures = [trainer.start(gradients, REBUILT[0], 0, False)[1]]
        if when == "in the middle":
            together.wait(60)
            together.wait(60)
        with contextlib.suppress(TransportError):  # the abort may be quicker
            futures.append(trainer.start(gradients, REBUILT[1], 1, False)[1])
            futures.append(trainer.start(gradients, REBUILT[2], 2, True)[1])
        for future in futures:
            with pytest.raises(RuntimeError, match="lost its mind"):
                future.wait()
        assert isinstance(trainer.state.failure, TransportError)
        assert_same(_state(trainer), before)
        assert trainer.state.step == 1

    on_ranks(2, run)


def test_a_backward_pass_without_its_end_never_was(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        skipping, reference = Trainer(comm, nonfinite="skip"), Trainer(comm)
        skipping.step(gradients_of(comm.rank, 0), REBUILT)
        reference.step(gradients_of(comm.rank, 0), REBUILT)
        _, lost = skipping.start(gradients_of(comm.rank, 9), REBUILT[0], 0, False)
        assert_same(_state(skipping), _state(reference))
        gradients = gradients_of(comm.rank, 1)
        assert_same(skipping.step(gradients, REBUILT), reference.step(gradients, REBUILT))
        assert_same(_state(skipping), _state(reference))
        with pytest.raises(RuntimeError, match="backward pass ended before its last bucket"):
            lost.wait()

    on_ranks(2, run)


def test_loading_a_state_ends_an_open_step(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="skip")
        trainer.step(gradients_of(comm.rank, 0), REBUILT)
        saved = trainer.state.state_dict()
        trainer.step(gradients_of(comm.rank, 1), REBUILT)
        trainer.start(gradients_of(comm.rank, 2), REBUILT[0], 0, False)
        trainer.state.load_state_dict(saved)
        trainer.step(_poisoned(comm.rank, {0: "bias"}), REBUILT)
        assert_same(trainer.state.state_dict(), saved)

    on_ranks(2, run)


def test_the_state_is_asked_for_before_the_verdict(on_ranks: OnRanks) -> None:
    """``state_dict`` waits for it, and a next step too."""

    def run(comm: Communicator) -> None:
        trainer, reference = Trainer(comm, nonfinite="skip"), Trainer(comm)
        for step in range(5):
            reference.step(gradients_of(comm.rank, step), ONE)
            trainer.start(_poisoned(comm.rank, {1: "bias"}), ONE[0], 0, True)
            trainer.start(gradients_of(comm.rank, step), ONE[0], 0, True)
            assert_same(_state(trainer), _state(reference))
        assert trainer.state.stats.skipped_steps == 5

    on_ranks(2, run)
