"""Who is measured with whom, inside of nodes and between them."""

from __future__ import annotations

from typing import cast

import pytest

from telegrad.communicator import Communicator
from telegrad.tuning.probes import LEVELS, partners, partners_of


class Ranks:
    """As much of a communicator as pairs look at."""

    def __init__(self, *nodes: int) -> None:
        self.nodes, self.world_size = nodes, len(nodes)


def pairs(level: str, *nodes: int) -> list[list[int | None]]:
    found = partners_of(cast(Communicator, Ranks(*nodes)), level)
    return [[of(rank) for rank in range(len(nodes))] for of in found]


def test_neighbours_of_one_level() -> None:
    assert pairs("flat", 0, 0, 0, 0) == [[1, 0, 3, 2], [2, 3, 0, 1]]
    assert pairs("flat", 0, 0, 0) == [[1, 0, None]]


def test_inside_of_nodes() -> None:
    assert pairs("within", 0, 1, 0, 1) == [[2, 3, 0, 1]]
    assert pairs("within", 0, 0, 0, 1) == [[1, 0, None, None]]
    assert pairs("within", 0, 0, 0, 0, 1, 1, 1, 1)[1] == [2, 3, 0, 1, 6, 7, 4, 5]


def test_between_nodes() -> None:
    assert pairs("between", 0, 1, 0, 1) == [[1, 0, 3, 2]]
    assert pairs("between", 0, 0, 1) == [[2, None, 0]]
    assert pairs("between", 0, 0, 1, 1, 2, 2, 3, 3)[1] == [4, 5, 6, 7, 0, 1, 2, 3]


def test_one_rank_of_each_node_alone() -> None:
    assert pairs("alone", 0, 0, 0, 1, 1) == [[3, None, None, 0, None]]
    assert pairs("alone", 0, 1, 0, 1, 2, 2, 3) == [[1, 0, None, None, 6, None, 4]]


@pytest.mark.parametrize("level", LEVELS)
def test_partners_are_each_others(level: str) -> None:
    nodes = (0, 1, 1, 0, 2, 1, 0)
    for distance in (1, 2):
        partner = partners(level, distance, nodes)
        for rank in range(len(nodes)):
            other = partner(rank)
            assert other is None or (partner(other) == rank and other != rank)


def test_levels_have_names() -> None:
    with pytest.raises(ValueError, match="level='upper' is none"):
        pairs("upper", 0, 0, 1)
