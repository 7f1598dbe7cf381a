"""What sums of groups take, measured: a function that is the same on all ranks and never falls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from telegrad import Communicator
from telegrad.calibration.computing import group_cost_while_computing
from telegrad.calibration.group_cost import measured_group_cost

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


@_MEASURES
def test_nothing_is_no_length(on_ranks: Callable[..., list[Any]], measure: Measure) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="most_bytes=0 must be at least 1"):
            measure(comm, most_bytes=0)

    on_ranks(1, run)
