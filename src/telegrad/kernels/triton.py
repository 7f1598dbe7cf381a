"""What the Triton kernels of all operations share: launches, 16-bit floats, and tables of many parts in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements of one program, where nothing else is said."""


def launch(kernel: Any, programs: int, x: torch.Tensor, *arguments: Any, warps: int = 8, **options: Any) -> None:
    """Runs ``programs`` of ``kernel``, whose first argument is ``x``, on the device of that, each of so many ``warps``.

    A multiplication and an addition are never made one: the fused one rounds once, the CPU's two twice.
    """
    with device_of(x):
        kernel[(programs,)](x, *arguments, **options, num_warps=warps, enable_fp_fusion=False)


def table_of(programs: Sequence[Sequence[int]], *numbers: Sequence[int]) -> torch.Tensor:
    """A table of ``parts``: of each launch how many ``programs`` every part has, then ``numbers`` of every part. Int64,
    in host memory, to be copied to the device."""
    firsts = [[0, *accumulate(of_launch)] for of_launch in programs]
    return torch.tensor([*firsts, *([*row, 0] for row in numbers)], dtype=torch.int64).view(-1)


def by_parts(table: torch.Tensor, parts: Sequence[object]) -> tuple[torch.Tensor, int, int]:
    """What every kernel of many parts takes first: their table, how many they are, and the steps of ``part_of``."""
    return table, len(parts), len(parts).bit_length()


def device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Inside it is the current one, which it mostly is before: making it that costs a tenth of a launch."""
    if x.is_cuda and x.get_device() != torch.cuda.current_device():
        return torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return nullcontext()


def numbers_on(x: torch.Tensor, *values: int) -> torch.Tensor:
    """These int64 on the device of ``x``. Filled there: a copy from the CPU's memory would wait for the GPU."""
    numbers = torch.empty(len(values), dtype=torch.int64, device=x.device)
    for place, value in zip(numbers, values, strict=True):
        place.fill_(value)
    return numbers


def told(*numbers: torch.Tensor) -> list[int]:
    """All of these int64 tensors in a row. Waits for the GPU."""
    row = torch.cat(numbers) if len(numbers) > 1 else numbers[0]
    return [int(number) for number in row.tolist()]


# 16-bit floats as their bits, rounded as the core rounds them: to nearest even, every NaN the one quiet NaN.
# By integer arithmetic, as GPUs' conversions differ in what they make of a NaN. KIND: 0 is float32, 1 bfloat16, 2
# float16; bits of the latter two are int16.

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """What kernels take: float32 as it is, 16-bit floats as int16."""
    return x if x.dtype == torch.float32 else x.view(torch.int16)


@triton.jit
def canonical(x):
    """float32 ``x``; every NaN the one quiet NaN, which is not the one that GPUs compute."""
    quiet = tl.full(x.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    return tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000, quiet, x)


@triton.jit
def rounded(x, KIND: tl.constexpr):
    """float32 ``x`` as KIND has it in memory."""
    word = x.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    if KIND == 0:
        stored = canonical(x)
    elif KIND == 1:
        kept = magnitude + 0x7FFF + ((magnitude >> 16) & 1)
        upper = tl.where(magnitude > 0x7F800000, 0x7FC0, (kept >> 16) | ((word >> 16) & 0x8000))
        stored = upper.to(tl.int16)
    else:
        # The unit in the last place of 0.5 is the smallest subnormal number: the addition rounds to a multiple of it.
        below = tl.where(magnitude < 0x38800000, magnitude, 0).to(tl.float32, bitcast=True)
        subnormal = (below + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
        normal = (magnitude - ((127 - 15) << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
        finite = tl.where(magnitude < 0x38800000, subnormal, normal)
        limited = tl.where(magnitude < 0x47800000, finite, 0x7C00)
        half = tl.where(magnitude > 0x7F800000, 0x7E00, limited | ((word >> 16) & 0x8000))
        stored = half.to(tl.int16)
    return stored


@triton.jit
def widened(stored, KIND: tl.constexpr):
    """The other way, exactly; a NaN keeps its bits, or becomes another NaN."""
    if KIND == 0:
        wide = stored
    elif KIND == 1:
        wide = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        half = stored.to(tl.int32)
        magnitude = half & 0x7FFF
        subnormal = (magnitude.to(tl.float32) * 5.9604644775390625e-08).to(tl.int32, bitcast=True)
        exponent = tl.where(magnitude < 0x7C00, 127 - 15, 255 - 31)
        finite = tl.where(magnitude < 0x0400, subnormal, (magnitude << 13) + (exponent << 23))
        wide = (finite | ((half & 0x8000) << 16)).to(tl.float32, bitcast=True)
    return wide


# Launches for many parts, arrays of their own: each program finds its part by a table on the device.
# A table is int64, rows of a number for each part and one more. Its first rows tell which programs are a part's: from
# that number on, up to the next part's; behind the last part is how many there are.


@triton.jit
def row_of(table, parts, ROW: tl.constexpr):
    """Where it begins."""
    return table + ROW * (parts + 1)


@triton.jit
def part_of(firsts, parts, steps, program):
    """The part that ``program`` is for, by the row ``firsts``; ``steps``: halvings of ``parts`` until one is left."""
    part = program * 0
    behind = part + parts
    for _ in range(steps):
        middle = (part + behind) // 2
        reaches = tl.load(firsts + middle) <= program
        part = tl.where(reaches, middle, part)
        behind = tl.where(reaches, behind, middle)
    return part
