"""Closed forms of ranks that live on nodes, held against the simulator, and the choice that they make."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from telegrad.cost import Costs, DecisionTable, Place, TableEntry, Tuning, allreduce_table, fastest_allreduce
from telegrad.cost.closed_forms import Levels, allreduce, allreduce_on_levels, allreduce_two_level, between_algorithm
from telegrad.tools.sim.measure import Network, Point, measure

LINK = Costs(20e-6, 8e-9, gamma_s_per_byte=1e-10)
MEMORY = Costs(1e-6, 1e-10, gamma_s_per_byte=1e-10)
BLOCKS, DEALT = (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1, 0, 1)


def shared(per_node: int) -> Costs:
    """Of a rank's share of a link that all ranks of a node send through."""
    return replace(LINK, beta_s_per_byte=LINK.beta_s_per_byte * per_node)


@pytest.mark.parametrize("per_node", [2, 4, 8])
@pytest.mark.parametrize("ranks", [16, 32])
@pytest.mark.parametrize("size", [1 << 12, 1 << 20, 1 << 24, 1 << 26])
def test_the_form_is_near_the_simulator(ranks: int, per_node: int, size: int) -> None:
    network = Network(
        LINK,
        ranks_per_node=per_node,
        node_alpha_s=MEMORY.alpha_s,
        node_beta_s_per_byte=MEMORY.beta_s_per_byte,
        oversubscription=float(per_node),
    )
    found = measure(Point("allreduce", "two_level", ranks, size, network))
    levels = Levels(tuple(rank // per_node for rank in range(ranks)), MEMORY)
    form = allreduce_two_level(levels, size, shared(per_node))
    assert found.finish_s == pytest.approx(form.time_s, rel=0.03 if size >= 1 << 20 else 0.35)
    assert int(found.bytes_sent.max()) == pytest.approx(form.bytes_per_rank, rel=0.05)


def test_it_beats_rings_by_what_they_send_between_nodes() -> None:
    size = 16 << 20
    for nodes, least in ((BLOCKS, 1.4), (DEALT, 3.0)):
        levels = Levels(nodes, MEMORY)
        ring = allreduce_on_levels("ring", levels, size, shared(4)).time_s
        assert ring / allreduce_on_levels("two_level", levels, size, shared(4)).time_s > least


def test_a_ring_is_no_faster_than_one_message_between_nodes() -> None:
    levels = Levels(BLOCKS, MEMORY)
    wide = replace(levels, alone=LINK)  # whose link carries what all ports can
    assert (
        allreduce_on_levels("ring", wide, 16 << 20, LINK).time_s
        == allreduce(  # costs of ranks that share: the same
            "ring", 8, 16 << 20, LINK
        ).time_s
    )
    assert (
        allreduce_on_levels("ring", levels, 16 << 20, LINK).time_s < 0.5 * allreduce("ring", 8, 16 << 20, LINK).time_s
    )
    assert allreduce_on_levels("ring", wide, 16 << 20, shared(4)) == allreduce_on_levels(
        "ring", levels, 16 << 20, shared(4)
    )


def test_leaving_counts_messages_that_share_a_link() -> None:
    assert Levels(BLOCKS, MEMORY).leaving == 1 / 4
    assert Levels(DEALT, MEMORY).leaving == 1
    assert Levels((0, 0, 1), MEMORY).slices == 1


def test_the_choice_is_two_level_where_it_is_faster() -> None:
    levels = Levels(BLOCKS, MEMORY)
    assert fastest_allreduce(8, 16 << 20, shared(4), levels) == "two_level"
    assert fastest_allreduce(8, 16 << 20, shared(4)) != "two_level"
    table = allreduce_table(8, shared(4), levels=levels)
    assert table.algorithm(16 << 20) == "two_level"
    assert table.algorithm(1 << 30) == "two_level"
    assert DecisionTable.from_json(table.to_json()) == table


def test_levels_are_of_all_ranks() -> None:
    with pytest.raises(ValueError, match="levels are of 8 ranks, not of ranks=4"):
        fastest_allreduce(4, 64, LINK, Levels(BLOCKS, MEMORY))


@pytest.mark.parametrize("nodes", [(), (0, 0), (0, 1)])
def test_levels_are_two(nodes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are no two levels"):
        Levels(nodes, MEMORY)


def test_a_slice_goes_as_the_core_sends_it() -> None:
    assert between_algorithm(2, 64 << 10) == "recursive_doubling"
    assert between_algorithm(2, 1 << 20) == "rabenseifner"
    assert between_algorithm(4, 1 << 20) == "ring"
    assert between_algorithm(3, 64 << 10) == "rabenseifner"


def tuning() -> Tuning:
    table = DecisionTable(8, (TableEntry(0, "recursive_doubling"), TableEntry(4096, "two_level")))
    place = Place("ucx", (("here", 8),), nodes=BLOCKS)
    return Tuning(place, LINK, table, "2026-11-22T00:00:00+00:00", "0", 0.1, MEMORY)


def test_a_tuning_keeps_its_nodes_and_costs() -> None:
    one = tuning()
    assert Tuning.from_json(one.to_json()) == one
    assert "2 nodes" in str(one)
    older = json.loads(one.to_json())
    del older["within"], older["place"]["nodes"]
    assert Tuning.from_data(older).within is None
    assert not Tuning.from_data(older).place.is_alike(one.place)


def test_parts_have_the_costs_of_where_they_are() -> None:
    inside = tuning().for_part(Place("ucx", (("here", 4),)), one_node=True)
    assert (inside.costs, inside.within) == (MEMORY, None)
    across = tuning().for_part(Place("ucx", (("here", 2),)))
    assert (across.costs, across.within) == (LINK, None)
    both = tuning().for_part(Place("ucx", (("here", 4),), nodes=(0, 0, 1, 1)))
    assert (both.costs, both.within) == (LINK, MEMORY)
    assert both.allreduce.algorithm(1 << 24) == "two_level"


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 0), (0, 1, 2)])
def test_nodes_of_a_place_are_of_its_ranks(nodes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be the node of each of 3 ranks"):
        Place("ucx", (("here", 3),), nodes=nodes)
