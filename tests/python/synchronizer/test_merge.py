"""Merge plans: the exact one against all cuts, the others against what they are said to do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import pytest

from telegrad.synchronizer import merge
from telegrad.synchronizer.merge_plan import MergePlan

SCHEMES = (merge.wfbp, merge.single, merge.fixed, merge.greedy)
Cost = Callable[[int], float]


def linear(a: float, b: float) -> Cost:
    return lambda size: a + b * size


def drawn(rng: np.random.Generator, most: int) -> tuple[list[int], list[float], np.ndarray]:
    """Sizes, backward times and what a group of so many bytes costs: of the kinds of networks where cuts differ."""
    count = int(rng.integers(1, most + 1))
    sizes = np.maximum(1, rng.exponential(float(rng.choice([3, 30, 300])), count)).astype(int)
    times = rng.exponential(1.0, count) * rng.choice([0, 1], count, p=[0.1, 0.9])
    total = int(sizes.sum())
    kind = rng.integers(4)
    size = np.arange(total + 1)
    if kind < 2:  # bound by latency or by bandwidth
        costs = rng.exponential(2.0 if kind else 0.2) + size * rng.exponential(2.0) * times.sum() / total
    elif kind == 2:  # the cheaper of two algorithms
        costs = np.minimum(0.1 + size * 0.1, 1.0 + size * 0.02)
    else:  # anything
        costs = rng.exponential(1.0, total + 1)
    return sizes.tolist(), times.tolist(), costs


def least_of_all_cuts(sizes: list[int], times: list[float], costs: np.ndarray) -> float:
    """By trying every set of cuts, all of them side by side: bit i of a mask cuts after tensor i."""
    count = len(sizes)
    masks = np.arange(1 << (count - 1))
    held, free = np.zeros(masks.size, int), np.zeros(masks.size)
    for position, ready in enumerate(accumulate(times)):
        held += sizes[position]
        cut = (masks >> position) & 1 == 1 if position + 1 < count else np.ones(masks.size, bool)
        free = np.where(cut, np.maximum(free, ready) + costs[held], free)
        held[cut] = 0
    return float(free.min())


@pytest.mark.parametrize("draws", [2000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_optimal_is_the_best_of_all_cuts(draws: int) -> None:
    rng = np.random.default_rng(0)
    behind = dict.fromkeys(("wfbp", "single", "fixed", "greedy"), 0)
    for _ in range(draws):
        sizes, times, costs = drawn(rng, 12)
        cost = costs.tolist().__getitem__
        best = merge.optimal(sizes, times, cost=cost)
        assert best.finish_s == least_of_all_cuts(sizes, times, costs)
        for scheme in SCHEMES:
            plan = scheme(sizes, times, cost=cost)
            assert best.finish_s <= plan.finish_s
            behind[plan.scheme] += best.finish_s < plan.finish_s
    assert min(behind.values()) > draws // 10  # greedy too: Theorem 1 of the paper does not hold


def test_a_timeline_is_what_groups_do_one_after_another() -> None:
    plan = merge.of_cuts("by hand", [10, 20, 30], [1.0, 1.0, 1.0], [2, 3], cost=linear(0.5, 0.1))
    assert plan.groups == ((0, 1), (2,))
    assert [tuple(slot) for slot in plan.timeline] == [(30, 2.0, 2.0, 5.5), (30, 3.0, 5.5, 9.0)]
    assert (plan.backward_s, plan.finish_s, plan.exposed_s) == (3.0, 9.0, 6.0)


def test_baselines_cut_where_they_say() -> None:
    mib = 1 << 20
    sizes, times = [mib // 2, mib, mib, 30 * mib, mib], [1.0] * 5
    cost = linear(1.0, 0.0)
    assert merge.wfbp(sizes, times, cost=cost).groups == ((0,), (1,), (2,), (3,), (4,))
    assert merge.single(sizes, times, cost=cost).groups == ((0, 1, 2, 3, 4),)
    assert merge.fixed(sizes, times, cost=cost).groups == ((0, 1), (2, 3), (4,))
    assert merge.fixed(sizes, times, cap_mb=1, first_mb=1, cost=cost).groups == ((0, 1), (2,), (3,), (4,))
    assert (
        merge.fixed(sizes, times, cap_mb=0, first_mb=0, cost=cost).groups == merge.wfbp(sizes, times, cost=cost).groups
    )


def published(a: float, b: float, times: list[float], sizes: list[int]) -> list[int]:
    """MG-WFBP, Algorithm 1, line by line, with layers in backward order: where groups end."""
    count, sizes = len(sizes), list(sizes)
    costs = [a + b * size for size in sizes]
    begun = [sum(times[:position]) for position in range(count)]

    def starts() -> list[float]:
        found: list[float] = []
        for position in range(count):
            free = found[-1] + costs[position - 1] if found else 0.0
            found.append(max(free, begun[position] + times[position]))
        return found

    merged = [False] * count
    start = starts()
    for position in range(count - 1):
        if begun[position + 1] + times[position + 1] - start[position] < a:
            costs[position] = 0.0
            sizes[position + 1] += sizes[position]
            costs[position + 1] = a + b * sizes[position + 1]
            start = starts()
            merged[position] = True
    return [position + 1 for position in range(count) if not merged[position]]


def test_greedy_is_the_published_algorithm() -> None:
    rng = np.random.default_rng(1)
    for _ in range(1000):  # in binary fractions, so that both round alike: not at all
        count = int(rng.integers(1, 30))
        sizes, times = rng.integers(1, 100, count).tolist(), (rng.integers(0, 64, count) / 8).tolist()
        a, b = int(rng.integers(0, 64)) / 4, int(rng.integers(0, 8)) / 64
        plan = merge.greedy(sizes, times, cost=linear(a, b))
        assert [group[-1] + 1 for group in plan.groups] == published(a, b, times, sizes)


def test_greedy_can_be_far_behind() -> None:
    """It merges all, because the next gradient is always there before the latency has passed."""
    sizes, times, cost = [1] * 40, [0.9] * 40, linear(1.0, 0.5)
    greedy, best = merge.greedy(sizes, times, cost=cost), merge.optimal(sizes, times, cost=cost)
    assert len(greedy.groups) == 1
    assert best.finish_s < 0.8 * greedy.finish_s


def test_compression_that_holds_the_backward_pass_up() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        sizes, times, costs = drawn(rng, 8)
        held_up = rng.exponential(0.3, costs.size)
        cost, delay = costs.tolist().__getitem__, held_up.tolist().__getitem__
        plan = merge.optimal(sizes, times, cost=cost, delay=delay)
        count = len(sizes)
        cuts = [[*stops, count] for n in range(count) for stops in combinations(range(1, count), n)]
        all_plans = [merge.of_cuts("any", sizes, times, stops, cost=cost, delay=delay) for stops in cuts]
        assert plan.finish_s == min(one.finish_s for one in all_plans)
        assert plan.backward_s == pytest.approx(sum(times) + sum(plan.delays))
    none = merge.optimal([5, 7], [1.0, 2.0], cost=linear(1.0, 1.0), delay=lambda size: 0.0)
    assert none == merge.optimal([5, 7], [1.0, 2.0], cost=linear(1.0, 1.0))


def test_a_thousand_tensors_need_half_a_million_costs() -> None:
    rng = np.random.default_rng(3)
    sizes, times = rng.integers(1, 1 << 20, 1000).tolist(), rng.exponential(1e-4, 1000).tolist()
    calls = 0

    def cost(size: int) -> float:
        nonlocal calls
        calls += 1
        return 1e-4 + 1e-9 * size

    best = merge.optimal(sizes, times, cost=cost)
    assert calls <= 1000 * 1001 / 2 + len(best.groups)
    assert best.finish_s <= merge.greedy(sizes, times, cost=cost).finish_s


def test_nothing_to_send() -> None:
    for scheme in (*SCHEMES, merge.optimal):
        plan = scheme([], [], cost=linear(1.0, 1.0))
        assert (plan.groups, plan.finish_s, plan.exposed_s) == ((), 0.0, 0.0)
        assert "0 tensors in 0 groups" in str(plan)


def test_a_plan_survives_json_and_can_be_compared() -> None:
    rng = np.random.default_rng(4)
    sizes, times = rng.integers(1, 100, 9).tolist(), rng.exponential(1.0, 9).tolist()
    plan = merge.optimal(sizes, times, cost=linear(0.3, 0.01))
    again = MergePlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.timeline == plan.timeline
    with pytest.raises(AttributeError):
        plan.scheme = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "x"}, "no merge plan"),
        ({"version": 9}, "version 9: this telegrad reads 2"),
        ({"groups": None}, "no 'groups'"),
        ({"groups": [1, 1]}, "groups must hold the positions 0 to 2"),
        ({"groups": [3, 0]}, "groups must hold"),
        ({"costs": [1.0, 1.0]}, "1 groups, 2 costs and 1 delays"),
        ({"sizes": [1, 2]}, "2 sizes and 3 backward_times"),
        ({"sizes": 5}, "damaged"),
        ({"sizes": [1, -2, 3]}, "must be finite numbers, 0 or more"),
        ({"groups": ["a"]}, "damaged"),
        ({"groups": [1.0, 2.0]}, "damaged"),
        ({"costs": ["x"]}, "damaged"),
        ({"ways": [1]}, "damaged"),
        ({"ways": ["dense", "dense"]}, "1 groups and 2 ways"),
        ({"costs": [-1.0]}, "must be finite numbers, 0 or more"),
        ({"backward_times": [None, 1, 1]}, "damaged"),
    ],
)
def test_what_is_no_plan_is_refused(change: dict[str, object], said: str) -> None:
    found = json.loads(merge.single([1, 2, 3], [1.0] * 3, cost=linear(1.0, 0.0)).to_json())
    found |= change
    text = json.dumps({name: value for name, value in found.items() if value is not None})
    with pytest.raises(ValueError, match=said):
        MergePlan.from_json(text)
    with pytest.raises(ValueError, match="no merge plan"):
        MergePlan.from_json("[]")


def test_a_plan_is_drawn_in_text() -> None:
    text = str(merge.of_cuts("by hand", [1024, 2048, 4096], [1e-3] * 3, [2, 3], cost=linear(1e-3, 0.0)))
    lines = text.splitlines()
    assert lines[0] == (
        "by hand: 3 tensors in 2 groups, backward pass 3.000 ms, all summed after 4.000 ms, 1.000 ms of communication "
        "exposed"
    )
    assert lines[2].split()[:6] == ["0", "0-1", "3.0", "2.000", "ms", "2.000"]
    assert lines[3].count("#") == pytest.approx(12, abs=1)
    assert "|" in lines[2]


@pytest.mark.parametrize(
    ("sizes", "times", "said"),
    [
        ([1], [], "sizes has 1 tensors and backward_times 0"),
        ([1, -1], [1.0, 1.0], r"sizes\[1\] is -1"),
        ([1.5], [1.0], r"sizes\[0\] is 1.5: it must be whole bytes"),
        ([1], [math.nan], r"backward_times\[0\] is nan"),
        ([1], [math.inf], r"backward_times\[0\] is inf"),
    ],
)
def test_what_cannot_be_planned_is_refused(sizes: list[Any], times: list[float], said: str) -> None:
    for scheme in (*SCHEMES, merge.optimal):
        with pytest.raises(ValueError, match=said):
            scheme(sizes, times, cost=linear(1.0, 1.0))


def test_bad_costs_caps_and_cuts_are_refused() -> None:
    for bad in (-1.0, math.nan, math.inf):
        for scheme in (*SCHEMES, merge.optimal):
            with pytest.raises(ValueError, match=r"cost\(\d+\) is "):
                scheme([1, 2], [1.0, 1.0], cost=lambda _, bad=bad: bad)
        with pytest.raises(ValueError, match=r"delay\(\d\) is "):
            merge.optimal([1, 2], [1.0, 1.0], cost=linear(1.0, 0.0), delay=lambda _, bad=bad: bad)
    with pytest.raises(ValueError, match="cap_mb=-1 must be 0 or more"):
        merge.fixed([1], [1.0], cost=linear(1.0, 0.0), cap_mb=-1)
    for stops in ([], [1], [2, 2], [0, 2], [3]):
        with pytest.raises(ValueError, match="stops="):
            merge.of_cuts("by hand", [1, 2], [1.0, 1.0], stops, cost=linear(1.0, 0.0))
