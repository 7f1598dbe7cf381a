"""Packing on the CPU: of indices with the core's kernels, of numbers of a fixed width with numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

Numbers = npt.NDArray[np.uint32]
Octets = npt.NDArray[np.uint8]


def pack_bits(numbers: Numbers, width: int, out: Octets) -> None:
    bits = np.unpackbits(numbers.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    out[:] = np.packbits(bits[:, :width], bitorder="little")


def unpack_bits(packed: Octets, width: int, numbers: Numbers) -> int:
    bits = np.unpackbits(packed, bitorder="little")
    used = numbers.size * width
    wide = np.zeros((numbers.size, 32), np.uint8)
    wide[:, :width] = bits[:used].reshape(-1, width)
    numbers[:] = np.packbits(wide, axis=1, bitorder="little").view(np.uint32).reshape(-1)
    return int(np.count_nonzero(bits[used:]))


def pack_indices(indices: Numbers, out: Octets) -> int:
    return _core.pack_indices(_address(indices), indices.size, _address(out), out.size)


def unpack_indices(packed: Octets, indices: Numbers) -> int:
    return not _core.unpack_indices(_address(packed), packed.size, _address(indices), indices.size)


def _address(x: npt.NDArray[Any]) -> int:
    return int(x.__array_interface__["data"][0])
