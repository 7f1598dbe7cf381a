"""Encodings of values on GPUs, with Triton kernels: the functions of ``cpu``, on torch tensors of one GPU.

The bytes, what they decode to and what they lose have the bits of the CPU's; the random words of QSGD are functions
of seed, call, rank and index, and are drawn where they are used. Of a mean the sum has another order, the same in
every run on one kind of GPU, so that it may differ in its last bit: the sender's is the one that all ranks decode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from telegrad.kernels.quantise import Draw, Quantisation
from telegrad.kernels.quantise.triton.buckets import dequantise_buckets, quantise_buckets
from telegrad.kernels.quantise.triton.rounding import lose_mean, narrow_values, tally_values, widen_values
from telegrad.kernels.triton import BLOCK, launch, numbers_on, told
from telegrad.kernels.triton.floats import KINDS, bits_of

_TOGETHER = 2048
"""Values of the buckets that one program has."""

_NAN_BITS = 0x7FC00000
_POSITIVE, _NEGATIVE, _SPOILT = 1, 2, 4


def quantise(
    how: Quantisation,
    draw: Draw,
    first: int,
    values: torch.Tensor,
    out: torch.Tensor,
    error: torch.Tensor | None = None,
) -> None:
    """As ``cpu.quantise``. Does not wait."""
    size = values.numel()
    if size == 0:
        return
    seed = (draw.seed & 0xFFFFFFFF, draw.seed >> 32)
    launch(
        quantise_buckets,
        _programs(how, size),
        *(values, size, out, values if error is None else error, first, *seed, draw.rank, draw.call),
        STOCHASTIC=how.stochastic,
        ERROR=error is not None,
        **_of(how),
    )


def dequantise(how: Quantisation, encoded: torch.Tensor, values: torch.Tensor) -> int:
    """How many faults there are. Waits once."""
    size = values.numel()
    if size == 0:
        return 0
    faults = numbers_on(values, 0)
    launch(dequantise_buckets, _programs(how, size), encoded, values, size, faults, **_of(how))
    return told(faults)[0]


def narrow(values: torch.Tensor, out: torch.Tensor, error: torch.Tensor | None = None) -> None:
    """As ``cpu.narrow``. Does not wait."""
    if values.numel():
        arguments = (values, values.numel(), bits_of(out), values if error is None else error)
        kind = KINDS[out.dtype]
        launch(narrow_values, _blocks(values), *arguments, KIND=kind, ERROR=error is not None, BLOCK=BLOCK)


def widen(encoded: torch.Tensor, values: torch.Tensor) -> None:
    """As ``cpu.widen``. Does not wait."""
    if values.numel():
        arguments = (bits_of(encoded), values.numel(), values)
        launch(widen_values, _blocks(values), *arguments, KIND=KINDS[encoded.dtype], BLOCK=BLOCK)


def mean_of_one_sign(values: torch.Tensor, out: torch.Tensor, error: torch.Tensor | None = None) -> bool:
    """As ``cpu.mean_of_one_sign``. Waits once."""
    size, blocks = values.numel(), _blocks(values)
    if size == 0:
        out.zero_()
        return True
    sums = torch.empty(blocks, dtype=torch.float64, device=values.device)
    seen = torch.empty(blocks, dtype=torch.int32, device=values.device)
    launch(tally_values, blocks, values, size, sums, seen, BLOCK=BLOCK)
    kinds = [((seen & kind) != 0).any().reshape(1).to(torch.int64) for kind in (_POSITIVE, _NEGATIVE, _SPOILT)]
    positive, negative, spoilt = told(*kinds)
    if positive and negative and not spoilt:
        return False
    if spoilt:
        out.view(torch.int32).fill_(_NAN_BITS)
    else:
        out.copy_(sums.sum().reshape(1) / size)
    if error is not None:
        launch(lose_mean, blocks, values, size, out, error, BLOCK=BLOCK)
    return True


def fill_mean(encoded: torch.Tensor, values: torch.Tensor) -> int:
    """How many faults there are. Waits once."""
    bits = encoded.view(torch.int32)
    values.view(torch.int32).copy_(bits.expand(values.numel()))
    wrong = ((bits & 0x7FFFFFFF) >= 0x7F800000) & (bits != _NAN_BITS)
    return told(wrong.to(torch.int64))[0]


def _of(how: Quantisation) -> dict[str, Any]:
    unit = float(np.float32(1) / np.float32(how.levels))
    return {"BITS": how.bits, "UNIT": unit, "BUCKET": how.bucket, "ROWS": _rows(how)}


def _rows(how: Quantisation) -> int:
    return max(1, _TOGETHER // how.bucket)


def _programs(how: Quantisation, size: int) -> int:
    return -(-size // (how.bucket * _rows(how)))


def _blocks(values: torch.Tensor) -> int:
    return -(-values.numel() // BLOCK)
