"""The compressor: several parameters in one index space, and its state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from telegrad.compress import Compressor, PlacedResidual, Velocities

SIZES = {"embedding": 1000, "head": 600}
OFFSETS = {"head": 50, "embedding": 700}  # as a bucket may place them, with something else between
SPACE = 1700


class Sender:
    """One compressor and what it has sent."""

    def __init__(self, **options: Any) -> None:
        self.compressor = Compressor(SIZES, **{"density": 0.02, **options})
        self.parts: list[PlacedResidual] = [self.compressor.part(name, offset) for name, offset in OFFSETS.items()]

    def send(self, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        capacity = self.compressor.capacity(self.parts)
        indices, values = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
        count = self.compressor.compress(self.parts, flat, indices, values)
        return indices[:count], values[:count]


def _gradients(steps: int) -> list[np.ndarray]:
    return [np.random.default_rng(step).standard_normal(SPACE).astype(np.float32) for step in range(steps)]


@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_entries_ascend_over_all_parts(selection: str) -> None:
    sender = Sender(selection=selection)
    for flat in _gradients(20):
        indices, _ = sender.send(flat)
        assert (np.diff(indices.astype(np.int64)) > 0).all()
        inside_head, inside_embedding = (indices >= 50) & (indices < 650), (indices >= 700)
        assert (inside_head | inside_embedding).all()
        assert 6 <= inside_head.sum() <= 24
        assert 10 <= inside_embedding.sum() <= 40


def test_a_gradient_of_zeros_leaves_its_residual_alone() -> None:
    sender = Sender(selection="reused")
    first, second = _gradients(2)
    sender.send(first)
    before = copy.deepcopy(sender.compressor.state_dict())
    second[700:] = 0
    indices, _ = sender.send(second)
    assert indices.max() < 700
    after = sender.compressor.state_dict()
    np.testing.assert_equal(after["parameters"]["embedding"], before["parameters"]["embedding"])
    assert not np.array_equal(after["parameters"]["head"]["residual"], before["parameters"]["head"]["residual"])


def test_one_late_entry_is_not_taken_for_zeros() -> None:
    sender = Sender(selection="topk")
    flat = np.zeros(SPACE, np.float32)
    flat[1699] = 3
    indices, values = sender.send(flat)
    assert values[indices == 1699].tolist() == [3]


def test_what_is_kept_is_sent_later() -> None:
    sender = Sender(selection="topk")
    sender.compressor.keep(sender.parts, np.array([60, 649, 700], np.uint32), np.array([90, -80, 70], np.float32))
    flat = np.full(SPACE, 0.5, np.float32)
    indices, values = sender.send(flat)
    sent = dict(zip(indices.tolist(), values.tolist(), strict=True))
    assert (sent[60], sent[649], sent[700]) == (90.5, -79.5, 70.5)


@pytest.mark.parametrize("selection", ["topk", "reused"])
def test_state_goes_on_bitwise(selection: str) -> None:
    gradients = _gradients(30)
    one, two = Sender(selection=selection), Sender(selection=selection)
    for flat in gradients[:11]:
        one.send(flat)
    two.compressor.load_state_dict(one.compressor.state_dict())
    for flat in gradients[11:]:
        for a, b in zip(one.send(flat), two.send(flat), strict=True):
            np.testing.assert_array_equal(a, b)


def test_state_is_a_copy() -> None:
    sender = Sender()
    state = sender.compressor.state_dict()
    sender.send(_gradients(1)[0])
    assert not state["parameters"]["head"]["residual"].any()


def test_another_density_drops_thresholds_and_keeps_residuals() -> None:
    one, two = Sender(density=0.02), Sender(density=0.1)
    one.send(_gradients(1)[0])
    two.compressor.load_state_dict(one.compressor.state_dict())
    entry = two.compressor.residuals["head"]
    assert entry.threshold is None
    np.testing.assert_array_equal(entry.values, one.compressor.residuals["head"].values)


def test_an_open_step_is_undone_bitwise() -> None:
    for options in ({"selection": "topk"}, {"selection": "reused", "interval": 3}, {"density": 1.0}):
        one, two = Sender(**options), Sender(**options)
        for flat in _gradients(9):
            one.compressor.begin()
            two.compressor.begin()
            before = one.compressor.state_dict()
            one.send(flat * 3)
            one.compressor.keep(one.parts, np.array([60, 700], np.uint32), np.array([90, 70], np.float32))
            one.send(flat)  # again in the same step
            np.testing.assert_equal(one.compressor.state_dict(), before)  # says nothing of an open step
            one.compressor.drop_step()
            np.testing.assert_equal(one.compressor.state_dict(), before)
            for a, b in zip(one.send(flat), two.send(flat), strict=True):
                np.testing.assert_array_equal(a, b)
            two.compressor.keep_step()
            np.testing.assert_equal(two.compressor.state_dict(), one.compressor.state_dict())
            for a, b in zip(one.compressor.residuals, two.compressor.residuals, strict=True):
                assert a.peak == b.peak


def test_what_can_be_undone_is_not_copied() -> None:
    sender = Sender(interval=3)
    for number, flat in enumerate(_gradients(9)):
        held = [entry.values for entry in sender.compressor.residuals]
        before = [values.copy() for values in held]
        sender.compressor.record(number != 4)
        sender.send(flat)
        for entry, values, copied in zip(sender.compressor.residuals, held, before, strict=True):
            assert (entry.values is values) == (number == 4)  # nothing of that pass can be undone
            assert np.array_equal(values, copied) == (number != 4)
        sender.compressor.confirm(sender.compressor.unconfirmed())
    addresses = {entry.values.ctypes.data for entry in sender.compressor.residuals} | {one.ctypes.data for one in held}
    assert len(addresses) == 4  # of two parameters each memory twice


def test_a_step_that_is_kept_or_absent_is_not_undone() -> None:
    sender = Sender()
    sender.compressor.begin()
    sender.send(_gradients(1)[0])
    sender.compressor.keep_step()
    kept = sender.compressor.state_dict()
    assert kept["parameters"]["head"]["residual"].any()
    sender.compressor.drop_step()
    np.testing.assert_equal(sender.compressor.state_dict(), kept)


def test_a_loaded_state_closes_the_open_step() -> None:
    sender = Sender()
    saved = sender.compressor.state_dict()
    sender.send(_gradients(1)[0])
    sender.compressor.begin()
    sender.send(_gradients(1)[0])
    sender.compressor.load_state_dict(saved)
    sender.compressor.drop_step()
    np.testing.assert_equal(sender.compressor.state_dict(), saved)


@pytest.mark.parametrize("selection", ["topk", "reused"])
@pytest.mark.parametrize("limit", [np.inf, 3e38])
def test_overflow_is_found_before_it_happens(selection: str, limit: float) -> None:
    """Against the sums themselves; gradients grow until residual + gradient is beyond float32, and shrink again."""
    sender, found = Sender(selection=selection), 0
    for step, flat in enumerate(_gradients(40)):
        flat = np.clip(flat.astype(np.float64) * 10.0 ** (38.4 - abs(step - 20)), -3.4e38, 3.4e38).astype(np.float32)
        before = sender.compressor.state_dict()
        total = np.zeros(SPACE, np.float32)
        for name, offset in OFFSETS.items():
            residual = before["parameters"][name]["residual"]
            with np.errstate(over="ignore"):
                total[offset : offset + residual.size] = residual + flat[offset : offset + residual.size]
        where = sender.compressor.overflowing(sender.parts, flat, limit)
        np.testing.assert_array_equal(where, np.flatnonzero(np.abs(total) >= np.float32(limit)))
        assert where.size == 0 or sender.compressor.may_overflow(sender.parts, flat)
        np.testing.assert_equal(sender.compressor.state_dict(), before)  # it only looks
        found += where.size
        np.testing.assert_array_equal(sender.compressor.take(sender.parts, flat, where), total[where])
        assert not flat[where].any()
        _, values = sender.send(flat)
        assert np.isfinite(values).all()
        assert all(np.isfinite(entry.values).all() for entry in sender.compressor.residuals)
        assert step > 3 or not sender.compressor.may_overflow(sender.parts, flat)  # sound residuals cost nothing
    assert found > 10


def test_nothing_overflows_where_there_is_no_gradient() -> None:
    sender = Sender()
    sender.compressor.residuals["head"].values[3] = 3e38
    sender.compressor.residuals["head"].peak = 3e38
    assert sender.compressor.overflowing(sender.parts, np.zeros(SPACE, np.float32), 1e38).size == 0


def _without(state: dict[str, Any]) -> None:
    del state["parameters"]["head"]


def _renamed(state: dict[str, Any]) -> None:
    state["parameters"]["tail"] = state["parameters"].pop("head")


def _with_another(state: dict[str, Any]) -> None:
    state["parameters"]["tail"] = state["parameters"]["head"]


def _shorter(state: dict[str, Any]) -> None:
    state["parameters"]["head"]["residual"] = np.ones(599, np.float32)


def _double(state: dict[str, Any]) -> None:
    state["parameters"]["head"]["residual"] = np.ones(600)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, "no residual for 'head'"),
        (
            _renamed,
            "state has no residual for 'head', and a residual of 'tail', for which there is none here: .*"
            "same parameters frozen and the same compress=",
        ),
        (_with_another, "^state has a residual of 'tail', for which there is none here"),
        (_shorter, r"\['head'\].*float32 of shape \(599,\).*needs float32 of shape \(600,\)"),
        (_double, r"\['head'\].*is float64"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(damage: Any, message: str) -> None:
    sender = Sender()
    sender.send(_gradients(1)[0])
    before = sender.compressor.state_dict()
    state = Sender().compressor.state_dict()
    damage(state)
    with pytest.raises(ValueError, match=message):
        sender.compressor.load_state_dict(state)
    np.testing.assert_equal(sender.compressor.state_dict(), before)


@pytest.mark.parametrize(("density", "k"), [(0.001, 1), (0.01, 6), (0.5, 300), (1, 600)])
def test_k(density: float, k: int) -> None:
    assert Compressor(SIZES, density=density).residuals["head"].k == k


@pytest.mark.parametrize("density", [-0.1, 0, 1.5, float("nan")])
def test_density_out_of_range(density: float) -> None:
    with pytest.raises(ValueError, match=rf"density={density} must be in \(0, 1\]"):
        Compressor(SIZES, density=density)


def test_other_bad_arguments() -> None:
    with pytest.raises(TypeError, match="density='1%' must be a number"):
        Compressor(SIZES, density="1%")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="selection='best' does not exist: use one of reused, topk, trimmed"):
        Compressor(SIZES, selection="best")
    with pytest.raises(ValueError, match=r"sizes\['empty'\]=0"):
        Compressor({"empty": 0})
    with pytest.raises(ValueError, match="parameter 'tail' has no residual"):
        Compressor(SIZES).part("tail", 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**101])
@pytest.mark.parametrize("nesterov", [None, False, True])
def test_gradients_that_nobody_has_looked_at(nesterov: bool | None, value: float) -> None:
    def sender() -> Sender:
        velocities = None if nesterov is None else Velocities(SIZES, 0.9, nesterov=nesterov)
        return Sender(selection="reused", momentum=velocities)

    looked, unchecked = sender(), sender()
    capacity = looked.compressor.capacity(looked.parts)
    for step, flat in enumerate(_gradients(30)):
        looked.compressor.record(True)
        unchecked.compressor.record(True)
        indices, values = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
        if step > 3 and (np.isfinite(value) <= (nesterov is not None)):
            bad = flat.copy()
            bad[60 if step % 2 else 1200] = value  # in the first part, or in the last one
            before, kept = (
                copy.deepcopy(unchecked.compressor.residuals.state_dict()),
                unchecked.compressor.unconfirmed(),
            )
            assert unchecked.compressor.compress_unchecked(unchecked.parts, bad, indices, values) is None
            np.testing.assert_equal(unchecked.compressor.residuals.state_dict(), before)
            assert unchecked.compressor.unconfirmed() == kept == []
        expected = looked.send(flat.copy())
        count = unchecked.compressor.compress_unchecked(unchecked.parts, flat.copy(), indices, values)
        assert count == expected[0].size
        np.testing.assert_array_equal(indices[:count], expected[0])
        np.testing.assert_array_equal(values[:count], expected[1])
        assert (
            unchecked.compressor.compress_unchecked(unchecked.parts, flat, indices, values) is None
        )  # undone by copies
        for one in (looked, unchecked):
            names = one.compressor.unconfirmed()
            assert names == ["head", "embedding"]
            (one.compressor.revert if step % 5 == 4 else one.compressor.confirm)(names)
        np.testing.assert_equal(unchecked.compressor.state_dict(), looked.compressor.state_dict())


def test_what_cannot_be_undone_is_looked_at_first() -> None:
    sender, (flat,) = Sender(selection="reused"), _gradients(1)
    indices, values = np.empty(1000, np.uint32), np.empty(1000, np.float32)
    assert sender.compressor.compress_unchecked(sender.parts, flat, indices, values) is None
    sender.compressor.record(True)
    sender.compressor.set_units(0.5)  # residuals would be converted
    assert sender.compressor.compress_unchecked(sender.parts, flat, indices, values) is None
    exact = Sender(selection="topk")
    exact.compressor.record(True)
    assert exact.compressor.compress_unchecked(exact.parts, flat, indices, values) is None
    assert all(not entry.values.any() for one in (sender, exact) for entry in one.compressor.residuals)
