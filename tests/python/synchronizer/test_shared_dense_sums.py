"""Plans for shared processors: against all cuts, and against the plans that know one cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from telegrad.synchronizer import merge
from telegrad.synchronizer.shared_ways import of_cuts, optimal

Cost = Callable[[int], float]


def _instance(seed: int) -> tuple[list[int], list[float], Cost, Cost]:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    sizes = [draw.choice([0, 4, 100, 1000, 9000]) for _ in range(count)]
    times = [draw.choice([0.0, 0.1, 1.0, 3.0]) * draw.random() for _ in range(count)]
    latency, rate, slower = draw.random(), draw.random() * 1e-3, draw.choice([0.5, 1.0, 2.0, 10.0])
    return sizes, times, lambda size: latency + size * rate, lambda size: slower * latency + 2 * size * rate


def _end(start: float, over: float, idle: float, busy: float) -> float:
    """Second thoughts on the same sentence: work is 1, done at 1 / busy a second and then at 1 / idle."""
    if start >= over:
        return start + idle
    if start + busy <= over:
        return start + busy
    return over + (1 - (over - start) / busy) * idle


def test_no_cut_ends_earlier() -> None:
    better = 0
    for seed in range(300):
        sizes, times, idle, busy = _instance(seed)
        plan = optimal(sizes, times, idle=idle, busy=busy)
        ready = list(itertools.accumulate(times))
        best = float("inf")
        for cuts in itertools.product([False, True], repeat=len(sizes) - 1):
            stops = [place + 1 for place, cut in enumerate(cuts) if cut] + [len(sizes)]
            free, begin = 0.0, 0
            for stop in stops:
                held = sum(sizes[begin:stop])
                free = _end(max(free, ready[stop - 1]), ready[-1], idle(held), max(idle(held), busy(held)))
                begin = stop
            best = min(best, free)
        assert plan.finish_s == pytest.approx(best, rel=1e-12)
        blind = merge.optimal(sizes, times, cost=idle)
        stops = [group[-1] + 1 for group in blind.groups]
        better += plan.finish_s < of_cuts("blind", sizes, times, stops, idle=idle, busy=busy).finish_s * 0.999
    assert better > 50


def test_where_nothing_is_shared_it_is_the_optimum_of_one_cost() -> None:
    for seed in range(100):
        sizes, times, idle, _ = _instance(seed)
        for busy in (idle, lambda size, idle=idle: idle(size) / 3):
            plan = optimal(sizes, times, idle=idle, busy=busy)
            assert plan.finish_s == pytest.approx(merge.optimal(sizes, times, cost=idle).finish_s, rel=1e-12)


def test_a_sum_beside_the_backward_pass_and_after_it() -> None:
    """Begins 1 s before the end, when it has done a quarter of its 4 s; the rest of its 2 s are 1.5."""
    plan = of_cuts("by hand", [10, 10, 10], [1.0, 1.0, 2.0], [1, 2, 3], idle=lambda _: 2.0, busy=lambda _: 4.0)
    first, second, third = plan.timeline
    assert (first.start_s, first.finish_s) == (1.0, 4.0 + 0.25 * 2.0)
    assert (second.start_s, second.finish_s) == (4.5, 6.5)
    assert third.finish_s == 8.5
    assert plan.scheme == "by hand"


def test_slow_sums_are_put_off_to_the_end() -> None:
    sizes, times = [1000] * 6, [1.0] * 6

    def cost(size: int) -> float:
        return 0.01 + size * 3e-4

    assert len(optimal(sizes, times, idle=cost, busy=cost).groups) > 1
    assert len(optimal(sizes, times, idle=cost, busy=lambda size: 1000 * cost(size)).groups) == 1


def test_nothing_to_plan() -> None:
    plan = optimal([], [], idle=lambda _: 1.0, busy=lambda _: 1.0)
    assert (plan.groups, plan.finish_s) == ((), 0.0)


def test_sums_that_cost_nothing() -> None:
    plan = optimal([1, 1], [1.0, 1.0], idle=lambda _: 0.0, busy=lambda _: 0.0)
    assert plan.finish_s == 2.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sizes": [1]}, "sizes has 1 tensors and backward_times 2"),
        ({"busy": lambda _: float("nan")}, "cost"),
        ({"idle": lambda _: -1.0}, "cost"),
        ({"backward_times": [1.0, -1.0]}, r"backward_times\[1\] is -1.0"),
    ],
    ids=["lengths", "busy", "idle", "time"],
)
def test_misuse_is_refused(change: dict[str, object], said: str) -> None:
    arguments: dict[str, object] = {"sizes": [1, 2], "backward_times": [1.0, 1.0], "idle": None, "busy": None}
    arguments |= {name: (lambda _: 1.0) for name in ("idle", "busy")}
    with pytest.raises(ValueError, match=said):
        optimal(**{**arguments, **change})  # type: ignore[arg-type]
    if "sizes" not in change:
        with pytest.raises(ValueError, match=said):
            of_cuts("x", stops=[2], **{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("strange", [float("inf"), float("nan"), -1.0], ids=str)
@pytest.mark.parametrize("name", ["idle", "busy"])
def test_a_cost_of_larger_groups_that_is_no_time_is_refused(name: str, strange: float) -> None:
    costs: dict[str, Callable[[int], float]] = {"idle": lambda _: 1.0, "busy": lambda _: 1.0}
    costs[name] = lambda size: strange if size > 2 else 1.0
    with pytest.raises(ValueError, match=r"cost\(3\) is .*: it must be finite and 0 or more"):
        optimal([1, 2], [1.0, 1.0], **costs)
    with pytest.raises(ValueError, match=r"cost\(3\) is .*: it must be finite and 0 or more"):
        of_cuts("x", [1, 2], [1.0, 1.0], [2], **costs)


def test_stops_must_cut() -> None:
    with pytest.raises(ValueError, match="must rise"):
        of_cuts("x", [1, 2], [1.0, 1.0], [1], idle=lambda _: 1.0, busy=lambda _: 1.0)
