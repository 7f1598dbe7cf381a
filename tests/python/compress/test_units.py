"""Residuals that hold steps (gradients times their learning rates), and residuals under a loss scale."""

from __future__ import annotations

import numpy as np
import pytest

from telegrad.compress import Compressor, Residual, ResidualStore
from telegrad.compress.residual import Entry

SIZE = 500
LARGEST = float(np.finfo(np.float32).max)


class Sender:
    """A compressor of one parameter; what it sends."""

    def __init__(self, selection: str, feedback: str = "steps") -> None:
        self.compressor = Compressor({"w": SIZE}, density=0.04, selection=selection, feedback=feedback)
        self.parts = [self.compressor.part("w", 0)]

    def send(self, gradient: np.ndarray) -> np.ndarray:
        indices, values = np.empty(40, np.uint32), np.empty(40, np.float32)
        count = self.compressor.compress(self.parts, gradient, indices, values)
        sent = np.zeros(SIZE, np.float32)
        sent[indices[:count]] = values[:count]
        return sent


RATES = {
    "constant": lambda step: 0.1,
    "warm-up and cosine": lambda step: 0.1 * min(step / 20, 1) * (1 + np.cos(np.pi * step / 300)) / 2,
    "falling in steps": lambda step: 10.0 ** -(step // 75),
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_sparcml_algorithm_1(selection: str, rates: str) -> None:
    """ε + lr·g with what is sent taken out: in float64 beside it, with the selection that was made."""
    sender, rng, waiting = Sender(selection), np.random.default_rng(1), np.zeros(SIZE)
    applied, given = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(300):
        rate = float(RATES[rates](step))
        gradient = rng.standard_normal(SIZE).astype(np.float32)
        sender.compressor.set_units(1.0, {"w": rate})
        sent = sender.send(gradient)
        assert np.isfinite(sent).all()
        total = waiting + rate * gradient.astype(np.float64)
        np.testing.assert_allclose(sent[sent != 0] * rate, total[sent != 0], rtol=1e-4)
        waiting = np.where(sent != 0, 0, total)
        applied += sent.astype(np.float64) * rate
        given += gradient.astype(np.float64) * rate
        assert (np.count_nonzero(sent) >= 10) == (rate > 0)
    entry = sender.compressor.residuals["w"]
    np.testing.assert_allclose(applied + entry.values.astype(np.float64) * entry.unit, given, rtol=1e-3, atol=1e-5)


def test_a_falling_rate_leaves_what_waits_as_it_is() -> None:
    """A residual of gradients loses its weight with the rate; one of steps does not."""
    gradient = np.ones(SIZE, np.float32)
    applied = {}
    for feedback in ("gradients", "steps"):
        sender = Sender("topk", feedback)
        for rate in (1.0, 0.001):
            sender.compressor.set_units(1.0, {"w": rate} if feedback == "steps" else None)
            applied[feedback] = sender.send(gradient)[39] * rate
    assert applied["gradients"] == pytest.approx(0.002)
    assert applied["steps"] == pytest.approx(1.001)


def test_at_a_rate_of_zero_nothing_is_sent_and_nothing_is_taken_up() -> None:
    sender = Sender("reused")
    sender.compressor.set_units(1.0, {"w": 0.5})
    sender.send(np.arange(SIZE, dtype=np.float32))
    before = sender.compressor.state_dict()
    sender.compressor.set_units(1.0, {"w": 0.0})
    assert not sender.send(np.ones(SIZE, np.float32)).any()
    assert sender.compressor.overflowing(sender.parts, np.ones(SIZE, np.float32)).size == 0
    np.testing.assert_equal(sender.compressor.state_dict(), before)


@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_a_loss_scale_changes_nothing(selection: str) -> None:
    plain, scaled, rng = Sender(selection, "gradients"), Sender(selection, "gradients"), np.random.default_rng(2)
    for step in range(60):
        gradient = rng.standard_normal(SIZE).astype(np.float32)
        scale = np.float32(2.0 ** rng.integers(0, 20))
        scaled.compressor.set_units(1 / float(scale))
        np.testing.assert_array_equal(scaled.send(gradient * scale), plain.send(gradient) * scale)
        one, two = scaled.compressor.residuals["w"], plain.compressor.residuals["w"]
        np.testing.assert_array_equal(one.values * np.float32(one.unit), two.values)
        assert one.threshold == two.threshold * float(scale), step  # type: ignore[operator]


def test_a_dropped_step_takes_its_unit_back() -> None:
    sender = Sender("reused")
    sender.compressor.set_units(1.0, {"w": 0.3})
    sender.send(np.arange(SIZE, dtype=np.float32))
    sender.compressor.begin()
    before = sender.compressor.state_dict()
    sender.compressor.set_units(0.5, {"w": 0.7})
    sender.send(np.ones(SIZE, np.float32))
    sender.compressor.drop_step()
    np.testing.assert_equal(sender.compressor.state_dict(), before)


def test_rounding_errors_are_kept_in_the_unit_of_the_step() -> None:
    sender = Sender("topk")
    for rate in (0.5, 0.125):
        sender.compressor.set_units(1.0, {"w": rate})
        sender.compressor.keep(sender.parts, np.array([7], np.uint32), np.array([2], np.float32))
        errors = np.zeros(SIZE, np.float32)
        errors[8] = 4
        sender.compressor.keep_all(sender.parts, errors)
    entry = sender.compressor.residuals["w"]
    assert (entry.values[[7, 8]] * entry.unit).tolist() == [1 + 0.25, 2 + 0.5]
    assert entry.peak >= np.abs(entry.values).max()
    sender.compressor.set_units(1.0, {"w": 0.0})
    sender.compressor.keep(sender.parts, np.array([7], np.uint32), np.array([2], np.float32))
    assert entry.values[7] * entry.unit == 1.25


@pytest.mark.parametrize("ratio", [2.0**90, 2.0**110, 1e39, 1e-39, 1e-300, 1e300])
def test_what_float32_cannot_hold_becomes_its_largest_number(ratio: float) -> None:
    entry = Entry("w", np.array([0, 1, -3, 1e-20, 5], np.float32), unit=ratio, peak=5.0)
    exact = entry.values.astype(np.float64) * ratio
    entry.rescale(1.0)
    np.testing.assert_allclose(entry.values, np.clip(exact, -LARGEST, LARGEST), rtol=1e-6, atol=1e-44)
    assert np.abs(entry.values).max() <= entry.peak
    assert entry.unit == 1.0


def test_a_threshold_follows_or_is_evaluated_anew() -> None:
    entry = Residual("w", np.ones(4, np.float32), 1, threshold=0.5, peak=1.0)
    entry.rescale(4.0)
    assert entry.threshold == 0.125
    entry.rescale(1e-300)
    assert entry.threshold is None


def test_overflow_by_a_falling_rate_is_foreseen() -> None:
    sender = Sender("topk")
    sender.compressor.set_units(1.0, {"w": 1e30})
    gradient = np.ones(SIZE, np.float32)
    sender.send(gradient)
    assert not sender.compressor.may_overflow(sender.parts, gradient)
    sender.compressor.set_units(1.0, {"w": 1e-10})
    assert sender.compressor.may_overflow(sender.parts, gradient)
    found = sender.compressor.overflowing(sender.parts, gradient)
    np.testing.assert_array_equal(found, np.flatnonzero(sender.compressor.residuals["w"].values))


def test_states_of_another_feedback_are_refused() -> None:
    sender = Sender("topk", "gradients")
    with pytest.raises(ValueError, match="state has residuals of steps, but feedback='gradients': load it with feedb"):
        sender.compressor.load_state_dict(Sender("topk").compressor.state_dict())
    with pytest.raises(ValueError, match="feedback='errors' does not exist: use one of gradients, steps"):
        Compressor({"w": 3}, feedback="errors")


def test_the_unit_is_part_of_the_state() -> None:
    one, two = Sender("reused"), Sender("reused")
    rng = np.random.default_rng(3)
    for step in range(20):
        gradient = rng.standard_normal(SIZE).astype(np.float32)
        for sender in (one, two) if step >= 10 else (one,):
            sender.compressor.set_units(1.0, {"w": 0.1 / (step + 1)})
        sent = one.send(gradient)
        if step >= 10:
            np.testing.assert_array_equal(two.send(gradient), sent)
        if step == 9:
            two.compressor.load_state_dict(one.compressor.state_dict())


def test_density_of_a_warm_up() -> None:
    store = ResidualStore({"a": 1000, "b": 1000}, 0.01, {"b": 0.1})
    store["a"].threshold, store["b"].threshold = 3.0, 4.0
    for least, ks in ((0.25, (250, 250)), (0.05, (50, 100)), (0.0, (10, 100))):
        store.begin()
        store.raise_density(least)
        assert (store["a"].k, store["b"].k) == ks
        store.keep_step()
    store.begin()
    store.raise_density(0.5)
    store.drop_step()
    assert store["a"].k == 10
    assert (store["a"].threshold, store["b"].threshold) == (None, None)
    store["a"].threshold = 3.0
    store.raise_density(0.001)
    assert store["a"].threshold == 3.0
