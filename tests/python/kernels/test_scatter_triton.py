"""Scattering on a GPU against the same oracle, bit for bit; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import scatter_checks as checks
from triton_arrays import DEVICE, SMALL_BLOCK, OnArrays, array_of, tensor_of, torch, turn_blocks_round

from telegrad.kernels.scatter import add_streams, kernels_of
from telegrad.kernels.scatter import triton as kernels

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
    index_type, base = ((np.uint32, 0), (np.int64, 2**40), (np.uint32, 1000))[count % 3]
    checks.check(GPU, name, dtype, count, index_type, base)


@pytest.mark.parametrize("held", checks.HELD)
@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_some_of_the_entries_count(name: str, held: int | None) -> None:
    checks.check(GPU, name, "float32", 130, np.uint32, 0, held)
    checks.check(GPU, name, "uint16", 130, np.int64, 7, held)


def test_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "BLOCK", 2)  # an index is compared with the last one of the block before
    checks.check_faults(GPU)


@pytest.mark.parametrize("name", checks.FUNCTIONS)
def test_nothing_is_written_outside(name: str) -> None:
    room = torch.full((30,), float("nan"), device=DEVICE)
    room[10:20] = 0
    indices = torch.tensor([-5, -1, 3, 10, 19, 2**40], device=DEVICE)
    values = torch.ones(6, device=DEVICE)
    getattr(kernels, name)(room[10:20], *((indices,) if name == "clear" else (indices, values)))
    assert room[:10].isnan().all()
    assert room[20:].isnan().all()
    assert room[10:20].sum().item() == (0 if name == "clear" else 1)


def test_tensors_go_to_triton_and_streams_are_checked_there() -> None:
    dense = tensor_of(np.zeros(4, np.float32))
    assert kernels_of(dense) is kernels
    good = (tensor_of(np.array([0, 3], np.uint32)), tensor_of(np.ones(2, np.float32)))
    add_streams(dense, [good, good])
    assert array_of(dense).tolist() == [2, 0, 0, 2]
    bad = (tensor_of(np.array([3, 0], np.uint32)), good[1])
    with pytest.raises(ValueError, match="stream 2 has 1 indices that are not above"):
        add_streams(dense, [good, good, bad])
    assert array_of(dense).tolist() == [2, 0, 0, 2]


@pytest.mark.xdist_group("gpu_memory")
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU with 20 GiB")
def test_positions_beyond_31_bits() -> None:
    dense = torch.zeros(2**31 + 4097, device=DEVICE)
    where = torch.tensor([7, 2**31 - 1, 2**31, 2**31 + 5, dense.numel() - 1], device=DEVICE)
    values = torch.tensor([1.0, -2, 3, -4, 5], device=DEVICE)
    add_streams(dense, [(where, values), (where.to(torch.uint32), values)])
    assert dense[where].tolist() == [2, -4, 6, -8, 10]
    kernels.clear(dense, where)
    assert not bool(dense.any())
