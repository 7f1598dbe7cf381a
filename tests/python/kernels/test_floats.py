"""The scan for NaN and infinity against its oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from telegrad.kernels.floats import as_float32, count_nonfinite


def expected_of(bits: npt.NDArray[Any]) -> int:
    return int(np.count_nonzero(~np.isfinite(as_float32(bits))))


@pytest.mark.parametrize("size", [0, 1, 7, 64, 1001])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_counts(size: int, bad: float) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    assert count_nonfinite(x) == 0
    x[::3] = bad
    bf16 = (x.view(np.uint32) >> 16).astype(np.uint16)
    expected = (size + 2) // 3
    assert count_nonfinite(x) == expected_of(x) == expected
    assert count_nonfinite(bf16) == expected_of(bf16) == expected


def test_the_largest_finite_values_count_as_finite() -> None:
    x = np.array([np.finfo(np.float32).max, np.finfo(np.float32).tiny / 2, -0.0], np.float32)
    assert count_nonfinite(x) == 0
    assert count_nonfinite(np.array([0x7F7F, 0x8000, 0x0001], np.uint16)) == 0
