"""Memory of the host that is exchanged: such as other processes read fast. Does not know what lies there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def zeros(count: int, dtype: torch.dtype) -> Tensor:
    """``count`` zeros. They are numpy's memory, which asks for huge pages from 4 MiB on: ranks of one host copy from
    each other page by page, and PyTorch's memory has small ones."""
    room = np.zeros(max(count, 1) * dtype.itemsize, np.uint8)  # PyTorch sees no other dtype in no bytes
    return torch.from_numpy(room).view(dtype)[:count]
