"""The policies for NaN and infinity that keep a step: ``raise`` and ``send``; and residuals that overflow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, Trainer, gradients_of

from telegrad import Communicator
from telegrad.errors import NonFiniteGradient, TransportError

OnRanks = Callable[..., list[Any]]


def _poisoned(rank: int, name: str, value: float = np.nan) -> dict[str, np.ndarray]:
    gradients = gradients_of(rank, 1)
    if rank == 1:
        gradients[name][5] = value
    return gradients


@pytest.mark.parametrize("compress", ["topk", None])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["hidden", "bias"])
def test_raise(on_ranks: OnRanks, compress: str | None, value: float, name: str) -> None:
    together = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, compress=compress)
        trainer.step(gradients_of(comm.rank, 0), ONE)
        together.wait(60)  # else rank 1 may abort before rank 0 is through with this step
        before = trainer.memory()
        if comm.rank == 1:
            with pytest.raises(
                NonFiniteGradient, match=f"rank 1, step 1: 1 of .* gradient of '{name}' are NaN"
            ) as caught:
                trainer.step(_poisoned(1, name, value), ONE)
            assert (caught.value.rank, caught.value.parameter) == (1, name)
            np.testing.assert_equal(trainer.memory(), before)
        else:
            with pytest.raises(RuntimeError, match=f"NonFiniteGradient: rank 1, step 1.*'{name}'"):
                trainer.step(_poisoned(0, name, value), ONE)
            assert isinstance(trainer.state.failure, TransportError)

    on_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["hidden", "bias"])
def test_send(on_ranks: OnRanks, name: str, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, dtype, nonfinite="send", select="topk")
        trainer.step(gradients_of(comm.rank, 0), ONE)
        result = trainer.step(_poisoned(comm.rank, name), ONE)
        assert np.flatnonzero(np.isnan(result[name])).tolist() == [5]
        assert all(np.isfinite(values).all() for other, values in result.items() if other != name)
        assert all(np.isfinite(trainer.residual(large)).all() for large in LARGE)
        clean = trainer.step(gradients_of(comm.rank, 2), ONE)
        assert all(np.isfinite(values).all() for values in clean.values())

    on_ranks(2, run)


def test_send_loses_nothing_else(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="send", select="topk")
        given = np.zeros(1000)
        applied = np.zeros(1000)
        for step in range(5):
            gradients = gradients_of(0, step)
            given += gradients["hidden"]
            gradients["hidden"][100:200:7] = np.nan
            given[100:200:7] -= gradients_of(0, step)["hidden"][100:200:7]
            applied += np.nan_to_num(trainer.step(gradients, ONE)["hidden"])
        np.testing.assert_array_equal(applied + trainer.residual("hidden"), given)

    on_ranks(1, run)


def test_raise_in_a_later_bucket(on_ranks: OnRanks) -> None:
    """The bucket at fault is untouched, the earlier ones hold what was not selected."""
    together = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        trainer.step(gradients_of(comm.rank, 0), REBUILT)
        together.wait(60)
        before = trainer.memory()["parameters"]
        with pytest.raises(NonFiniteGradient if comm.rank == 1 else RuntimeError, match="rank 1, step 1: .*embedding"):
            trainer.step(_poisoned(comm.rank, "embedding"), REBUILT)
        if comm.rank == 1:
            after = trainer.memory()["parameters"]
            np.testing.assert_equal(after["embedding"], before["embedding"])
            left = after["hidden"]["residual"]
            expected = before["hidden"]["residual"] + gradients_of(1, 1)["hidden"]
            assert ((left == expected) | (left == 0)).all()
            Trainer(comm).state.load_state_dict(trainer.state.state_dict())  # sound: it can be loaded

    on_ranks(2, run)


# Two gradients that make the residual of "hidden" overflow on rank 1 where the first one still waits.
OVERFLOWS = {
    torch.float32: (3e38, 3e38),
    torch.bfloat16: (torch.finfo(torch.bfloat16).max, 1e36),  # finite in float32, rounded to an infinite bfloat16
}
WAITING = 120  # of the entries with that gradient stay in the residual, since k = 50 leave; no policy holds so many


def _huge(rank: int, value: float, step: int = 0) -> dict[str, np.ndarray]:
    gradients = gradients_of(rank, step)
    if rank == 1:
        gradients["hidden"][: 50 + WAITING] = value
    return gradients


def test_the_overflows_are_what_they_say() -> None:
    for dtype, values in OVERFLOWS.items():
        total = torch.tensor(values, dtype=dtype).float().sum()
        assert torch.isinf(total) == (dtype == torch.float32)
        assert torch.isinf(total.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_raise_on_overflow(on_ranks: OnRanks, selection: str, dtype: torch.dtype) -> None:
    together = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, dtype, select=selection)
        first, second = OVERFLOWS[dtype]
        trainer.step(_huge(comm.rank, first), ONE)
        together.wait(60)
        before = trainer.memory()
        message = f"rank 1, step 1: the residual of 'hidden' overflowed: {WAITING} of 1000 entries"
        if comm.rank == 1:
            with pytest.raises(NonFiniteGradient, match=message) as caught:
                trainer.step(_huge(1, second), ONE)
            assert (caught.value.rank, caught.value.parameter) == (1, "hidden")
            np.testing.assert_equal(trainer.memory(), before)
            assert np.isfinite(trainer.residual("hidden")).all()
        else:
            with pytest.raises(RuntimeError, match=f"NonFiniteGradient: {message}"):
                trainer.step(_huge(0, second), ONE)
            assert isinstance(trainer.state.failure, TransportError)

    on_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_send_on_overflow(on_ranks: OnRanks, selection: str, dtype: torch.dtype) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, dtype, select=selection, nonfinite="send")
        first, second = OVERFLOWS[dtype]
        trainer.step(_huge(comm.rank, -first), ONE)
        waiting = np.flatnonzero(trainer.residual("hidden") < -1e38)
        assert waiting.tolist() == (list(range(50, 50 + WAITING)) if comm.rank == 1 else [])
        result = trainer.step(_huge(comm.rank, -second), ONE)
        # more infinities than the policy has capacity for; all leave
        assert np.flatnonzero(np.isinf(result["hidden"])).tolist() == list(range(50, 50 + WAITING))
        assert (result["hidden"][50 : 50 + WAITING] < 0).all()
        assert not np.isnan(result["hidden"]).any()
        assert all(np.isfinite(result[name]).all() for name in result if name != "hidden")
        if comm.rank == 1:
            assert not trainer.residual("hidden")[50 : 50 + WAITING].any()
        assert all(np.isfinite(trainer.residual(name)).all() for name in LARGE)
        assert trainer.state.stats.nonfinite_buckets == (comm.rank == 1)
        for step in range(2, 5):
            clean = trainer.step(gradients_of(comm.rank, step), ONE)
            assert all(np.isfinite(values).all() for values in clean.values())

    on_ranks(2, run)


def test_send_of_nan_and_overflow_together(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite="send")
        first = np.zeros(1000)
        first[:52] = 3e38
        gradients = {**gradients_of(0, 0), "hidden": first.astype(np.float32)}
        trainer.step(gradients, ONE)
        assert np.flatnonzero(trainer.residual("hidden")).tolist() == [50, 51]
        gradients["hidden"][50] = np.nan  # the residual keeps its 3e38
        gradients["hidden"][:50] = 1
        result = trainer.step(gradients, ONE)["hidden"]
        assert np.isnan(result[50])
        assert result[51] == np.inf
        assert trainer.residual("hidden")[50:52].tolist() == [np.float32(3e38), 0]

    on_ranks(1, run)


def test_huge_gradients_that_do_not_overflow_are_sound(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm)
        value = 3e38
        for _ in range(6):
            result = trainer.step(_huge(comm.rank, value, 2), ONE)
            value = -value
        assert np.isfinite(result["hidden"]).all()
        assert np.isfinite(trainer.residual("hidden")).all()
        assert trainer.state.stats.nonfinite_buckets == 0

    on_ranks(2, run)


@pytest.mark.parametrize("policy", ["raise", "skip", "send"])
def test_a_loaded_residual_that_overflows_at_once(on_ranks: OnRanks, policy: str) -> None:
    def run(comm: Communicator) -> None:
        trainer = Trainer(comm, nonfinite=policy)
        state = trainer.state.state_dict()
        state["compressor"]["parameters"]["hidden"]["residual"][7] = 3e38
        trainer.state.load_state_dict(state)
        gradients = gradients_of(0, 0)
        gradients["hidden"][7] = 1e38
        if policy == "raise":
            with pytest.raises(NonFiniteGradient, match="residual of 'hidden' overflowed: 1 of 1000"):
                trainer.step(gradients, ONE)
        else:
            result = trainer.step(gradients, ONE)["hidden"]
            assert result[7] == (0 if policy == "skip" else np.inf)
        assert trainer.residual("hidden")[7] == (0 if policy == "send" else np.float32(3e38))

    on_ranks(1, run)
