"""Entries added to or written into a dense tensor on a GPU: as the oracle does, bit for bit; where there is no GPU, in
Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import scatter_checks as checks
from triton_arrays import DEVICE, SMALL_BLOCK, OnArrays, torch, turn_blocks_round

from telegrad.kernels.staging import triton as kernels

GPU = OnArrays(kernels)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy, in the interpreter


@pytest.fixture(autouse=True)
def _in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    turn_blocks_round(monkeypatch)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 257])
@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_as_the_oracle(name: str, dtype: str, count: int) -> None:
    checks.check(GPU, name, dtype, count, (np.uint32, np.int64)[count % 2], count)


@pytest.mark.parametrize("held", checks.HELD)
@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_some_of_the_entries_count(name: str, held: int) -> None:
    checks.check(GPU, name, "float32", 130, np.uint32, held)
    checks.check(GPU, name, "uint16", 130, np.int64, held)


@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_nothing_is_written_outside(name: str) -> None:
    room = torch.full((30,), float("nan"), device=DEVICE)
    room[10:20] = 0
    indices = torch.tensor([-5, -1, 3, 10, 19, 2**40], device=DEVICE)
    held = torch.tensor([6], device=DEVICE)
    getattr(kernels, name)(room[10:20], indices, torch.ones(6, device=DEVICE), held)
    assert room[:10].isnan().all()
    assert room[20:].isnan().all()
    assert room[10:20].sum().item() == 1


@pytest.mark.xdist_group("gpu_memory")
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU with 20 GiB")
def test_positions_beyond_31_bits() -> None:
    dense = torch.zeros(2**31 + 4097, device=DEVICE)
    where = torch.tensor([7, 2**31 - 1, 2**31, 2**31 + 5, dense.numel() - 1], device=DEVICE)
    values = torch.tensor([1.0, -2, 3, -4, 5], device=DEVICE)
    held = torch.tensor([5], device=DEVICE)
    kernels.scatter_set(dense, where, values, held)
    kernels.scatter_add(dense, where.to(torch.uint32), values, held)
    assert dense[where].tolist() == [2, -4, 6, -8, 10]
