"""What the Triton kernels of all operations share: how they are launched, and the rounding of 16-bit floats."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

BLOCK = 1024
"""Elements of one program, where nothing else is said."""


def launch(kernel: Any, programs: int, x: torch.Tensor, *arguments: Any, warps: int = 8, **options: Any) -> None:
    """Runs ``programs`` of ``kernel``, whose first argument is ``x``, on the device of that, each of so many ``warps``.

    A multiplication and an addition are never made one: the fused one rounds once, the CPU's two twice.
    """
    # The device is rarely another one than the current: making it that costs a tenth of a launch.
    is_elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    with torch.cuda.device_of(x) if is_elsewhere else nullcontext():  # type: ignore[no-untyped-call]
        kernel[(programs,)](x, *arguments, **options, num_warps=warps, enable_fp_fusion=False)


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
