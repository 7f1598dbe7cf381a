"""How a vector is cut among ranks, and what may share memory with what: checked before a pointer leaves Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from telegrad.communicator.tensors import HostBuffer, empty_like, movable, overlap
from telegrad.sparse_vector import is_torch_tensor

_MOST_ELEMENTS = 1 << 48  # of a block: what processors can address


class Result(NamedTuple):
    """A tensor that is written, and its memory."""

    tensor: Any
    buffer: HostBuffer


def checked_counts(counts: Any, argument: str, ranks: int) -> list[int]:
    """``counts`` as a list of ``ranks`` ints, 0 or more, else ``TypeError`` or ``ValueError``."""
    is_list = isinstance(counts, (Sequence, np.ndarray)) and not isinstance(counts, (str, bytes))
    listed = list(counts) if is_list else None
    if listed is None or any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) for one in listed):
        raise TypeError(
            f"{argument}={counts!r} must be a sequence of ints: the number of elements of each rank's block"
        )
    if len(listed) != ranks:
        raise ValueError(f"{argument} has {len(listed)} entries: give one for each of the {ranks} ranks")
    for rank, count in enumerate(listed):
        if count < 0:
            raise ValueError(f"{argument}[{rank}]={count} must not be negative: a rank without elements has 0")
        if count > _MOST_ELEMENTS:
            raise ValueError(f"{argument}[{rank}]={count} is more than memory can hold")
    return [int(count) for count in listed]


def check_length(x: Any, argument: str, elements: int, reason: str) -> None:
    """Raises ``ValueError`` unless ``x`` is one-dimensional with ``elements`` elements."""
    if len(x.shape) != 1 or x.shape[0] != elements:
        raise ValueError(f"{argument} has shape {tuple(x.shape)} but {reason}: give it shape ({elements},)")


def result_of(out: Any, like: Any, shape: tuple[int, ...], *, device: bool = False) -> Result:
    """``out`` if it has ``shape`` and the library and dtype of ``like``; a new tensor where it is None.
    ``device``: it may be a device's.

    Raises ``TypeError`` or ``ValueError`` with the remedy.
    """
    if out is None:
        out = empty_like(like, shape)
    buffer = movable(out, "out", device=device)
    if is_torch_tensor(out) != is_torch_tensor(like) or out.dtype != like.dtype:
        kind = "torch" if is_torch_tensor(like) else "numpy"
        raise TypeError(f"out is a {type(out).__name__} of {out.dtype}: give a {kind} one of {like.dtype}, as x is")
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}: the result has shape {shape}")
    return Result(out, buffer)


def check_apart(x: HostBuffer, out: HostBuffer, own: tuple[int, int] | None, remedy: str) -> None:
    """Raises ``ValueError`` where ``x`` and ``out`` share memory.

    ``own``: where in the longer of the two the shorter one may lie nevertheless: first byte and length.
    """
    if not overlap(x, out) or not x.nbytes or not out.nbytes:
        return
    whole, part = (out, x) if out.nbytes >= x.nbytes else (x, out)
    if own is not None and (part.pointer - whole.pointer, part.nbytes) == own:
        return
    raise ValueError(f"x shares memory with out: {remedy}")
