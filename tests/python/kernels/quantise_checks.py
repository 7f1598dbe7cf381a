"""What every implementation of the encodings must do: what the oracle does, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from telegrad.kernels.quantise import INT8, QSGD2, QSGD4, QSGD8, Draw, Quantisation, naive

QUANTISATIONS = (QSGD8, QSGD4, QSGD2, INT8)
NAMES = ("qsgd8", "qsgd4", "qsgd2", "int8")
SIZES = (0, 1, 3, 64, 255, 256, 257, 1023, 1024, 1025, 2300)
DRAWS = (Draw(), Draw(2**64 - 3, 2**32 - 1, 2**32 - 5), Draw(12345, 6, 7))
FIRSTS = (0, 64 * 7, 2**38 - 1024, 2**40 + 64)  # at 2^38 counters go beyond 32 bits
GUARD = 16

KINDS = ("ordinary", "tiny", "huge", "zero", "constant", "spoilt", "mixed")


def values_of(kind: str, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    x = rng.standard_normal(size).astype(np.float32)
    if kind == "tiny":
        return x * np.float32(1e-41)  # denormal: their scale has no finite reciprocal
    if kind == "huge":
        return np.clip(x.astype(np.float64) * 1e38, -3.4e38, 3.4e38).astype(np.float32)
    if kind == "zero":
        return np.where(rng.random(size) < 0.5, np.float32(0), np.float32(-0.0))
    if kind == "constant":
        return np.full(size, -1.5, np.float32)
    if kind == "spoilt":  # a bucket or two of them
        x[size // 2 : size // 2 + 1] = np.nan
        x[-1:] = -np.inf
    if kind == "mixed":
        x = (x * 10.0 ** rng.integers(-44, 38, size)).astype(np.float32)
        x[np.isinf(x)] = 3e38
    return x


def bits(x: np.ndarray) -> list[int]:
    return x.view(f"u{x.itemsize}").tolist()  # type: ignore[no-any-return]


def guarded(size: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Memory of NaN, or of odd bytes, and the part of it that is to be written."""
    room = np.full(size + 2 * GUARD, 0xA5 if dtype == "uint8" else np.nan, dtype)
    return room, room[GUARD : GUARD + size]


def check_guard(room: np.ndarray) -> None:
    for outside in (room[:GUARD], room[room.size - GUARD :]):
        assert np.isnan(outside).all() if room.dtype == np.float32 else (outside == 0xA5).all()


def check_quantisation(kernels: Any, how: Quantisation, size: int, kind: str, draw: Draw, first: int) -> None:
    """Bytes, errors (also where they are written over the values), and what the bytes decode to."""
    values = values_of(kind, size)
    expected, expected_error = np.zeros(how.encoded_bytes(size), np.uint8), np.zeros_like(values)
    naive.quantise(how, draw, first, values, expected, expected_error)
    (room, out), (error_room, error) = guarded(expected.size, "uint8"), guarded(size, "float32")
    kernels.quantise(how, draw, first, values, out)
    assert out.tobytes() == expected.tobytes()
    out[:] = 0xA5
    kernels.quantise(how, draw, first, values, out, error)
    assert out.tobytes() == expected.tobytes()
    assert bits(error) == bits(expected_error)
    check_guard(room)
    check_guard(error_room)
    in_place = values.copy()
    kernels.quantise(how, draw, first, in_place, out, in_place)
    assert (out.tobytes(), bits(in_place)) == (expected.tobytes(), bits(expected_error))
    (value_room, got), decoded = guarded(size, "float32"), np.empty_like(values)
    assert kernels.dequantise(how, out, got) == 0
    assert naive.dequantise(how, expected, decoded) == 0
    assert bits(got) == bits(decoded)
    check_guard(value_room)
    finite = np.isfinite(decoded)
    np.testing.assert_array_equal(error[~finite], 0)
    with np.errstate(over="ignore"):
        assert bits(values[finite] - decoded[finite]) == bits(error[finite])


