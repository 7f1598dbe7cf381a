"""NaN and infinity in a bucket's gradients: whose they are, and how they are sent past the residuals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from telegrad.compress import Compressor
from telegrad.errors import NonFiniteGradient
from telegrad.ops.nonfinite.cpu import count_nonfinite
from telegrad.train.bucket import Bits, BucketLayout

POLICIES = ("raise", "skip", "send")


def error_for(layout: BucketLayout, bits: Bits, rank: int, step: int) -> NonFiniteGradient:
    """The error that names the first parameter with NaN or infinity in its gradient."""
    counts = [count_nonfinite(bits[offset : offset + size]) for _, offset, size in layout.members]
    name, count, size = next((m.name, count, m.size) for m, count in zip(layout.members, counts, strict=True) if count)
    return NonFiniteGradient(
        f"rank {rank}, step {step}: {count} of {size} entries in the gradient of {name!r} are NaN or infinite: lower "
        "the learning rate or clip, or choose nonfinite='skip' (this rank sits such a bucket out) or 'send' (the "
        "optimiser sees it)",
        rank=rank,
        parameter=name,
    )


def compress_around(
    compressor: Compressor, layout: BucketLayout, flat: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Compresses ``flat`` and sends its NaN and infinities along as they are; no residual meets one.

    ``flat`` is overwritten: the non-finite entries by zero. Returns ascending indices, and values.
    """
    inside = np.zeros(flat.size, bool)
    for part in layout.parts:
        inside[part.offset : part.offset + part.entry.values.size] = True
    where = np.flatnonzero(inside & ~np.isfinite(flat)).astype(np.uint32)
    what = flat[where]
    flat[where] = 0
    indices, values = layout.scratch()
    count = compressor.compress(layout.parts, flat, indices, values)
    indices, values = indices[:count], values[:count]
    replaced = np.isin(indices, where)
    compressor.keep(layout.parts, indices[replaced], values[replaced])
    indices = np.concatenate([indices[~replaced], where])
    values = np.concatenate([values[~replaced], what])
    order = np.argsort(indices)
    return indices[order], values[order]
