"""What each rank computes in a step, for any mini-batch, and on which device: how fast that multiplies, and how fast it
goes through its memory.

The figures are assumptions for planning. Give the time of your own step where you know it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.architectures import Architecture, architecture


def trace_of(model: Architecture, compute_s: float, *, element_bytes: int = 4) -> Trace:
    """A model of the step: ``compute_s`` seconds, a third of them forward, the rest divided among the gradients as
    the multiplications with their parameters are.

    Raises ``ValueError`` for a time that is not above 0 and finite.
    """
    if not 0 < compute_s < math.inf:
        raise ValueError(f"compute_s={compute_s} must be above 0 and finite: the seconds of a step on one rank")
    backward = [*reversed(model.parameters)]
    per_mac = compute_s * _BACKWARD_SHARE / model.macs
    return Trace(
        tuple(one.name for one in backward),
        tuple(one.elements * element_bytes for one in backward),
        tuple(one.macs * per_mac for one in backward),
        compute_s * (1 - _BACKWARD_SHARE),
        f"{model.name}, a step of {compute_s * 1e3:g} ms divided by multiplications",
        rows=tuple(one.rows for one in backward),
    )


_BACKWARD_SHARE = 2 / 3


_FLOP_PER_MAC = 2
_FORWARD_AND_BACKWARD = 3  # the backward pass multiplies twice as much
ELEMENT_BYTES = 4
REUSED_BYTES, EXACT_BYTES = 12, 36
"""Of memory traffic for an element: to add a gradient to its residual and take what a known threshold lets through; and
to find the threshold before, in six further readings."""
_ENTRY_BYTES = 16  # an index and a value are read, the entry of the vector is read and written


@dataclass(frozen=True)
class Device:
    """``flops_per_s`` and ``memory_bytes_per_s`` as they are reached; ``launch_s``: to start a kernel. ``about``: where
    they come from. Raises ``ValueError`` for rates that are not above 0 and for a launch below 0."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float = 1e-5
    about: str = ""

    def __post_init__(self) -> None:
        for field in fields(self)[1:3]:
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name}={getattr(self, field.name)} must be above 0 and finite")
        if not 0 <= self.launch_s < math.inf:
            raise ValueError(f"launch_s={self.launch_s} must be 0 or more seconds, and finite")

    def compute_s(self, model: Architecture, samples: float) -> float:
        """Forward and backward, of so many samples."""
        return samples * model.macs * _FLOP_PER_MAC * _FORWARD_AND_BACKWARD / self.flops_per_s

    def pass_s(self, size: float, *, kernels: int = 1) -> float:
        """To move so many bytes of memory, in so many kernels."""
        return kernels * self.launch_s + size / self.memory_bytes_per_s

    def select_s(self, size: int, *, element_bytes: float = REUSED_BYTES, kernels: int = 2) -> float:
        """To select from a gradient of so many bytes, with ``element_bytes`` of traffic for each of its elements."""
        return self.pass_s(size / ELEMENT_BYTES * element_bytes, kernels=kernels)

    def scatter_s(self, entries: float, messages: int = 1) -> float:
        """To add the entries of so many messages, ``entries`` in all, to a vector, a kernel for each message."""
        return self.pass_s(entries * _ENTRY_BYTES, kernels=messages)


def _of_peak(
    name: str, long_name: str, peak_tflops: float, peak_gb_per_s: float, *, kind: str = "float32", share: float = 0.5
) -> Device:
    parts = {0.5: "half"}.get(share, f"{share:.0%}")
    about = (
        f"{long_name}: {parts} of its peak of {peak_tflops:g} Tflop/s in {kind}, two thirds of its memory's "
        f"{peak_gb_per_s:g} GB/s, 10 µs to start a kernel"
    )
    return Device(name, peak_tflops * 1e12 * share, peak_gb_per_s * 1e9 * 2 / 3, about=about)


def _tensor_cores(name: str, long_name: str, bf16_tflops: float, fp32_tflops: float, gb_per_s: float) -> Device:
    """Autocast to bfloat16, dense, without the vendors' factor for sparsity."""
    kind = f"dense bfloat16 ({fp32_tflops:g} in float32)"
    return _of_peak(name, long_name, bf16_tflops, gb_per_s, kind=kind, share=0.4)


DEVICES = {
    one.name: one
    for one in (
        _of_peak("k80", "one of the two GK210 of a Tesla K80", 4.37, 240),
        _of_peak("p100", "Tesla P100", 9.3, 732),
        _of_peak("v100", "Tesla V100", 15.7, 900),
        _of_peak("a100", "A100, without TF32", 19.5, 1555),
        _tensor_cores("h100", "H100 SXM", 989.4, 66.9, 3350),
        _tensor_cores("h200", "H200 SXM", 989.4, 66.9, 4800),
        _tensor_cores("b200", "B200", 2250, 75, 8000),
        _tensor_cores("l40s", "L40S", 362, 91.6, 864),
        _tensor_cores("mi300x", "Instinct MI300X", 1307.4, 163.4, 5300),
        _tensor_cores("rtx4090", "GeForce RTX 4090", 165.2, 82.6, 1008),
        _tensor_cores("rtx5090", "GeForce RTX 5090", 209.5, 104.8, 1792),
        Device(
            "cpu",
            5e10,
            1.5e10,
            launch_s=1e-4,
            about="one core of an x86-64 server: 50 Gflop/s in float32, 15 GB/s, 100 µs of Python for each kernel",
        ),
    )
}
"""By name: published peaks, and an assumption of how much of them is reached."""


def device_of(name: str) -> Device:
    """Raises ``ValueError`` for a name that is none of ``DEVICES``."""
    if name not in DEVICES:
        raise ValueError(
            f"device {name!r} is not known: use one of {', '.join(DEVICES)}; for another one name the nearest, and "
            "give the milliseconds of your own step with --compute-ms"
        )
    return DEVICES[name]


@dataclass(frozen=True)
class Workload:
    """``trace``: of a pass of ``samples`` on one rank; ``fixed_s``: the part of it that does not shrink with the
    mini-batch, such as starting kernels, which is why small batches are inefficient. ``model``: its name.
    ``accumulate``: passes of each optimizer step; the gradients of the last one are exchanged. ``family``: one of
    ``advice.FAMILIES``; ``None``: not known.

    Raises ``ValueError`` for samples that are not above 0, a fixed part beyond the whole, and no pass.
    """

    model: str
    trace: Trace
    samples: float
    fixed_s: float = 0.0
    accumulate: int = 1
    family: str | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate} must be at least 1: passes of each optimizer step")
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
    """A step of a known architecture: of ``samples`` (``None``: its own mini-batch) in ``compute_s`` seconds
    (``None``: those of its multiplications on ``device``, and ``fixed_s``).

    Raises ``ValueError`` for unknown names and for numbers that make no sense.
    """
    shape = architecture(name)
    count = shape.mini_batch if samples is None else samples
    if not 0 < count < math.inf:
        raise ValueError(f"samples={count} must be above 0 and finite: the mini-batch of a rank")
    seconds = fixed_s + device.compute_s(shape, count) if compute_s is None else compute_s
    return Workload(name, trace_of(shape, seconds), count, fixed_s, family=shape.family)


def scaled(trace: Trace, factor: float) -> Trace:
    """With all times multiplied. Raises ``ValueError`` for a factor that is below 0 or not finite."""
    if not 0 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be 0 or more, and finite")
    times = tuple(one * factor for one in trace.backward_times)
    return replace(trace, backward_times=times, forward_s=trace.forward_s * factor)
