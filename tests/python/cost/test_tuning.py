"""A tuning as a value: its JSON, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from telegrad.cost import Costs, DecisionTable, Place, TableEntry, Tuning, allreduce_table
from telegrad.cost.send_method import LinearCost

PLACE = Place("ucx", (("node1", 2), ("node2", 2)), "eth0", (("UCX_TLS", "tcp,self"),))
TUNING = Tuning(
    place=PLACE,
    costs=Costs(2e-6, 1e-10, 1.5e-10, 3e-11),
    allreduce=DecisionTable(4, (TableEntry(0, "recursive_doubling"), TableEntry(50_000, "ring"))),
    measured_at="2026-11-21T12:00:00+00:00",
    telegrad_version="0.1.0",
    residual=0.07,
)


def test_a_tuning_travels_as_json() -> None:
    again = Tuning.from_json(TUNING.to_json())
    assert again == TUNING
    assert again.digest == TUNING.digest
    assert dataclasses.replace(TUNING, residual=0.08).digest != TUNING.digest
    assert TUNING.ranks == 4
    for unit in ("alpha_s", "beta_s_per_byte", "beta_exchange_s_per_byte", "gamma_s_per_byte", "from_bytes"):
        assert f'"{unit}"' in TUNING.to_json()


def test_costs_of_gloo_travel_and_stay_with_the_same_ranks() -> None:
    tuning = dataclasses.replace(TUNING, gloo=LinearCost(1e-3, 2e-9))
    assert Tuning.from_json(tuning.to_json()) == tuning
    assert tuning.for_part(PLACE).gloo == tuning.gloo
    assert tuning.for_part(Place("ucx", (("node1", 2), ("node2", 1)))).gloo is None
    for wrong in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="gloo=.* must be of finite numbers, 0 or more"):
            dataclasses.replace(TUNING, gloo=LinearCost(wrong, 2e-9))
    damaged = {**json.loads(tuning.to_json()), "gloo": {"startup_s": -1.0, "s_per_byte": 0.0}}
    with pytest.raises(ValueError, match="this tuning is damaged .*gloo="):
        Tuning.from_data(damaged)


def test_a_tuning_says_where_it_holds_and_what_it_chooses() -> None:
    first, *table = str(TUNING).splitlines()
    assert first == (
        "4 ranks on 2 hosts (node1, …), driver ucx, interface eth0, UCX_TLS=tcp,self; "
        "measured 2026-11-21T12:00:00+00:00"
    )
    assert table == str(TUNING.allreduce).splitlines()
    assert str(Place("ucx", (("node1", 8),))) == "8 ranks on node1, driver ucx"


def test_a_part_that_shares_memory_has_a_table_for_that() -> None:
    place = Place("ucx", (("node1", 3),))
    tables = {shares: allreduce_table(3, TUNING.costs, shares_memory=shares) for shares in (False, True)}
    assert tables[False] != tables[True]
    for shares, table in tables.items():
        assert TUNING.for_part(place, shares_memory=shares).allreduce == table


def test_costs_on_levels_travel_and_stay_with_parts_on_levels() -> None:
    place = Place("ucx", (("node1", 2), ("node2", 2)), nodes=(0, 0, 1, 1))
    within, alone = Costs(1e-6, 1e-11), Costs(2e-6, 5e-11)
    tuning = dataclasses.replace(TUNING, place=place, within=within, alone=alone)
    assert Tuning.from_json(tuning.to_json()) == tuning
    part = tuning.for_part(Place("ucx", (("node1", 2), ("node2", 1)), nodes=(0, 0, 1)))
    assert (part.costs, part.within, part.alone) == (TUNING.costs, within, alone)
    apart = tuning.for_part(Place("ucx", (("node1", 1), ("node2", 1))))
    assert (apart.costs, apart.within, apart.alone) == (TUNING.costs, None, None)
    together = tuning.for_part(Place("ucx", (("node1", 2),)), one_node=True)
    assert (together.costs, together.within, together.alone) == (within, None, None)
    before = {name: what for name, what in json.loads(tuning.to_json()).items() if name != "alone"}
    assert Tuning.from_data(before) == dataclasses.replace(tuning, alone=None)


def test_a_tuning_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TUNING.residual = 0.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no tuning but damaged JSON"),
        (TUNING.to_json()[:-40], "no tuning but damaged JSON"),
        ("[" * 100_000, "no tuning but damaged JSON .*recursion"),
        ("[]", 'it lacks "format": "telegrad tuning"'),
        ('{"ranks": 4}', 'it lacks "format": "telegrad tuning"'),
    ],
)
def test_text_that_is_no_tuning_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tuning.from_json(text)


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    *names, last = path

    def remove(data: dict[str, Any]) -> None:
        for name in names:
            data = data[name]
        del data[last]

    return remove


def _with(*path: Any) -> Callable[[dict[str, Any]], None]:
    *names, last, value = path

    def change(data: Any) -> None:
        for name in names:
            data = data[name]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((_without(name), f"it lacks '{name}'") for name in ("place", "costs", "allreduce", "residual")),
        (_with("costs", {}), "it lacks 'alpha_s'"),
        *((_without("costs", name), f"it lacks '{name}'") for name in json.loads(TUNING.to_json())["costs"]),
        (_with("within", {"alpha_s": 1e-6}), "it lacks 'beta_s_per_byte'"),
        (_with("costs", "alpha_s", "fast"), "could not convert"),
        (_with("costs", "alpha_s", -1.0), "alpha_s=-1.0 is no cost"),
        (_with("costs", "delta_s", 1.0), "delta_s"),
        (_with("costs", None), "no attribute 'items'"),
        (_with("place", "hosts", {}), "hosts=.* must be sorted names, each once, with 1 rank or more"),
        (_with("place", "hosts", "node1", 0), "hosts=.* must be sorted names, each once, with 1 rank or more"),
        (_with("place", "hosts", "node1", float("inf")), "infinity"),
        (_with("place", "hosts", "node1", 7), "the table is for 4 ranks, but the place has 9"),
        (_with("allreduce", "choices", 1, "algorithm", "magic"), "'magic' does not exist"),
        (_with("allreduce", "choices", 0, "from_bytes", 4), "let the first begin at 0"),
        (_with("allreduce", "choices", 1, "from_bytes", 1 << 70), "no vector is longer"),
        (_with("allreduce", "choices", 1, "from_bytes", 0.9), "from_bytes=0.9 must be a whole number"),
        (_with("allreduce", []), "no decision table"),
        (_with("residual", float("nan")), "residual=nan must be a finite number"),
    ],
)
def test_damage_is_named(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    data = json.loads(TUNING.to_json())
    damage(data)
    with pytest.raises(ValueError, match=f"this tuning is damaged \\(.*{message}.*calibrate again"):
        Tuning.from_json(json.dumps(data))


def test_another_format_version_is_refused() -> None:
    data = json.loads(TUNING.to_json()) | {"format_version": 2}
    with pytest.raises(ValueError, match="has format version 2, but this telegrad reads version 1: calibrate again"):
        Tuning.from_data(data)


@pytest.mark.parametrize("hosts", [(), (("b", 1), ("a", 1)), (("a", 1), ("a", 1)), (("a", 0),)])
def test_hosts_that_make_no_sense_are_refused(hosts: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ValueError, match="must be sorted names, each once, with 1 rank or more"):
        Place("ucx", hosts)
