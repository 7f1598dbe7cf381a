"""What a call of torch's is, where the Communicator's that carries it does not say: so that ranks that called different
things hear of it."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence

import torch

from telegrad import _core
from telegrad.torch_backend.operands import Operand


@contextlib.contextmanager
def compared(operation: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """In it this thread's collectives match only those of ranks that say the same: an operation's name, dtypes and
    numbers of elements of ``tensors``, and what was said around it."""
    before = _core.set_purpose(0)
    said = repr((before, operation, [(x.dtype, x.numel()) for x in tensors]))
    _core.set_purpose(zlib.crc32(said.encode()) or 1)
    try:
        yield
    finally:
        _core.set_purpose(before)


def compared_as_given(
    tensors: Sequence[torch.Tensor], operands: Sequence[Operand], op: str
) -> contextlib.AbstractContextManager[None]:
    """The same, where a sum of ``operands`` says less than torch's call of ``tensors`` does: several that are summed as
    one, those that are summed in another dtype, averages of integers, and sums with factors."""
    alike = all(x.dtype == one.held.dtype and one.divisor == 1 for x, one in zip(tensors, operands, strict=True))
    as_given = len(tensors) <= 1 and alike and op != "PREMUL_SUM"
    return contextlib.nullcontext() if as_given else compared(op, tensors)
