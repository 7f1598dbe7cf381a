"""What torch.distributed gets for an operation on device tensors: streams wait for it, and the host does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from telegrad.communicator.cuda.work import DeviceWork
from telegrad.communicator.work import Work
from telegrad.torch_backend.group_work import GroupWork, _kept


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
