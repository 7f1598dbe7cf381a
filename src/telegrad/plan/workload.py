"""What each rank computes in a step, for any mini-batch: weak scaling, and strong scaling of a global one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from telegrad.plan.architectures import architecture, trace_of
from telegrad.plan.device import SAMPLES, Device
from telegrad.plan.trace import Trace


@dataclass(frozen=True)
class Workload:
    """``trace``: of a step of ``samples`` on one rank; ``fixed_s``: the part of it that does not shrink with the
    mini-batch, such as starting kernels, which is why small batches are inefficient. ``model``: its name.

    Raises ``ValueError`` for samples that are not above 0 and for a fixed part beyond the whole.
    """

    model: str
    trace: Trace
    samples: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.samples < math.inf:
            raise ValueError(f"samples={self.samples} must be above 0 and finite: the mini-batch of a rank")
        if not 0 <= self.fixed_s <= self.trace.compute_s:
            raise ValueError(
                f"fixed_s={self.fixed_s} must be from 0 to {self.trace.compute_s:g}, which the whole step takes"
            )

    def of(self, samples: float) -> Workload:
        """The same with another mini-batch. Raises ``ValueError`` for one that is not above 0."""
        if not 0 < samples < math.inf:
            raise ValueError(f"samples={samples} must be above 0 and finite: the mini-batch of a rank")
        whole_s = self.trace.compute_s
        if samples == self.samples or whole_s == 0:
            return replace(self, samples=samples)
        compute_s = self.fixed_s + (whole_s - self.fixed_s) * samples / self.samples
        return replace(self, trace=scaled(self.trace, compute_s / whole_s), samples=samples)


def of_model(
    name: str, device: Device, *, samples: float | None = None, compute_s: float | None = None, fixed_s: float = 0.0
) -> Workload:
    """A step of a known architecture: of ``samples`` (``None``: ``SAMPLES``) in ``compute_s`` seconds (``None``: those
    of its multiplications on ``device``, and ``fixed_s``).

    Raises ``ValueError`` for unknown names and for numbers that make no sense.
    """
    shape = architecture(name)
    count = SAMPLES[name] if samples is None else samples
    if not 0 < count < math.inf:
        raise ValueError(f"samples={count} must be above 0 and finite: the mini-batch of a rank")
    seconds = fixed_s + device.compute_s(shape, count) if compute_s is None else compute_s
    return Workload(name, trace_of(shape, seconds), count, fixed_s)


def scaled(trace: Trace, factor: float) -> Trace:
    """With all times multiplied. Raises ``ValueError`` for a factor that is below 0 or not finite."""
    if not 0 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be 0 or more, and finite")
    times = tuple(one * factor for one in trace.backward_times)
    return replace(trace, backward_times=times, forward_s=trace.forward_s * factor)
