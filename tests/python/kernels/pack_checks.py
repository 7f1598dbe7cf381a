"""What every implementation of packing must do: what the oracle does, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from telegrad.kernels.pack import naive, packed_bits_bytes, packed_indices_most

WIDTHS = (1, 2, 3, 7, 8, 9, 13, 24, 31, 32)
COUNTS = (0, 1, 5, 63, 64, 65, 200)
GUARD = 0xA5

LAYOUTS = ("uniform", "dense", "all", "rare", "runs", "short runs", "mixed", "ends")
SIZES = (0, 1, 2, 63, 64, 65, 128, 129, 1023, 1024, 1025, 2500)


def indices_of(layout: str, size: int) -> np.ndarray:
    """Strictly increasing, with blocks of gaps, of runs, cut ones and whole ones among them."""
    rng = np.random.default_rng(size)
    if layout == "ends":  # as far apart as two indices can be
        few = [0, 2**31, 2**32 - 1]
        return np.array(few if size > 2 else few[3 - size :], np.uint32)
    gaps = {
        "uniform": rng.geometric(0.01, size),
        "dense": rng.integers(1, 3, size),
        "all": np.ones(size, int),
        "rare": rng.integers(1, 2**32 // max(size, 1), size),
        "runs": np.where(rng.random(size) < 0.02, rng.integers(2, 1000, size), 1),
        "short runs": np.where(rng.random(size) < 0.2, 3, 1),
        "mixed": np.where(np.arange(size) % 700 < 300, 1, rng.integers(1, 10**5, size)),
    }[layout]
    return (np.cumsum(gaps) - 1).astype(np.uint32)


def check_bits(kernels: Any, width: int, count: int) -> None:
    numbers = np.random.default_rng(width + count).integers(0, 2**32, count).astype(np.uint32)
    size = packed_bits_bytes(count, width)
    room, expected = np.full(size + 16, GUARD, np.uint8), np.zeros(size, np.uint8)
    kernels.pack_bits(numbers, width, room[8 : 8 + size])
    naive.pack_bits(numbers, width, expected)
    assert room[8 : 8 + size].tobytes() == expected.tobytes()
    assert (room[:8] == GUARD).all()
    assert (room[8 + size :] == GUARD).all()
    again = np.full(count + 2, 7, np.uint32)
    assert kernels.unpack_bits(expected, width, again[1:-1]) == 0
    np.testing.assert_array_equal(again[1:-1], numbers & np.uint32((1 << width) - 1))
    assert (again[0], again[-1]) == (7, 7)
    if spare := -count * width % 8:
        expected[-1] |= 1 << 8 - spare
        assert kernels.unpack_bits(expected, width, again[1:-1]) != 0


def check_indices(kernels: Any, layout: str, size: int) -> None:
    indices = indices_of(layout, size)
    room, packed = (np.full(packed_indices_most(indices.size), octet, np.uint8) for octet in (GUARD, 0))
    count = naive.pack_indices(indices, packed)
    assert kernels.pack_indices(indices, room) == count
    assert room[:count].tobytes() == packed[:count].tobytes()
    again = np.full(indices.size + 2, 7, np.uint32)
    assert kernels.unpack_indices(packed[:count], again[1:-1]) == 0
    np.testing.assert_array_equal(again[1:-1], indices)
    assert (again[0], again[-1]) == (7, 7)


def damaged(indices: np.ndarray, times: int) -> list[np.ndarray]:
    """The packed bytes with a bit turned, a byte cut off, a byte too many, and what no sender makes."""
    room = np.zeros(packed_indices_most(indices.size), np.uint8)
    packed = room[: naive.pack_indices(indices, room)]
    rng = np.random.default_rng(indices.size)
    hurt = [packed[:-1], np.append(packed, np.uint8(0)), packed[:4], packed[:0]]
    places = np.append(rng.integers(0, 8, times // 2), rng.integers(0, packed.size, times - times // 2))
    for place in places:
        hurt.append(packed.copy())
        hurt[-1][place] ^= np.uint8(1 << int(rng.integers(8)))
    hurt.append(rng.integers(0, 256, packed.size).astype(np.uint8))
    hurt.append(np.full(packed.size, 0xFF, np.uint8))
    return hurt


def check_damage(kernels: Any, layout: str, size: int, times: int) -> None:
    """Found where the oracle finds it; else the same indices. Memory around the indices is left alone."""
    found = 0
    for packed in damaged(indices_of(layout, size), times):
        room, expected = np.full(size + 2, 7, np.uint32), np.zeros(size, np.uint32)
        faults = naive.unpack_indices(packed, expected)
        assert (kernels.unpack_indices(packed, room[1:-1]) != 0) == (faults != 0)
        if not faults:
            np.testing.assert_array_equal(room[1:-1], expected)
        assert (room[0], room[-1]) == (7, 7)
        found += faults != 0
    assert found >= 4
