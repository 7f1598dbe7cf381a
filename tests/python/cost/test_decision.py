"""The automatic choice: against the simulator for few ranks, against the closed forms everywhere."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from telegrad.cost import ALLREDUCE_ALGORITHMS, Costs, DecisionTable, TableEntry, allreduce_table, fastest_allreduce
from telegrad.cost.closed_forms import allreduce
from telegrad.tools.sim.measure import Network, Point, measure

NETWORKS = (
    Costs(alpha_s=2e-6, beta_s_per_byte=8e-11, gamma_s_per_byte=1e-10),
    Costs(alpha_s=20e-6, beta_s_per_byte=8.5e-9),
    Costs(alpha_s=1e-7, beta_s_per_byte=1e-9, gamma_s_per_byte=3e-9),
    Costs(alpha_s=20e-6, beta_s_per_byte=1e-9, beta_exchange_s_per_byte=1.7e-9, gamma_s_per_byte=5e-10),
)
MOST = 64 << 20


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 12, 16, 33, 64])
def test_at_most_5_percent_slower_than_the_best_in_the_simulator(ranks: int, costs: Costs) -> None:
    table = allreduce_table(ranks, costs)
    sizes = {4 * 8**power for power in range(9)}
    sizes |= {choice.from_bytes + step for choice in table.choices[1:] for step in (-4, 0)}
    for size in sorted(size for size in sizes if size <= MOST):
        points = {name: Point("allreduce", name, ranks, size, Network(costs)) for name in ALLREDUCE_ALGORITHMS}
        times_s = {name: measure(point).finish_s for name, point in points.items()}
        for choice in (table.algorithm(size), fastest_allreduce(ranks, size, costs)):
            assert times_s[choice] <= 1.05 * min(times_s.values()), (size, choice, times_s)


def _near(*powers: int) -> set[int]:
    return {power + step for power in powers for step in (-1, 0, 1)} - {4097}


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize(
    "every",
    [
        pytest.param({2, 7, 23, 100, 513, 4096} | _near(4, 16), id="a_few"),
        pytest.param({6, 11, 40, 851, 1662} | _near(8, 64, 512, 4096), id="more", marks=pytest.mark.slow),
    ],
)
def test_at_most_5_percent_slower_than_the_best_by_the_closed_forms(every: set[int], costs: Costs) -> None:
    chance = random.Random(1)
    for ranks in sorted(every):
        table = allreduce_table(ranks, costs)
        size = 4
        while size <= MOST:
            for probe in (size, min(MOST, size + 4 * chance.randrange(3 * size // 4))):
                times_s = {name: allreduce(name, ranks, probe, costs).time_s for name in ALLREDUCE_ALGORITHMS}
                assert times_s[table.algorithm(probe)] <= 1.05 * min(times_s.values()), (ranks, probe)
                assert times_s[fastest_allreduce(ranks, probe, costs)] == min(times_s.values())
            size *= 4


def test_few_rows_and_no_doubling_of_long_vectors() -> None:
    for ranks in (4, 100, 4096):
        table = allreduce_table(ranks, NETWORKS[0])
        names = [choice.algorithm for choice in table.choices]
        assert names[:2] == ["recursive_doubling", "rabenseifner"]
        assert all(choice.algorithm != "recursive_doubling" for choice in table.choices if choice.from_bytes > 1 << 20)
        assert len(names) <= 6
        for before, after in itertools.pairwise(table.choices):
            assert table.algorithm(after.from_bytes - 4) == before.algorithm
            assert table.algorithm(after.from_bytes) == after.algorithm
        assert table.algorithm(1 << 40) == names[-1]


def test_networks_where_nothing_costs_anything_have_a_table_too() -> None:
    assert allreduce_table(8, Costs(0, 0, 0, 0)).choices == (TableEntry(0, "recursive_doubling"),)
    assert allreduce_table(1, NETWORKS[0]).choices == (TableEntry(0, "recursive_doubling"),)


@pytest.mark.parametrize("ranks", [4.5, "4"])
def test_ranks_are_whole_numbers(ranks: Any) -> None:
    with pytest.raises(TypeError, match=r"ranks=.* give a whole number, 1 or more"):
        fastest_allreduce(ranks, 400, NETWORKS[0])


def test_a_table_travels_as_json_and_says_what_it_says() -> None:
    table = DecisionTable(12, (TableEntry(0, "recursive_doubling"), TableEntry(65_536, "ring")))
    assert DecisionTable.from_json(table.to_json()) == table
    assert str(table).splitlines() == [
        "allreduce, 12 ranks",
        "  from             0 bytes  recursive_doubling",
        "  from        65,536 bytes  ring",
    ]
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.ranks = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 100_000, "{}", '{"ranks": 2, "choices": [{"algorithm": "ring"}]}', '{"ranks": null}']
)
def test_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no decision table: give what to_json"):
        DecisionTable.from_json(text)


@pytest.mark.parametrize("value", [0.9, 64.0, "64", True, float("inf"), None])
def test_sizes_and_ranks_that_are_no_whole_numbers_are_refused(value: object) -> None:
    choice = {"from_bytes": 0, "algorithm": "ring"}
    with pytest.raises(ValueError, match=f"from_bytes={value!r} must be a whole number"):
        DecisionTable.from_data({"ranks": 2, "choices": [choice, {"from_bytes": value, "algorithm": "ring"}]})
    with pytest.raises(ValueError, match=f"ranks={value!r} must be a whole number"):
        DecisionTable.from_data({"ranks": value, "choices": [choice]})


def test_tables_that_make_no_sense_are_refused() -> None:
    ring = TableEntry(0, "ring")
    for choices in ((), (TableEntry(4, "ring"),), (ring, ring), (ring, TableEntry(8, "ring"), TableEntry(4, "ring"))):
        with pytest.raises(ValueError, match="let the first begin at 0, and the others ascend"):
            DecisionTable(2, choices)
    with pytest.raises(ValueError, match="'magic' does not exist: use recursive_doubling, rabenseifner, ring"):
        DecisionTable(2, (TableEntry(0, "magic"),))
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        DecisionTable(0, (ring,))
    with pytest.raises(ValueError, match="size=-4 must be 0 bytes or more"):
        DecisionTable(2, (ring,)).algorithm(-4)
    with pytest.raises(ValueError, match="tolerance=-1 must be 0 or more"):
        allreduce_table(2, NETWORKS[0], tolerance=-1)
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        allreduce_table(0, NETWORKS[0])
