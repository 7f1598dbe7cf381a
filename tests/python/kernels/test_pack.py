"""Packing on the CPU against its oracle, bit for bit, and what callers are told of wrong lengths and damage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pack_checks as checks
import pytest

from telegrad.kernels.pack import cpu, kernels_of, pack_bits, pack_indices, unpack_bits, unpack_indices

pytestmark = pytest.mark.usefixtures("simd_level")


@pytest.mark.parametrize("count", checks.COUNTS)
@pytest.mark.parametrize("width", checks.WIDTHS)
def test_bits(width: int, count: int) -> None:
    checks.check_bits(cpu, width, count)


@pytest.mark.parametrize("size", checks.SIZES)
@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_indices(layout: str, size: int) -> None:
    checks.check_indices(cpu, layout, size)


@pytest.mark.parametrize("size", [2, 65, 700])
@pytest.mark.parametrize("layout", ["uniform", "runs", "mixed"])
def test_damage(layout: str, size: int) -> None:
    checks.check_damage(cpu, layout, size, 100)


def test_arrays_of_the_cpu_go_to_the_core() -> None:
    assert kernels_of(np.zeros(1, np.uint32)) is cpu


def numbers(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def octets(size: int) -> np.ndarray:
    return np.zeros(size, np.uint8)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (pack_bits, (numbers(5), 0, octets(0)), "width=0 is out of range: use 1 to 32 bits"),
        (pack_bits, (numbers(5), 33, octets(21)), "width=33 is out of range"),
        (pack_bits, (numbers(5), 3, octets(3)), "out has 3 bytes, but 5 numbers of 3 bits take 2"),
        (unpack_bits, (octets(1), 3, numbers(5)), "packed has 1 bytes, but 5 numbers of 3 bits take 2: it is damaged"),
        (unpack_bits, (octets(2) + 255, 3, numbers(5)), "packed has a bit behind its last number: it is damaged"),
        (pack_indices, (numbers(5), octets(32)), "out has 32 bytes, but 5 indices can take 33: make it longer"),
        (unpack_indices, (octets(7), numbers(5)), "packed, of 7 bytes, is not what 5 indices become: it is damaged"),
    ],
    ids=["no width", "width", "out", "length", "spare", "room", "indices"],
)
def test_what_is_refused(function: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)


def test_what_is_packed_is_unpacked() -> None:
    out, again = octets(33), numbers(5) * 0
    length = pack_indices(numbers(5) * 9, out)
    unpack_indices(out[:length], again)
    assert again.tolist() == [0, 9, 18, 27, 36]
    packed = octets(4)
    pack_bits(again, 6, packed)
    unpack_bits(packed, 6, again)
    assert again.tolist() == [0, 9, 18, 27, 36]
