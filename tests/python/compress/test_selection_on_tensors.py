"""Selection policies on torch tensors: what they do on numpy arrays; counts as promised on awkward tensors.

On a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import pytest
from selection_promises import EVERY, check_move, check_ties, tensor
from triton_arrays import DEVICE, tensor_of, torch

from telegrad.compress import (
    SELECTIONS,
    ExactTopK,
    Residual,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    selection_named,
)
from telegrad.kernels.select.triton import launches

TENSORS = 160 if DEVICE == "cpu" else 1000  # the interpreter is slow; ten of each kind


def _on_tensors(policy: Selection, entry: Residual, gradient: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    room = policy.capacity(entry)
    indices = torch.full((room,), 0xDEAD, dtype=torch.uint32, device=DEVICE)
    values = torch.full((room,), np.nan, device=DEVICE)
    count = policy.select(entry, tensor_of(gradient), indices, values, offset)
    assert 0 <= count <= room
    return indices[:count].cpu().numpy(), values[:count].cpu().numpy()


def _on_arrays(policy: Selection, entry: Residual, gradient: np.ndarray, offset: int) -> tuple[np.ndarray, np.ndarray]:
    room = policy.capacity(entry)
    indices, values = np.empty(room, np.uint32), np.empty(room, np.float32)
    count = policy.select(entry, gradient, indices, values, offset)
    return indices[:count], values[:count]


@pytest.mark.parametrize(("name", "policy"), EVERY, ids=[name for name, _ in EVERY])
@pytest.mark.parametrize("k", [9, 300], ids=["9 of 300", "all"])
def test_tensors_and_arrays_of_whole_numbers_give_the_same_bits(
    name: str, policy: Selection, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "BLOCK", 128)
    rng = np.random.default_rng(len(name))
    array = Residual(name, np.zeros(300, np.float32), k)
    tensor = Residual(name, torch.zeros(300, device=DEVICE), k)
    for step in range(3 if k < 300 else 1):
        gradient = rng.integers(-50, 50, 300).astype(np.float32) * (1, 1, 8)[step]  # whose sums are exact
        expected = _on_arrays(policy, array, gradient, 70)
        found = _on_tensors(policy, tensor, gradient, 70)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
        np.testing.assert_array_equal(tensor.values.cpu().numpy(), array.values)
        assert (tensor.threshold, tensor.calls) == (array.threshold, array.calls)
        assert np.abs(array.values).max() <= np.float32(tensor.peak)


POLICIES: tuple[Selection, ...] = (*[ExactTopK()] * 7, ThresholdSearch(), ReusedThreshold(), SampledThreshold())


@pytest.mark.parametrize("part", range(len(POLICIES)), ids=lambda part: f"{part} {type(POLICIES[part]).__name__}")
def test_counts_of_awkward_tensors(part: int) -> None:
    """Promises of docs/reference/selection.md, each on some of the tensors that test_selection_counts draws."""
    policy = POLICIES[part]
    reaches_2k = isinstance(policy, ThresholdSearch | SampledThreshold)
    for number in range(part, TENSORS, len(POLICIES)):
        kind, x, k = tensor(number)
        # As the addition to the residual: -0 becomes 0, and a NaN the one that the device makes.
        x = (torch.from_numpy(x).to(DEVICE) + torch.zeros(1, device=DEVICE)).cpu().numpy()
        entry = Residual(kind, torch.zeros(x.size, device=DEVICE), k)
        indices, values = _on_tensors(policy, entry, x, 0)
        assert k <= indices.size <= (min(2 * k, x.size) if reaches_2k else k), (kind, number)
        left = Residual(kind, entry.values.cpu().numpy(), k, peak=entry.peak)
        check_move(x, left, indices, values, 0)
        if indices.size == k:
            check_ties(x, indices, 0)
        if isinstance(policy, ReusedThreshold | SampledThreshold):
            entry.values.zero_()
            following = np.random.default_rng(number).permutation(x) * np.float32(0.5)
            indices, values = _on_tensors(policy, entry, following, 0)
            least = k if reaches_2k else (k + 1) // 2
            assert least <= indices.size <= min(2 * k, x.size), (kind, number)


def test_every_selection_is_among_those_compared() -> None:
    assert {type(policy) for _, policy in EVERY} == {type(selection_named(name)) for name in SELECTIONS}
