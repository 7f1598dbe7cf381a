"""Parameters of a bucket on a device, all of whose values go in a wire of dense sums, with what waits; what that loses
waits. In streams: the host waits for nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from telegrad.comm import Communicator
from telegrad.comm.device.work import DeviceWork


class Addend(NamedTuple):
    """A parameter's. ``gradient``: its part of the bucket, float32, which becomes the average; ``residual``: as long,
    ``None`` where nothing of it waits in this step; ``used``: one element, 0 where the gradient takes no part."""

    gradient: torch.Tensor
    residual: torch.Tensor | None
    used: torch.Tensor


class Quantised(NamedTuple):
    """``overflowed``: for each addend, whether it and what waits are infinite together."""

    work: DeviceWork
    overflowed: torch.Tensor


def sum_quantised(comm: Communicator, addends: Sequence[Addend], wire: str, most: float) -> Quantised:
    """Begins to average. What is not finite goes as it is, and its residual stays; what is finite and larger than
    ``most``, which the wire holds, goes as that, and the rest waits."""
    gradients = [one.gradient for one in addends]
    sizes = [one.numel() for one in gradients]
    values = torch.cat(gradients)
    finite = values.isfinite()
    waiting = torch.cat([_waiting(one) for one in addends])
    released = torch.where(finite, waiting, torch.zeros_like(waiting))
    values.add_(released)
    overflowed = finite & values.isinf()
    of_each = torch.stack([part.any() for part in torch.split(overflowed, sizes)])
    excess = None
    if most < math.inf:
        values, excess = _cut(values, most)
    kept = [one.residual for one in addends if one.residual is not None]
    with_residual = [number for number, one in enumerate(addends) if one.residual is not None]
    if kept:
        parts = torch.split(released, sizes)
        torch._foreach_sub_(kept, [parts[number] for number in with_residual])
    lost = torch.empty_like(values)
    work: DeviceWork = comm.all_reduce(values, "avg", wire=wire, error=lost, async_op=True)

    def take() -> None:
        with torch.no_grad():
            torch._foreach_copy_(gradients, torch.split(values, sizes))
            if excess is not None:
                lost.add_(excess)
            if kept:
                parts = torch.split(lost.nan_to_num_(0.0, 0.0, 0.0), sizes)
                torch._foreach_add_(kept, [parts[number] for number in with_residual])

    work.then(take, [values, lost, *gradients, *kept, *([] if excess is None else [excess])])
    return Quantised(work, of_each)


def _waiting(one: Addend) -> torch.Tensor:
    return torch.zeros_like(one.gradient) if one.residual is None else one.residual * one.used


def _cut(values: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """With finite values that are at most that large; and what that takes from them."""
    held = torch.where(values.isfinite(), values.clamp(-most, most), values)
    return held, (values - held).nan_to_num_(0.0, 0.0, 0.0)
