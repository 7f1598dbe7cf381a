"""How device tensors are cut into the operations of the engine that communicate them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

from telegrad import _core
from telegrad.comm.device.transfers import Part, Pieces, cuts

# With the addresses of input and output, how long they are, and the gate.
_Begin = Callable[[int, int, int, _core.Gate], _core.Request]
_BeginBlocks = Callable[[int, int, list[int], _core.Gate], _core.Request]


# Every view costs a microsecond or two of the caller's time, so that only those are made that are needed.
def flat(x: Any) -> Any:
    """``x`` in one dimension, without its history."""
    if x.requires_grad:  # as of host tensors, autograd learns nothing of what is communicated
        x = x.detach()
    return x if x.dim() == 1 else x.view(-1)


def _cut(vector: Any, cut: slice) -> Any:
    return vector if cut.stop - cut.start == vector.shape[0] else vector[cut]


def element_parts(x: Any, out: Any, begin: _Begin) -> list[Part]:
    """For an operation that turns elements of ``x`` into those of ``out`` at the same places. Lengths: in elements."""
    source = flat(x)
    target = source if out is x else flat(out)

    def part(cut: slice) -> Part:
        length = cut.stop - cut.start
        return Pieces(
            [_cut(source, cut)], [_cut(target, cut)], lambda given, taken, gate: begin(given, taken, length, gate)
        )

    return [part(cut) for cut in cuts(x.numel(), x.element_size())]


def scattered_parts(x: Any, block: Any, lengths: list[int], begin: _BeginBlocks) -> list[Part]:
    """For one that turns the blocks of ``x``, of ``lengths`` elements, into this rank's ``block``. Lengths: of the
    blocks of a part, in elements."""
    source, target = flat(x), flat(block)
    if len(set(lengths)) > 1:  # chunks of unequal blocks would lie differently on each rank
        return [Pieces([source], [target], lambda given, taken, gate: begin(given, taken, lengths, gate))]
    first = range(0, source.numel(), lengths[0]) if lengths[0] else [0] * len(lengths)

    def part(cut: slice) -> Part:
        counted = [cut.stop - cut.start] * len(lengths)
        pieces = [source[at + cut.start : at + cut.stop] for at in first]
        return Pieces(pieces, [_cut(target, cut)], lambda given, taken, gate: begin(given, taken, counted, gate))

    return [part(cut) for cut in cuts(lengths[0], x.element_size(), len(lengths))]


def gathered_parts(x: Any, out: Any, lengths: list[int] | None, ranks: int, begin: _Begin) -> list[Part]:
    """For one that puts all ranks' ``x`` into ``out``; ``lengths``: in bytes where they are unequal. Lengths: of this
    rank's input, in bytes."""
    source, target, item = flat(x), flat(out), x.element_size()
    if lengths is not None:
        ends = [0, *accumulate(length // item for length in lengths)]
        pieces = [target[first:last] for first, last in pairwise(ends)]
        nbytes = x.numel() * item
        return [Pieces([source], pieces, lambda given, taken, gate: begin(given, taken, nbytes, gate))]

    def part(cut: slice) -> Part:
        pieces = [target[rank * x.numel() + cut.start : rank * x.numel() + cut.stop] for rank in range(ranks)]
        nbytes = (cut.stop - cut.start) * item
        return Pieces([_cut(source, cut)], pieces, lambda given, taken, gate: begin(given, taken, nbytes, gate))

    return [part(cut) for cut in cuts(x.numel(), item, ranks)]


def broadcast_parts(x: Any, is_root: bool, begin: Callable[[int, int, _core.Gate], _core.Request]) -> list[Part]:
    """For one that copies the root's ``x``; ``begin`` gets an address and a length in bytes."""
    source, item = flat(x), x.element_size()

    def part(cut: slice) -> Part:
        piece, nbytes = [_cut(source, cut)], (cut.stop - cut.start) * item
        if is_root:
            return Pieces(piece, [], lambda given, _, gate: begin(given, nbytes, gate))
        return Pieces([], piece, lambda _, taken, gate: begin(taken, nbytes, gate))

    return [part(cut) for cut in cuts(x.numel(), item)]
