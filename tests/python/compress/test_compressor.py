"""The compressor: several parameters in one index space, and its state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from telegrad.compress import Compressor, Part

SIZES = {"embedding": 1000, "head": 600}
OFFSETS = {"head": 50, "embedding": 700}  # as a bucket may place them, with something else between
SPACE = 1700


class Sender:
    """One compressor and what it has sent."""

    def __init__(self, **options: Any) -> None:
        self.compressor = Compressor(SIZES, **{"density": 0.02, **options})
        self.parts: list[Part] = [self.compressor.part(name, offset) for name, offset in OFFSETS.items()]

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


def _without(state: dict[str, Any]) -> None:
    del state["parameters"]["head"]


def _renamed(state: dict[str, Any]) -> None:
    state["parameters"]["tail"] = state["parameters"].pop("head")


def _shorter(state: dict[str, Any]) -> None:
    state["parameters"]["head"]["residual"] = np.ones(599, np.float32)


def _double(state: dict[str, Any]) -> None:
    state["parameters"]["head"]["residual"] = np.ones(600)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, "no residual for 'head'"),
        (_renamed, "no residual for 'head', and one too many for 'tail'.*small_tensor_elements"),
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
    with pytest.raises(ValueError, match="selection='best' does not exist: use one of reused, topk"):
        Compressor(SIZES, selection="best")
    with pytest.raises(ValueError, match=r"sizes\['empty'\]=0"):
        Compressor({"empty": 0})
    with pytest.raises(ValueError, match="parameter 'tail' has no residual"):
        Compressor(SIZES).part("tail", 0)
