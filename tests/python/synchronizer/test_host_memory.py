"""Memory that is exchanged: zeros of any dtype, long ones in huge pages where numpy gets them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from telegrad.synchronizer.gradient_group import zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5, 100_000])
def test_zeros_are_those_of_torch(dtype: torch.dtype, count: int) -> None:
    made = zeros(count, dtype)
    assert made.dtype == dtype
    assert torch.equal(made, torch.zeros(count, dtype=dtype))
    assert made.is_contiguous()
    assert made.data_ptr() % 64 == 0 or not count
    assert not made.requires_grad


def _huge_kib() -> int:
    smaps = Path("/proc/self/smaps").read_text()
    return sum(int(kib) for kib in re.findall(r"AnonHugePages:\s+(\d+) kB", smaps))


def test_long_ones_lie_where_numpy_s_do() -> None:
    before = _huge_kib()
    of_numpy = np.zeros(32 << 20, np.uint8)
    of_numpy.fill(1)
    huge = _huge_kib() - before
    if huge == 0:
        pytest.skip("numpy gets no huge pages here")
    before = _huge_kib()
    made = zeros(8 << 20, torch.float32)
    made.fill_(1.0)
    assert _huge_kib() - before > 16 << 10  # of 32: the system may have run out of some
    assert made.data_ptr() % (2 << 20) == 0
