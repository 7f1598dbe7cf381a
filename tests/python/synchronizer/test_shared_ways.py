"""Joint plans for shared processors: against all cuts and ways, and against the plans that know less."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from telegrad.cost.send_method import SendMethod
from telegrad.synchronizer import merge, shared_ways


def drawn(
    rng: np.random.Generator, *, delays: bool = True
) -> tuple[list[int], list[float], list[SendMethod], list[int]]:
    count = int(rng.integers(1, 6))
    sizes = rng.integers(1, 1000, count).tolist()
    times = rng.exponential(1.0, count).tolist()
    speed = sum(times) / sum(sizes)
    dense_at, sparse_at = rng.exponential(0.2, 2)
    slower = float(rng.choice([1.0, 2.0, 8.0]))

    def dense(size: int) -> float:
        return float(dense_at + size * speed)

    def busy(size: int) -> float:
        return float(slower * dense_at + 1.5 * size * speed)

    ways = [
        SendMethod("dense", dense, busy=busy),
        SendMethod(
            "sparse",
            lambda size: float(sparse_at + 0.1 * size * speed),
            (lambda size: float(0.02 + 0.3 * size * speed)) if delays else (lambda size: 0.0),
            beside=dense,
            busy=lambda size: float(slower * sparse_at + 0.1 * size * speed),
            busy_beside=busy,
        ),
    ]
    return sizes, times, ways, [size if rng.random() < 0.2 else 0 for size in sizes]


def least_of_all(sizes: list[int], times: list[float], ways: list[SendMethod], dense: list[int]) -> float:
    """By trying every cut with every way of every group; work is 1, done at 1 / busy a second and then at 1 / idle."""
    prefix, apart, ready = [0, *accumulate(sizes)], [0, *accumulate(dense)], list(accumulate(times))
    least = math.inf

    def end_of(groups: list[tuple[int, int, SendMethod]]) -> float:
        held = [(prefix[stop] - prefix[begin], apart[stop] - apart[begin]) for begin, stop, _ in groups]
        delays = [way.delay_of(*one) for (_, _, way), one in zip(groups, held, strict=True)]
        over, free, late = ready[-1] + sum(delays), 0.0, 0.0
        for (_, stop, way), one, delay in zip(groups, held, delays, strict=True):
            late += delay
            start, idle = max(free, ready[stop - 1] + late), way.cost_of(*one)
            busy = max(idle, way.busy_of(*one))
            if start >= over:
                free = start + idle
            elif start + busy <= over:
                free = start + busy
            else:
                free = over + (1 - (over - start) / busy) * idle
        return free

    def tried(begin: int, groups: list[tuple[int, int, SendMethod]]) -> None:
        nonlocal least
        if begin == len(sizes):
            least = min(least, end_of(groups))
        for stop in range(begin + 1, len(sizes) + 1):
            for way in ways:
                tried(stop, [*groups, (begin, stop, way)])

    tried(0, [])
    return least


def test_near_the_best_of_all_cuts_and_ways() -> None:
    rng = np.random.default_rng(0)
    ratios, ahead = [], 0
    for _ in range(250):
        sizes, times, ways, dense = drawn(rng)
        plan = shared_ways.joint(sizes, times, ways=ways, dense=dense)
        best = least_of_all(sizes, times, ways, dense)
        ratios.append(plan.finish_s / best)
        blind = merge.joint(sizes, times, ways=ways, dense=dense)
        numbers = {way.name: way for way in ways}
        stops = [group[-1] + 1 for group in blind.groups]
        seen = shared_ways.planned("", sizes, times, stops, [numbers[one] for one in blind.ways], dense=dense)
        assert plan.finish_s <= seen.finish_s
        ahead += plan.finish_s < seen.finish_s * 0.999
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.05
    assert sum(one < 1 + 1e-9 for one in ratios) > 230
    assert ahead > 30


def test_exact_where_no_way_has_a_delay() -> None:
    rng = np.random.default_rng(1)
    for _ in range(150):
        sizes, times, ways, dense = drawn(rng, delays=False)
        plan = shared_ways.joint(sizes, times, ways=ways, dense=dense)
        assert plan.finish_s == pytest.approx(least_of_all(sizes, times, ways, dense), rel=1e-12)


def test_one_dense_way_is_the_plan_of_dense_sums() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        sizes, times, (dense, _), _ = drawn(rng)
        assert dense.busy is not None
        plan = shared_ways.joint(sizes, times, ways=[dense])
        other = shared_ways.optimal(sizes, times, idle=dense.cost, busy=dense.busy)
        assert plan.finish_s == pytest.approx(other.finish_s, rel=1e-12)


def test_equal_costs_are_the_joint_plan() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        sizes, times, ways, dense = drawn(rng)
        plain = [SendMethod(one.name, one.cost, one.delay, beside=one.beside) for one in ways]
        expected = merge.joint(sizes, times, ways=plain, dense=dense)
        assert shared_ways.joint(sizes, times, ways=plain, dense=dense) == expected
        equal = [SendMethod(one.name, one.cost, one.delay, beside=one.beside, busy=lambda _: 0.0) for one in ways]
        found = shared_ways.joint(sizes, times, ways=equal, dense=dense)
        assert found.finish_s == pytest.approx(expected.finish_s, rel=1e-12)


def test_a_busy_cost_is_checked() -> None:
    ways = [SendMethod("dense", lambda size: 1.0, busy=lambda size: math.nan)]
    with pytest.raises(ValueError, match=r"dense busy cost\(7\) is nan"):
        shared_ways.joint([7], [1.0], ways=ways)
    assert shared_ways.joint([], [], ways=ways).groups == ()


def test_a_model_of_many_tensors() -> None:
    rng = np.random.default_rng(4)
    sizes, times = rng.integers(4, 100_000, 150).tolist(), rng.exponential(1e-3, 150).tolist()
    ways = drawn(rng)[2]
    plan = shared_ways.joint(sizes, times, ways=ways)
    assert sum(map(len, plan.groups)) == 150


@pytest.mark.parametrize("strange", [math.inf, math.nan, -1.0], ids=str)
@pytest.mark.parametrize(
    ("name", "said"),
    [("cost", "odd cost"), ("busy", "odd busy cost"), ("delay", "odd delay")],
    ids=["cost", "busy", "delay"],
)
def test_seconds_of_larger_groups_that_are_no_time_are_refused(name: str, said: str, strange: float) -> None:
    odd: dict[str, Any] = {"cost": lambda _: 1.0, "busy": lambda _: 1.0, "delay": lambda _: 0.0}
    odd[name] = lambda size: strange if size > 2 else 1.0
    with pytest.raises(ValueError, match=rf"{said}\(3\) is .*: it must be finite and 0 or more"):
        shared_ways.joint([1, 2], [1.0, 1.0], ways=[SendMethod("odd", **odd), SendMethod("even", lambda _: 2.0)])
