"""What sums of groups take, measured: a function that is the same on all ranks and never falls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from telegrad import Communicator
from telegrad.tuning import group_cost
from telegrad.tuning.group_cost import Prepare, group_cost_while_computing, measured_group_cost, measured_way

Measure = Callable[..., Callable[[int], float]]
_MEASURES = pytest.mark.parametrize(
    "measure", [measured_group_cost, group_cost_while_computing], ids=["alone", "while computing"]
)


@_MEASURES
@pytest.mark.parametrize("most_bytes", [1, 5000, 1 << 20])
def test_costs_rise_and_are_the_same_on_all_ranks(
    on_ranks: Callable[..., list[Any]], most_bytes: int, measure: Measure
) -> None:
    sizes = [0, 4, 1024, 3000, 5000, 1 << 19, 1 << 20, 1 << 24]

    def run(comm: Communicator) -> list[float]:
        cost = measure(comm, most_bytes=most_bytes)
        return [cost(size) for size in sizes]

    first, second = on_ranks(2, run)
    assert first == second
    assert first[0] > 0
    assert (np.diff(first) >= 0).all()
    if most_bytes <= 1024:
        assert first[-1] == pytest.approx(first[2] * (1 << 14))


def test_a_way_has_the_slowest_ranks_median_of_both_parts(
    on_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that tests move: beginning takes 1 s an element on rank 0 and 2 on rank 1, the rest 30 s; the first
    of each length takes longer, and making ready does not count."""

    class Clock(threading.local):
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(group_cost, "time", clock)

    def run(comm: Communicator) -> list[float]:
        def of_length(elements: int) -> Prepare:
            calls = 0

            def finish() -> None:
                clock.now += 30.0

            def start() -> Callable[[], None]:
                nonlocal calls
                calls += 1
                clock.now += elements * (1.0 + comm.rank) + (1000.0 if calls == 1 else 0.0)
                return finish

            def prepare() -> Callable[[], Callable[[], None]]:
                clock.now += 7000.0
                return start

            return prepare

        way = measured_way(comm, "sparse", of_length, most_bytes=1 << 13, beside=lambda _: 5.0)
        assert way.name == "sparse"
        sizes = (0, 1 << 10, 3 << 10, 1 << 13, 1 << 14)
        return [*map(way.delay, sizes), *map(way.cost, sizes), way.cost_of(1 << 13, 1 << 13)]

    first, second = on_ranks(2, run)
    assert first == second
    assert first == [512, 512, 1536, 4096, 8192, 30, 30, 30, 30, 60, 5]


@_MEASURES
def test_nothing_is_no_length(on_ranks: Callable[..., list[Any]], measure: Measure) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="most_bytes=0 must be at least 1"):
            measure(comm, most_bytes=0)

    on_ranks(1, run)
