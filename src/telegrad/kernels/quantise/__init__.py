"""float32 values in fewer bytes: QSGD with 2, 4 or 8 bits, int8, bfloat16, float16, the mean of values of one sign.

The bytes are those of messages (``core/kernels/quantise.hpp`` and ``narrow.hpp``): what one kind of array encodes,
any other decodes. Every function tells what is lost, ``error[i] = values[i] - what values[i] decodes to``; ``error``
may be the memory of ``values``. A bucket that has a NaN or an infinity among its values decodes to NaN as a whole, a
mean too, and leaves an error of 0; so does what becomes infinite in 16 bits.

Source: Alistarh et al., QSGD, NeurIPS 2017, with the largest magnitude as scale (SparCML §6); RedSync §5 (same sign).

``cpu`` does it for numpy arrays with the core's kernels, ``triton`` for torch tensors on a GPU, and ``naive`` is the
oracle of both, bit for bit but for a mean, whose sum of doubles has another order in each: it may differ in its last
bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from telegrad.kernels.placement import is_on_gpu

Array = Any
"""A numpy array, or a torch tensor on a GPU; contiguous."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How values become levels: every ``bucket`` consecutive ones are a scale and a code of ``bits`` bits each.

    Raises ``ValueError`` for other bits than 2, 4 and 8, and for a bucket that is no power of two from 64 on.
    """

    bits: int
    bucket: int  # values
    stochastic: (
        bool  # rounded to either neighbouring level at random, so that the mean is the value; else to the nearest
    )

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits={self.bits} is not supported: use 2, 4 or 8")
        if self.bucket < 64 or self.bucket & (self.bucket - 1):
            raise ValueError(f"bucket={self.bucket} is no power of two from 64 on: use 1024, say")

    @property
    def levels(self) -> int:
        """Above 0, and as many below."""
        return (1 << (self.bits - 1)) - 1

    def encoded_bytes(self, count: int) -> int:
        """Of ``count`` values."""
        whole, tail = divmod(count, self.bucket)
        return whole * (4 + self.bucket * self.bits // 8) + (4 + (tail * self.bits + 7) // 8 if tail else 0)


QSGD8, QSGD4, QSGD2 = (Quantisation(bits, 1024, True) for bits in (8, 4, 2))
INT8 = Quantisation(8, 256, False)


@dataclass(frozen=True, slots=True)
class Draw:
    """What random choices depend on, beside a value's index: they are the same wherever all of it is."""

    seed: int = 0  # 64 bits
    call: int = 0  # 32 bits
    rank: int = 0  # 32 bits


class Kernels(Protocol):
    """The functions for arrays of one kind. Lengths have been checked."""

    def quantise(
        self, how: Quantisation, draw: Draw, first: int, values: Array, out: Array, error: Array | None = None
    ) -> None:
        """See ``encode``."""

    def dequantise(self, how: Quantisation, encoded: Array, values: Array) -> int:
        """0, or another number where ``encoded`` is damaged; see ``decode``."""

    def narrow(self, values: Array, out: Array, error: Array | None = None) -> None:
        """``values`` as bfloat16 or float16, the dtype of ``out``, to nearest even. numpy's bfloat16 is uint16."""

    def widen(self, encoded: Array, values: Array) -> None:
        """The other way, exactly. Every NaN becomes the one quiet NaN."""

    def mean_of_one_sign(self, values: Array, out: Array, error: Array | None = None) -> bool:
        """Writes the mean into ``out``, one float32; 0 of no values. False, with nothing of use written, where one
        value is above zero and another below. Calls that take entries of either sign in turn are the caller's."""

    def fill_mean(self, encoded: Array, values: Array) -> int:
        """0, or another number where ``encoded`` is damaged; see ``decode_mean``."""


def kernels_of(values: Array) -> Kernels:
    """The functions for arrays such as ``values``: by where it lies. Raises as ``placement.is_on_gpu``."""
    if is_on_gpu(values, "values"):
        from telegrad.kernels.quantise import triton

        return triton
    from telegrad.kernels.quantise import cpu

    return cpu


def encode(how: Quantisation, draw: Draw, first: int, values: Array, out: Array, error: Array | None = None) -> None:
    """Encodes float32 ``values``, of which the first has index ``first`` in its vector, into ``out``, uint8.

    Raises ``ValueError`` where ``out`` or ``error`` has another length, and for a ``first`` that is no multiple of 64.
    """
    if first % 64:
        raise ValueError(f"first={first} is not a multiple of 64: cut vectors where a group of random words begins")
    expected = how.encoded_bytes(len(values))
    if len(out) != expected:
        raise ValueError(f"out has {len(out)} bytes, but {len(values)} values take {expected}: give it as many")
    if error is not None and len(error) != len(values):
        raise ValueError(f"error has {len(error)} elements but values has {len(values)}: give both the same")
    kernels_of(values).quantise(how, draw, first, values, out, error)


def decode(how: Quantisation, encoded: Array, values: Array) -> None:
    """Decodes uint8 ``encoded`` into float32 ``values``. A GPU is waited for once.

    Raises ``ValueError``, and ``values`` are of no use, where ``encoded`` is not what so many values become: another
    length, a scale that is negative, infinite or another NaN, a code that stands for no level, a spare bit that is set.
    """
    expected = how.encoded_bytes(len(values))
    if len(encoded) != expected:
        raise ValueError(f"encoded has {len(encoded)} bytes, but {len(values)} values take {expected}: it is damaged")
    if kernels_of(values).dequantise(how, encoded, values):
        raise ValueError(
            f"encoded is not what {len(values)} values become in {how.bits} bits: it is damaged; ask for it again"
        )


def decode_mean(encoded: Array, values: Array) -> None:
    """Every one of ``values`` becomes the mean in ``encoded``, one float32. A GPU is waited for once.

    Raises ``ValueError`` where ``encoded`` has another length, or is neither finite nor the one quiet NaN.
    """
    if len(encoded) != 1:
        raise ValueError(f"encoded has {len(encoded)} elements but a mean is one: it is damaged")
    if kernels_of(values).fill_mean(encoded, values):
        raise ValueError("encoded is not a mean, which is finite or the quiet NaN: it is damaged; ask for it again")
