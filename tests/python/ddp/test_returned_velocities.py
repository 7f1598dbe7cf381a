"""Momentum factor masking where sums keep a part: only what has left loses its velocity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from handmade_buckets import LARGE, ONE, REBUILT, SHAPES, Trainer, gradients_of, named, plain_sgd

from telegrad import Communicator

OnRanks = Callable[..., list[Any]]
RANKS, STEPS, DENSITY = 3, 40, 0.05
MOMENTUM = np.float32(0.5)


def _velocity(trainer: Trainer, name: str) -> np.ndarray:
    return trainer.memory()["velocities"][name]["velocity"]  # type: ignore[no-any-return]


class _Rank:
    """Momentum correction and error feedback in numpy; what is selected and what the sum keeps is taken as given."""

    def __init__(self, nesterov: bool) -> None:
        self._nesterov = nesterov
        self.velocity = {name: np.zeros(int(np.prod(SHAPES[name])), np.float32) for name in LARGE}
        self.residual = {name: np.zeros_like(one) for name, one in self.velocity.items()}

    def accumulate(self, name: str, gradient: np.ndarray) -> np.ndarray:
        """The places of the largest entries, after ``gradient`` has been taken up."""
        velocity, residual = self.velocity[name], self.residual[name]
        if self._nesterov:
            velocity[:] = MOMENTUM * (velocity + gradient)
            residual += gradient + velocity
        else:
            velocity[:] = MOMENTUM * velocity + gradient
            residual += velocity
        k = round(DENSITY * residual.size)
        chosen = np.zeros(residual.size, bool)
        chosen[np.argsort(-np.abs(residual), kind="stable")[:k]] = True
        return chosen

    def clear(self, name: str, sent: np.ndarray) -> None:
        self.residual[name][sent] = 0
        self.velocity[name][sent] = 0


@pytest.mark.parametrize(
    "options",
    [{}, {"nonfinite": "skip"}, {"nesterov": True}, {"buckets": REBUILT}],
    ids=named,
)
def test_what_ok_topk_hands_back_keeps_its_velocity(on_ranks: OnRanks, options: dict[str, Any]) -> None:
    settings = {"combine": "oktopk", "select": "topk", "momentum": float(MOMENTUM), **options}
    buckets = settings.pop("buckets", ONE)

    def run(comm: Communicator) -> int:
        trainer = Trainer(comm, density=DENSITY, optimizer=plain_sgd, **settings)
        expected, returned = _Rank(bool(options.get("nesterov"))), 0
        for step in range(STEPS):
            gradients = {name: one + 0.25 * comm.rank for name, one in gradients_of(comm.rank, step).items()}
            gradients = {name: one.astype(np.float32) for name, one in gradients.items()}
            chosen = {name: expected.accumulate(name, gradients[name]) for name in LARGE}
            averages = trainer.step(gradients, buckets)
            for name in LARGE:
                sent = chosen[name] & (averages[name] != 0)
                returned += int((chosen[name] & ~sent).sum())
                expected.clear(name, sent)
                np.testing.assert_array_equal(_velocity(trainer, name), expected.velocity[name])
                np.testing.assert_array_equal(trainer.residual(name), expected.residual[name])
        return returned

    assert all(returned > STEPS for returned in on_ranks(RANKS, run))


@pytest.mark.parametrize("collective", ["oktopk", "gtopk", "bounded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_velocity_is_masked_where_and_only_where_nothing_comes_back(
    on_ranks: OnRanks, collective: str, dtype: torch.dtype
) -> None:
    """Beside a twin that masks nothing, from the same state."""

    def run(comm: Communicator) -> tuple[int, int]:
        settings = {"combine": collective, "select": "topk", "momentum": 0.5, "optimizer": plain_sgd}
        masked, twin = (Trainer(comm, dtype, masking=masking, **settings) for masking in (True, False))
        cleared = returned = 0
        for step in range(12):
            twin.state.load_state_dict(masked.state.state_dict())
            gradients = gradients_of(comm.rank, step)
            before = {name: masked.residual(name) for name in LARGE}
            masked.step(gradients, ONE)
            twin.step(gradients, ONE)
            for name in LARGE:
                mine, full = _velocity(masked, name), _velocity(twin, name)
                total = before[name] + full
                left = masked.residual(name) != total  # it was sent, or a part of it
                np.testing.assert_array_equal(masked.residual(name), twin.residual(name))
                np.testing.assert_array_equal(mine[~left], full[~left])
                cleared += int((mine != full).sum())
                order = np.argsort(-np.abs(total), kind="stable")
                returned += int((~left[order[: round(0.05 * total.size)]]).sum())
        return cleared, returned

    for cleared, returned in on_ranks(RANKS, run):
        assert cleared > 0
        assert returned > 0


def test_what_is_not_finite_does_not_unmask_the_rest(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        settings = {"combine": "oktopk", "momentum": 0.5, "optimizer": plain_sgd, "nonfinite": "send"}
        trainer = Trainer(comm, select="topk", same_sign=False, **settings)
        gradients = gradients_of(comm.rank, 0)
        if comm.rank == 1:
            gradients["hidden"][7] = np.inf
        averages = trainer.step(gradients, ONE)
        assert np.isinf(averages["hidden"][7])
        for name in LARGE:
            velocity = _velocity(trainer, name)
            finite = np.isfinite(gradients[name])
            waits = trainer.residual(name) != 0
            np.testing.assert_array_equal(velocity[waits & finite], gradients[name][waits & finite])
            assert np.isfinite(velocity).all()
            assert (velocity[~waits] == 0).sum() > 0

    on_ranks(2, run)
