"""Memory that is exchanged: zeros of any dtype, long ones in huge pages where numpy gets them."""

from __future__ import annotations

import mmap
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


def _may_be_huge(address: int) -> bool:
    """Whether the memory there has asked for huge pages; whether it gets some is up to what the system has left."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif here and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise LookupError(f"{address:#x} is in no mapping")


def test_long_ones_lie_where_numpy_s_do() -> None:
    of_numpy = np.zeros(32 << 20, np.uint8)
    if not _may_be_huge(of_numpy.ctypes.data + (16 << 20)):
        pytest.skip("numpy asks for no huge pages here")
    made = zeros(8 << 20, torch.float32)
    assert _may_be_huge(made.data_ptr() + (16 << 20))
    assert made.data_ptr() % (2 << 20) == 0
    # Not torch.zeros: malloc may give it memory that numpy had before.
    plain = np.frombuffer(mmap.mmap(-1, 64 << 20), np.uint8)
    assert not _may_be_huge(plain.ctypes.data + (16 << 20)), "else nothing is shown"
