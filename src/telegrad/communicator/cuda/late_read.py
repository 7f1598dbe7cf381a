"""What the host reads of a device later, without waiting for it when it asks."""

from __future__ import annotations

from typing import Any

from telegrad.communicator.cuda.runtime import runtime_of


class LateRead:
    """The contents that a small contiguous device tensor has when the current stream comes to here."""

    def __init__(self, x: Any) -> None:
        self._runtime = runtime_of(x.device.type)
        stream = self._runtime.current_stream(x.device)
        flat = x.detach().view(-1)
        self._host = self._runtime.pinned(flat.nbytes).view(flat.dtype)
        self._runtime.copy(stream, self._host, flat)
        self._event = self._runtime.record(stream)

    @property
    def is_known(self) -> bool:
        """Whether ``values()`` would not wait."""
        return self._runtime.passed(self._event)

    def values(self) -> Any:
        """A host tensor of one dimension; the host waits for the stream to have come there."""
        self._runtime.wait_on_host(self._event)
        return self._host
