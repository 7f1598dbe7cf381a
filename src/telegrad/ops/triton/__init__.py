"""What the Triton kernels of all operations share: how they are launched, and the rounding of 16-bit floats."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
