"""Staging against its oracle, bit for bit; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import staging_reference
from scatter_checks import DTYPES as FLOATS
from scatter_checks import vector as floats
from triton_arrays import SMALL_BLOCK, OnArrays, tensor_of, torch, turn_blocks_round

from telegrad.kernels.staging import DENSE, kernels_of
from telegrad.kernels.staging import triton as kernels

GPU = OnArrays(kernels)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of numpy, in the interpreter


DTYPES = (*FLOATS, "float64", "int32", "int64", "uint32", "uint64")


def vector(size: int, dtype: str, seed: int) -> np.ndarray:
    """Of integers any."""
    if dtype in FLOATS:
        return floats(size, dtype, seed)
    words = np.random.default_rng(seed).integers(0, 2**64, size, np.uint64)
    return words.view(dtype)[:size].copy()


@pytest.fixture(autouse=True)
def _in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    turn_blocks_round(monkeypatch)


def poisoned(size: int, dtype: str) -> np.ndarray:
    """What no test writes: NaN, or the largest integer."""
    return np.full(size * np.dtype(dtype).itemsize, 0xFF, np.uint8).view(dtype)


@pytest.mark.parametrize("index_type", [np.uint32, np.int64], ids=["u32", "i64"])
@pytest.mark.parametrize("room", [0, 1, 63, 64, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stage(dtype: str, room: int, index_type: type) -> None:
    rng = np.random.default_rng(room)
    indices = rng.integers(0, 2**32 - 1, room, dtype=np.int64)
    if index_type is np.int64 and room > 60:
        indices[[3, 40, 50]] = -1, 2**32, 2**63 - 1
    for counted in {-(2**31), -1, 0, 1, room // 2, room, room + 1, 2**31 - 1}:
        for count_type in (np.int32, np.int64):
            given = (indices.astype(index_type), vector(room, dtype, 3), np.array([counted], count_type))
            got = [poisoned(1, "int64"), poisoned(room, "uint32"), poisoned(room, dtype)]
            expected = [array.copy() for array in got]
            GPU.stage(*given, *got)
            staging_reference.stage(*given, *expected)
            assert [array.tobytes() for array in got] == [array.tobytes() for array in expected]


@pytest.mark.parametrize("absent", [0.0, 1.0, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_sum(dtype: str, absent: float) -> None:
    for size in (0, 1, 63, 64, 65, 500):
        room = size // 2
        rng = np.random.default_rng(size)
        indices = np.sort(rng.choice(max(size, 1), room, replace=False)).astype(np.uint32)
        dense, values = vector(size, dtype, 1), vector(room, dtype, 2)
        for form in {DENSE, -1, -(2**63), 0, room // 2, room}:
            whole = poisoned(size + 20, dtype)
            expected = whole.copy()
            counted = np.array([form], np.int64)
            ended = indices.copy(), values.copy()
            ended[0][max(form, 0) :], ended[1][max(form, 0) :] = 2**32 - 1, poisoned(1, dtype)[0]
            held = (counted, dense if form == DENSE else poisoned(size, dtype), *ended, absent)
            GPU.write_sum(whole[10 : 10 + size], *held)
            staging_reference.write_sum(expected[10 : 10 + size], *held)
            assert whole.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 300])
def test_add_sum(size: int) -> None:
    room = size // 2
    rng = np.random.default_rng(size)
    indices = np.sort(rng.choice(max(size, 1), room, replace=False)).astype(np.uint32)
    before, dense, values = (rng.standard_normal(one).astype(np.float32) for one in (size, size, room))
    for form in {DENSE, -1, 0, room // 2, room}:
        got, expected = before.copy(), before.copy()
        held = (np.array([form], np.int64), dense if form == DENSE else poisoned(size, "float32"), indices, values)
        GPU.add_sum(got, *held)
        staging_reference.add_sum(expected, *held)
        assert got.tobytes() == expected.tobytes()
        assert (got.tobytes() == before.tobytes()) == (form in (-1, 0) or size == 0)


def test_what_failed_is_nan() -> None:
    out, form = tensor_of(np.zeros(70, np.float32)), tensor_of(np.array([-1], np.int64))
    kernels.write_sum(out, form, out, out[:0].view(torch.int32), out[:0], 0.0)
    assert bool(out.isnan().all())


def test_who_works_on_what() -> None:
    assert kernels_of(tensor_of(np.zeros(1, np.float32))) is kernels
    with pytest.raises(TypeError, match="x is a numpy array, which nothing needs to stage: give a tensor on a GPU"):
        kernels_of(np.zeros(1))