def check_damage(kernels: Any, how: Quantisation, size: int) -> None:
    """Scales, codes and spare bits that no value has are found where the oracle finds them, others decoded alike."""
    encoded = np.zeros(how.encoded_bytes(size), np.uint8)
    naive.quantise(how, Draw(5), 0, values_of("ordinary", size), encoded)
    scales = [np.array([bits_], np.uint32).view(np.uint8) for bits_ in (0xBF800000, 0x7F800000, 0x7FC00001, 0x80000000)]
    found = 0
    for place, scale in enumerate(scales):
        hurt = encoded.copy()
        hurt[: scale.size] = scale
        assert kernels.dequantise(how, hurt, np.empty(size, np.float32)) != 0, place
    lowest = sum(1 << how.bits - 1 + bit for bit in range(0, 8, how.bits))  # codes below the lowest level
    for place, octet in ((4, lowest), (4, 0xFF), (-1, 0xFF), (-1, 0x40), (encoded.size // 2, lowest)):
        hurt = encoded.copy()
        hurt[place] = octet
        got, expected = np.empty(size, np.float32), np.empty(size, np.float32)
        damaged = naive.dequantise(how, hurt, expected) != 0
        assert (kernels.dequantise(how, hurt, got) != 0) == damaged
        assert damaged or bits(got) == bits(expected)
        found += damaged
    assert found > 0


ODD = (0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 65504.0, 65519.99, 65520.0, 3.4e38, -3.4e38, 6e-8, 2.9e-8, 1e-40)


def rounded_values(size: int) -> np.ndarray:
    """All that can be hard to round: ties, what is too large, what is too small, any bits."""
    rng = np.random.default_rng(size)
    any_bits = rng.integers(0, 2**32, size, np.uint64).astype(np.uint32).view(np.float32)
    halfway = (rng.integers(0x0, 0x7F80, size) << 16 | 0x8000).astype(np.uint32).view(np.float32)
    tied = (rng.integers(0x38000, 0x47800, size) << 12 | 0x1000).astype(np.uint32).view(np.float32)
    small = (rng.integers(0, 2**11, size) * 2.0**-25).astype(np.float32)  # of half a smallest float16
    chosen = rng.integers(0, 5, size)
    return np.choose(chosen, (any_bits, halfway, tied, small, rng.choice(np.array(ODD, np.float32), size)))


def check_narrow(kernels: Any, dtype: str, size: int) -> None:
    values = rounded_values(size)
    expected, expected_error = np.zeros(size, dtype), np.zeros(size, np.float32)
    naive.narrow(values, expected, expected_error)
    out, (room, error) = np.full(size, 0x5A5A, np.uint16).view(dtype), guarded(size, "float32")
    kernels.narrow(values, out)
    assert bits(out) == bits(expected)
    kernels.narrow(values, out, error)
    assert (bits(out), bits(error)) == (bits(expected), bits(expected_error))
    check_guard(room)
    in_place = values.copy()
    kernels.narrow(in_place, out, in_place)
    assert (bits(out), bits(in_place)) == (bits(expected), bits(expected_error))


def check_widen(kernels: Any, dtype: str, step: int) -> None:
    """Every ``step``-th of all 16-bit floats."""
    encoded = np.arange(0, 2**16, step, dtype=np.uint16).view(dtype)
    (room, got), expected = guarded(encoded.size, "float32"), np.empty(encoded.size, np.float32)
    kernels.widen(encoded, got)
    with np.errstate(invalid="ignore"):
        naive.widen(encoded, expected)
    assert bits(got) == bits(expected)
    check_guard(room)


def check_mean(kernels: Any, size: int, sign: float) -> None:
    rng = np.random.default_rng(size)
    exact = (sign * rng.integers(0, 1000, size) / 4).astype(np.float32)  # sums of quarters are exact in any order
    for values, units in ((exact, 0), ((sign * rng.random(size) ** 9).astype(np.float32), 1)):
        expected, expected_error = np.zeros(1, np.float32), np.zeros(size, np.float32)
        assert naive.mean_of_one_sign(values, expected, expected_error)
        out, (room, error) = np.full(1, np.nan, np.float32), guarded(size, "float32")
        assert kernels.mean_of_one_sign(values, out) is True
        assert kernels.mean_of_one_sign(values, out, error) is True
        assert abs(int(out.view(np.int32)[0]) - int(expected.view(np.int32)[0])) <= units
        assert bits(error) == bits(values - out[0])
        check_guard(room)
        (room, filled) = guarded(size, "float32")
        assert kernels.fill_mean(out, filled) == 0
        assert bits(filled) == bits(np.full(size, out[0]))
        check_guard(room)


def check_mean_of_odd_values(kernels: Any) -> None:
    def mean(*values: float) -> tuple[bool, int, list[float]]:
        out, error = np.full(1, 77, np.float32), np.full(len(values), 77, np.float32)
        said = kernels.mean_of_one_sign(np.array(values, np.float32), out, error)
        return said, int(out.view(np.uint32)[0]), error.tolist()

    assert mean() == (True, 0, [])
    assert mean(0.0, -0.0, 0.0) == (True, 0, [0, 0, 0])
    assert mean(1.0, -0.0, 2.0) == (True, 0x3F800000, [0, -1, 1])
    assert mean(1.0, -1e-40)[0] is False
    assert mean(-1.0, 1e-40)[0] is False
    for spoilt in (np.nan, np.inf, -np.inf):
        assert mean(1.0, spoilt) == (True, 0x7FC00000, [0, 0])
        assert mean(1.0, spoilt, -1.0) == (True, 0x7FC00000, [0, 0, 0])
    for scale, damaged in ((0x7FC00000, False), (0x80000000, False), (0x7F800000, True), (0xFFC00000, True)):
        encoded = np.array([scale], np.uint32).view(np.float32)
        assert bool(kernels.fill_mean(encoded, np.empty(3, np.float32))) is damaged
