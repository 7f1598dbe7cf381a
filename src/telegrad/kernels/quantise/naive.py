"""The oracle of ``cpu`` and ``triton``: plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.kernels.quantise import Draw, Quantisation

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[Any]

NAN_BITS = 0x7FC00000


def canonical(x: Floats) -> Floats:
    """Every NaN the one quiet NaN."""
    return np.where(np.isnan(x), np.uint32(NAN_BITS).view(np.float32), x).astype(np.float32)


def narrowed(x: Floats, dtype: np.dtype[Any]) -> Bits:
    """float32 ``x`` as float32, float16 or (uint16) bfloat16, to nearest even."""
    with np.errstate(all="ignore"):
        if dtype == np.float32:
            return canonical(x)
        if dtype == np.float16:
            return np.where(np.isnan(x), np.uint16(0x7E00).view(np.float16), x.astype(np.float16)).astype(np.float16)
        word = x.view(np.uint32).astype(np.uint64)
        upper = (word + 0x7FFF + (word >> 16 & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, upper).astype(np.uint16)


def widened(x: Bits) -> Floats:
    """The other way, exactly."""
    wide = (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)
    return canonical(wide)


def quantise(
    how: Quantisation, draw: Draw, first: int, values: Floats, out: npt.NDArray[np.uint8], error: Floats | None = None
) -> None:
    """Value after value."""
    lost = np.zeros_like(values)
    for begin in range(0, values.size, how.bucket):
        bucket = values[begin : begin + how.bucket]
        magnitude = int((bucket.view(np.uint32) & 0x7FFFFFFF).max())
        scale_bits = magnitude if magnitude < 0x7F800000 else NAN_BITS
        to = how.encoded_bytes(begin)
        out[to : to + how.encoded_bytes(bucket.size)] = 0
        out[to : to + 4] = np.array([scale_bits], np.uint32).view(np.uint8)
        if scale_bits == NAN_BITS:
            continue
        for i, value in enumerate(bucket):
            code = _code(how, value, np.uint32(scale_bits).view(np.float32), _word(how, draw, first + begin + i))
            bit = i * how.bits
            out[to + 4 + bit // 8] |= (code & (1 << how.bits) - 1) << bit % 8
            lost[begin + i] = value - _value(how, code, np.uint32(scale_bits).view(np.float32))
    if error is not None:
        error[:] = lost


def dequantise(how: Quantisation, encoded: npt.NDArray[np.uint8], values: Floats) -> int:
    """How many faults there are."""
    faults = 0
    for begin in range(0, values.size, how.bucket):
        count = min(how.bucket, values.size - begin)
        at = how.encoded_bytes(begin)
        scale_bits = int(encoded[at : at + 4].view(np.uint32)[0])
        faults += scale_bits >= 0x7F800000 and scale_bits != NAN_BITS
        for i in range((count * how.bits + 7) // 8 * 8 // how.bits):
            bit = i * how.bits
            field = int(encoded[at + 4 + bit // 8]) >> bit % 8 & (1 << how.bits) - 1
            code = field - (1 << how.bits if field >> (how.bits - 1) else 0)
            faults += code < -how.levels or (i >= count and code != 0)
            if i < count:
                with np.errstate(all="ignore"):
                    decoded = _value(how, code, np.uint32(scale_bits).view(np.float32))
                values[begin + i : begin + i + 1] = canonical(np.array([decoded], np.float32))
    return faults


def narrow(values: Floats, out: Bits, error: Floats | None = None) -> None:
    """The rounding of ``narrowed``."""
    out[:] = narrowed(values, out.dtype)
    if error is not None:
        error[:] = _lost(values, widened(out))


def widen(encoded: Bits, values: Floats) -> None:
    """As ``widened``."""
    values[:] = widened(encoded)


def mean_of_one_sign(values: Floats, out: Floats, error: Floats | None = None) -> bool:
    """The mean of an exactly rounded sum."""
    finite = bool(np.isfinite(values).all())
    if finite and (values > 0).any() and (values < 0).any():
        return False
    mean = np.float32(math.fsum(map(float, values)) / values.size) if finite and values.size else np.float32(0)
    out[:] = mean if finite else np.uint32(NAN_BITS).view(np.float32)
    if error is not None:
        error[:] = _lost(values, np.full_like(values, out[0]))
    return True


def fill_mean(encoded: Floats, values: Floats) -> int:
    """How many faults there are."""
    bits = int(encoded.view(np.uint32)[0])
    values[:] = encoded[0]
    return int(bits & 0x7FFFFFFF >= 0x7F800000 and bits != NAN_BITS)


def _lost(values: Floats, decoded: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(decoded), values - decoded, np.float32(0))


def _code(how: Quantisation, value: np.float32, scale: np.float32, word: int) -> int:
    most = np.float32(how.levels * 2**24)
    magnify = np.float32(2.0**100 if scale < np.float32(2.0**-60) else 1)
    to_fixed = most / (scale * magnify) if scale > 0 else np.float32(0)
    fixed = int(min(np.abs(value) * magnify * to_fixed, most))
    level = fixed + (word >> 8) >> 24
    return -level if np.signbit(value) else level


def _value(how: Quantisation, code: int, scale: np.float32) -> np.float32:
    return np.float32(scale * (np.float32(code) * np.float32(1 / np.float32(how.levels))))


def _word(how: Quantisation, draw: Draw, index: int) -> int:
    """The random word of the value with that index; half a level where there is no chance."""
    if not how.stochastic:
        return 0x80000000
    counter = index // 64 * 16 + index % 16
    return _philox((counter & 0xFFFFFFFF, counter >> 32, draw.rank, draw.call), draw.seed)[index % 64 // 16]


def _philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: Salmon, Moraes, Dror, Shaw, SC 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
