"""Staging with Triton kernels, which read and write pinned memory where it lies: what is not there does not travel.

Bytes over the bus: of every staged entry 4 and its value; of a sparse sum as many, of a dense one its values. In the
GPU's memory: of every staged entry its index and value; of a sum all of ``out`` once, and 32 bytes around each place
of an entry that no neighbour shares.
"""

from __future__ import annotations

import numpy as np
import torch

from telegrad.kernels.scatter.triton import scatter_add, scatter_set
from telegrad.kernels.staging import DENSE
from telegrad.kernels.staging.triton.copies import add_dense, begin_sum, stage_entries
from telegrad.kernels.triton import BLOCK, launch

_DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def stage(
    indices: torch.Tensor,
    values: torch.Tensor,
    count: torch.Tensor,
    to_count: torch.Tensor,
    to_indices: torch.Tensor,
    to_values: torch.Tensor,
) -> None:
    """See ``Kernels.stage``."""
    room = indices.numel()
    targets = (to_count, to_indices, _bits(to_values))
    launch(stage_entries, max(1, -(-room // BLOCK)), indices, _bits(values), count, room, *targets, BLOCK=BLOCK)


def write_sum(
    out: torch.Tensor,
    form: torch.Tensor,
    dense: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    absent: float,
) -> None:
    """See ``Kernels.write_sum``."""
    size = out.numel()
    if size == 0:
        return
    given = (_bits(out), form, _bits(dense), size, _bits_of(absent, out.dtype))
    launch(begin_sum, -(-size // BLOCK), *given, DENSE=DENSE, BLOCK=BLOCK)
    scatter_set(out, indices, values, 0, form)


def add_sum(
    out: torch.Tensor, form: torch.Tensor, dense: torch.Tensor, indices: torch.Tensor, values: torch.Tensor
) -> None:
    """See ``Kernels.add_sum``."""
    size = out.numel()
    if size == 0:
        return
    launch(add_dense, -(-size // BLOCK), out, form, dense, size, DENSE=DENSE, BLOCK=BLOCK)
    scatter_add(out, indices, values, 0, form)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(_DTYPES[x.dtype])


def _bits_of(number: float, dtype: torch.dtype) -> int:
    """As an int32, whose lower half are those of a 16-bit float. ``number``: 0, 1 or an infinity."""
    if dtype == torch.float16:
        return int(np.float16(number).view(np.int16))
    word = int(np.float32(number).view(np.int32))
    return word >> 16 if dtype == torch.bfloat16 else word
