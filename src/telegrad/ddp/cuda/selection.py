"""The selections that a stream can make by itself: what is chosen, and how much, is known to the device alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from telegrad.communicator.cuda.runtime import DeviceRuntime, Stream
from telegrad.compress import Compressor, ExactTopK, Residual, ReusedThreshold, Selection, TrimmedTopK
from telegrad.ddp.cuda.feedback import DeviceResidual, DeviceTables
from telegrad.kernels.select import queues_of


class QueuedSelection(NamedTuple):
    """What is chosen from one residual after its gradient, by ``policy``. ``start``: where the room of its entries
    begins; ``offset``: where its gradient does, and what is added to its positions; ``place``: its own in
    ``QueuedEntries.active``."""

    policy: Selection
    entry: Residual
    held: DeviceResidual
    start: int
    offset: int
    place: int

    @property
    def reuses(self) -> bool:
        """Whether by a threshold that is used again."""
        return isinstance(self.policy, ReusedThreshold) and self.entry.k < self.entry.size


class QueuedEntries(NamedTuple):
    """What all choices of a bucket are from, and where they go. ``counts``: int64, by choice; ``active``: int64, by
    place: where it is 0, nothing is done."""

    gradient: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    active: torch.Tensor


def queue_selections(
    choices: Sequence[QueuedSelection],
    chosen: QueuedEntries,
    tables: DeviceTables,
    runtime: DeviceRuntime,
    stream: Stream,
) -> None:
    """Adds gradients to residuals, and moves out what policies choose. Those that reuse thresholds go together."""
    reused: dict[ReusedThreshold, list[int]] = {}
    for number, one in enumerate(choices):
        if one.reuses:
            assert isinstance(one.policy, ReusedThreshold)
            reused.setdefault(one.policy, []).append(number)
        else:
            _queue_one(one, number, chosen, runtime, stream)
    for policy, numbers in reused.items():
        _queue_reused(policy, choices, numbers, chosen, tables, runtime, stream)


def _queue_one(
    choice: QueuedSelection, number: int, chosen: QueuedEntries, runtime: DeviceRuntime, stream: Stream
) -> None:
    kernels, k, size, offset = queues_of(choice.held.values), choice.entry.k, choice.entry.size, choice.offset

    def select(residual: Any, gradient: Any, indices: Any, values: Any, count: Any, active: Any) -> None:
        if k == size:
            kernels.queue_all(residual, gradient, indices, values, count, offset, active)
        else:
            kernels.queue_topk(residual, gradient, k, indices, values, count, offset, active=active)

    room = slice(choice.start, choice.start + k)
    outputs = chosen.indices[room], chosen.values[room], chosen.counts[number : number + 1]
    active = chosen.active[choice.place : choice.place + 1]
    runtime.launch(stream, select, choice.held.values, chosen.gradient[offset : offset + size], *outputs, active)


def _queue_reused(
    policy: ReusedThreshold,
    choices: Sequence[QueuedSelection],
    numbers: Sequence[int],
    chosen: QueuedEntries,
    tables: DeviceTables,
    runtime: DeviceRuntime,
    stream: Stream,
) -> None:
    """``numbers``: of those choices that are by this policy."""
    of_policy = [choices[number] for number in numbers]
    kernels, count = queues_of(of_policy[0].held.values), len(numbers)
    parts = [
        kernels.Reusing(
            one.held.values, one.entry.k, one.held.threshold, one.held.calls, one.start, one.offset, one.place
        )
        for one in of_policy
    ]
    arrays = [one for part in parts for one in (part.residual, part.threshold, part.calls)]
    numbers_of = [(one.residual.numel(), one.k, one.start, one.offset, one.place) for one in parts]
    contents = [one.data_ptr() for one in arrays], numbers_of
    name = "reuse", of_policy[0].entry.name
    table = tables.of(name, contents, lambda: kernels.reuse_table(parts), parts[0].residual)

    def select(table: Any, gradient: Any, indices: Any, values: Any, counts: Any, active: Any, *residuals: Any) -> None:
        own = [part._replace(residual=residual) for part, residual in zip(parts, residuals, strict=True)]
        counted = counts if count == len(choices) else counts.new_empty(count)
        kept = {"interval": policy.interval, "gain": policy.gain}
        kernels.queue_reused(own, table, gradient, indices, values, counted, active=active, **kept)
        if counted is not counts:
            torch._foreach_copy_([counts[number : number + 1] for number in numbers], [*counted.split(1)])

    runtime.launch(stream, select, table, *chosen, *(part.residual for part in parts))


def check_selections(compressor: Compressor, entries: Iterable[Residual]) -> None:
    """Raises ``TypeError``, naming the parameter, for a policy that a stream cannot follow."""
    for entry in entries:
        policy = compressor.policy_of(entry)
        fits = isinstance(policy, (ExactTopK, TrimmedTopK, ReusedThreshold))
        if not fits or getattr(policy, "same_sign", False):
            raise TypeError(
                f"parameter {entry.name!r} is on a device, where {policy!r} cannot choose without waiting for it: use "
                "select='topk', 'trimmed' or 'reused' without same_sign, or model.cpu()"
            )
