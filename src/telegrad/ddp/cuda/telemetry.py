"""Telemetry of gradients on a device: figures are computed there in an observed pass, and written once the host knows
them, which it never waits for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import LateRead
from telegrad.compress import BucketTopK, Observation, RandomK
from telegrad.ddp.bucket import BucketLayout
from telegrad.ddp.cuda.selection import QueuedEntries, QueuedSelection
from telegrad.ddp.telemetry import DDPStats, StepRecord, Telemetry, write_record


class _Figures(NamedTuple):
    """Of the compressed parameters of a bucket, those of which the host knows, and the others."""

    tensors: list[tuple[str, int, int]]  # name, elements, k
    read: LateRead


@dataclass(slots=True)
class _ObservedPass:
    """``dropped``: ``None`` until the ranks have agreed."""

    record: StepRecord | None
    figures: list[_Figures] = field(default_factory=list)
    dropped: bool | None = None


class DeviceTelemetry:
    """``telemetry``: where records go; ``None``: nothing is observed. Their step is the number of the pass, dropped
    ones counted, since whether they were is known too late. When one begins, sums of earlier ones may still be under
    way: their bytes count for it."""

    def __init__(self, telemetry: Telemetry | None, comm: Communicator, stats: DDPStats) -> None:
        self._telemetry = telemetry
        self._comm, self._stats = comm, stats
        self._passes: deque[_ObservedPass] = deque()
        self._open: _ObservedPass | None = None

    @property
    def observes(self) -> bool:
        """Whether this pass is one of those that are written."""
        return self._open is not None and self._open.record is not None

    def begin(self, number: int) -> None:
        """A pass, of that number. One that was not closed is forgotten."""
        observed = self._telemetry is not None and number % self._telemetry.every == 0
        record = StepRecord.begin(number, self._comm, self._stats) if observed else None
        self._open = _ObservedPass(record)

    def add_bucket(self, layout: BucketLayout, buffer: torch.Tensor, *, sparse: bool) -> None:
        """``sparse``: its parts are compressed."""
        if self._open is not None and self._open.record is not None:
            self._open.record.add(buffer, layout.dense if sparse else layout.members)

    def add_selections(
        self,
        choices: Sequence[QueuedSelection],
        chosen: QueuedEntries,
        given: Sequence[torch.Tensor],
        unit: torch.Tensor | None,
    ) -> None:
        """After selections from gradients whose norms were ``given``, of one element each. ``unit``: of gradients,
        float64; ``None``: 1."""
        if not choices:
            return
        left = torch._foreach_norm([one.held.values for one in choices])
        pairs = zip(choices, chosen.counts, strict=True)
        thresholds = torch.cat([_threshold_of(one, chosen, count) for one, count in pairs])
        active = torch.cat([chosen.active[one.place : one.place + 1] for one in choices])
        tensors = [(one.entry.name, one.entry.size, one.entry.k) for one in choices]
        self._add(tensors, given, left, thresholds, torch.stack([chosen.counts, active]), unit)

    def add_matrices(
        self,
        tensors: list[tuple[str, int, int]],
        residuals: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        active: torch.Tensor,
        unit: torch.Tensor | None,
    ) -> None:
        """Of matrices of low rank; ``residuals``: what stays. ``tensors``: name, elements, and how many numbers are
        sent; ``active``: whether they took part; the others as in ``add_selections``."""
        counts = torch.stack([torch.full_like(one, words) for one, (_, _, words) in zip(given, tensors, strict=True)])
        left = torch._foreach_norm([*residuals])
        self._add(tensors, given, left, torch.zeros_like(counts), torch.stack([counts, active.to(counts.dtype)]), unit)

    def _add(
        self,
        tensors: list[tuple[str, int, int]],
        given: Sequence[torch.Tensor],
        left: Sequence[torch.Tensor],
        thresholds: torch.Tensor,
        others: torch.Tensor,
        unit: torch.Tensor | None,
    ) -> None:
        """``others``: how many left, and whether anything did."""
        if self._open is not None:
            norms = [torch.stack([*given]).double(), torch.stack([*left]).double(), thresholds.double()]
            scaled = torch.stack(norms if unit is None else [one * unit for one in norms])
            self._open.figures.append(_Figures(tensors, LateRead(torch.cat([scaled, others.double()]))))

    def close(self) -> None:
        """The pass has had its last bucket."""
        if self._open is not None:
            self._passes.append(self._open)
            self._open = None

    def settled(self, dropped: bool) -> None:
        """What has become of the first pass of which that was not known."""
        for one in self._passes:
            if one.dropped is None:
                one.dropped = dropped
                break

    def write(self, *, wait: bool = False) -> None:
        """The records of which the host knows all by now; ``wait``: of all passes that have been settled."""
        while self._passes and self._passes[0].dropped is not None:
            first = self._passes[0]
            if not wait and not all(figures.read.is_known for figures in first.figures):
                return
            self._passes.popleft()
            if first.record is not None and self._telemetry is not None:
                for figures in first.figures:
                    first.record.tensors += _observations(figures)
                first.record.close(dropped=bool(first.dropped))
                self._telemetry = write_record(self._telemetry, first.record)

    def forget(self) -> None:
        """What is not yet written is of no account."""
        self._passes.clear()
        self._open = None


def _threshold_of(choice: QueuedSelection, chosen: QueuedEntries, count: torch.Tensor) -> torch.Tensor:
    """Float64, one element: the lowest magnitude of what was chosen, or where the threshold of the next call is; 0:
    there is none. ``count``: how many were chosen."""
    if choice.reuses:
        return choice.held.threshold  # type: ignore[no-any-return]
    if isinstance(choice.policy, (BucketTopK, RandomK)):
        return torch.zeros_like(choice.held.threshold)
    magnitudes = chosen.values[choice.start : choice.start + choice.room].abs()
    others = count.new_ones(choice.room).cumsum(0) > count
    lowest = magnitudes.masked_fill(others, math.inf).amin().double().view(1)
    return lowest.masked_fill(lowest == math.inf, 0.0)


def _observations(figures: _Figures) -> list[Observation]:
    columns = figures.read.values().view(5, -1).T.tolist()
    return [
        Observation(name, size, k, int(count), given, left, threshold if threshold > 0 else None)
        for (name, size, k), (given, left, threshold, count, active) in zip(figures.tensors, columns, strict=True)
        if active  # a parameter that took no part is not observed
    ]
