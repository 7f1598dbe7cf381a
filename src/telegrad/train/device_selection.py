"""The selections that a stream can make by itself: what is chosen, and how much, is known to the device alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from telegrad.comm.device.runtime import DeviceRuntime, Stream
from telegrad.compress import Compressor, ExactTopK, Residual, ReusedThreshold, Selection, TrimmedTopK
from telegrad.ops.select import queues_of
from telegrad.train.device_feedback import DeviceResidual
from telegrad.train.device_tables import DeviceTables


class Choice(NamedTuple):
    """What is chosen from one residual after its gradient: indices (+ ``offset``), values and their count, an int64, go
    into ``outputs``. Nothing is done if ``active`` (int64, one element) is 0."""

    policy: Selection
    entry: Residual
    held: DeviceResidual
    gradient: torch.Tensor
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    offset: int
    active: torch.Tensor


def queue_selections(choices: Sequence[Choice], tables: DeviceTables, runtime: DeviceRuntime, stream: Stream) -> None:
    """Adds gradients to residuals, and moves out what policies choose. Those that reuse thresholds go together."""
    reused: dict[ReusedThreshold, list[Choice]] = {}
    for one in choices:
        if isinstance(one.policy, ReusedThreshold) and one.entry.k < one.entry.size:
            reused.setdefault(one.policy, []).append(one)
        else:
            _queue_one(one, runtime, stream)
    for policy, of_policy in reused.items():
        _queue_reused(policy, of_policy, tables, runtime, stream)


def _queue_one(choice: Choice, runtime: DeviceRuntime, stream: Stream) -> None:
    kernels, k, size, offset = queues_of(choice.held.values), choice.entry.k, choice.entry.size, choice.offset

    def select(residual: Any, gradient: Any, indices: Any, values: Any, count: Any, active: Any) -> None:
        if k == size:
            kernels.queue_all(residual, gradient, indices, values, count, offset, active)
        else:
            kernels.queue_topk(residual, gradient, k, indices, values, count, offset, active=active)

    runtime.launch(stream, select, choice.held.values, choice.gradient, *choice.outputs, choice.active)


def _queue_reused(
    policy: ReusedThreshold, choices: Sequence[Choice], tables: DeviceTables, runtime: DeviceRuntime, stream: Stream
) -> None:
    kernels, number = queues_of(choices[0].held.values), len(choices)
    ks, offsets = [one.entry.k for one in choices], [one.offset for one in choices]
    table = _rank_table(choices, tables)

    def select(*tensors: Any) -> None:
        *tensors, of_ranks = tensors if table is not None else (*tensors, None)  # type: ignore[assignment]
        kinds = [[*tensors[start : start + number]] for start in range(0, len(tensors), number)]
        residuals, gradients, indices, values, counts, active, thresholds, calls, limits = kinds
        joined = (torch.cat(one) for one in (thresholds, calls, limits))
        kept = kernels.Kept(*joined, policy.interval, policy.gain)
        kernels.queue_reused(residuals, gradients, ks, kept, indices, values, counts, offsets, active, of_ranks)
        torch._foreach_copy_([*thresholds, *calls], [*kept.threshold.split(1), *kept.calls.split(1)])

    by_kind = zip(
        *(
            (
                one.held.values,
                one.gradient,
                *one.outputs,
                one.active,
                one.held.threshold,
                one.held.calls,
                one.held.limits,
            )
            for one in choices
        ),
        strict=True,
    )
    known = () if table is None else (table,)
    runtime.launch(stream, select, *(tensor for kind in by_kind for tensor in kind), *known)


def _rank_table(choices: Sequence[Choice], tables: DeviceTables) -> torch.Tensor | None:
    """``rank_table`` of what is chosen from, on its device; ``None``: there is nothing long."""
    residuals, ks = [one.held.values for one in choices], [one.entry.k for one in choices]
    kernels = queues_of(residuals[0])
    if not any(map(kernels.is_long, residuals)):
        return None
    contents = [one.data_ptr() for one in residuals], ks
    name = "rank", choices[0].entry.name
    return tables.of(name, contents, lambda: kernels.rank_table(residuals, ks), residuals[0])


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
