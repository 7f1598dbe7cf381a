"""Joint plans: cuts and ways together, against all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest

from telegrad.cost.send_method import SendMethod
from telegrad.synchronizer import joint, merge
from telegrad.synchronizer.merge_plan import MergePlan

Instance = tuple[list[int], list[float], list[SendMethod]]


def drawn(rng: np.random.Generator, most: int) -> Instance:
    """Sizes, backward times and up to three ways, of which mostly none is always the best."""
    count = int(rng.integers(1, most + 1))
    sizes = np.maximum(1, rng.exponential(float(rng.choice([3, 30, 300])), count)).astype(int)
    times = rng.exponential(1.0, count) * rng.choice([0, 1], count, p=[0.1, 0.9])
    size, total = np.arange(sizes.sum() + 1), float(sizes.sum())
    speed = times.sum() / total
    ways = []
    for number in range(int(rng.integers(1, 4))):
        if rng.random() < 0.3:  # anything
            cost, delay = rng.exponential(1.0, size.size), rng.exponential(0.3, size.size)
        else:
            cost = rng.exponential(0.5) + size * rng.exponential(2.0) * speed
            delay = rng.exponential(0.1) + size * rng.exponential(0.3) * speed
        options = {} if number == 0 and rng.random() < 0.5 else {"delay": delay.tolist().__getitem__}
        ways.append(SendMethod(f"way {number}", cost.tolist().__getitem__, **options))
    return sizes.tolist(), times.tolist(), ways


def least_of_all(sizes: list[int], times: list[float], ways: list[SendMethod]) -> float:
    """By trying every cut with every way of every group."""
    prefix, ready = [0, *accumulate(sizes)], list(accumulate(times))

    def least(start: int, free: float, late: float) -> float:
        if start == len(sizes):
            return free
        found = math.inf
        for stop in range(start + 1, len(sizes) + 1):
            size = prefix[stop] - prefix[start]
            for way in ways:
                total = late + way.delay(size)
                found = min(found, least(stop, max(free, ready[stop - 1] + total) + way.cost(size), total))
        return found

    return least(0, 0.0, 0.0)


def alone(sizes: list[int], times: list[float], way: SendMethod) -> MergePlan:
    return merge.optimal(sizes, times, cost=way.cost, delay=way.delay)


def test_joint_is_the_best_of_all_cuts_and_ways() -> None:
    rng = np.random.default_rng(0)
    mixed = ahead = 0
    for _ in range(400):
        sizes, times, ways = drawn(rng, 6)
        plan = merge.joint(sizes, times, ways=ways)
        assert plan.finish_s == least_of_all(sizes, times, ways)
        singles = [alone(sizes, times, way).finish_s for way in ways]
        assert plan.finish_s <= min(singles)
        mixed += len({*plan.ways}) > 1
        ahead += plan.finish_s < min(singles)
    assert min(mixed, ahead) > 40


@pytest.mark.parametrize(("quick", "most"), [(1, 1), (2, 40), (16, 2000)])
def test_fewer_pairs_are_still_no_worse_than_one_way(monkeypatch: pytest.MonkeyPatch, quick: int, most: int) -> None:
    rng = np.random.default_rng(1)
    monkeypatch.setattr(joint, "_QUICK", quick)
    monkeypatch.setattr(joint, "_MOST", most)
    for _ in range(60):
        sizes, times, ways = drawn(rng, 20)
        plan = merge.joint(sizes, times, ways=ways)
        assert all(plan.finish_s <= alone(sizes, times, way).finish_s for way in ways)
        assert plan.ways == tuple(way for way, _ in zip(plan.ways, plan.groups, strict=True))


def test_bounds_are_below_every_plan() -> None:
    """Of each prefix of a plan: what was reached there, and the bound of what remains."""
    rng = np.random.default_rng(2)
    for _ in range(200):
        sizes, times, ways = drawn(rng, 8)
        prefix, ready = [0, *accumulate(sizes)], list(accumulate(times))
        table = [joint.costs_of(prefix, None, stop, ways) for stop in range(1, len(sizes) + 1)]
        bounds = joint._bounds(table, ready[-1])
        count = len(sizes)
        stops = [*np.flatnonzero(rng.random(count - 1) < 0.5) + 1, count]
        plan = merge.of_ways("any", sizes, times, stops, [ways[int(rng.integers(len(ways)))] for _ in stops])
        late = 0.0
        for stop, slot, delay in zip(stops[:-1], plan.timeline, plan.delays, strict=False):
            late += delay
            for weight, bound in zip(joint._WEIGHTS[:, 0], bounds[:, stop], strict=True):
                assert weight * slot.finish_s + (1 - weight) * late + bound <= plan.finish_s * (1 + 1e-12)


def network() -> list[SendMethod]:
    """1 Gbit/s: quick selection of one entry in a hundred pays for large groups."""
    return [
        SendMethod("dense", lambda size: 1e-4 + 8e-9 * size),
        SendMethod("sparse", lambda size: 3e-4 + 4e-10 * size, lambda size: 2e-5 + 3e-10 * size),
        SendMethod("qsgd8", lambda size: 2e-4 + 2e-9 * size, lambda size: 1e-5 + 1e-10 * size),
    ]


def test_a_thousand_tensors_and_three_ways() -> None:
    rng = np.random.default_rng(3)
    sizes, times = rng.integers(1, 1 << 16, 1000).tolist(), rng.exponential(1e-4, 1000).tolist()
    calls = 0

    def counted(cost: Callable[[int], float]) -> Callable[[int], float]:
        def count(size: int) -> float:
            nonlocal calls
            calls += 1
            return cost(size)

        return count

    ways = network()
    plan = merge.joint(sizes, times, ways=[SendMethod(one.name, counted(one.cost), counted(one.delay)) for one in ways])
    assert calls <= 3 * 1000 * 1001 + 2 * len(plan.groups)
    assert plan.finish_s < 0.9 * merge.optimal(sizes, times, cost=ways[0].cost).finish_s


def test_what_no_way_compresses_goes_beside() -> None:
    rng = np.random.default_rng(4)
    for _ in range(100):
        sizes, times, (first, *others) = drawn(rng, 5)
        dense = [int(rng.integers(size + 1)) if rng.random() < 0.7 else size for size in sizes]
        ways = [first, *(dataclasses.replace(one, beside=lambda size: 0.1 + 0.01 * size) for one in others)]
        best = merge.joint(sizes, times, ways=ways, dense=dense)
        for _ in range(30):
            stops = [*np.flatnonzero(rng.random(len(sizes) - 1) < 0.5) + 1, len(sizes)]
            taken = [ways[int(rng.integers(len(ways)))] for _ in stops]
            assert best.finish_s <= merge.of_ways("any", sizes, times, stops, taken, dense=dense).finish_s
    way = SendMethod("sparse", lambda size: 1.0 + size, lambda size: 2.0 + size, beside=lambda size: 4.0 + size)
    plan = merge.of_ways("by hand", [8, 8, 8], [1.0] * 3, [1, 2, 3], [way] * 3, dense=[0, 3, 8])
    assert (plan.costs, plan.delays) == ((13.0, 13.0, 12.0), (10.0, 7.0, 0.0))


def test_what_does_not_pay_is_left_dense() -> None:
    """Selection takes longer than the network would have."""
    ways = [
        SendMethod("dense", lambda size: 1e-5 + 1e-10 * size),
        SendMethod("sparse", lambda _: 2e-5, lambda size: 1e-9 * size),
    ]
    plan = merge.joint([1 << 20] * 8, [1e-3] * 8, ways=ways)
    assert {*plan.ways} == {"dense"}
    assert plan.finish_s == merge.optimal([1 << 20] * 8, [1e-3] * 8, cost=ways[0].cost).finish_s


def test_of_equal_ways_the_first_is_taken() -> None:
    first, second = (SendMethod(name, lambda size: 1.0 + size, lambda size: 0.5) for name in ("first", "second"))
    assert merge.joint([1, 2, 3], [1.0] * 3, ways=[first, second]).ways[0] == "first"
    assert merge.joint([1, 2, 3], [1.0] * 3, ways=[second, first]).ways[0] == "second"


def test_ways_are_part_of_a_plan() -> None:
    plan = merge.of_ways("by hand", [1024, 2048, 4096], [1e-3] * 3, [2, 3], network()[:2])
    assert plan.ways == ("dense", "sparse")
    assert MergePlan.from_json(plan.to_json()) == plan
    assert plan != dataclasses.replace(plan, ways=("sparse", "dense"))
    assert plan != dataclasses.replace(plan, ways=())
    lines = str(plan).splitlines()
    assert lines[1].split()[:4] == ["group", "tensors", "way", "KiB"]
    assert lines[2].split()[:4] == ["0", "0-1", "dense", "3.0"]
    assert lines[3].split()[:4] == ["1", "2", "sparse", "4.0"]
    assert merge.joint([], [], ways=network()).ways == ()


def test_bad_ways_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ways=\[\] must be one or more"):
        merge.joint([1], [1.0], ways=[])
    with pytest.raises(ValueError, match=r"ways=\['dense', 'dense'\] must be one or more, each with a name of its own"):
        merge.joint([1], [1.0], ways=[network()[0]] * 2)
    with pytest.raises(ValueError, match="ways has 1 entries for 2 groups: give one of each"):
        merge.of_ways("by hand", [1, 2], [1.0, 1.0], [1, 2], network()[:1])
    with pytest.raises(ValueError, match="2 groups and 1 ways: give one for each group, or none"):
        MergePlan("by hand", (1, 2), (1.0, 1.0), ((0,), (1,)), (1.0, 1.0), (0.0, 0.0), ("dense",))
    for dense in ([0], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="must have a number for each of the 2 sizes, and none above it"):
            merge.joint([1, 2], [1.0, 1.0], ways=network(), dense=dense)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"odd beside\(0\) is "):
            merge.joint([1], [1.0], ways=[SendMethod("odd", lambda _: 1.0, beside=lambda _, bad=bad: bad)])
        with pytest.raises(ValueError, match=r"odd cost\(\d+\) is "):
            merge.joint([1, 2], [1.0, 1.0], ways=[network()[0], SendMethod("odd", lambda _, bad=bad: bad)])
        with pytest.raises(ValueError, match=r"odd delay\(\d+\) is "):
            merge.joint([1, 2], [1.0, 1.0], ways=[SendMethod("odd", lambda _: 1.0, lambda _, bad=bad: bad)])
        with pytest.raises(ValueError, match=r"odd delay\(\d+\) is "):
            merge.of_ways("by hand", [1], [1.0], [1], [SendMethod("odd", lambda _: 1.0, lambda _, bad=bad: bad)])
