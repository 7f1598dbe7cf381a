"""What a dense sum whose messages hold encoded values is asked for: checked before anything is sent."""

from __future__ import annotations

from typing import Any

from telegrad import _core
from telegrad.communicator.arguments import checked_integer
from telegrad.communicator.tensors import HostBuffer, check_together, on_device, overlap, reducible
from telegrad.cost.tuning import HOST_TRANSFER

WIRES = ("bf16", "f16", "int8", "qsgd8", "qsgd4", "qsgd2")
"""How a message may hold float32 values in fewer bytes."""

_ENCODINGS: dict[str, _core.ValueEncoding] = {name: getattr(_core.ValueEncoding, name) for name in WIRES}
_REDUCTIONS = {"sum": _core.Reduction.sum, "avg": _core.Reduction.avg}
_SEEDS = 2**64


def encoding_of(wire: object) -> _core.ValueEncoding:
    """Raises ``ValueError`` with the names that there are."""
    if not isinstance(wire, str) or wire not in _ENCODINGS:
        raise ValueError(f"wire={wire!r} does not exist for dense vectors: use one of {', '.join(WIRES)}")
    return _ENCODINGS[wire]


def check_encodable(buffer: HostBuffer, x: Any, reduction: _core.Reduction, algorithm: str) -> None:
    """What encoded values cannot do: other dtypes, reductions but sums and averages, other algorithms."""
    if buffer.dtype != _core.DType.f32:
        raise TypeError(f"x has dtype {x.dtype}: wire= is for float32; leave it out, or convert x")
    if reduction not in _REDUCTIONS.values():
        raise ValueError(f"op={reduction.name!r} is not supported with wire=: use 'sum' or 'avg', or leave wire out")
    if algorithm != "auto" and not (algorithm == HOST_TRANSFER and on_device(x)):
        raise ValueError(f"algorithm={algorithm!r} is not supported with wire=: use 'auto', or leave wire out")


def error_of(error: Any, x: Any, others: tuple[HostBuffer, ...]) -> int:
    """The address of an ``error`` that is to take what rounding loses of ``x``; 0 if it is ``None``.

    ``others``: memory that it must not share.
    """
    if error is None:
        return 0
    into = reducible(error, "error", device=on_device(x))
    check_together(x, error, "error")
    if into.dtype != _core.DType.f32:
        raise TypeError(f"error has dtype {error.dtype} but x has {x.dtype}: give both the same")
    if tuple(error.shape) != tuple(x.shape):
        raise ValueError(f"error has shape {tuple(error.shape)} but x has {tuple(x.shape)}: give both the same")
    if any(overlap(into, other) for other in others):
        raise ValueError("error shares memory with x or out: give it memory of its own")
    return into.pointer


def checked_seed(seed: object) -> int:
    """``seed`` as an unsigned number of 64 bits."""
    number = checked_integer(seed, "seed")
    if not 0 <= number < _SEEDS:
        raise ValueError(f"seed={number} is out of range: use 0 to 2**64 - 1")
    return number
