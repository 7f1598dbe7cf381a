"""What was measured of sums of device tensors: the choice by bytes, and its way through files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from telegrad.cost import Costs, DecisionTable, DeviceTuning, Place, TableEntry, Tuning
from telegrad.cost.send_method import LinearCost
from telegrad.synchronizer import merge

NCCL, HOST = LinearCost(2.0**-14, 2.0**-33), LinearCost(2.0**-15, 2.0**-31)  # which floats add exactly
CROSSING = 87_382  # bytes
MEASURED = DeviceTuning("H200", NCCL, HOST, 0.04)


def tuning(place: Place | None = None) -> Tuning:
    return Tuning(
        place=place or Place("ucx", (("here", 4),)),
        costs=Costs(2e-6, 1e-10),
        allreduce=DecisionTable(4, (TableEntry(0, "ring"),)),
        measured_at="2026-11-23T12:00:00+00:00",
        telegrad_version="0.1.0",
        residual=0.07,
        on_device=MEASURED,
    )


def test_the_faster_one_is_chosen_for_each_length() -> None:
    assert MEASURED.choices == (TableEntry(0, "host_transfer"), TableEntry(CROSSING, "nccl"))
    for size in (0, 4, 1000, CROSSING - 1):
        assert MEASURED.algorithm(size) == "host_transfer"
        assert MEASURED(size) == HOST(size)
    for size in (CROSSING, 1 << 20, 1 << 40):
        assert MEASURED.algorithm(size) == "nccl"
        assert MEASURED(size) == NCCL(size)


@pytest.mark.parametrize(
    ("nccl", "host_transfer", "choices"),
    [
        (LinearCost(1e-5, 1e-10), LinearCost(2e-5, 2e-10), [(0, "nccl")]),
        (LinearCost(3e-5, 2e-10), LinearCost(2e-5, 1e-10), [(0, "host_transfer")]),
        (LinearCost(1e-5, 1e-10), LinearCost(1e-5, 1e-10), [(0, "nccl")]),
        (LinearCost(1e-5, 2e-10), LinearCost(2e-5, 1e-10), [(0, "nccl"), (100_001, "host_transfer")]),
        (None, LinearCost(2e-5, 1e-10), [(0, "host_transfer")]),
    ],
)
def test_tables(nccl: LinearCost | None, host_transfer: LinearCost, choices: list[tuple[int, str]]) -> None:
    found = DeviceTuning("H200", nccl, host_transfer, 0.0)
    assert [(one.from_bytes, one.algorithm) for one in found.choices] == choices
    for (begin, name), (end, _) in zip(choices, [*choices[1:], (1 << 50, "")], strict=True):
        assert {found.algorithm(size) for size in (begin, (begin + end) // 2, end - 1)} == {name}


def test_files_keep_every_bit_of_it() -> None:
    again = Tuning.from_json(tuning().to_json())
    assert again == tuning()
    assert again.digest == tuning().digest
    assert again.on_device is not None
    assert again.on_device.choices == MEASURED.choices
    without = replace(tuning(), on_device=replace(MEASURED, nccl=None))
    assert Tuning.from_json(without.to_json()) == without
    assert "allreduce on H200\n  from             0 bytes  host_transfer" in str(tuning())


def test_files_of_before_have_none() -> None:
    found = json.loads(tuning().to_json())
    del found["on_device"]
    assert Tuning.from_data(found).on_device is None


@pytest.mark.parametrize(
    "damage",
    [
        {"device": "H200"},
        {**asdict(MEASURED), "nccl": {"startup_s": "fast", "s_per_byte": 0}},
        {**asdict(MEASURED), "host_transfer": {"startup_s": -1.0, "s_per_byte": 0.0}},
        {**asdict(MEASURED), "residual": float("nan")},
        7,
    ],
)
def test_damaged_files_are_named(damage: Any) -> None:
    with pytest.raises(ValueError, match=r"this tuning is damaged .*calibrate again"):
        Tuning.from_data({**json.loads(tuning().to_json()), "on_device": damage})


def test_planners_take_it_as_a_cost() -> None:
    """Gradients that come together go together where beginning a sum is dear, and not where it is cheap."""
    sizes, at_once = [1 << 20] * 4, [0.0] * 4
    dear = DeviceTuning("H200", LinearCost(1e-3, 1e-10), LinearCost(2e-3, 2e-10), 0.0)
    assert merge.optimal(sizes, at_once, cost=dear).groups == ((0, 1, 2, 3),)
    apart = merge.optimal(sizes, [1.0] * 4, cost=replace(dear, nccl=LinearCost(1e-9, 1e-10)))
    assert len(apart.groups) == 4


def test_sizes_below_zero() -> None:
    with pytest.raises(ValueError, match="size=-1 must be 0 bytes or more"):
        MEASURED.algorithm(-1)


def test_a_part_of_the_ranks_knows_nothing_of_it() -> None:
    assert tuning().for_part(Place("ucx", (("here", 4),), interface="lo")).on_device == MEASURED
    assert tuning().for_part(Place("ucx", (("here", 2),))).on_device is None
