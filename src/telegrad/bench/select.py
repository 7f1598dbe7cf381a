"""Times selections beside torch.topk and one memory copy, interleaved: on one thread of this processor, or on a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from telegrad.bench.select_plan import COPIES, GRADIENTS, METHODS, PEER, SETTLING_STEPS, Outcome, Sample, SelectPlan
from telegrad.compress import Residual, Selection, selection_named


def run(plan: SelectPlan, on_sample: Callable[[str], None] = lambda _: None) -> Outcome:
    """Measures all that ``plan`` asks for; ``on_sample`` is called after each sample.

    Every sample begins with the same residual and has the next of ``GRADIENTS`` gradients, the same for all contenders.
    A method keeps its threshold from one to the next, so that
    a median is of calls that reuse it. Of the first sample, which touches memory for the first time, nothing is kept.
    """
    bench = _contenders(plan)
    outcome = Outcome({name: [] for name in plan.contenders}, {name: [] for name in plan.methods})
    order = np.random.default_rng(0)
    with _one_thread():
        for number in range(plan.samples + 1):
            for name in order.permutation(plan.contenders).tolist():  # nobody always finds the caches of the same other
                sample = bench.sample(name, number)
                if number == 0:
                    continue
                outcome.times[name].append(sample.seconds)
                if sample.count is not None:
                    outcome.counts[name].append(sample.count)
                if sample.enqueue_s is not None:
                    outcome.enqueued.setdefault(name, []).append(sample.enqueue_s)
                on_sample(name)
            if number == 0:  # in which kernels may have been compiled
                begin = time.perf_counter()
            elif number >= 3 and (time.perf_counter() - begin) * (number + 1) / number > plan.seconds:
                break
    return outcome


class _Contenders(Protocol):
    def sample(self, name: str, number: int) -> Sample: ...


def _contenders(plan: SelectPlan) -> _Contenders:
    if plan.device == "cpu":
        return _Arrays(plan)
    from telegrad.bench.select_gpu import Tensors

    return Tensors(plan)


class _Arrays:
    """What all contenders work on."""

    def __init__(self, plan: SelectPlan) -> None:
        rng = np.random.default_rng(0)
        exact, k = selection_named("topk"), plan.k
        self._policies: dict[str, Selection] = {name: selection_named(METHODS[name]) for name in plan.methods}
        self._residual = np.zeros(plan.elements, np.float32)
        entries = {name: Residual(name, self._residual, k) for name in (PEER, *plan.methods)}
        self._entries = entries
        room = max([k, *(policy.capacity(entries[name]) for name, policy in self._policies.items())])
        self._indices, self._values = np.zeros(room, np.uint32), np.zeros(room, np.float32)
        for _ in range(SETTLING_STEPS):
            gradient = rng.standard_normal(plan.elements, np.float32)
            exact.select(entries[PEER], gradient, self._indices, self._values, 0)
        self._gradients = [rng.standard_normal(plan.elements, np.float32) for _ in range(GRADIENTS)]
        self._gradient = self._gradients[0]
        self._before = self._residual.copy()
        self._copy = np.zeros_like(self._residual)
        self._k = k

    def sample(self, name: str, number: int) -> Sample:
        """One call of this contender in that round.

        Seconds are the thread's own: what else runs on this machine takes caches and bandwidth from it, but not its
        time.
        """
        self._gradient = self._gradients[number % GRADIENTS]
        np.copyto(self._residual, self._before)
        if name in self._policies:
            policy, entry = self._policies[name], self._entries[name]
            begin = time.thread_time()
            count = policy.select(entry, self._gradient, self._indices, self._values, 0)
            return Sample(time.thread_time() - begin, count)
        by_numpy, by_torch = COPIES["cpu"]
        work = {by_numpy: self._copy_by_numpy, by_torch: self._copy_by_torch, PEER: self._select_by_torch}[name]
        begin = time.thread_time()
        work()
        return Sample(time.thread_time() - begin)

    def _copy_by_numpy(self) -> None:
        np.copyto(self._copy, self._gradient)

    def _copy_by_torch(self) -> None:
        torch.from_numpy(self._copy).copy_(torch.from_numpy(self._gradient))

    def _select_by_torch(self) -> None:
        residual = torch.from_numpy(self._residual)
        residual += torch.from_numpy(self._gradient)
        _, indices = torch.topk(residual.abs(), self._k, sorted=False)
        self._sent = residual[indices]
        residual[indices] = 0


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Ours has one thread: so has torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
