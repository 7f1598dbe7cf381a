"""What a call of torch's is, where the Communicator's that carries it does not say: so that ranks that called different
things hear of it."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch

from telegrad import _core


@contextlib.contextmanager
def compared(operation: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """In it this thread's collectives match only those of ranks that say the same: an operation's name, and dtypes and
    numbers of elements of ``tensors``."""
    said = repr((operation, [(x.dtype, x.numel()) for x in tensors]))
    before = _core.set_purpose(zlib.crc32(said.encode()) or 1)
    try:
        yield
    finally:
        _core.set_purpose(before)
