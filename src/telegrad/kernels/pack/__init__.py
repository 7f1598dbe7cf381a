"""Integers in few bits: any of a fixed width, and strictly increasing indices near their entropy.

*Fixed width*: ``width`` low bits of each number, one behind the other, the lowest first; spare bits of the last byte
are 0.

*Indices*: the ``packed`` format of messages, blocks of at most 1,024 indices in Golomb-Rice code or as runs, as
``core/codec/pack_indices.hpp`` says. A GPU writes the same bytes as a CPU and reads whatever a CPU reads, so either
may be at either end.

Numbers and indices are uint32, bytes are uint8, all contiguous. ``cpu`` does it for numpy arrays, indices with the
core's kernels, ``triton`` for torch tensors on a GPU, and ``naive`` is the oracle of both, bit for bit.
"""

from __future__ import annotations

from typing import Any, Protocol

from telegrad.kernels.placement import is_on_gpu

Array = Any
"""A numpy array, or a torch tensor on a GPU."""

BLOCK_MOST = 1024
"""Indices of one block."""
BLOCK_LEAST = 64
"""Where a block is cut for its bytes, no part but the last one has fewer indices."""
RUN_LEAST = 4
"""Indices of a run on average, where a block holds runs."""


class Kernels(Protocol):
    """The functions for arrays of one kind. Lengths have been checked."""

    def pack_bits(self, numbers: Array, width: int, out: Array) -> None:
        """See ``packed_bits_bytes``. Bits of a number beyond ``width`` are left out."""

    def unpack_bits(self, packed: Array, width: int, numbers: Array) -> int:
        """0, or another number where a spare bit is set."""

    def pack_indices(self, indices: Array, out: Array) -> int:
        """How many bytes were written; those behind are of no use. Indices are strictly increasing."""

    def unpack_indices(self, packed: Array, indices: Array) -> int:
        """0, or another number where ``packed`` is damaged."""


def kernels_of(numbers: Array) -> Kernels:
    """The functions for arrays such as ``numbers``: by where it lies. Raises as ``placement.is_on_gpu``."""
    if is_on_gpu(numbers, "numbers"):
        from telegrad.kernels.pack import triton

        return triton
    from telegrad.kernels.pack import cpu

    return cpu


def packed_bits_bytes(count: int, width: int) -> int:
    """What so many numbers take. Raises ``ValueError`` for a width that is not 1 to 32."""
    if not 1 <= width <= 32:
        raise ValueError(f"width={width} is out of range: use 1 to 32 bits")
    return (count * width + 7) // 8


def pack_bits(numbers: Array, width: int, out: Array) -> None:
    """Packs numbers of a fixed width. A GPU is not waited for.

    Raises ``ValueError`` where ``out`` has not ``packed_bits_bytes`` of them, and as that does.
    """
    expected = packed_bits_bytes(len(numbers), width)
    if len(out) != expected:
        raise ValueError(f"out has {len(out)} bytes, but {len(numbers)} numbers of {width} bits take {expected}")
    kernels_of(numbers).pack_bits(numbers, width, out)


def unpack_bits(packed: Array, width: int, numbers: Array) -> None:
    """The other way. A GPU is waited for once.

    Raises ``ValueError`` where ``packed`` has another length than so many numbers take, or a spare bit that is set.
    """
    expected = packed_bits_bytes(len(numbers), width)
    if len(packed) != expected:
        raise ValueError(
            f"packed has {len(packed)} bytes, but {len(numbers)} numbers of {width} bits take {expected}: it is damaged"
        )
    if kernels_of(numbers).unpack_bits(packed, width, numbers):
        raise ValueError("packed has a bit behind its last number: it is damaged; ask for it again")


def packed_indices_most(count: int) -> int:
    """No ``count`` indices take more bytes."""
    return 5 * count + 8 * (-(-count // BLOCK_MOST))


def pack_indices(indices: Array, out: Array) -> int:
    """Packs strictly increasing indices; returns the bytes written. A GPU is waited for once.

    Raises ``ValueError`` where ``out`` has fewer bytes than ``packed_indices_most`` of them.
    """
    most = packed_indices_most(len(indices))
    if len(out) < most:
        raise ValueError(f"out has {len(out)} bytes, but {len(indices)} indices can take {most}: make it longer")
    return kernels_of(indices).pack_indices(indices, out)


def unpack_indices(packed: Array, indices: Array) -> None:
    """The other way: all of ``packed``, as many indices as there is room for. A GPU is waited for twice.

    Raises ``ValueError``, and ``indices`` are of no use, where ``packed`` is not what so many strictly increasing
    indices become. Any bytes are safe. Whether indices lie inside a vector is for ``kernels.scatter`` to see.
    """
    if kernels_of(indices).unpack_indices(packed, indices):
        raise ValueError(
            f"packed, of {len(packed)} bytes, is not what {len(indices)} indices become: it is damaged; ask for it "
            "again"
        )
