"""How long a training step takes, and what part of it is communication that nothing hides: by the host's clock where
the host computes, between points of the stream where a device does. Needs torch."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import torch

from telegrad.bench.device import Device


class StepTimes(NamedTuple):
    """Seconds; see ``worker`` for what they are."""

    step_s: float
    exposed_s: float


class StepClock(Protocol):
    """Called in this order in each step."""

    def begin(self) -> None: ...

    def reduced(self) -> None:
        """``backward()`` has returned."""

    def end(self) -> StepTimes:
        """The optimiser's step has been called."""


class HostClock:
    """Hooks on all parameters, below and before DDP's own, note when the last gradient is computed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._begun_s = self._last_s = self._reduced_s = 0.0
        _on_each_gradient(model, self._note)

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def reduced(self) -> None:
        self._reduced_s = time.perf_counter()

    def end(self) -> StepTimes:
        return StepTimes(time.perf_counter() - self._begun_s, self._reduced_s - self._last_s)

    def _note(self, _: torch.Tensor) -> None:
        self._last_s = time.perf_counter()


class DeviceClock:
    """The same where the host only puts kernels into a stream: marks there take the place of the host's time, and a
    step is over when the stream has come to its end."""

    def __init__(self, model: torch.nn.Module, device: Device) -> None:
        self._device = device
        self._begun_s = 0.0
        self._last: Any = None
        self._reduced: Any = None
        _on_each_gradient(model, self._note)

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def reduced(self) -> None:
        self._reduced = self._device.mark()

    def end(self) -> StepTimes:
        self._device.synchronize()
        step_s = time.perf_counter() - self._begun_s
        return StepTimes(step_s, self._device.seconds(self._last, self._reduced))

    def _note(self, _: torch.Tensor) -> None:
        self._last = self._device.mark()


def _on_each_gradient(model: torch.nn.Module, note: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(note)  # type: ignore[no-untyped-call]
