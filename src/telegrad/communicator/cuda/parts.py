"""How device tensors are cut into the operations of the engine that communicate them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from telegrad import _core
from telegrad.communicator.cuda import transfers
from telegrad.communicator.cuda.runtime import DeviceRuntime, Stream
from telegrad.communicator.cuda.staging import Lease
from telegrad.communicator.cuda.transfers import Part

# With the addresses of input and output, how long they are, and the gate.
Begin = Callable[[int, int, Any, _core.Gate], _core.Request]

Piece = tuple[Any, int, int]
"""A contiguous tensor of a device, from which of its bytes on, and how many."""


def flat(x: Any) -> Any:
    """``x`` in one dimension, without its history."""
    if x.requires_grad:  # as of host tensors, autograd learns nothing of what is communicated
        x = x.detach()
    return x if x.dim() == 1 else x.view(-1)


class Pieces:
    """A Part of pieces that are copied as they are. ``begin`` gets the addresses at which inputs and outputs lie, one
    behind the other, and ``length``."""

    __slots__ = ("_begin", "_inputs", "_length", "_outputs", "has_input", "input_bytes", "output_bytes")

    def __init__(self, inputs: Sequence[Piece], outputs: Sequence[Piece], begin: Begin, length: Any) -> None:
        self._inputs, self._outputs, self._begin, self._length = inputs, outputs, begin, length
        self.has_input = len(inputs) != 0
        self.input_bytes = _bytes_of(inputs)
        self.output_bytes = _bytes_of(outputs)

    def prepare(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        """Copies need no kernels."""

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        return lease.output_address, self.output_bytes

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        address = lease.input_address
        for x, first, nbytes in self._inputs:
            if nbytes:
                runtime.copy_to_host(stream, address, x, first, nbytes)
                address += nbytes

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        return self._begin(lease.input_address, lease.output_address, self._length, gate)

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        address = lease.output_address
        for x, first, nbytes in self._outputs:
            if nbytes:
                runtime.copy_to_device(stream, x, first, address, nbytes)
                address += nbytes


def whole(x: Any) -> Piece:
    """All of it."""
    return x, 0, x.nbytes


def element_parts(x: Any, out: Any, begin: Begin, error: Any = None) -> list[Part]:
    """For an operation that turns elements of ``x`` into those of ``out`` at the same places, and of ``error`` if that
    is given, which lie behind them. Lengths: in elements."""
    elements, item = x.numel(), x.element_size()
    if error is None and elements * item <= transfers.CHUNK_BYTES:
        piece = (x, 0, elements * item)
        return [Pieces((piece,), (piece if out is x else (out, 0, elements * item),), begin, elements)]
    outputs = (out,) if error is None else (out, error)
    return [
        Pieces(
            ((x, first * item, length * item),),
            [(one, first * item, length * item) for one in outputs],
            begin,
            length,
        )
        for first, length in _cuts(elements, item)
    ]


def scattered_parts(x: Any, block: Any, lengths: list[int], begin: Begin) -> list[Part]:
    """For one that turns the blocks of ``x``, of ``lengths`` elements, into this rank's ``block``. Lengths: of the
    blocks of a part, in elements."""
    if len(set(lengths)) > 1:  # chunks of unequal blocks would lie differently on each rank
        return [Pieces([whole(x)], [whole(block)], begin, lengths)]
    ranks, item = len(lengths), x.element_size()
    parts: list[Part] = []
    for first, length in _cuts(lengths[0], item, ranks):
        nbytes = length * item
        pieces = [(x, (rank * lengths[0] + first) * item, nbytes) for rank in range(ranks)]
        parts.append(Pieces(pieces, [(block, first * item, nbytes)], begin, [length] * ranks))
    return parts


def gathered_parts(x: Any, out: Any, lengths: list[int] | None, ranks: int, begin: Begin) -> list[Part]:
    """For one that puts all ranks' ``x`` into ``out``; ``lengths``: in bytes where they are unequal. Lengths: of this
    rank's input, in bytes."""
    if lengths is not None:
        ends = [0, *accumulate(lengths)]
        return [Pieces([whole(x)], [(out, first, last - first) for first, last in pairwise(ends)], begin, x.nbytes)]
    item = x.element_size()
    parts: list[Part] = []
    for first, length in _cuts(x.numel(), item, ranks):
        nbytes = length * item
        pieces = [(out, rank * x.nbytes + first * item, nbytes) for rank in range(ranks)]
        parts.append(Pieces([(x, first * item, nbytes)], pieces, begin, nbytes))
    return parts


def broadcast_parts(x: Any, is_root: bool, begin: Callable[[int, int, _core.Gate], _core.Request]) -> list[Part]:
    """For one that copies the root's ``x``; ``begin`` gets an address and a length in bytes."""
    item = x.element_size()
    parts: list[Part] = []
    for first, length in _cuts(x.numel(), item):
        nbytes = length * item
        piece = [(x, first * item, nbytes)]
        if is_root:
            parts.append(Pieces(piece, [], lambda given, _, nbytes, gate: begin(given, nbytes, gate), nbytes))
        else:
            parts.append(Pieces([], piece, lambda _, taken, nbytes, gate: begin(taken, nbytes, gate), nbytes))
    return parts


def _cuts(elements: int, itemsize: int, copies: int = 1) -> list[tuple[int, int]]:
    """The first elements and lengths of a vector's chunks, ``copies`` of which are communicated at once; of an empty
    one an empty chunk."""
    step = max(1, transfers.CHUNK_BYTES // (itemsize * copies))
    return [(first, min(step, elements - first)) for first in range(0, max(elements, 1), step)]


def _bytes_of(pieces: Sequence[Piece]) -> int:
    nbytes = 0
    for piece in pieces:
        nbytes += piece[2]
    return nbytes
