"""The selections that a stream can make by itself: what is chosen, and how much, is known to the device alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from telegrad.communicator.cuda.runtime import DeviceRuntime, Stream
from telegrad.compress import (
    SELECTIONS,
    BucketTopK,
    Compressor,
    GaussianThreshold,
    RandomK,
    Residual,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
)
from telegrad.compress.baselines import LOWERED_BY, LOWERED_MOST
from telegrad.ddp.cuda.feedback import DeviceResidual, DeviceTables
from telegrad.kernels.select import Sign, queues_of


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
        return isinstance(self.policy, (ReusedThreshold, SampledThreshold)) and self.entry.k < self.entry.size

    @property
    def room(self) -> int:
        """The most entries that leave."""
        return self.policy.capacity(self.entry)


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
    reused: dict[ReusedThreshold | SampledThreshold, list[int]] = {}
    for number, one in enumerate(choices):
        if one.reuses:
            assert isinstance(one.policy, (ReusedThreshold, SampledThreshold))
            reused.setdefault(one.policy, []).append(number)
        else:
            _queue_one(one, number, chosen, runtime, stream)
    for policy, numbers in reused.items():
        _queue_reused(policy, choices, numbers, chosen, tables, runtime, stream)


def _queue_one(
    choice: QueuedSelection, number: int, chosen: QueuedEntries, runtime: DeviceRuntime, stream: Stream
) -> None:
    entry, held, policy, start, offset, place = choice.entry, choice.held, choice.policy, *choice[3:]
    kernels, k, size = queues_of(held.values), entry.k, entry.size

    def queue(given: tuple[Any, Any], out: tuple[Any, Any], count: Any, active: Any, calls: Any, sign: Sign) -> None:
        end = (*out, count, offset)
        if isinstance(policy, BucketTopK):
            kernels.queue_buckets(*given, *policy.shares(entry), *end, active=active)
        elif isinstance(policy, RandomK):
            draw = (policy.seed, calls, policy.rank, policy.stream(entry))
            kernels.queue_random(*given, k, draw, *end, active=active)
            calls.add_(active)
        elif k == size and sign == 0:
            kernels.queue_all(*given, *end, active)
        elif isinstance(policy, GaussianThreshold):
            how = (policy.deviations(entry), LOWERED_BY, LOWERED_MOST)
            kernels.queue_normal(*given, k, how, *end, active=active)
        elif isinstance(policy, ThresholdSearch):
            kernels.queue_search(*given, k, policy.tolerance, *end, sign, active)
        else:
            kernels.queue_topk(*given, k, *end, sign, active)

    def select(residual: Any, gradient: Any, indices: Any, values: Any, count: Any, active: Any, calls: Any) -> None:
        given, out = (residual, gradient), (indices, values)
        if not getattr(policy, "same_sign", False):
            queue(given, out, count, active, calls, 0)
            return
        calls.add_(active)  # of both signs the one whose turn it is takes part
        positive = active * (calls & 1)
        others = torch.empty_like(count)
        queue(given, out, count, positive, calls, 1)
        queue(given, out, others, active - positive, calls, -1)
        count.add_(others)

    room = slice(start, start + choice.room)
    outputs = chosen.indices[room], chosen.values[room], chosen.counts[number : number + 1]
    gradient, active = chosen.gradient[offset : offset + size], chosen.active[place : place + 1]
    runtime.launch(stream, select, held.values, gradient, *outputs, active, held.calls)


def _queue_reused(
    policy: ReusedThreshold | SampledThreshold,
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
        options = {"gain": 0.0, **vars(policy)}
        kernels.queue_reused(own, table, gradient, indices, values, counted, active=active, **options)
        if counted is not counts:
            torch._foreach_copy_([counts[number : number + 1] for number in numbers], [*counted.split(1)])

    runtime.launch(stream, select, table, *chosen, *(part.residual for part in parts))


def check_selections(compressor: Compressor) -> None:
    """Raises ``TypeError``, naming the parameter, for a policy that a stream cannot follow."""
    for entry in compressor.residuals:
        policy = compressor.policy_of(entry)
        if compressor.selects(entry.name) and not isinstance(policy, tuple(SELECTIONS.values())):
            raise TypeError(
                f"parameter {entry.name!r} is on a device, where a {type(policy).__name__} cannot choose without "
                "waiting for it: use a selection of telegrad.compress, or model.cpu()"
            )
