"""The operations that move data without looking at it, between all ranks or two of them, and the barrier."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from telegrad import _core
from telegrad.communicator.base import CommunicatorBase
from telegrad.communicator.cuda.entries import DeviceEntries
from telegrad.communicator.cuda.transfers import (
    Pieces,
    StagedOperation,
    broadcast_parts,
    exchanged_parts,
    gathered_parts,
    scattered_parts,
    whole,
)
from telegrad.communicator.operands import (
    HostBuffer,
    address,
    check_apart,
    check_async,
    check_dense_options,
    check_length,
    check_together,
    checked_counts,
    checked_integer,
    checked_rank,
    formats_named,
    movable,
    on_device,
    overlap,
    result_of,
)
from telegrad.communicator.reductions import StreamReductions, sparse_input
from telegrad.communicator.work import Work
from telegrad.sparse_vector.formats import DTYPES

_OWN_MEMORY = "give out memory of its own"


class Moves(StreamReductions):
    """Operations that move ranks' elements unchanged, of any dtype without Python objects.

    Blocks of equal shape need no ``counts``. For blocks of unequal lengths, ``counts`` says how many elements each rank
    has, the same on all ranks, and tensors are one-dimensional. Other lengths, counts or dtypes than on the other ranks
    are a ``MismatchedCall``. Shapes are not compared: (2, 3) on one rank and (3, 2) on another are six elements each. A
    dtype without a name in messages (8-bit floats, numpy's longdouble, datetime64, text, structured ones) is compared
    as uint8 of as many bytes: ranks must give the same one. Operations raise ``TypeError`` or ``ValueError`` for
    arguments that do not fit, before anything is sent."""

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Any = None,
        async_op: bool = False,
        wire: str | None = None,
        error: Any = None,
        seed: int = 0,
    ) -> Any:
        """All ranks' ``x`` (the same shape and dtype on all), stacked: shape ``(world_size, *x.shape)``.

        With ``counts`` ``x`` has ``counts[rank]`` elements, and the result is one-dimensional, of ``sum(counts)``
        elements. It is written into ``out``, or a new tensor, and returned; with ``async_op=True`` as the ``result()``
        of a Work. ``x`` may be this rank's own block of ``out``, but must not overlap it otherwise.

        For a SparseVector or a ``torch.sparse_coo`` tensor the result is a list of them, by rank. ``n`` is the same on
        all ranks, the number of entries may differ, and a zero stays an entry. ``wire``, ``error`` and ``seed`` as for
        a sparse ``all_reduce``. Rounded values are the same on all ranks; this rank's rounding error is added to its
        ``error``. DeviceEntries become a list of these, each with as much room as ``x``: give all ranks' the same.
        Source: SparCML §5.2."""
        check_async(async_op)
        if (sparse := x if isinstance(x, DeviceEntries) else sparse_input(x)) is not None:
            for name, given in (("out", out), ("counts", counts)):
                if given is not None:
                    raise TypeError(f"{name} is for a dense x: sparse vectors are gathered into a new list")
            if isinstance(sparse, DeviceEntries):
                return self._gather_entries(sparse, wire, error, seed, async_op)
            like, stream = sparse.like, sparse.stream
            formats_named(wire, stream.dtype)  # refuses one of sums: nothing is summed
            how = self._sparse_reduction(stream, "sum", "auto", 1.0, wire, error, seed)
            indices, values = stream.entries(0.0)
            entries = (address(indices), address(values), indices.size, stream.n, DTYPES[stream.dtype])
            request = self._usable().all_gather_sparse(*entries, how, not async_op)

            def finish(done: _core.Request) -> Any:
                return [like(stream.result(*arrays)) for arrays in done.sparse_results()]

            return self._stream_work(request, "all_gather", (indices, values, error), finish, async_op)
        if wire is not None or error is not None:
            raise TypeError("wire and error are for sparse vectors: leave them out to gather dense tensors")
        check_dense_options(seed=seed)
        core, buffer = self._usable(), movable(x, "x", writable=False, device=True)
        shape, lengths = self._gathered(x, buffer.nbytes, counts)
        result, into = result_of(out, x, shape, device=True)
        check_together(x, result)
        check_apart(buffer, into, self._own(buffer.nbytes, lengths), f"{_OWN_MEMORY}, or its own block to x")

        def begin(given: int, taken: int, nbytes: int, gate: _core.Gate | None) -> _core.Request:
            return core.all_gather(given, taken, nbytes, buffer.dtype, lengths, not (async_op or gate), gate)

        at = (buffer.pointer, into.pointer, buffer.nbytes)
        parts = partial(gathered_parts, x, result, lengths, self.world_size, begin)
        return self._run("all_gather", begin, at, parts, (x, result), result, async_op) or result

    def gather(self, x: Any, root: int, *, out: Any = None, counts: Any = None, async_op: bool = False) -> Any:
        """All ranks' ``x`` on rank ``root``, as ``all_gather`` returns them: stacked or, with ``counts``, in sequence.
        ``None`` on the other ranks, which give no ``out``."""
        check_async(async_op)
        core, buffer = self._usable(), movable(x, "x", writable=False, device=True)
        root = checked_rank(root, "root", self.world_size)
        shape, lengths = self._gathered(x, buffer.nbytes, counts)
        taken, to = None, 0
        if self.rank == root:
            taken, into = result_of(out, x, shape, device=True)
            check_together(x, taken)
            check_apart(buffer, into, self._own(buffer.nbytes, lengths), f"{_OWN_MEMORY}, or its own block to x")
            to = into.pointer
        elif out is not None:
            raise ValueError(f"out is given on rank {self.rank}, but the result is on root={root} only: pass None")

        def begin(given: int, taken: int, nbytes: int, gate: _core.Gate | None) -> _core.Request:
            return core.gather(given, taken, nbytes, buffer.dtype, root, lengths, not (async_op or gate), gate)

        at = (buffer.pointer, to, buffer.nbytes)
        parts = partial(gathered_parts, x, taken, lengths, self.world_size, begin)
        return self._run("gather", begin, at, parts, (x, taken), taken, async_op) or taken

    def scatter(self, x: Any, out: Any, root: int, *, counts: Any = None, async_op: bool = False) -> Any:
        """Sends block r of rank ``root``'s ``x`` to rank r, into ``out``, which is returned (with ``async_op=True`` a
        Work).

        ``x``: on the root, with ``out``'s dtype; None on the others. Its shape is ``(world_size, *out.shape)`` or, with
        the first two dimensions as one, ``(world_size * out.shape[0], *out.shape[1:])``. With ``counts`` both are
        one-dimensional, of ``sum(counts)`` and ``counts[rank]`` elements. ``out`` may be the root's own block of ``x``.
        """
        check_async(async_op)
        core, buffer = self._usable(), movable(out, "out", device=True)
        root = checked_rank(root, "root", self.world_size)
        item, listed = _itemsize(out), [buffer.elements] * self.world_size
        if counts is not None:
            listed = checked_counts(counts, "counts", self.world_size)
            check_length(out, "out", listed[self.rank], f"counts[{self.rank}]={listed[self.rank]}")
        lengths = None if counts is None else [count * item for count in listed]

        def begin(given: int, taken: int, counted: list[int], gate: _core.Gate | None) -> _core.Request:
            nbytes = counted[self.rank] * item
            return core.scatter(given, taken, nbytes, buffer.dtype, root, lengths, not (async_op or gate), gate)

        def begun(given: int) -> Any:
            at = (given, buffer.pointer, listed)
            parts = partial(scattered_parts, x, out, listed, begin, at_once=lengths is not None)
            return self._run("scatter", begin, at, parts, (out, x), out, async_op) or out

        if self.rank != root:
            if x is not None:
                raise ValueError(f"x is given on rank {self.rank}, but the blocks are root={root}'s: pass None")
            return begun(0)
        if x is None:
            raise TypeError(f"x is None, but rank {root} is the root: it gives x, the blocks of all ranks")
        blocks = movable(x, "x", writable=False, device=True)
        check_together(x, out)
        if type(x) is not type(out) or x.dtype != out.dtype:
            raise TypeError(
                f"x is a {type(x).__name__} of {x.dtype}, out a {type(out).__name__} of {out.dtype}: give both the same"
            )
        if lengths is not None:
            check_length(x, "x", sum(listed), f"counts add up to {sum(listed)}")
        else:
            stacked = (self.world_size, *out.shape)
            behind = (self.world_size * out.shape[0], *out.shape[1:]) if len(out.shape) > 0 else stacked
            if tuple(x.shape) not in (stacked, behind):
                raise ValueError(f"x has shape {tuple(x.shape)}: give {self.world_size} blocks like out, {stacked}")
        check_apart(blocks, buffer, self._own(buffer.nbytes, lengths), f"{_OWN_MEMORY}, or x's own block")
        return begun(blocks.pointer)

    def all_to_all(
        self, x: Any, *, out: Any = None, send_counts: Any = None, receive_counts: Any = None, async_op: bool = False
    ) -> Any:
        """Sends block r of ``x`` to rank r; returns the blocks that all ranks have for this one, in their order.

        Without counts ``x`` has the same shape on all ranks, its first dimension divisible by the number of ranks, and
        so has the result. With counts, on all ranks then, ``x`` is one-dimensional: rank r gets ``send_counts[r]``
        elements and sends ``receive_counts[r]``. If a rank sends another number than its receiver expects, the receiver
        raises ``TransportError``; ranks that were done already raise it at their next call. ``out``: as in
        ``all_gather``, but it must not overlap ``x``."""
        check_async(async_op)
        core, buffer = self._usable(), movable(x, "x", writable=False, device=True)
        ranks = self.world_size
        if (send_counts is None) != (receive_counts is None):
            given = "send_counts" if receive_counts is None else "receive_counts"
            raise ValueError(f"only {given} is given: give send_counts and receive_counts, or none for equal blocks")
        if send_counts is None:
            if len(x.shape) == 0 or x.shape[0] % ranks:
                raise ValueError(
                    f"x has shape {tuple(x.shape)}, which {ranks} ranks cannot share evenly: its first dimension must "
                    f"be a multiple of {ranks}, or give send_counts and receive_counts"
                )
            shape = tuple(x.shape)

            def begin(given: int, taken: int, nbytes: int, gate: _core.Gate | None) -> _core.Request:
                return core.all_to_all(given, taken, nbytes, buffer.dtype, not (async_op or gate), gate)
        else:
            sent = checked_counts(send_counts, "send_counts", ranks)
            received = checked_counts(receive_counts, "receive_counts", ranks)
            check_length(x, "x", sum(sent), f"send_counts add up to {sum(sent)}")
            if sent[self.rank] != received[self.rank]:
                raise ValueError(
                    f"send_counts[{self.rank}]={sent[self.rank]} but receive_counts[{self.rank}]="
                    f"{received[self.rank]}: what a rank keeps for itself has one length"
                )
            shape = (sum(received),)
            leaving, coming = ([count * _itemsize(x) for count in counts] for counts in (sent, received))

            def begin(given: int, taken: int, nbytes: int, gate: _core.Gate | None) -> _core.Request:
                return core.all_to_all_v(given, taken, leaving, coming, buffer.dtype, not (async_op or gate), gate)

        result, into = result_of(out, x, shape, device=True)
        check_together(x, result)
        check_apart(buffer, into, None, _OWN_MEMORY)
        at = (buffer.pointer, into.pointer, buffer.nbytes)

        def parts() -> list[StagedOperation]:
            if send_counts is None:
                return exchanged_parts(x, result, ranks, begin)
            return [Pieces([whole(x)], [whole(result)], begin, 0)]

        return self._run("all_to_all", begin, at, parts, (x, result), result, async_op) or result

    def broadcast(self, x: Any, root: int, *, async_op: bool = False) -> Work | None:
        """Overwrites ``x`` (same shape and dtype on all ranks) with rank ``root``'s."""
        check_async(async_op)
        root = checked_rank(root, "root", self.world_size)
        is_root = root == self.rank
        core, buffer = self._usable(), movable(x, "x", writable=not is_root, device=True)

        def begin(given: int, taken: int, nbytes: int, gate: _core.Gate | None) -> _core.Request:
            at = given if is_root else taken
            return core.broadcast(at, nbytes, buffer.dtype, root, not (async_op or gate), gate)

        at, parts = (buffer.pointer, buffer.pointer, buffer.nbytes), partial(broadcast_parts, x, is_root, begin)
        return self._run("broadcast", begin, at, parts, (x,), x, async_op)

    def broadcast_state(self, state: Any, root: int) -> Any:
        """Returns the ``state`` of rank ``root`` on all ranks, as a ``state_dict()`` of a model, an optimizer or a
        scheduler. The other ranks may give ``None``.

        ``state``: tensors of torch, arrays of numpy, and plain values, in mappings, lists and tuples. Tensors arrive in
        host memory. Raises ``TypeError`` on ``root`` for anything else, before anything is sent."""
        root = checked_rank(root, "root", self.world_size)
        is_root = self.rank == root
        held: list[Any] = []
        said = json.dumps(_plain(state, held)).encode() if is_root else b""
        length = np.array([len(said)])
        self.broadcast(length, root)
        text = np.frombuffer(said, np.uint8).copy() if is_root else np.empty(length[0], np.uint8)
        self.broadcast(text, root)
        return self._with_tensors(json.loads(text.tobytes()), iter(held) if is_root else None, root)

    def broadcast_bytes_of(self, x: Any, root: int) -> None:
        """Overwrites a contiguous tensor or array of any dtype with rank ``root``'s."""
        is_array = isinstance(x, np.ndarray)
        flat = x.reshape(-1).view(np.uint8) if is_array else x.view(-1).view(sys.modules["torch"].uint8)
        if x.shape == () or 0 not in x.shape:
            self.broadcast(flat, root)

    def _with_tensors(self, value: Any, own: Iterator[Any] | None, root: int) -> Any:
        """What ``_plain`` was given; the tensors follow, which are ``own`` on ``root``."""
        if not isinstance(value, dict):
            return value
        ((kind, held),) = value.items()
        if kind in ("tensor", "array"):
            if own is not None:
                made = next(own)
            elif kind == "array":
                made = np.empty(held[1], np.dtype(held[0]))
            else:
                import torch

                made = torch.empty(held[1], dtype=getattr(torch, held[0]))
            self.broadcast_bytes_of(made, root)
            return made
        if kind == "pairs":
            return {self._with_tensors(key, own, root): self._with_tensors(one, own, root) for key, one in held}
        parts = [self._with_tensors(one, own, root) for one in held]
        return tuple(parts) if kind == "tuple" else parts

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Returns once every rank has called it."""
        check_async(async_op)
        return self._begun(self._usable().barrier(not async_op), "barrier", None, None, async_op)

    def _gathered(self, x: Any, nbytes: int, counts: Any) -> tuple[tuple[int, ...], list[int] | None]:
        """The shape of what is gathered, and the blocks' lengths in bytes where they are unequal."""
        if counts is None:
            return (self.world_size, *x.shape), None
        listed = checked_counts(counts, "counts", self.world_size)
        check_length(x, "x", listed[self.rank], f"counts[{self.rank}]={listed[self.rank]}")
        return (sum(listed),), [count * _itemsize(x) for count in listed]

    def _own(self, nbytes: int, lengths: list[int] | None) -> tuple[int, int]:
        """Where this rank's block lies among all: first byte and length."""
        if lengths is None:
            return self.rank * nbytes, nbytes
        return [0, *accumulate(lengths)][self.rank], nbytes


