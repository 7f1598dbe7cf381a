"""DeviceWork: an operation on device tensors in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from telegrad import _core
from telegrad.comm.device.runtime import DeviceRuntime, Event
from telegrad.comm.work import Work, check_timeout

if TYPE_CHECKING:
    import torch


class DeviceWork(Work):
    """One that was started with ``async_op=True`` on device tensors: streams wait for it, and the host never does."""

    def __init__(
        self,
        requests: Sequence[_core.Request],
        operation: str,
        rank: int,
        result: Any,
        device: Any,
        runtime: DeviceRuntime,
        event: Event,
        held: Any,
    ) -> None:
        super().__init__(requests[0], operation, rank, lambda _: result)
        self._requests = requests
        self._device = device
        self._runtime = runtime
        self._event = event
        self._held = held

    def wait(self, timeout_s: float | None = None) -> bool:
        """Makes the device's current stream wait for the operation; returns True, at once.

        ``timeout_s`` is checked and not used: nothing waits here. Raises what the operation failed with, if that is
        known by now; otherwise ``Communicator.synchronize()`` or the next operation does.
        """
        if timeout_s is not None:
            check_timeout(timeout_s, "timeout_s")
        self._check_process()
        self._runtime.wait_event(self._runtime.current_stream(self._device), self._event)
        for request in self._requests:
            if request.done():
                request.wait(0.0)
        return True

    def is_completed(self) -> bool:
        """True once the result is on the device, also when the operation failed: then it is NaN."""
        return self._runtime.passed(self._event)

    def span_s(self) -> tuple[float, float] | None:
        """When the engine began and when it ended, copies not counted; see Work."""
        spans = [request.span_s() for request in self._requests]
        known = [span for span in spans if span is not None]
        if len(known) < len(spans):
            return None
        return min(begun for begun, _ in known), max(ended for _, ended in known)

    def get_future(self) -> torch.futures.Future[Any]:
        """Raises ``TypeError``: a future would be completed by the host, which does not wait here."""
        self._refuse_future()

    def _refuse_future(self) -> NoReturn:
        raise TypeError(
            f"the {self._operation} of device tensors has no future: call wait(), which makes the stream wait, or use "
            "host tensors (.cpu())"
        )
