"""DeviceWork: an operation on device tensors in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from telegrad import _core
from telegrad.communicator.cuda.runtime import DeviceRuntime, Event, Stream
from telegrad.communicator.work import Work, check_timeout

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
        stream: Stream,
        event: Event,
        held: Any,
    ) -> None:
        super().__init__(requests[0], operation, rank, lambda _: result)
        self._requests = requests
        self._device = device
        self._runtime = runtime
        self._stream = stream
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
        self.raise_failure()
        return True

    def raise_failure(self) -> None:
        """Raises what the operation failed with, if that is known by now."""
        for request in self._requests:
            if request.done():
                request.wait(0.0)

    def communicated(self) -> bool:
        """Blocks the host until this rank's part of the communication is over; the result may still be copied. Raises
        what it failed with. Whose stream never comes to the operation waits for ever."""
        self._check_process()
        for request in self._requests:
            request.wait()
        return True

    def then(self, compute: Callable[[], object], tensors: Sequence[Any]) -> None:
        """Puts what ``compute`` has the device do behind the operation, as a part of it. ``tensors``: all that it
        uses."""
        for tensor in tensors:
            self._runtime.keep(tensor, self._stream)
        with self._runtime.on(self._stream):
            compute()
        self._event = self._runtime.record(self._stream)

    def timed_end(self) -> Event:
        """A timed event of the runtime's, which passes once the result is on the device. Called before anything else is
        begun."""
        return self._runtime.record_timed(self._stream)

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
        """A future of ``result()``, complete at once: ``future.wait()`` makes the current stream wait, as ``wait()``
        does. After a failure the tensor is NaN, and the error comes from where ``wait()`` says."""
        return self.future_of(self._made())

    def future_of(self, value: Any) -> torch.futures.Future[Any]:
        """As ``get_future()``, of another tensor of the device or a list of them."""
        self._check_process()
        self.raise_failure()
        future: torch.futures.Future[Any] = self._runtime.future(self._device)
        self.complete(future, value)
        return future

    def complete(self, future: torch.futures.Future[Any], value: Any) -> None:
        """Gives ``value`` to a future that the runtime has made; who waits for it waits for this operation."""
        self._runtime.complete(future, self._stream, value)


class GroupSumWork(DeviceWork):
    """A sum that a group of torch's communicates. What the engine has of it is the ranks' calls, and their failures."""

    def communicated(self) -> bool:
        """Blocks the host until the sum is over, on the device too. Raises what is known by then to have failed."""
        super().communicated()
        self._runtime.wait_on_host(self._event)
        return True

    def span_s(self) -> tuple[float, float] | None:
        """``None``: only the device knows."""
        return None
