"""The messages that one rank sends another, of which the others need not know."""

from __future__ import annotations

from typing import Any

from telegrad import _core
from telegrad.communicator.arguments import check_async, checked_integer, checked_rank
from telegrad.communicator.cuda.transfers import Pieces, StagedOperation, whole
from telegrad.communicator.member import Member
from telegrad.communicator.tensors import HostBuffer, check_together, movable, on_device, overlap
from telegrad.communicator.work import Work

_TAGS = 1 << 31


class PointToPoint(Member):
    """Operations between two ranks. They take no number among those that all ranks call, so that the others need not
    call anything, and may be called between any two of them.

    Messages from one rank to another with the same tag are received in the order in which they were sent; with
    different tags in any order. Both sides give the same dtype and number of elements; if they do not, all ranks get
    ``MismatchedCall``. Shapes are not compared, and a dtype that messages have no name for (8-bit floats, numpy's
    longdouble, datetime64, text, structured ones) is compared as the uint8 of as many bytes: that both sides give the
    same one is left to them. A receive of what a peer that has closed never sent raises ``PeerFailed`` at once.
    Operations raise ``TypeError`` or ``ValueError`` for arguments that do not fit, before anything is sent.
    """

    def send(self, x: Any, to: int, *, tag: int = 0, async_op: bool = False) -> Work | None:
        """Sends ``x`` (torch tensor or numpy array, any dtype and shape, contiguous) to rank ``to``.

        Returns once ``x`` may be changed. Over ``driver`` ``"local"`` that is once ``to`` receives it, however short it
        is; over ``"mpi"`` so for more than 16 KiB, and over ``"ucx"`` for what UCX does not send ahead (more than about
        128 KiB inside a host; between hosts UCX chooses); shorter ones are on their way before. So two ranks that both
        send first may wait for each other (``sendrecv`` does not); rely on no length. That a send is over does not mean
        that it was received. For an ``x`` on a device it returns at once, and a stream waits. ``to``: another rank;
        ``tag``: an int in [0, 2³¹). With ``async_op=True`` a Work is returned.
        """
        check_async(async_op)
        core, buffer = self._usable(), movable(x, "x", writable=False, device=True)
        if on_device(x):
            part = _sending(core, x, buffer, self._peer(to, "to"), _tag(tag))
            return self._between_devices("send", [part], (x,), x, async_op, (to, None))
        request = core.send(buffer.pointer, buffer.nbytes, buffer.dtype, self._peer(to, "to"), _tag(tag), not async_op)
        if async_op:
            return self._work(request, "send", x, lambda _: x)
        self._block(request, x)
        return None

    def recv(self, x: Any, source: int | None = None, *, tag: int = 0, async_op: bool = False) -> Work | int | None:
        """Overwrites ``x`` with what rank ``source`` sends with ``tag``: the oldest message not yet received.

        ``x``: as in ``send``, of the sender's dtype and number of elements. ``source=None``: of any rank's messages the
        one that came first; once all other ranks have closed without sending one, ``PeerFailed`` is raised. Returns the
        sender's rank (``None`` for an ``x`` on a device, since nobody waits); with ``async_op=True`` a Work, whose
        ``result()`` is ``x`` and whose ``source()`` that rank.
        """
        check_async(async_op)
        core, buffer = self._usable(), movable(x, "x", device=True)
        peer = None if source is None else self._peer(source, "source")
        if peer is None and self.world_size == 1:
            raise ValueError("source=None, but there is no other rank to receive from")
        if on_device(x):
            part = _receiving(core, x, buffer, peer, _tag(tag))
            return self._between_devices("recv", [part], (x,), x, async_op, (None, source))
        request = core.recv(buffer.pointer, buffer.nbytes, buffer.dtype, peer, _tag(tag), not async_op)
        if async_op:
            return self._work(request, "recv", x, lambda _: x)
        self._block(request, x)
        return request.source()

    def sendrecv(self, x: Any, to: int, out: Any, source: int, *, tag: int = 0, async_op: bool = False) -> Work | None:
        """Sends ``x`` to rank ``to`` and receives ``out`` from rank ``source`` at once, both with ``tag``; over when
        both are. ``to`` and ``source`` may be the same rank; ``x`` and ``out`` may differ in dtype and size, but must
        not share memory. With ``async_op=True`` a Work is returned, whose ``result()`` is ``out``.
        """
        check_async(async_op)
        core = self._usable()
        buffer, into = movable(x, "x", writable=False, device=True), movable(out, "out", device=True)
        check_together(x, out)
        if overlap(buffer, into):
            raise ValueError("out shares memory with x: give it memory of its own")
        if on_device(x):
            parts = [
                _receiving(core, out, into, self._peer(source, "source"), _tag(tag)),
                _sending(core, x, buffer, self._peer(to, "to"), _tag(tag)),
            ]
            return self._between_devices("sendrecv", parts, (x, out), out, async_op, (to, source))
        request = core.sendrecv(
            buffer.pointer,
            buffer.nbytes,
            buffer.dtype,
            self._peer(to, "to"),
            into.pointer,
            into.nbytes,
            into.dtype,
            self._peer(source, "source"),
            _tag(tag),
            not async_op,
        )
        if async_op:
            return self._work(request, "sendrecv", (x, out), lambda _: out)
        self._block(request, (x, out))
        return None

    # Each peer and direction in a lane of its own: nobody knows when a peer answers, and others may wait for this rank.
    def _between_devices(
        self,
        operation: str,
        parts: list[StagedOperation],
        tensors: tuple[Any, ...],
        result: Any,
        async_op: bool,
        lane: tuple[int | None, int | None],
    ) -> Work | None:
        work: Work | None = self._run_on_device(
            operation, parts, tensors, result if async_op else None, async_op, (operation, *lane)
        )
        return work

    def _peer(self, value: Any, argument: str) -> int:
        peer = checked_rank(value, argument, self.world_size)
        if peer == self.rank:
            raise ValueError(f"{argument}={peer} is this rank itself: copy the tensor instead")
        return peer


# In one piece each: the other side may be a host tensor, which is not cut.
def _sending(core: _core.Communicator, x: Any, buffer: HostBuffer, to: int, tag: int) -> StagedOperation:
    return Pieces(
        [whole(x)],
        [],
        lambda given, _, nbytes, gate: core.send(given, nbytes, buffer.dtype, to, tag, False, gate),
        buffer.nbytes,
    )


def _receiving(core: _core.Communicator, x: Any, buffer: HostBuffer, source: int | None, tag: int) -> StagedOperation:
    return Pieces(
        [],
        [whole(x)],
        lambda _, taken, nbytes, gate: core.recv(taken, nbytes, buffer.dtype, source, tag, False, gate),
        buffer.nbytes,
    )


def _tag(value: Any) -> int:
    tag = checked_integer(value, "tag")
    if not 0 <= tag < _TAGS:
        raise ValueError(f"tag={value!r} is out of range: use an int in [0, {_TAGS})")
    return tag
