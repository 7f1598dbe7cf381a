"""The closed forms of what moves data, and of the barrier, against the simulator, which runs the algorithms."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.collectives import closed_forms
from lab.collectives.closed_forms import FORMS as EVERY_FORM
from lab.collectives.closed_forms import form_of
from telegrad.cost import Cost, Costs
from telegrad.cost import closed_forms as own
from telegrad.tools.sim.measure import ALGORITHMS, SPARSE, Network, Point, measure

COLLECTIVES = Path(__file__).resolve().parents[3] / "core" / "collectives"

# Latency counts, bytes count, work counts, work is all that counts; none of them is free.
NETWORKS = (
    Costs(alpha_s=2e-6, beta_s_per_byte=8e-11),
    Costs(alpha_s=20e-6, beta_s_per_byte=8.5e-9, gamma_s_per_byte=1e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=2e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=3e-9),
)
FORMS: dict[str, Callable[[int, int, Costs], Cost]] = {
    name: EVERY_FORM[name] for name in ("allgather", "gather", "scatter", "all_to_all", "broadcast")
}
RANKS = [2, 3, 4, 5, 8, 15, 16, 17, 33, 64]
# Around every length at which an algorithm changes its ways.
SIZES = (
    4,
    512,
    516,
    2048,
    2052,
    32 << 10,
    (32 << 10) + 4,
    65_532,
    65_536,
    256 << 10,
    (256 << 10) + 4,
    3 << 20,
    9 << 20,
)


def compare(operation: str, ranks: int, size: int, costs: Costs) -> None:
    form = closed_forms.barrier(ranks, costs) if operation == "barrier" else FORMS[operation](ranks, size, costs)
    found = measure(Point(operation, ALGORITHMS[operation][0], ranks, size, Network(costs)))
    assert form.time_s == pytest.approx(found.finish_s, rel=0.01), (operation, ranks, size, costs)
    assert form.bytes_per_rank == found.bytes_sent.max(), (operation, ranks, size)


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("operation", FORMS)
def test_every_length(operation: str, ranks: int, costs: Costs) -> None:
    for size in SIZES:
        compare(operation, ranks, size, costs)


@pytest.mark.parametrize("operation", [name for name in FORMS if name not in ("allgather", "all_to_all")])
@pytest.mark.parametrize("ranks", [1000, 2049, 4096])
def test_thousands_of_ranks(operation: str, ranks: int) -> None:
    for size in (4, 4096, 64 << 20 if ranks <= 1000 else 4 << 20):
        compare(operation, ranks, size, NETWORKS[1])


@pytest.mark.parametrize("ranks", [256, 1000])
def test_everybody_to_everybody_of_many_ranks(ranks: int) -> None:
    for operation in ("allgather", "all_to_all"):
        for size in (4, 4096) if ranks > 256 else (4, 4096, 300_000):
            compare(operation, ranks, size, NETWORKS[1])


def test_short_blocks_among_4096_ranks() -> None:
    for operation in ("allgather", "all_to_all"):
        compare(operation, 4096, 64, NETWORKS[1])


@pytest.mark.parametrize("seed", range(100))
def test_drawn_costs(seed: int) -> None:
    draw = random.Random(seed)
    ranks, size = draw.randint(2, 40), 4 * round(2 ** draw.uniform(0, 20))
    beta, gamma = (0.0 if draw.random() < 0.15 else 10 ** draw.uniform(-11, -8) for _ in range(2))
    costs = Costs(alpha_s=10 ** draw.uniform(-7, -3), beta_s_per_byte=beta, gamma_s_per_byte=gamma)
    for operation in FORMS:
        compare(operation, ranks, size, costs)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 17, 64, 1000, 2048, 4095, 4096])
def test_barrier(ranks: int) -> None:
    for costs in NETWORKS[:2]:
        compare("barrier", ranks, 0, costs)


@pytest.mark.parametrize("exchange", [1.5e-9, 1.9e-9])
def test_exchange_between_two_ranks(exchange: float) -> None:
    costs = Costs(alpha_s=10e-6, beta_s_per_byte=1e-9, beta_exchange_s_per_byte=exchange, gamma_s_per_byte=1e-10)
    for size in (4, 20_000, 300_000, 3 << 20):
        for operation in ("allgather", "all_to_all"):
            compare(operation, 2, size, costs)
        for ranks in (4, 16, 32):
            compare("allgather", ranks, size, costs)
    compare("all_to_all", 64, 512, costs)


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
def test_one_rank_alone_and_no_bytes_at_all(costs: Costs) -> None:
    for operation in FORMS:
        for ranks, size in ((1, 4096), (8, 0), (7, 0), (2, 0), (33, 0)):
            compare(operation, ranks, size, costs)
    compare("barrier", 1, 0, costs)
    assert closed_forms.broadcast(1, 4096, costs) == closed_forms.barrier(1, costs) == Cost(0, 0)
    assert closed_forms.allgather(1, 4096, costs) == Cost(4096 * costs.gamma_s_per_byte, 0)


def test_figures_of_the_papers() -> None:
    costs = Costs(alpha_s=1.0, beta_s_per_byte=0.5, gamma_s_per_byte=0.25)
    assert closed_forms.broadcast(8, 64, costs) == Cost(3 * 33, 192)
    assert closed_forms.barrier(9, costs) == Cost(4, 0)
    assert closed_forms.allgather(8, 64, costs) == Cost(3 + 7 * 32 + 8 * 16, 7 * 64)
    assert closed_forms.gather(8, 64, costs) == Cost(1 + 7 * 32, 64)
    assert closed_forms.scatter(8, 64, costs) == Cost(1 + 7 * 32, 7 * 64)
    assert closed_forms.all_to_all(8, 64, costs) == Cost(2 + 7 * 32 + 16, 7 * 64)
    assert closed_forms.all_to_all(16, 64, costs) == Cost(4 * (1 + 8 * 32 + 16 * 16) + 32 * 16, 4 * 8 * 64)


def test_long_vectors_gain_from_a_chain() -> None:
    for ranks in (3, 8, 64, 4096):
        tree_s = (ranks - 1).bit_length() * (64 << 20) * NETWORKS[1].beta_s_per_byte
        assert closed_forms.broadcast(ranks, 64 << 20, NETWORKS[1]).time_s < 0.6 * tree_s
        assert closed_forms.broadcast_pieces(ranks, 4096) == 1


CONSTANTS = {
    "SHORT_BYTES": ("dense/allgather.cpp", "kShortBytes"),
    "CARD_PIECES_MOST": ("dense/allgather_ring.cpp", "kCardPiecesMost"),
    "LONG_PIECE_BYTES": ("dense/allgather_ring.cpp", "kLongPieceBytes"),
    "ALLGATHER_PIECES_MOST": ("dense/allgather_ring.cpp", "kPiecesMost"),
    "PIECES_UNDER_WAY": ("dense/allgather_ring.cpp", "kUnderWay"),
    "BULK_BYTES": ("dense/broadcast.cpp", "kBulkBytes"),
    "CHAIN_LATENCY_BYTES": ("dense/broadcast_chain.cpp", "kLatencyBytes"),
    "CHAIN_LONG_BYTES": ("dense/broadcast_chain.cpp", "kLongBytes"),
    "CHAIN_LEAST_BYTES": ("dense/broadcast_chain.cpp", "kLeastPieceBytes"),
    "CHAIN_UNDER_WAY": ("dense/broadcast_chain.cpp", "kUnderWay"),
    "TREE_RANKS": ("support/rooted_tree.hpp", "kRanksLeast"),
    "ROOTED_TREE_BYTES": ("support/rooted_tree.hpp", "kBlockBytesMost"),
    "BRUCK_RANKS": ("dense/all_to_all.cpp", "kBruckRanksLeast"),
    "BRUCK_BYTES": ("dense/all_to_all.cpp", "kBruckBytesMost"),
    "EXCHANGE_UNDER_WAY": ("dense/all_to_all.cpp", "kUnderWayMost"),
    "EXCHANGE_PIECES": ("dense/all_to_all.hpp", "kExchangeBlocksSteps"),
    "OVERLAP_BYTES": ("dense/all_to_all.cpp", "kOverlapBytesMost"),
}


@pytest.mark.parametrize("name", [*CONSTANTS, "dense/gather.cpp", "dense/scatter.cpp"])
def test_the_core_has_the_same_constants(name: str) -> None:
    file, constant = CONSTANTS.get(name, (name, "kUnderWay"))
    text = (COLLECTIVES / file).read_text()
    found = re.search(rf"{constant} = (?:[\w:]+\{{)?([\d'.]+)\}}?(?: << (\d+))?;", text)
    assert found is not None
    value = float(found[1].replace("'", "")) * 2 ** int(found[2] or 0)
    assert value == getattr(closed_forms, name, None) or getattr(own, name, None) or closed_forms.ROOT_UNDER_WAY


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        closed_forms.barrier(0, NETWORKS[0])
    for form in FORMS.values():
        for size in (-4, 6):
            with pytest.raises(ValueError, match=f"size={size} is no vector of 4-byte floats: use a multiple of 4"):
                form(2, size, NETWORKS[0])


@pytest.mark.parametrize("exchange", [1.0, 1.3, 2.0, 2.1, 10.0])
@pytest.mark.parametrize("alpha_s", [0.0, 2e-6, 2e-5])
def test_a_closed_form_holds_or_is_not_given(alpha_s: float, exchange: float) -> None:
    costs = replace(NETWORKS[1], alpha_s=alpha_s, beta_exchange_s_per_byte=exchange * NETWORKS[1].beta_s_per_byte)
    given = set()
    everything = {*ALGORITHMS} - {*SPARSE}
    for operation in everything:
        for ranks, size in itertools.product((5, 8, 12), (64, 4096, 1 << 16, 1 << 20)):
            length = 0 if operation == "barrier" else size
            one = Point(operation, ALGORITHMS[operation][0], ranks, length, Network(costs))
            if (form := form_of(one)) is not None:
                given.add(operation)
                assert form.time_s == pytest.approx(measure(one).finish_s, rel=0.01), one
    if alpha_s == 0 or exchange > 2:
        assert given == set()
    else:
        assert given == (everything if exchange == 1 else everything - {"all_to_all", "reduce"})