def _plain(value: Any, held: list[Any]) -> Any:
    """As JSON can hold it: keys need not be strings, and tuples stay what they are. ``held``: gets the tensors."""
    if on_device(value) or hasattr(value, "detach"):
        held.append(value.detach().cpu().contiguous().clone())
        return {"tensor": [str(value.dtype).removeprefix("torch."), [*value.shape]]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"state has an array of {value.dtype}, of Python objects: give arrays of numbers")
        held.append(value.copy(order="C"))
        return {"array": [value.dtype.str, [*value.shape]]}
    if isinstance(value, Mapping):
        return {"pairs": [[_plain(key, held), _plain(one, held)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(one, held) for one in value]}
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"state has a {type(value).__name__}: give tensors, numbers, texts and None, in mappings, lists and tuples"
        )
    return value


def _itemsize(x: Any) -> int:
    size = getattr(x, "itemsize", None)
    return int(size if size is not None else x.element_size())


_TAGS = 1 << 31


# On a device each peer and direction has a lane of its own: nobody knows when a peer answers, and others may wait for
# this rank.
class PointToPoint(CommunicatorBase):
    """Operations between two ranks. The other ranks need not call anything, and both may call them between any
    collectives.

    Messages from one rank to another with the same tag are received in the order in which they were sent; with
    different tags in any order. Both sides give the same dtype and number of elements; if they do not, all ranks get
    ``MismatchedCall``. Shapes are not compared. A dtype without a name in messages (8-bit floats, numpy's longdouble,
    datetime64, text, structured ones) is compared as uint8 of as many bytes: both sides must give the same one. A
    receive from a peer that has closed without sending raises ``PeerFailed`` at once. Operations raise ``TypeError`` or
    ``ValueError`` for arguments that do not fit, before anything is sent."""

    def send(self, x: Any, to: int, *, tag: int = 0, async_op: bool = False) -> Work | None:
        """Sends ``x`` (torch tensor or numpy array, any dtype and shape, contiguous) to rank ``to``.

        Returns once ``x`` may be changed, which does not mean that it was received. Short messages leave before ``to``
        receives them: over ``"mpi"`` up to 16 KiB, over ``"ucx"`` up to about 128 KiB inside a host, over ``"local"``
        none. Rely on no length: two ranks that both send first may wait for each other. ``sendrecv`` avoids that. For
        an ``x`` on a device it returns at once, and a CUDA stream waits. ``to``: another rank; ``tag``: an int in [0,
        2³¹). With ``async_op=True`` a Work is returned."""
        check_async(async_op)
        core, buffer = self._usable(), movable(x, "x", writable=False, device=True)
        peer, number = self._peer(to, "to"), _tag(tag)
        if on_device(x):
            part = _send_part(core, x, buffer, peer, number)
            return self._run_on_device("send", [part], (x,), x, async_op, ("send", to, None))
        request = core.send(buffer.pointer, buffer.nbytes, buffer.dtype, peer, number, not async_op)
        return self._begun(request, "send", x, x, async_op)

    def recv(self, x: Any, source: int | None = None, *, tag: int = 0, async_op: bool = False) -> Work | int | None:
        """Overwrites ``x`` with the oldest message from rank ``source`` with ``tag`` that is not yet received.

        ``x``: as in ``send``, of the sender's dtype and number of elements. ``source=None``: any rank's first message;
        if all other ranks have closed without sending one, it raises ``PeerFailed``. Returns the sender's rank
        (``None`` for an ``x`` on a device, because the host does not wait). With ``async_op=True`` returns a Work,
        whose ``result()`` is ``x`` and whose ``source()`` is that rank."""
        check_async(async_op)
        core, buffer = self._usable(), movable(x, "x", device=True)
        peer = None if source is None else self._peer(source, "source")
        if peer is None and self.world_size == 1:
            raise ValueError("source=None, but there is no other rank to receive from")
        number = _tag(tag)
        if on_device(x):
            part = _recv_part(core, x, buffer, peer, number)
            return self._run_on_device("recv", [part], (x,), x, async_op, ("recv", None, source))
        request = core.recv(buffer.pointer, buffer.nbytes, buffer.dtype, peer, number, not async_op)
        work = self._begun(request, "recv", x, x, async_op)
        return request.source() if work is None else work

    def sendrecv(self, x: Any, to: int, out: Any, source: int, *, tag: int = 0, async_op: bool = False) -> Work | None:
        """Sends ``x`` to rank ``to`` and receives ``out`` from rank ``source`` at once, both with ``tag``; waits for
        both.

        ``to`` and ``source`` may be the same rank. ``x`` and ``out`` may differ in dtype and size, but must not share
        memory. With ``async_op=True`` a Work is returned, whose ``result()`` is ``out``."""
        check_async(async_op)
        core = self._usable()
        buffer, into = movable(x, "x", writable=False, device=True), movable(out, "out", device=True)
        check_together(x, out)
        if overlap(buffer, into):
            raise ValueError("out shares memory with x: give it memory of its own")
        peer, origin, number = self._peer(to, "to"), self._peer(source, "source"), _tag(tag)
        if on_device(x):
            parts = [_recv_part(core, out, into, origin, number), _send_part(core, x, buffer, peer, number)]
            return self._run_on_device("sendrecv", parts, (x, out), out, async_op, ("sendrecv", to, source))
        sent, received = ((one.pointer, one.nbytes, one.dtype) for one in (buffer, into))
        request = core.sendrecv(*sent, peer, *received, origin, number, not async_op)
        return self._begun(request, "sendrecv", (x, out), out, async_op)

    def _peer(self, value: Any, argument: str) -> int:
        peer = checked_rank(value, argument, self.world_size)
        if peer == self.rank:
            raise ValueError(f"{argument}={peer} is this rank itself: copy the tensor instead")
        return peer


# In one piece each: the other side may be a host tensor, which is not cut.
def _send_part(core: _core.Communicator, x: Any, buffer: HostBuffer, to: int, tag: int) -> StagedOperation:
    def begin(given: int, _: int, nbytes: int, gate: _core.Gate | None) -> _core.Request:
        return core.send(given, nbytes, buffer.dtype, to, tag, False, gate)

    return Pieces([whole(x)], [], begin, buffer.nbytes)


def _recv_part(core: _core.Communicator, x: Any, buffer: HostBuffer, source: int | None, tag: int) -> StagedOperation:
    def begin(_: int, taken: int, nbytes: int, gate: _core.Gate | None) -> _core.Request:
        return core.recv(taken, nbytes, buffer.dtype, source, tag, False, gate)

    return Pieces([], [whole(x)], begin, buffer.nbytes)


def _tag(value: Any) -> int:
    tag = checked_integer(value, "tag")
    if not 0 <= tag < _TAGS:
        raise ValueError(f"tag={value!r} is out of range: use an int in [0, {_TAGS})")
    return tag
