"""What callers bring as a sparse vector, and how a result becomes what they brought."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad import _core
from telegrad.communicator.cuda.entries import DeviceEntries
from telegrad.communicator.tensors import HostBuffer, check_together, on_device, overlap, reducible
from telegrad.sparse_vector import SparseVector
from telegrad.sparse_vector.formats import is_coo


class StreamInput(NamedTuple):
    """A caller's sparse vector as a stream, and the way back."""

    stream: SparseVector
    like: Callable[[SparseVector], Any]
    """Makes a stream of as many elements the type, and the shape, of what was given."""


def sparse_input(x: Any) -> StreamInput | None:
    """``x`` if it is a SparseVector or a ``torch.sparse_coo`` tensor, else ``None``.

    Raises ``TypeError`` or ``ValueError`` for a COO tensor that is no stream.
    """
    if isinstance(x, SparseVector):
        return StreamInput(x, lambda stream: stream)
    if not is_coo(x):
        return None
    shape, sparse_dim = tuple(x.shape), x.sparse_dim()
    return StreamInput(SparseVector.from_coo(x), lambda stream: stream.to_coo(shape, sparse_dim))


def dense_for(entries: DeviceEntries, out: Any, error: Any) -> Any:
    """``out``, if the sum of ``entries`` can go there, and what is lost to ``error``, if that is given. Raises
    ``TypeError`` or ``ValueError`` if not."""
    if out is None:
        raise TypeError(
            f"the sum of DeviceEntries goes into a dense tensor: give out=, of {entries.length} elements on "
            f"{entries.values.device}"
        )
    buffer = reducible(out, "out", device=True)
    check_together(entries.values, out)
    if out.dtype != entries.values.dtype:
        raise TypeError(f"out has dtype {out.dtype} but the values have {entries.values.dtype}: give both the same")
    if buffer.elements != entries.length:
        raise ValueError(f"out has {buffer.elements} elements but the entries' length is {entries.length}")
    parts = [
        HostBuffer(part.data_ptr(), part.numel(), part.nbytes, buffer.dtype)
        for part in (entries.indices, entries.values, entries.count)
    ]
    if any(overlap(part, buffer) for part in parts):
        raise ValueError("out shares memory with the entries: give it memory of its own")
    if error is not None:
        _check_error(entries, error, [*parts, buffer])
    return out


def _check_error(entries: DeviceEntries, error: Any, others: list[HostBuffer]) -> None:
    into, place = reducible(error, "error", device=True), entries.values.device
    if not on_device(error) or error.device != place:
        raise TypeError(f"error is not on {place}, where the entries are: give a float32 tensor there")
    if into.dtype != _core.DType.f32:
        raise TypeError(f"error has dtype {error.dtype}: give a float32 one of {entries.length} elements")
    if into.elements != entries.length:
        raise ValueError(f"error has {into.elements} elements but the entries' length is {entries.length}")
    if any(overlap(into, other) for other in others):
        raise ValueError("error shares memory with out or the entries: give it memory of its own")
