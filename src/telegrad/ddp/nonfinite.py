"""NaN and infinity in a bucket's gradients, or born in its residuals: whose they are, and how they are sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad.compress import Compressor
from telegrad.ddp.bucket import Bits, BucketLayout, Member, rounded_to_bf16
from telegrad.errors import NonFiniteGradient
from telegrad.kernels.nonfinite.cpu import count_nonfinite
from telegrad.kernels.nonfinite.naive import as_float32

_NONE = np.zeros(0, np.intp)
POLICIES = ("raise", "skip", "send")
_BF16_LIMIT = 2.0**128 - 2.0**119  # from here on a float32 is rounded to an infinite bfloat16


class Fault(NamedTuple):
    """What is wrong with a bucket: the first parameter concerned, and a clause that names it."""

    parameter: str
    text: str


def find_fault(compressor: Compressor, layout: BucketLayout, bits: Bits, sparse: bool) -> Fault | None:
    """Looks before anything is changed. ``sparse``: the bucket's parts will be added to their residuals."""
    if count_nonfinite(bits):
        for name, offset, size in layout.members:
            count = count_nonfinite(bits[offset : offset + size])
            if count:
                return Fault(name, f"{count} of {size} entries in the gradient of {name!r} are NaN or infinite")
    if sparse:
        flat = as_float32(bits)
        if compressor.may_overflow(layout.parts, flat):
            where = compressor.overflowing(layout.parts, flat, _limit(bits))
            for part in layout.parts:
                name, size = part.entry.name, part.entry.values.size
                count = int(np.count_nonzero((where >= part.offset) & (where < part.offset + size)))
                if count:
                    return _overflow("residual", "residual + gradient", name, count, size, bits)
    if compressor.momentum is not None:
        for name, offset, size in layout.dense if sparse else layout.members:
            gradient = as_float32(bits[offset : offset + size])
            if size and compressor.momentum.may_overflow(name, gradient):
                total = compressor.momentum.contribution(name, gradient, compressor.gradient_unit)
                count = int(np.count_nonzero(~(np.abs(total) < np.float32(_limit(bits)))))
                if count:
                    return _overflow("velocity", "its sum with the gradient", name, count, size, bits)
    return None


def _overflow(what: str, total: str, name: str, count: int, size: int, bits: Bits) -> Fault:
    dtype = "float32" if bits.dtype == np.float32 else "bfloat16"
    return Fault(
        name,
        f"the {what} of {name!r} overflowed: {count} of {size} entries of {total} are infinite in {dtype}, though both "
        "are finite",
    )


REMEDY = (
    "lower the learning rate or clip, or choose nonfinite='skip' (all ranks drop such a step) or 'send' (the optimiser "
    "sees it)"
)
REMEDY_WITHOUT_SKIP = "lower the learning rate or clip, or choose nonfinite='send' (the optimiser sees it)"


def error_of(fault: Fault, rank: int, step: int, *, remedy: str = REMEDY, among: str = "") -> NonFiniteGradient:
    """The error for the policy ``"raise"``. ``among``: which ranks ``rank`` counts, if not all."""
    return NonFiniteGradient(
        f"rank {rank}{among}, step {step}: {fault.text}: {remedy}",
        rank=rank,
        parameter=fault.parameter,
    )


def compress_around(
    compressor: Compressor, layout: BucketLayout, bits: Bits, *, mask: bool = True
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Compresses the bucket and sends along what is not finite; no residual holds such a value afterwards.

    A gradient's NaN or infinity goes as it is and leaves the residual alone; where residual + gradient overflows, the
    infinity goes and the residual is zero. ``bits`` may be overwritten. ``mask``: see ``Compressor.compress``. Returns
    ascending indices, and values.
    """
    flat = as_float32(bits)
    inside = np.zeros(flat.size, bool)
    for part in layout.parts:
        inside[part.offset : part.offset + part.entry.values.size] = True
    faulty = np.flatnonzero(inside & ~np.isfinite(flat)).astype(np.uint32)
    faulty_values = flat[faulty]
    flat[faulty] = 0
    overflowing = np.setdiff1d(compressor.overflowing(layout.parts, flat, _limit(bits)), faulty)
    overflowing_values = np.copysign(np.float32(np.inf), compressor.take(layout.parts, flat, overflowing))
    indices, values = layout.scratch()
    count = compressor.compress(layout.parts, flat, indices, values, mask=mask)
    indices, values = indices[:count], values[:count]
    replaced = np.isin(indices, np.concatenate([faulty, overflowing]))
    compressor.keep(layout.parts, indices[replaced], values[replaced])
    indices = np.concatenate([indices[~replaced], faulty, overflowing])
    values = np.concatenate([values[~replaced], faulty_values, overflowing_values])
    order = np.argsort(indices)
    return indices[order], values[order]


def correct_around(compressor: Compressor, bits: Bits, members: Iterable[Member]) -> None:
    """With momentum: makes of the gradients of ``members``, which are to be summed densely, what is to be summed.

    NaN and infinity stay what they are, and no velocity holds such a value afterwards.
    """
    if compressor.momentum is None:
        return
    for name, offset, size in members:
        own = bits[offset : offset + size]
        gradient = as_float32(own)
        faulty = np.flatnonzero(~np.isfinite(gradient)) if count_nonfinite(own) else _NONE
        kept = own[faulty]
        gradient[faulty] = 0
        if size:
            compressor.correct(name, gradient)
        if gradient is not own:
            own[:] = rounded_to_bf16(gradient)
        own[faulty] = kept


def _limit(bits: Bits) -> float:
    return math.inf if bits.dtype == np.float32 else _BF16_LIMIT
