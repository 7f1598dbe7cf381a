"""From tensors as torch programs give them to tensors that a Communicator takes, and back: of any dtype, and not
contiguous.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from telegrad import _core
from telegrad.communicator.cuda.runtime import has_runtime

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)
BITWISE = {"BAND": "band", "BOR": "bor", "BXOR": "bxor"}
OPS = {"SUM": "sum", "PREMUL_SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max", **BITWISE}
"""What a Communicator calls torch's reductions."""


@dataclass(frozen=True)
class Operand:
    """``held``: contiguous memory with ``tensor``'s elements, ``tensor``'s own where it can be. ``op``: what the
    Communicator is to do with it; ``divisor``: what integers, of which it has sums only, are divided by afterwards."""

    tensor: torch.Tensor
    held: torch.Tensor
    op: str = "sum"
    divisor: int = 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Both."""
        return [self.tensor, self.held]

    @property
    def finish(self) -> Callable[[], None] | None:
        """What is left to do once ``held`` has its contents, if that is not ``tensor``'s memory."""
        return None if self._is_own and self.divisor == 1 else self.give_back

    @property
    def _is_own(self) -> bool:
        return self.held.data_ptr() == self.tensor.data_ptr() and self.held.dtype == self.tensor.dtype

    def give_back(self) -> None:
        """Gives ``tensor`` what ``held`` has now; called once."""
        if self.divisor != 1:
            self.held.div_(self.divisor, rounding_mode="trunc")  # towards zero, as NCCL does
        if not self._is_own:
            self.tensor.copy_(self.held.view(self.tensor.shape))


def moved(tensor: torch.Tensor) -> Operand:
    """For what moves elements without looking at them. Raises ``TypeError`` for tensors of devices that have no
    streams here, and for those that are not dense."""
    _check(tensor)
    plain = tensor.detach()
    return Operand(tensor.detach(), plain.contiguous())


def written(tensor: torch.Tensor) -> Operand:
    """As ``moved``, for what is filled. Raises as ``check_places``."""
    check_places([tensor])
    return moved(tensor)


def apart(input: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """It, or a copy where it has memory in common with what is written."""
    shared = output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
    return input.clone() if shared else input


def check_places(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ``ValueError`` for those that ``expand()`` has made, which cannot be filled: torch would refuse it when
    the others have their results."""
    for x in tensors:
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise ValueError(
                f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} has one place for several elements, and "
                "is to be filled: use tensor.clone()"
            )


def reduced(tensor: torch.Tensor, op: Any, size: int) -> Operand:
    """For sums and the like over ``size`` ranks: eight-bit floats in float32, averages of narrow integers as sums in 32
    bits, and all else as it is. Raises ``TypeError`` for what cannot be reduced."""
    _check(tensor)
    whole, name = tensor.detach(), name_of(op)
    plain = whole.resolve_conj()  # of which memory holds the opposite
    if plain.is_complex() and name not in ("SUM", "AVG", "PREMUL_SUM"):  # as torch's own backends
        raise TypeError(f"op={name} of {tensor.dtype}: complex numbers have sums and averages only")
    if name == "PREMUL_SUM":
        return _multiplied(whole, plain, op)
    if name in BITWISE and plain.is_floating_point():
        raise TypeError(f"op={name} of {plain.dtype}: bitwise reductions are of integers and booleans")
    if plain.dtype in _EIGHT_BITS:
        return Operand(whole, plain.float().contiguous(), OPS[name])
    if name == "AVG" and not (plain.is_floating_point() or plain.is_complex()):
        if plain.dtype == torch.bool:
            raise TypeError("op=AVG of torch.bool: booleans have no averages; use tensor.float()")
        wide = plain.to(torch.int32) if plain.dtype in _NARROW else plain
        return Operand(whole, wide.contiguous(), OPS["SUM"], size)
    return Operand(whole, plain.contiguous(), OPS[name])


def _multiplied(whole: torch.Tensor, plain: torch.Tensor, op: Any) -> Operand:
    """What each rank adds of a sum with a factor of its own (``PREMUL_SUM``)."""
    if not (plain.is_floating_point() or plain.is_complex()):
        raise TypeError(f"op=PREMUL_SUM of {plain.dtype}: its factor is for floats and complex numbers")
    state = op.__getstate__() if hasattr(op, "__getstate__") else None
    if not (isinstance(state, tuple) and len(state) == 2):
        raise ValueError("op=PREMUL_SUM has no factor: make one with torch.distributed._make_nccl_premul_sum(factor)")
    held = plain.float() if plain.dtype in _EIGHT_BITS else plain
    return Operand(whole, (held * state[1]).to(held.dtype).contiguous())


def name_of(op: Any) -> str:
    """``SUM``, ``AVG``, … of torch's ``ReduceOp``, whichever of its types it has."""
    return next(name for name in OPS if op == getattr(dist.ReduceOp, name))


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" and not has_runtime(tensor.device.type):
        raise TypeError(
            f"a tensor on {tensor.device}: the backend 'telegrad' is for tensors of the CPU and of CUDA; use "
            "tensor.cpu(), or a group with another backend for that device"
        )
    if tensor.layout != torch.strided:
        raise TypeError(
            f"a tensor of layout {tensor.layout}: give a dense one; all_reduce takes sparse_coo tensors too"
        )


# The purpose of a call of torch's, where the Communicator's operation does not say it: ranks that call different
# operations raise.


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
