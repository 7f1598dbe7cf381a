"""The core's encodings against their oracle, bit for bit, and what callers are told of wrong lengths and damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quantise_checks as checks

from telegrad.kernels.quantise import INT8, QSGD4, Draw, Quantisation, cpu, decode, decode_mean, encode, kernels_of

pytestmark = pytest.mark.usefixtures("simd_level")
every_quantisation = pytest.mark.parametrize("how", checks.QUANTISATIONS, ids=checks.NAMES)


@every_quantisation
@pytest.mark.parametrize("size", checks.SIZES)
def test_sizes(how: Quantisation, size: int) -> None:
    checks.check_quantisation(cpu, how, size, "ordinary", Draw(3, 4, 5), 64)


@every_quantisation
@pytest.mark.parametrize("kind", checks.KINDS)
def test_kinds_of_values(how: Quantisation, kind: str) -> None:
    checks.check_quantisation(cpu, how, 1100, kind, Draw(3, 4, 5), 0)


@pytest.mark.parametrize("first", checks.FIRSTS)
@pytest.mark.parametrize("draw", checks.DRAWS, ids=["0", "most", "some"])
def test_draws(draw: Draw, first: int) -> None:
    checks.check_quantisation(cpu, QSGD4, 300, "ordinary", draw, first)


@every_quantisation
@pytest.mark.parametrize("size", [1, 5, 1027])
def test_damage(how: Quantisation, size: int) -> None:
    checks.check_damage(cpu, how, size)


@pytest.mark.parametrize("dtype", ["float16", "uint16"])
@pytest.mark.parametrize("size", [0, 1, 7, 1024, 5000])
def test_narrow(dtype: str, size: int) -> None:
    checks.check_narrow(cpu, dtype, size)


@pytest.mark.parametrize("dtype", ["float16", "uint16"])
def test_widen(dtype: str) -> None:
    checks.check_widen(cpu, dtype, 1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 1000])
def test_mean(size: int, sign: float) -> None:
    checks.check_mean(cpu, size, sign)


def test_mean_of_odd_values() -> None:
    checks.check_mean_of_odd_values(cpu)


def test_the_mean_of_what_decodes_is_the_value() -> None:
    values = np.linspace(-1, 1, 64).astype(np.float32)
    decoded, total, calls = np.empty_like(values), np.zeros(64), 2000
    encoded = np.empty(QSGD4.encoded_bytes(64), np.uint8)
    for call in range(calls):
        encode(QSGD4, Draw(1, call, 0), 0, values, encoded)
        decode(QSGD4, encoded, decoded)
        total += decoded
    # A value lies between two levels 1/7 apart: its deviation is at most half of that.
    assert np.abs(total / calls - values).max() < 5 * (0.5 / 7) / calls**0.5


def test_arrays_of_the_cpu_go_to_the_core() -> None:
    assert kernels_of(np.zeros(1, np.float32)) is cpu


def floats(size: int) -> np.ndarray:
    return np.ones(size, np.float32)


def octets(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (encode, (INT8, Draw(), 0, floats(5), octets(8)), "out has 8 bytes, but 5 values take 9: give it as many"),
        (encode, (INT8, Draw(), 0, floats(5), octets(9), floats(4)), "error has 4 elements but values has 5: give"),
        (encode, (INT8, Draw(), 63, floats(5), octets(9)), "first=63 is not a multiple of 64: cut vectors where"),
        (decode, (INT8, octets(10), floats(5)), "encoded has 10 bytes, but 5 values take 9: it is damaged"),
        (decode, (INT8, octets(9) + 255, floats(5)), "encoded is not what 5 values become in 8 bits: it is damaged"),
        (decode_mean, (floats(2), floats(5)), "encoded has 2 elements but a mean is one: it is damaged"),
        (decode_mean, (floats(1) * np.inf, floats(5)), "encoded is not a mean, which is finite or the quiet NaN: it"),
        (Quantisation, (3, 1024, True), "bits=3 is not supported: use 2, 4 or 8"),
        (Quantisation, (4, 96, True), "bucket=96 is no power of two from 64 on: use 1024, say"),
        (Quantisation, (4, 32, True), "bucket=32 is no power of two"),
    ],
    ids=["out", "error", "first", "length", "code", "means", "infinite", "bits", "bucket", "short bucket"],
)
def test_what_is_refused(function: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_means_are_decoded() -> None:
    values = floats(3)
    decode_mean(np.array([2.5], np.float32), values)
    assert values.tolist() == [2.5] * 3
