"""What callers bring as a sparse vector, and how a result becomes what they brought."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.comm.device.entries import DeviceEntries
from telegrad.comm.tensors import HostBuffer, check_together, overlap, reducible
from telegrad.stream import SparseStream
from telegrad.stream.coo import is_coo


class StreamInput(NamedTuple):
    """A caller's sparse vector as a stream, and the way back."""

    stream: SparseStream
    like: Callable[[SparseStream], Any]
    """Makes a stream of as many elements the type, and the shape, of what was given."""


def sparse_input(x: Any) -> StreamInput | None:
    """``x`` if it is a SparseStream or a ``torch.sparse_coo`` tensor, else ``None``.

    Raises ``TypeError`` or ``ValueError`` for a COO tensor that is no stream.
    """
    if isinstance(x, SparseStream):
        return StreamInput(x, lambda stream: stream)
    if not is_coo(x):
        return None
    shape, sparse_dim = tuple(x.shape), x.sparse_dim()
    return StreamInput(SparseStream.from_coo(x), lambda stream: stream.to_coo(shape, sparse_dim))


def dense_for(entries: DeviceEntries, out: Any, error: Any) -> Any:
    """``out``, if the sum of ``entries`` can go there. Raises ``TypeError`` or ``ValueError`` if not."""
    if error is not None:
        raise TypeError("error is not for DeviceEntries: leave it out, or give a SparseStream of host memory")
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
    for part in (entries.indices, entries.values, entries.count):
        held = HostBuffer(part.data_ptr(), part.numel(), part.nbytes, buffer.dtype)
        if overlap(held, buffer):
            raise ValueError("out shares memory with the entries: give it memory of its own")
    return out
