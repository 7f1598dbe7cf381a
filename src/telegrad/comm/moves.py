"""The operations that move data without looking at it, and the barrier."""

from __future__ import annotations

from typing import Any

from telegrad.comm.member import Member
from telegrad.comm.tensors import empty_like, movable
from telegrad.comm.work import Work


class Moves(Member):
    """Operations in which ranks get each other's elements as they are."""

    def all_gather(self, x: Any, *, async_op: bool = False) -> Any:
        """All ranks' ``x`` (any dtype; the same shape and dtype on all), stacked: shape ``(world_size, *x.shape)``."""
        core, buffer = self._usable(), movable(x, "x", writable=False)
        out = empty_like(x, (self.world_size, *x.shape))
        request = core.all_gather(
            buffer.pointer, movable(out, "out").pointer, buffer.nbytes, buffer.dtype, not async_op
        )
        if async_op:
            return self._work(request, "all_gather", (x, out), lambda _: out)
        self._block(request, (x, out))
        return out

    def broadcast(self, x: Any, root: int, *, async_op: bool = False) -> Work | None:
        """Overwrites ``x`` (any dtype; same shape and dtype on all ranks) with rank ``root``'s."""
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.world_size:
            raise ValueError(f"root={root!r} is no rank: use an int in [0, {self.world_size})")
        core, buffer = self._usable(), movable(x, "x", writable=root != self.rank)
        request = core.broadcast(buffer.pointer, buffer.nbytes, buffer.dtype, root, not async_op)
        if async_op:
            return self._work(request, "broadcast", x, lambda _: x)
        self._block(request, x)
        return None

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Returns once every rank has called it."""
        request = self._usable().barrier(not async_op)
        if async_op:
            return self._work(request, "barrier", None, lambda _: None)
        self._block(request, None)
        return None
