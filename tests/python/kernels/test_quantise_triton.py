"""The encodings on a GPU against the same oracle, bit for bit; where there is no GPU, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import quantise_checks as checks
from triton_arrays import DEVICE, SMALL_BLOCK, OnArrays, array_of, tensor_of, torch, turn_blocks_round

from telegrad.kernels.quantise import (
    INT8,
    QSGD2,
    QSGD4,
    QSGD8,
    Draw,
    Quantisation,
    cpu,
    decode,
    decode_mean,
    encode,
    kernels_of,
)
from telegrad.kernels.quantise import triton as kernels

GPU = OnArrays(kernels)
pytestmark = [
    pytest.mark.usefixtures("in_small_blocks"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # of numpy, in the interpreter, about NaN and infinity
]
every_quantisation = pytest.mark.parametrize("how", checks.QUANTISATIONS, ids=checks.NAMES)


@pytest.fixture
def in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", SMALL_BLOCK)
    turn_blocks_round(monkeypatch)


@every_quantisation
@pytest.mark.parametrize("size", [0, 1, 257, 1024, 2300])
def test_sizes(how: Quantisation, size: int) -> None:
    checks.check_quantisation(GPU, how, size, "ordinary", Draw(3, 4, 5), 64)


@pytest.mark.parametrize("how", [QSGD2, INT8], ids=["qsgd2", "int8"])
@pytest.mark.parametrize("kind", checks.KINDS)
def test_kinds_of_values(how: Quantisation, kind: str) -> None:
    checks.check_quantisation(GPU, how, 1100, kind, Draw(3, 4, 5), 0)


@pytest.mark.parametrize("first", checks.FIRSTS)
@pytest.mark.parametrize("draw", checks.DRAWS, ids=["0", "most", "some"])
def test_draws(draw: Draw, first: int) -> None:
    checks.check_quantisation(GPU, QSGD4, 70, "ordinary", draw, first)


@pytest.mark.parametrize("size", [2047, 2048, 2049, 4100])
def test_sizes_around_a_program(size: int) -> None:
    values = checks.values_of("mixed", size)
    for how in (QSGD8, INT8):
        got, expected = np.full(how.encoded_bytes(size), 0xA5, np.uint8), np.zeros(how.encoded_bytes(size), np.uint8)
        GPU.quantise(how, Draw(1, 2, 3), 0, values, got)
        cpu.quantise(how, Draw(1, 2, 3), 0, values, expected)
        assert got.tobytes() == expected.tobytes()


@every_quantisation
@pytest.mark.parametrize("size", [1, 5, 1027])
def test_damage(how: Quantisation, size: int) -> None:
    checks.check_damage(GPU, how, size)


@pytest.mark.parametrize("dtype", ["float16", "uint16"])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000])
def test_narrow(dtype: str, size: int) -> None:
    checks.check_narrow(GPU, dtype, size)


@pytest.mark.parametrize("dtype", ["float16", "uint16"])
def test_widen(dtype: str) -> None:
    checks.check_widen(GPU, dtype, 11)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1, 64, 65, 257])
def test_mean(size: int, sign: float) -> None:
    checks.check_mean(GPU, size, sign)


def test_mean_of_odd_values() -> None:
    checks.check_mean_of_odd_values(GPU)


def test_tensors_go_to_triton_and_damage_is_told() -> None:
    values = tensor_of(checks.values_of("ordinary", 100))
    encoded, again = torch.empty(INT8.encoded_bytes(100), dtype=torch.uint8, device=DEVICE), torch.empty_like(values)
    assert kernels_of(values) is kernels
    encode(INT8, Draw(), 0, values, encoded)
    decode(INT8, encoded, again)
    assert np.abs(array_of(again - values)).max() <= np.abs(array_of(values)).max() / 127
    with pytest.raises(ValueError, match="encoded is not what 100 values become in 8 bits: it is damaged"):
        decode(INT8, encoded | 255, again)
    with pytest.raises(ValueError, match="encoded is not a mean, which is finite or the quiet NaN"):
        decode_mean(torch.full((1,), float("inf"), device=DEVICE), again)


@pytest.mark.xdist_group("gpu_memory")
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU with 30 GiB")
def test_positions_beyond_31_bits() -> None:
    size = 2**31 + 4097
    values = torch.zeros(size, device=DEVICE)
    where = torch.tensor([7, 2**31 - 1, 2**31, 2**31 + 5, size - 1], device=DEVICE)
    values[where] = torch.tensor([1.0, -2, 3, -3, 5], device=DEVICE)  # alike where they share a scale
    encoded = torch.empty(INT8.encoded_bytes(size), dtype=torch.uint8, device=DEVICE)
    kernels.quantise(INT8, Draw(), 0, values, encoded)
    again = torch.empty_like(values)
    assert kernels.dequantise(INT8, encoded, again) == 0
    torch.testing.assert_close(again[where], values[where])
    assert int(again.count_nonzero()) == 5
