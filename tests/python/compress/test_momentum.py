"""Momentum correction: velocities before the selection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from telegrad.compress import Compressor, Velocities

SIZE = 600


def _gradients(steps: int, seed: int = 0) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    yield from (rng.standard_normal(SIZE).astype(np.float32) for _ in range(steps))


def _sgd(gradients: list[np.ndarray], momentum: float, nesterov: bool) -> list[np.ndarray]:
    """What SGD multiplies by the learning rate in each step; in float64, as torch's documentation has it."""
    velocity, steps = np.zeros(SIZE), []
    for gradient in gradients:
        velocity = momentum * velocity + gradient
        steps.append(gradient + momentum * velocity if nesterov else velocity)
    return steps


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_contributions_are_those_of_sgd(nesterov: bool) -> None:
    momentum = Velocities({"w": SIZE}, 0.9, nesterov=nesterov)
    gradients = [gradient + 1 for gradient in _gradients(40)]
    for gradient, expected in zip(gradients, _sgd(gradients, 0.9, nesterov), strict=True):
        foreseen = momentum.contribution("w", gradient, 1.0)
        found = momentum.apply("w", gradient.copy(), 1.0)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(foreseen, found, rtol=1e-6, atol=1e-6)
        assert np.abs(momentum["w"].values).max() <= momentum["w"].peak


class Sender:
    """A compressor with momentum and what it sends."""

    def __init__(self, *, density: float = 0.02, selection: str = "topk", **options: Any) -> None:
        momentum = Velocities({"w": SIZE, "bias": 3}, **{"factor": 0.9, **options})
        self.compressor = Compressor({"w": SIZE}, density=density, selection=selection, momentum=momentum)
        self.parts = [self.compressor.part("w", 0)]

    def send(self, gradient: np.ndarray) -> np.ndarray:
        capacity = self.compressor.capacity(self.parts)
        indices, values = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
        count = self.compressor.compress(self.parts, gradient.copy(), indices, values)
        sent = np.zeros(SIZE, np.float32)
        sent[indices[:count]] = values[:count]
        return sent

    @property
    def velocity(self) -> np.ndarray:
        assert self.compressor.momentum is not None
        return self.compressor.momentum["w"].values


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_nothing_is_lost_in_a_thousand_steps(selection: str, nesterov: bool) -> None:
    """Without masking all that SGD would have applied is sent or waits."""
    sender = Sender(selection=selection, nesterov=nesterov, masking=False)
    gradients = list(_gradients(1000))
    sent = sum(sender.send(gradient).astype(np.float64) for gradient in gradients)
    expected = sum(_sgd(gradients, 0.9, nesterov))
    np.testing.assert_allclose(sent + sender.compressor.residuals["w"].values, expected, atol=2e-3)


@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_masking_clears_the_velocity_of_what_is_sent(selection: str) -> None:
    """Against RedSync's Algorithm 4, step by step, with the selection that was made."""
    sender = Sender(selection=selection)
    u, v = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for gradient in _gradients(50):
        u = np.float32(0.9) * u + gradient
        v = v + u
        chosen = np.flatnonzero(sender.send(gradient))
        assert 6 <= chosen.size <= 24
        u[chosen] = v[chosen] = 0
        np.testing.assert_array_equal(sender.velocity, u)
        np.testing.assert_array_equal(sender.compressor.residuals["w"].values, v)


def test_without_masking_the_velocity_stays() -> None:
    masked, unmasked = Sender(density=1.0), Sender(density=1.0, masking=False)
    for gradient in _gradients(3):
        masked.send(gradient)
        unmasked.send(gradient)
    assert not masked.velocity.any()
    assert unmasked.velocity.all()


def test_a_gradient_of_zeros_leaves_the_velocity_alone() -> None:
    sender = Sender()
    sender.send(next(_gradients(1)))
    before = sender.velocity.copy()
    assert not sender.send(np.zeros(SIZE, np.float32)).any()
    np.testing.assert_array_equal(sender.velocity, before)


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_open_step_is_undone_bitwise(nesterov: bool) -> None:
    sender = Sender(nesterov=nesterov)
    compressor = sender.compressor
    for gradient in _gradients(6):
        compressor.begin()
        before = compressor.state_dict()
        sender.send(gradient)
        compressor.correct("bias", np.ones(3, np.float32))
        np.testing.assert_equal(compressor.state_dict(), before)
        compressor.drop_step()
        np.testing.assert_equal(compressor.state_dict(), before)
        sender.send(gradient)
        compressor.correct("bias", np.ones(3, np.float32))
        assert compressor.state_dict()["velocities"]["bias"]["velocity"].all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_loss_scale_changes_nothing(nesterov: bool) -> None:
    """Powers of two are exact: the same bits, scaled."""
    plain, scaled = Sender(nesterov=nesterov, selection="reused"), Sender(nesterov=nesterov, selection="reused")
    scales = [2.0**exponent for exponent in (16, 16, 15, 15, 3, 30, 30, 0, 17, 16)] * 3
    for gradient, scale in zip(_gradients(len(scales)), scales, strict=True):
        scaled.compressor.set_units(1 / scale)
        np.testing.assert_array_equal(
            scaled.send(gradient * np.float32(scale)), plain.send(gradient) * np.float32(scale)
        )


