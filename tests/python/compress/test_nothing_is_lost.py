"""Σ sent + residual = Σ given, over a thousand steps of whatever a training may do, for every selection."""

from __future__ import annotations

import numpy as np
import pytest

from telegrad.compress import SELECTIONS, Compressor, selection_named

SIZES = {"embedding": 300, "head": 200}
OFFSETS = {"head": 20, "embedding": 250}
SPACE, STEPS = 560, 1000


def _makes_signs(name: str) -> bool:
    return "same_sign" in SELECTIONS[name].__dataclass_fields__  # type: ignore[attr-defined]


CASES = [(name, False) for name in SELECTIONS] + [(name, True) for name in SELECTIONS if _makes_signs(name)]


def _compressor(selection: str, same_sign: bool, feedback: str) -> Compressor:
    policy = selection_named(selection, same_sign=same_sign)
    return Compressor(SIZES, density=0.05, selections=dict.fromkeys(SIZES, policy), feedback=feedback)


@pytest.mark.parametrize("feedback", ["gradients", "steps"])
@pytest.mark.parametrize(("selection", "same_sign"), CASES)
def test_a_thousand_steps(selection: str, same_sign: bool, feedback: str) -> None:
    """Gradients of changing size, some of them zero; rates and loss scales that change; dropped steps, rounding errors,
    and states that are saved and loaded. What enters and leaves is added up in float64, in the residual's quantity."""
    rng = np.random.default_rng(len(selection))
    compressor = _compressor(selection, same_sign, feedback)
    sent, given, largest = np.zeros(SPACE), np.zeros(SPACE), np.zeros(SPACE)
    rate, scale = 0.1, 1.0
    for step in range(STEPS):
        if step % 97 == 50:
            state, compressor = compressor.state_dict(), _compressor(selection, same_sign, feedback)
            compressor.load_state_dict(state)
        parts = [compressor.part(name, offset) for name, offset in OFFSETS.items()]
        if rng.random() < 0.2:
            rate *= rng.choice([0.5, 0.9, 1.1, 1.9])
            scale = float(2.0 ** rng.integers(-3, 12))
        rates = {"embedding": rate, "head": 0.3 * rate}
        gradient = (rng.standard_normal(SPACE) * 10.0 ** rng.uniform(-2, 1)).astype(np.float32)
        for name, offset in OFFSETS.items():
            if rng.random() < 0.1:
                gradient[offset : offset + SIZES[name]] = 0
        compressor.set_units(1 / scale, rates if feedback == "steps" else None)
        worth = np.zeros(SPACE)
        for name, offset in OFFSETS.items():
            worth[offset : offset + SIZES[name]] = rates[name] if feedback == "steps" else 1.0
        dropped = rng.random() < 0.1
        if dropped:
            compressor.begin()
        capacity = compressor.capacity(parts)
        indices, values = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
        count = compressor.compress(parts, gradient * np.float32(scale), indices, values)
        errors = np.zeros(SPACE, np.float32)
        errors[indices[:count]] = values[:count] * np.float32(0.25)  # a wire that takes a quarter off
        compressor.keep_all(parts, errors)
        if dropped:
            compressor.drop_step()
            continue
        leaving = np.zeros(SPACE)
        leaving[indices[:count]] = values[:count]
        sent += (leaving - errors) / scale * worth
        given += gradient * worth
        largest = np.maximum(largest, np.abs(given))
    waiting = np.zeros(SPACE)
    for entry in compressor.residuals:
        offset = OFFSETS[entry.name]
        waiting[offset : offset + entry.values.size] = entry.values.astype(np.float64) * entry.unit
    assert np.count_nonzero(sent) > SPACE / 10
    error = np.abs(sent + waiting - given)
    assert (error <= STEPS * 2.0**-24 * (largest + np.abs(given).max())).all(), error.max()
