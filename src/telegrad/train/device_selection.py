"""The selections that a stream can make by itself: what is chosen, and how much, is known to the device alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from telegrad.comm.device.runtime import DeviceRuntime, Stream
from telegrad.compress import Compressor, ExactTopK, Residual, ReusedThreshold, Selection, TrimmedTopK
from telegrad.ops.select import queues_of
from telegrad.train.device_feedback import DeviceResidual


def queue_selection(
    policy: Selection,
    entry: Residual,
    held: DeviceResidual,
    gradient: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offset: int,
    active: torch.Tensor,
    runtime: DeviceRuntime,
    stream: Stream,
) -> None:
    """residual += gradient, and what ``policy`` chooses leaves it: indices (+ ``offset``), values and their count into
    ``outputs``. Nothing is done if ``active`` (int64, one element) is 0."""
    kernels, k = queues_of(held.values), entry.k
    tensors = [held.values, gradient, *outputs, active]
    if isinstance(policy, ReusedThreshold) and k < entry.size:
        tensors += [held.threshold, held.calls]

    def select(residual: Any, gradient: Any, indices: Any, values: Any, count: Any, active: Any, *kept: Any) -> None:
        to = (indices, values, count, offset)
        if k == entry.size:
            kernels.queue_all(residual, gradient, *to, active)
        elif isinstance(policy, ReusedThreshold):
            kernels.queue_reused(residual, gradient, k, kernels.Kept(*kept, policy.interval, policy.gain), *to, active)
        else:
            kernels.queue_topk(residual, gradient, k, *to, active=active)

    runtime.launch(stream, select, *tensors)


def check_selections(compressor: Compressor, entries: Iterable[Residual]) -> None:
    """Raises ``TypeError``, naming the parameter, for a policy that a stream cannot follow."""
    for entry in entries:
        policy = compressor.policy_of(entry)
        fits = isinstance(policy, (ExactTopK, TrimmedTopK, ReusedThreshold))
        if not fits or getattr(policy, "same_sign", False):
            raise TypeError(
                f"parameter {entry.name!r} is on a device, where {policy!r} cannot choose without waiting for it: use "
                "selection='topk', 'trimmed' or 'reused' without same_sign, or model.cpu()"
            )
