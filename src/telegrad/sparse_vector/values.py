"""A stream's values as numpy sees them: torch's bfloat16 as its bits in uint16, all others as they are."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core

Bits = npt.NDArray[Any]

NAMES = {
    np.dtype(name): short
    for name, short in (("float32", "f32"), ("float64", "f64"), ("float16", "f16"), ("uint16", "bf16"))
}
"""What the bits' numpy dtype stands for; not by its name, which numpy makes anew in microseconds each time."""

_DTYPES = {dtype: getattr(_core.DType, short) for dtype, short in NAMES.items()}
# Of a dense vector's elements, at first: memory costs nothing before it is touched.
_ROOM_SHARE, _ROOM_LEAST = 4, 1 << 16

_PARTS = "make streams of .real and .imag, one of each"
_TORCH = ("float32", "float64", "float16", "bfloat16")
_NUMPY = ("float32", "float64", "float16")


def is_torch_tensor(x: object) -> bool:
    """True for a torch tensor; does not import torch (what is a tensor came from an imported torch)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def check_not_masked(x: object, argument: str) -> None:
    """Raises ``TypeError`` for numpy's masked arrays: what is behind a mask would be taken for values."""
    masked = sys.modules.get("numpy.ma")  # whoever has such an array has imported it
    if masked is not None and isinstance(x, masked.MaskedArray):
        raise TypeError(
            f"{argument} is a masked array, and its mask would not be looked at: give an array without one, as of "
            ".filled(0)"
        )


def bits_of(values: Any, argument: str) -> Bits:
    """A one-dimensional numpy array or torch tensor, without a copy; of a lazy negative view a copy of what it shows.

    Raises ``TypeError`` or ``ValueError``, which name ``argument``, with the remedy.
    """
    if is_torch_tensor(values):
        return _bits_of_tensor(values, argument)
    if not isinstance(values, np.ndarray):
        raise TypeError(f"{argument} is a {type(values).__name__}: it must be a numpy array or a torch tensor")
    check_not_masked(values, argument)
    if values.dtype.name not in _NUMPY or not values.dtype.isnative:
        others = "use .astype(numpy.float32), or float64 or float16; bfloat16 is torch's"
        raise TypeError(f"{argument} has dtype {values.dtype}: {_PARTS if values.dtype.kind == 'c' else others}")
    if values.ndim != 1:
        raise ValueError(f"{argument} has {values.ndim} dimensions: it must have one; use .reshape(-1)")
    if not values.flags.c_contiguous:
        raise ValueError(f"{argument} is not contiguous (strides {values.strides}): use numpy.ascontiguousarray()")
    return values


def wrapped(bits: Bits, of_torch: bool) -> Any:
    """The values that ``bits`` hold, in the caller's library and without a copy."""
    if not of_torch:
        return bits
    torch = sys.modules["torch"]
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits)


def as_bits(value: float, dtype: np.dtype[Any]) -> Any:
    """A number that bfloat16 holds exactly, as an element of ``dtype``."""
    if dtype != np.uint16:
        return dtype.type(value)
    return np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16))


def entries_of_dense(bits: Bits, absent: float, most: int) -> tuple[npt.NDArray[np.uint32], Bits] | None:
    """Where ``bits`` are not ``absent`` (0 stands for both zeros), and what stands there; ``None`` where these are more
    than ``most`` entries. One pass, or two where more than a quarter are entries."""
    dtype, room = _DTYPES[bits.dtype], max(bits.size // _ROOM_SHARE, min(bits.size, _ROOM_LEAST))
    while True:
        indices, values = np.empty(room, np.uint32), np.empty(room, bits.dtype)
        count = _core.compact(bits.ctypes.data, bits.size, dtype, absent, indices.ctypes.data, values.ctypes.data, room)
        if count <= min(room, most):
            # Gives back what was not written; nobody else has seen the arrays.
            indices.resize(count, refcheck=False)
            values.resize(count, refcheck=False)
            return indices, values
        if count > most:
            return None
        room = count


def _bits_of_tensor(values: Any, argument: str) -> Bits:
    torch = sys.modules["torch"]
    if values.device.type != "cpu" or values.layout != torch.strided:
        raise TypeError(f"{argument} is a {values.layout} tensor on {values.device}: it must be dense on the CPU")
    if str(values.dtype).removeprefix("torch.") not in _TORCH:
        remedy = _PARTS if values.is_complex() else "use .to(torch.float32), or float64, float16 or bfloat16"
        raise TypeError(f"{argument} has dtype {values.dtype}: {remedy}")
    if values.dim() != 1:
        raise ValueError(f"{argument} has {values.dim()} dimensions: it must have one; use .reshape(-1)")
    if not values.is_contiguous():
        raise ValueError(f"{argument} is not contiguous (stride {values.stride()}): use .contiguous()")
    plain = values.detach().resolve_neg()  # memory holds the values as they were before the sign changed
    if plain.dtype == torch.bfloat16:
        bits: Bits = plain.view(torch.int16).numpy().view(np.uint16)
        return bits
    floats: Bits = plain.numpy()
    return floats
