"""Many points over several processes: the same results, in order, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest

from telegrad import _core
from telegrad.cost import Costs
from telegrad.tools.sim.measure import Measurement, Network, Point, measure, sweep

NETWORK = Network(Costs(alpha_s=2e-6, beta_s_per_byte=1e-10), jitter=0.5)


def points(*algorithms: str) -> list[Point]:
    return [
        Point("allreduce", algorithm, ranks, size, NETWORK, seed=7)
        for ranks in (2, 5, 16)
        for size in (4, 65_536)
        for algorithm in algorithms
    ]


def test_results_are_in_order_and_do_not_depend_on_the_number_of_processes() -> None:
    asked = points("ring", "recursive_doubling")
    alone, together = (sweep(asked, processes=count) for count in (1, 2))
    assert [found.point for found in alone] == [found.point for found in together] == asked
    for one, other in zip(alone, together, strict=True):
        assert one.finish_s == other.finish_s
        assert np.array_equal(one.finish_by_rank_s, other.finish_by_rank_s)
        assert one.events == other.events


def test_progress_hears_of_every_point_and_equal_points_are_simulated_once() -> None:
    heard: list[Measurement] = []
    asked = [*points("recursive_doubling", "auto"), *points("auto")]
    found = sweep(asked, processes=1, on_measured=heard.append)
    assert len(heard) == len(asked) == len(found)
    assert {one.point for one in heard} == set(asked)
    small = [one for one in found if one.point.size == 4]  # auto is recursive doubling there
    assert len(small) == 9
    assert len({id(one.finish_by_rank_s) for one in small}) == 3


def test_a_point_that_cannot_be_simulated_ends_the_sweep() -> None:
    bad = Point("broadcast", "by_length", 2, 4, NETWORK, root=9)
    for processes in (1, 2):
        with pytest.raises(ValueError, match="root"):
            sweep([*points("ring"), bad], processes=processes)


@pytest.mark.parametrize("limit", ["_LONG_EVENTS", "_LONG_BYTES"])
def test_long_points_are_simulated_in_another_process_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    point = Point("allreduce", "ring", 4, 4096, NETWORK, payloads=True, seed=3)
    here = measure(point)

    def fails(**_: object) -> None:
        raise AssertionError("simulated in this process")

    monkeypatch.setattr(_core, "measure", fails)
    with pytest.raises(AssertionError, match="in this process"):
        sweep([point])  # a short one
    monkeypatch.setattr(f"telegrad.tools.sim.measure.{limit}", 0)
    (swept,) = sweep([point], processes=1)
    assert swept.finish_s == here.finish_s
    assert swept.events == here.events


def test_no_points_and_no_processes() -> None:
    assert sweep([]) == []
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        sweep(points("ring"), processes=0)
