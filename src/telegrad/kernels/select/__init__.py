"""Which entries of a residual are sent: one pass adds the gradient, and moves the chosen entries out.

Entries are ranked by their magnitude, as the bits of a float32 order it: a NaN is larger than infinity, so that it is
chosen first rather than hiding in a residual for ever. Among equal ones the lowest index is first.

``cpu`` does it for numpy arrays, ``triton`` for torch tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from telegrad.kernels import is_on_gpu

Sign = Literal[0, 1, -1]
"""Which entries can be chosen: 0: all; 1: positive ones only; -1: negative ones only. A zero is neither."""

Array = Any
"""A numpy array, or a torch tensor on a GPU."""

TINY = float(np.finfo(np.float32).tiny)
"""Smallest normal float32. A threshold that is reused is never below it: with flush-to-zero everything would pass."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a selection did."""

    count: int  # entries moved
    threshold: float  # the lowest magnitude that was looked for
    peak: float  # no magnitude that stays in the residual is larger


class SelectionKernels(Protocol):
    """The selections for arrays of one kind. Arguments, and what each promises, are said in ``cpu``."""

    accumulate_all: Callable[..., None]
    accumulate_select: Callable[..., int]
    accumulate_topk: Callable[..., Chosen]
    accumulate_trimmed: Callable[..., Chosen]
    accumulate_search: Callable[..., Chosen]
    accumulate_buckets: Callable[..., Chosen]
    accumulate_random: Callable[..., Chosen]
    accumulate_normal: Callable[..., tuple[float, float]]
    put_back: Callable[..., None]


def kernels_of(residual: Array) -> SelectionKernels:
    """The selections for arrays such as ``residual``: by where it lies.

    Raises as ``is_on_gpu``.
    """
    if is_on_gpu(residual, "residual"):
        from telegrad.kernels.select import triton

        return triton
    from telegrad.kernels.select import cpu

    return cpu


def queues_of(residual: Array) -> Any:
    """The module of selections that nobody waits for, ``triton``, for a tensor on a GPU.

    Raises as ``is_on_gpu``; ``TypeError`` for a numpy array.
    """
    if not is_on_gpu(residual, "residual"):
        raise TypeError("residual is a numpy array, whose selections nobody queues: give a tensor on a GPU")
    from telegrad.kernels.select import triton

    return triton


# What selections demand of their arrays. Kernels get addresses, and would read whatever lies there. Nothing here looks
# at what arrays hold, so that nothing waits for a GPU.

_FLOAT32, _UINT32 = np.dtype(np.float32), np.dtype(np.uint32)
_GRADIENTS_ON_DEVICE = ("torch.float32", "torch.bfloat16", "torch.float16")


def check_arguments(residual: Any, gradient: Any, indices: Any, values: Any, room: int, k: int | None = None) -> None:
    """Raises ``ValueError`` unless all arrays are contiguous and lie where the residual does, the gradient (``None``:
    there is none) is as long as it, the outputs hold ``room`` entries, and ``k``, if given, is 1 to the residual's
    length; ``TypeError`` for other dtypes than float32 and, of indices, uint32 (a gradient on a GPU can be bfloat16 or
    float16, too)."""
    check_inputs(residual, gradient, indices=indices, values=values)
    size = _length(residual)
    if k is not None and not 1 <= k <= size:
        if not size:
            raise ValueError(f"k={k}: residual is empty, there is nothing to choose from")
        raise ValueError(f"k={k} must be 1 to {size}, the entries of the residual")
    held = min(_length(indices), _length(values))
    if held < room:
        raise ValueError(f"indices and values hold {held} entries, but up to {room} are to be moved: make them longer")


def check_inputs(residual: Any, gradient: Any, **outputs: Any) -> None:
    """As ``check_arguments``, of what is added alone, and of ``outputs`` but for their room."""
    arrays = {"residual": residual, **outputs}
    if gradient is not None:
        arrays["gradient"] = gradient
    if isinstance(residual, np.ndarray):
        _check_on_host(arrays)
    else:
        _check_on_device(arrays)
    size = _length(residual)
    if gradient is not None and _length(gradient) != size:
        raise ValueError(f"gradient has {_length(gradient)} entries, residual {size}: give one for each")


def check_buckets(size: int, bucket: int, per_bucket: int, of_last: int) -> None:
    """Raises ``ValueError`` unless each bucket, and what they leave over, gives 1 entry to all that it has."""
    if not 1 <= per_bucket <= bucket:
        raise ValueError(f"per_bucket={per_bucket} must be 1 to bucket={bucket}, its entries")
    rest = size % bucket
    if not min(1, rest) <= of_last <= rest:
        raise ValueError(f"of_last={of_last} must be {min(1, rest)} to {rest}, the entries that buckets leave over")


def _length(x: Any) -> int:
    return x.size if isinstance(x, np.ndarray) else x.numel()


def _check_on_host(arrays: dict[str, Any]) -> None:
    for name, x in arrays.items():
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{name} is a {type(x).__name__}, and residual a numpy array: give arrays of one kind")
        wanted = _UINT32 if name == "indices" else _FLOAT32
        if x.dtype != wanted:
            raise TypeError(f"{name} is {x.dtype}: it must be {wanted}, as by {name}.astype(np.{wanted})")
        if not x.flags.c_contiguous:
            raise ValueError(f"{name} is not contiguous (strides {x.strides}): give np.ascontiguousarray({name})")
        if name != "gradient" and not x.flags.writeable:
            raise ValueError(f"{name} is read-only: give an array that can be written")


def _check_on_device(arrays: dict[str, Any]) -> None:
    device = arrays["residual"].device
    for name, x in arrays.items():
        if isinstance(x, np.ndarray) or x.device != device:
            where = "a numpy array" if isinstance(x, np.ndarray) else f"on {x.device}"
            raise ValueError(f"{name} is {where}, and residual on {device}: give all on one device")
        wanted = "torch.uint32" if name == "indices" else "torch.float32"
        dtype = str(x.dtype)
        if dtype != wanted and not (name == "gradient" and dtype in _GRADIENTS_ON_DEVICE):
            raise TypeError(f"{name} is {dtype}: it must be {wanted}, as by {name}.to({wanted})")
        if not x.is_contiguous():
            raise ValueError(f"{name} is not contiguous (strides {x.stride()}): give {name}.contiguous()")
