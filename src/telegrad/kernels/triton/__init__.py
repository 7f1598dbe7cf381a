"""What the Triton kernels of all operations share: how they are launched, and the rounding of 16-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch

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
