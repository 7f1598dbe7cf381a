"""Memory of the host that is exchanged: such as other processes read fast. Does not know what lies there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_LINE = 64
_HUGE_PAGE = 2 << 20


def zeros(count: int, dtype: torch.dtype) -> Tensor:
    """``count`` zeros. They are numpy's memory, which asks for huge pages from 4 MiB on: ranks of one host copy from
    each other page by page, and PyTorch's memory has small ones. Their storage cannot be resized."""
    size = max(count, 1) * dtype.itemsize  # PyTorch sees no other dtype in no bytes
    boundary = _LINE if size < _HUGE_PAGE else _HUGE_PAGE
    room = np.zeros(size + boundary, np.uint8)
    begin = -room.ctypes.data % boundary
    return torch.from_numpy(room[begin : begin + size]).view(dtype)[:count]
