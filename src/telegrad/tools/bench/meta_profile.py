"""A model's step without running it: shapes from torch's ``meta`` device, and a model of what each operation takes.

Nothing is allocated, so that a model of a billion parameters takes seconds. The same count says how much of a backward
pass each gradient can have taken where it was measured, and bounds what other programs' noise gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from telegrad.synchronizer import StepProfile
from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.workload import Device

_WITHIN = 4.0
"""By how much a measured share of the backward pass may differ from the counted one, as a factor."""


class _CountedClock:
    """Stands until an operation is counted, and then moves on by the seconds that a device takes for it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def mark(self) -> float:
        return self.now_s

    def is_known(self, mark: float) -> bool:
        return True

    def between_s(self, before: float, after: float) -> float:
        return after - before


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each operation takes as long as its arithmetic or its memory traffic, whichever is longer."""

    def __init__(self, clock: _CountedClock, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock, self._device = clock, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        found = func(*args, **given)
        if any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            return found  # a view
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **given, out_val=found)
        size = sum(
            one.numel() * one.element_size() for one in tree_leaves((args, given, found)) if isinstance(one, Tensor)
        )
        self._clock.now_s += max(flops / self._device.flops_per_s, size / self._device.memory_bytes_per_s)
        return found


class _FusedAttention(torch.autograd.Function):
    """Attention as kernels compute it that keep no matrix of all positions by all positions. The ``meta`` device has
    none of them: torch decomposes attention there, and the matrix's memory traffic would count."""

    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, clock: _CountedClock, flops_per_s: float
    ) -> Tensor:
        *_, positions, width = query.shape
        macs = query.shape[:-2].numel() * positions * key.shape[-2] * (width + value.shape[-1])
        context.save_for_backward(query, key, value)
        context.clock, context.seconds = clock, 2 * macs / flops_per_s
        clock.now_s += context.seconds
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        context.clock.now_s += _ATTENTION_BACKWARD * context.seconds
        return (*(torch.empty_like(one) for one in context.saved_tensors), None, None)


_ATTENTION_BACKWARD = 2.5  # five products for two, as the scores are computed again


class _Fusing(TorchFunctionMode):
    def __init__(self, clock: _CountedClock, device: Device) -> None:
        super().__init__()
        self._clock, self._device = clock, device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *(given[name] for name in ("query", "key", "value")[len(args) :]))[:3]
            if query.is_meta:
                return _FusedAttention.apply(query, key, value, self._clock, self._device.flops_per_s)  # type: ignore[no-untyped-call]
        return func(*args, **given)


def counted(model: nn.Module, loss: Callable[[nn.Module], Tensor], device: Device) -> Trace:
    """One forward and backward pass of ``model``, as ``device`` would take for it; what ``loss`` raises."""
    clock = _CountedClock()
    with StepProfile(model, skip=0, clock=clock) as watched, _Counting(clock, device), _Fusing(clock, device):
        loss(model).backward()  # type: ignore[no-untyped-call]
    return watched.trace()


@contextmanager
def on_meta() -> Iterator[None]:
    """New tensors have a shape and no memory."""
    with torch.device("meta"):
        yield


def steadied(measured: Trace, counted_: Trace) -> Trace:
    """``measured`` without noise: each gradient takes a quarter to four times its counted share of the backward pass,
    and the whole pass takes as long as before.

    Another program that runs for some milliseconds, or memory that is allocated, then lengthens the pass, and not the
    one gradient that came next. Gradients that were not counted keep their times.
    """
    shares = dict(zip(counted_.names, counted_.backward_times, strict=True))
    total_s, all_s = measured.backward_s, counted_.backward_s
    if not (total_s > 0 and all_s > 0):
        return measured
    times = []
    for name, seconds in zip(measured.names, measured.backward_times, strict=True):
        share_s = shares.get(name, math.nan) / all_s * total_s
        times.append(seconds if math.isnan(share_s) else min(max(seconds, share_s / _WITHIN), share_s * _WITHIN))
    if not sum(times) > 0:
        return measured
    factor = total_s / sum(times)
    return replace(measured, backward_times=tuple(one * factor for one in times))
