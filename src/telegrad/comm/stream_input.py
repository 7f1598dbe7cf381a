"""What callers bring as a sparse vector, and how a result becomes what they brought."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
