"""Packing on a GPU against the same oracle, bit for bit; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pack_checks as checks
import pytest
from triton_arrays import DEVICE, SMALL_BLOCK, OnArrays, array_of, tensor_of, torch, turn_blocks_round

from telegrad.kernels.pack import kernels_of, pack_bits, pack_indices, packed_indices_most, unpack_bits, unpack_indices
from telegrad.kernels.pack import triton as kernels
from telegrad.kernels.pack.triton.plan import plan_of

GPU = OnArrays(kernels)
pytestmark = pytest.mark.usefixtures("in_small_blocks")


@pytest.fixture
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(kernels, "_TILE", 256)
    turn_blocks_round(monkeypatch)


@pytest.mark.parametrize("count", [0, 1, 65, 300])
@pytest.mark.parametrize("width", checks.WIDTHS)
def test_bits(width: int, count: int) -> None:
    checks.check_bits(GPU, width, count)


@pytest.mark.parametrize("size", [1, 2, 64, 65, 1024, 1025])
@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_indices(layout: str, size: int) -> None:
    checks.check_indices(GPU, layout, size)


class _NumbersOfWhere(torch.utils._python_dispatch.TorchDispatchMode):
    """A number that torch.where is given becomes a tensor on the host, and on a GPU is copied there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.scalar_tensor.default, "the host would wait for a copy"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_the_plan_waits_for_nothing(layout: str) -> None:
    indices = tensor_of(checks.indices_of(layout, 1500).astype(np.int64))
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _NumbersOfWhere():
            plan_of(indices)
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def test_no_indices_at_all() -> None:
    checks.check_indices(GPU, "all", 0)
    assert GPU.unpack_indices(np.zeros(1, np.uint8), np.zeros(0, np.uint32)) != 0


@pytest.mark.parametrize("layout", ["uniform", "runs", "mixed"])
def test_damage(layout: str) -> None:
    checks.check_damage(GPU, layout, 130, 20)


def test_tensors_go_to_triton_and_damage_is_told() -> None:
    indices = tensor_of(checks.indices_of("uniform", 100))
    out = torch.empty(packed_indices_most(100), dtype=torch.uint8, device=DEVICE)
    assert kernels_of(indices) is kernels
    length = pack_indices(indices, out)
    again = tensor_of(np.zeros(100, np.uint32))
    unpack_indices(out[:length], again)
    np.testing.assert_array_equal(array_of(again), array_of(indices))
    with pytest.raises(ValueError, match=r"packed, of \d+ bytes, is not what 100 indices become: it is damaged"):
        unpack_indices(out[: length - 1], again)
    packed = torch.empty(38, dtype=torch.uint8, device=DEVICE)
    pack_bits(indices[:100], 3, packed)
    packed[-1] |= 128
    with pytest.raises(ValueError, match="packed has a bit behind its last number: it is damaged"):
        unpack_bits(packed, 3, again)


@pytest.mark.xdist_group("gpu_memory")
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU with 40 GiB")
def test_numbers_beyond_31_bits() -> None:
    count = 2**31 + 4097
    numbers = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    numbers[-3:] = 7
    packed = torch.empty((count * 3 + 7) // 8, dtype=torch.uint8, device=DEVICE)
    pack_bits(numbers.view(torch.uint32), 3, packed)
    again = torch.empty_like(numbers)
    unpack_bits(packed, 3, again.view(torch.uint32))
    assert again[-4:].tolist() == [0, 7, 7, 7]
    assert int(again.count_nonzero()) == 3
