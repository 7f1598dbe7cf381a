"""What torch.distributed gets for an operation that has begun: telegrad's operations, and what is left to do once they
are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from telegrad.communicator.cuda.transfers import DeviceWork
from telegrad.communicator.work import Work, completion_thread, future_of_all

_LOSES_WORKS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)
"""Whether C++ that waits for a Work of Python's, as DistributedDataParallel does, does not keep it alive: it then waits
for ever."""

_MOST_KEPT = 256
_kept: dict[int, GroupWork] = {}
"""With such a torch, those that nobody has waited for: all that are not over, and the last ones that are."""


def _keep(work: GroupWork) -> None:
    _kept[id(work)] = work
    if len(_kept) > _MOST_KEPT:
        for name, one in [*_kept.items()][:-_MOST_KEPT]:
            if one.is_completed():
                _kept.pop(name, None)


class GroupWork(dist.Work):
    """Over when all ``operations`` are and ``finish``, which runs once, has given ``tensors`` their contents."""

    def __init__(
        self, operations: Sequence[Work], tensors: list[torch.Tensor], finish: Callable[[], object] | None
    ) -> None:
        super().__init__()
        self.operations, self.tensors, self._finish = operations, tensors, finish
        self.most = timedelta(0)
        self._lock = threading.Lock()
        self._error: Exception | None = None
        if _LOSES_WORKS:
            _keep(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until it is over. ``timeout``: 0 leaves it to ``most``, and where that is 0 to the group's own. Raises
        ``TransportError``, which names rank, peer and operation, and ``TimeoutExpired``, after which it may be waited
        for again; ``TypeError`` for another ``timeout`` than a timedelta."""
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout={timeout!r} must be a datetime.timedelta, as timedelta(seconds={timeout!r})")
        seconds = (timeout or self.most).total_seconds()
        for work in self.operations:
            try:
                work.wait(seconds if seconds > 0 else None)
            except Exception as error:
                if work.is_completed():  # else it may be waited for again
                    self._error = error
                raise
        self._conclude()
        _kept.pop(id(self), None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """True once its operations are over, also when they failed. The tensors hold the result after ``wait``."""
        return all(work.is_completed() for work in self.operations)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it failed with, as far as it is over."""
        if self._error is None and self.is_completed():
            for work in self.operations:
                try:
                    work.wait()
                except Exception as error:
                    self._error = error
                    break
        return self._error

    def _source_rank(self) -> int:
        """Of a receive: the sender's rank in the group."""
        source = self.operations[0].source() if self.operations else None
        return -1 if source is None else source

    source_rank = _source_rank

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self.tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the list of the caller's tensors. Asked for in a callback of another future, it is over when this returns:
        the thread that runs callbacks would have to complete it."""
        if not self.operations or completion_thread().is_current:
            future: torch.futures.Future[Any] = torch.futures.Future()
            self.wait()
            future.set_result(self.tensors)
            return future
        return future_of_all(self.operations, self._concluded, self._failed)

    def _concluded(self) -> list[torch.Tensor]:
        self._conclude()
        return self.tensors

    def _failed(self, error: Exception) -> None:
        self._error = error

    def _conclude(self) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            finish, self._finish = self._finish, None
            try:
                if finish is not None:
                    finish()
            except Exception as error:
                self._error = error
                raise


# Operations on device tensors: streams wait for them, and the host does not.


class DeviceGroupWork(GroupWork):
    """Of operations that share a stream, behind which ``finish`` is put at once. ``used``: the tensors that it uses."""

    def __init__(
        self,
        operations: Sequence[DeviceWork],
        tensors: list[torch.Tensor],
        finish: Callable[[], object] | None,
        used: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(operations, tensors, None)
        self._last = operations[-1]
        if finish is not None:
            self._last.then(finish, used)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Makes the device's current stream wait; returns True, at once, whatever the ``timeout``. Raises what an
        operation failed with, if that is known by now; else the group's next operation does."""
        for work in self.operations:
            work.wait()
        _kept.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        """True once the tensors hold the result, also when an operation failed: then it is NaN."""
        return all(work.is_completed() for work in self.operations)

    def exception(self) -> Exception | None:
        """What it failed with, if that is known by now."""
        try:
            for work in self.operations:
                assert isinstance(work, DeviceWork)
                work.raise_failure()
        except Exception as error:
            return error
        return None

    def _source_rank(self) -> int:
        """Of a receive: the sender's rank in the group. The host waits for the message."""
        self._last.communicated()
        return super()._source_rank()

    source_rank = _source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Of the list of the caller's tensors; complete at once, and who waits for it has the stream wait."""
        return self._last.future_of(self.tensors)


def begun(
    operations: Sequence[Any],
    tensors: list[torch.Tensor],
    finish: Callable[[], object] | None = None,
    used: Sequence[torch.Tensor] = (),
) -> GroupWork:
    """Of operations called with ``async_op=True``, all on tensors of the host or all on those of one device; the other
    arguments as of ``GroupWork`` and ``DeviceGroupWork``."""
    host = [work for work in operations if isinstance(work, Work) and not isinstance(work, DeviceWork)]
    on_device = [work for work in operations if isinstance(work, DeviceWork)]
    if on_device:
        assert not host  # tensors that are joined, or belong to one call, are in one place
        return DeviceGroupWork(on_device, tensors, finish, used)
    return GroupWork(host, tensors, finish)
