"""Times selections on a GPU, beside torch.topk and a memory copy there. Times are between events of the device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from telegrad.bench.select_plan import GPU_COPY, GRADIENTS, METHODS, PEER, SETTLING_STEPS, SelectPlan
from telegrad.compress import Residual, Selection, selection_named


def seconds_between_events(work: Callable[[], object]) -> float:
    """From the device's reaching ``work`` to its being through with it; what waits for the CPU in between counts."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


class Tensors:
    """What all contenders work on: the same numbers in every run, but not those that the CPU's work on."""

    def __init__(
        self,
        plan: SelectPlan,
        device: str = "cuda",
        seconds_of: Callable[[Callable[[], object]], float] = seconds_between_events,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        exact, self._k, self._seconds_of = selection_named("topk"), plan.k, seconds_of
        self._policies: dict[str, Selection] = {name: selection_named(METHODS[name]) for name in plan.methods}
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

    def sample(self, name: str, number: int) -> tuple[float, int | None]:
        """Seconds of one call of this contender in that round, and of a method how many entries it selects."""
        self._gradient = self._gradients[number % GRADIENTS]
        self._residual.copy_(self._before)
        if name in self._policies:
            counts: list[int] = []
            policy, entry = self._policies[name], self._entries[name]
            seconds = self._seconds_of(
                lambda: counts.append(policy.select(entry, self._gradient, self._indices, self._values, 0))
            )
            return seconds, counts[0]
        work = {GPU_COPY: lambda: self._copy.copy_(self._gradient), PEER: self._select_by_torch}[name]
        return self._seconds_of(work), None

    def _select_by_torch(self) -> None:
        self._residual += self._gradient
        _, indices = torch.topk(self._residual.abs(), self._k, sorted=False)
        self._sent = self._residual[indices]
        self._residual[indices] = 0