@pytest.mark.parametrize("nesterov", [False, True])
def test_overflow_is_foreseen(nesterov: bool) -> None:
    """Gradients that are all finite, of which the velocity makes more than float32 holds."""
    sender = Sender(nesterov=nesterov, masking=False)
    compressor, huge = sender.compressor, np.ones(SIZE, np.float32)
    huge[[3, 77]] = 2e38
    assert not compressor.may_overflow(sender.parts, np.ones(SIZE, np.float32))
    found: list[int] = []
    for _ in range(4):
        assert compressor.may_overflow(sender.parts, huge)
        gradient = huge.copy()
        where = compressor.overflowing(sender.parts, gradient)
        found += where.tolist()
        taken = compressor.take(sender.parts, gradient, where)
        assert np.isinf(taken).all()
        assert np.isfinite(sender.send(gradient)).all()
        assert np.isfinite(sender.velocity).all()
    assert set(found) == {3, 77}


def test_a_velocity_that_overflows_unforeseen_becomes_zero() -> None:
    momentum = Velocities({"w": 4}, 0.9)
    for _ in range(3):
        result = momentum.apply("w", np.array([3e38, 1, 0, 0], np.float32), 1.0)
        assert np.isfinite(momentum["w"].values).all()
    assert result[0] == np.float32(3e38)  # it was infinite in the second step, and began anew
    assert momentum["w"].peak < np.inf


def test_state_goes_on_bitwise() -> None:
    one, two = Sender(selection="reused", nesterov=True), Sender(selection="reused", nesterov=True)
    gradients = list(_gradients(30))
    for gradient in gradients[:10]:
        one.send(gradient)
    two.compressor.load_state_dict(one.compressor.state_dict())
    for gradient in gradients[10:]:
        np.testing.assert_array_equal(one.send(gradient), two.send(gradient))


def test_states_with_and_without_velocities_do_not_mix() -> None:
    plain, sender = Compressor({"w": SIZE}), Sender()
    with pytest.raises(ValueError, match="state has velocities, but there is no momentum: give the momentum"):
        plain.load_state_dict(sender.compressor.state_dict())
    with pytest.raises(ValueError, match="state has no 'velocities': it was saved without momentum"):
        sender.compressor.load_state_dict(plain.state_dict())


def _nan(state: dict[str, Any]) -> None:
    state["velocities"]["w"]["velocity"][5] = np.nan


def _missing(state: dict[str, Any]) -> None:
    del state["velocities"]["bias"]


def _empty(state: dict[str, Any]) -> None:
    del state["velocities"]["w"]["velocity"]


def _no_unit(state: dict[str, Any]) -> None:
    state["velocities"]["w"]["unit"] = 0.0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_nan, r"\['velocities'\]\['w'\]\['velocity'\] holds NaN"),
        (_missing, "no velocity for 'bias'"),
        (_empty, r"\['velocities'\]\['w'\] must have a velocity"),
        (_no_unit, r"\['w'\]\['unit'\] is 0.0"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(damage: Any, message: str) -> None:
    sender, other = Sender(), Sender()
    for gradient in _gradients(3):
        sender.send(gradient)
        other.send(-gradient)
    before, state = sender.compressor.state_dict(), other.compressor.state_dict()
    damage(state)
    with pytest.raises(ValueError, match=message):
        sender.compressor.load_state_dict(state)
    np.testing.assert_equal(sender.compressor.state_dict(), before)


def test_other_bad_arguments() -> None:
    with pytest.raises(ValueError, match="parameter 'v' has no velocity"):
        Velocities({"w": 3}, 0.9)["v"]
    with pytest.raises(ValueError, match=r"sizes\['w'\]=0"):
        Velocities({"w": 0}, 0.9)
