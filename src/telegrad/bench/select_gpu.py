"""Times selections on a GPU, beside torch.topk and a memory copy there. Times are between events of the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from telegrad.bench.select_plan import (
    GPU_COPY,
    GRADIENTS,
    PEER,
    QUEUED,
    QUEUED_COPY,
    QUEUED_PEER,
    SELECTION_OF,
    SETTLING_STEPS,
    Sample,
    SelectPlan,
)
from telegrad.compress import Residual, ReusedThreshold, Selection, selection_named
from telegrad.ops.select import queues_of

Clock = Callable[[Callable[[], object]], float]
"""Does the work, and says how many seconds it took."""

_BUSY_CYCLES = 6_000_000
"""About 3 ms: a slow host launches the 40 kernels of a selection in less than half of them."""


def seconds_between_events(work: Callable[[], object]) -> float:
    """From the device's reaching ``work`` to its being through with it; what waits for the CPU in between counts."""
    begin, end = _events()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def seconds_behind_others(work: Callable[[], object]) -> float:
    """As ``seconds_between_events``, but the device is busy until all of ``work`` is in its stream: only its own time
    counts. ``work`` must not wait for it, and be enqueued within 3 ms."""
    begin, end = _events()
    torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]


class Tensors:
    """What all contenders work on: the same numbers in every run, but not those that the CPU's work on."""

    def __init__(
        self,
        plan: SelectPlan,
        device: str = "cuda",
        seconds_of: Clock = seconds_between_events,
        queued_seconds_of: Clock = seconds_behind_others,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        exact, self._k = selection_named("topk"), plan.k
        self._seconds_of, self._queued_seconds_of = seconds_of, queued_seconds_of
        self._policies: dict[str, Selection] = {name: selection_named(SELECTION_OF[name]) for name in plan.methods}
        self._residual = torch.zeros(plan.elements, device=device)
        names = (PEER, *plan.methods)
        self._entries = {name: Residual(name, self._residual, plan.k) for name in names}  # type: ignore[arg-type]
        room = max([plan.k, *(one.capacity(self._entries[name]) for name, one in self._policies.items())])
        self._indices = torch.zeros(room, dtype=torch.uint32, device=device)
        self._values = torch.zeros(room, device=device)
        for _ in range(SETTLING_STEPS):
            gradient = torch.randn(plan.elements, device=device, generator=generator)
            exact.select(self._entries[PEER], gradient, self._indices, self._values, 0)
        self._gradients = [torch.randn(plan.elements, device=device, generator=generator) for _ in range(GRADIENTS)]
        self._gradient = self._gradients[0]
        self._before, self._copy = self._residual.clone(), torch.empty_like(self._residual)
        self._queued = _Queued(self._residual, plan.k, self._indices, self._values)

    def sample(self, name: str, number: int) -> Sample:
        """One call of this contender in that round."""
        self._gradient = self._gradients[number % GRADIENTS]
        self._residual.copy_(self._before)
        if name in QUEUED:
            return self._sample_queued(lambda: self._queued.select(QUEUED[name], self._gradient), self._queued.count)
        if name in self._policies:
            counts: list[int] = []
            policy, entry = self._policies[name], self._entries[name]
            seconds = self._seconds_of(
                lambda: counts.append(policy.select(entry, self._gradient, self._indices, self._values, 0))
            )
            return Sample(seconds, counts[0])
        work = self._copy_by_torch if name in (GPU_COPY, QUEUED_COPY) else self._select_by_torch
        return self._sample_queued(work) if name in (QUEUED_COPY, QUEUED_PEER) else Sample(self._seconds_of(work))

    def _sample_queued(self, work: Callable[[], object], count: torch.Tensor | None = None) -> Sample:
        enqueue_s = 0.0

        def enqueue() -> None:
            nonlocal enqueue_s
            begin = time.perf_counter()
            work()
            enqueue_s = time.perf_counter() - begin

        seconds = self._queued_seconds_of(enqueue)
        return Sample(seconds, None if count is None else int(count), enqueue_s)

    def _copy_by_torch(self) -> None:
        self._copy.copy_(self._gradient)

    def _select_by_torch(self) -> None:
        self._residual += self._gradient
        _, indices = torch.topk(self._residual.abs(), self._k, sorted=False)
        self._sent = self._residual[indices]
        self._residual[indices] = 0


class _Queued:
    """Selections as ``train.device_selection`` puts them in a stream. ``count``: the entries moved by the last one."""

    def __init__(self, residual: torch.Tensor, k: int, indices: torch.Tensor, values: torch.Tensor) -> None:
        kernels = self._kernels = queues_of(residual)
        policy = ReusedThreshold()
        self._residual, self._k, self._indices, self._values = residual, k, indices, values
        self.count, self._active = residual.new_zeros(1, dtype=torch.int64), residual.new_ones(1, dtype=torch.int64)
        threshold, calls = residual.new_zeros(1, dtype=torch.float64), residual.new_zeros(1, dtype=torch.int64)
        self._parts = [kernels.Reusing(residual, k, threshold, calls, 0, 0, 0)]
        self._policy, self._table = policy, kernels.reuse_table(self._parts).to(residual.device)

    def select(self, selection: str, gradient: torch.Tensor) -> None:
        """``"topk"`` or ``"reused"``, which keeps its threshold from one to the next. Does not wait."""
        kernels, residual, k, active = self._kernels, self._residual, self._k, self._active
        outputs = self._indices, self._values, self.count
        if k == residual.numel():
            kernels.queue_all(residual, gradient, *outputs, 0, active)
        elif selection == "topk":
            kernels.queue_topk(residual, gradient, k, *outputs, 0, active=active)
        else:
            kept = {"interval": self._policy.interval, "gain": self._policy.gain}
            kernels.queue_reused(self._parts, self._table, gradient, *outputs, active=active, **kept)
