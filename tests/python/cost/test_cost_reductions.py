"""The closed forms of halving, reduce and reduce_scatter against the simulator, which runs the algorithms."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.collectives.closed_forms import LEAST_BLOCK_BYTES, PAIR_TREE_BYTES, REDUCE_TREE_BYTES, reduce
from telegrad.cost import Cost, Costs, closed_forms, network
from telegrad.tools.sim.measure import Network, Point, measure

COLLECTIVES = Path(__file__).resolve().parents[3] / "core" / "collectives"
NETWORKS = (
    Costs(alpha_s=2e-6, beta_s_per_byte=8e-11),
    Costs(alpha_s=20e-6, beta_s_per_byte=8.5e-9, gamma_s_per_byte=1e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=2e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=3e-9),
    Costs(alpha_s=10e-6, beta_s_per_byte=1e-9, beta_exchange_s_per_byte=1.5e-9, gamma_s_per_byte=1e-10),
    Costs(alpha_s=10e-6, beta_s_per_byte=1e-9, beta_exchange_s_per_byte=1.9e-9, gamma_s_per_byte=1e-10),
)
FORMS: dict[tuple[str, str], Callable[[int, int, Costs], Cost]] = {
    ("allreduce", "rabenseifner"): closed_forms.allreduce_rabenseifner,
    ("reduce", "by_length"): reduce,
    ("reduce_scatter", "by_length"): closed_forms.reduce_scatter,
}


def compare(operation: tuple[str, str], ranks: int, size: int, costs: Costs, *, rel: float = 0.01) -> None:
    form = FORMS[operation](ranks, size, costs)
    found = measure(Point(*operation, ranks, size, Network(costs)))
    assert form.time_s == pytest.approx(found.finish_s, rel=rel), (ranks, size, costs)
    assert form.bytes_per_rank == found.bytes_sent.max(), (ranks, size)


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 13, 16, 33, 100])
@pytest.mark.parametrize("operation", FORMS, ids="-".join)
def test_few_ranks(operation: tuple[str, str], ranks: int, costs: Costs) -> None:
    for size in (0, 4, 4 * ranks - 4, 4 * ranks, 4 * ranks + 4, 8 * ranks - 4, 8192, 100_000, 4 << 20, 64 << 20):
        compare(operation, ranks, size, costs)


PLAIN, SLOW_EXCHANGES = NETWORKS[1], NETWORKS[-1]
MANY = [(255, PLAIN), (255, SLOW_EXCHANGES), (500, SLOW_EXCHANGES)]
MANY_MORE = [
    (1000, PLAIN),
    (1000, SLOW_EXCHANGES),
    *((ranks, costs) for ranks in (4095, 4096) for costs in (PLAIN, SLOW_EXCHANGES)),
]


@pytest.mark.parametrize(
    ("ranks", "costs"), [*MANY, *(pytest.param(*one, marks=pytest.mark.slow) for one in MANY_MORE)], ids=str
)
@pytest.mark.parametrize("operation", FORMS, ids="-".join)
def test_many_ranks(operation: tuple[str, str], ranks: int, costs: Costs) -> None:
    for size in (4, 4 * ranks + 4):
        compare(operation, ranks, size, costs)
    # Where exchanges are slower: of hundreds of pieces not all meet others as the form says.
    meets = ranks in (500, 1000) and costs.beta_exchange_s_per_byte > costs.beta_s_per_byte
    compare(operation, ranks, 64 << 20 if ranks <= 1000 else 4 << 20, costs, rel=0.02 if meets else 0.01)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("operation", FORMS, ids="-".join)
def test_drawn_costs(operation: tuple[str, str], seed: int) -> None:
    draw = random.Random(seed)
    alpha, beta, gamma = (
        0.0 if draw.random() < 0.15 else 10 ** draw.uniform(*powers) for powers in ((-7, -3), (-11, -8), (-11, -8))
    )
    ranks, size = draw.randint(2, 40), 4 * round(2 ** draw.uniform(0, 23))
    compare(operation, ranks, size, Costs(alpha_s=alpha, beta_s_per_byte=beta, gamma_s_per_byte=gamma))


@pytest.mark.parametrize("operation", FORMS, ids="-".join)
def test_one_rank_alone(operation: tuple[str, str]) -> None:
    for costs in NETWORKS:
        compare(operation, 1, 4096, costs)


def test_figures_of_the_papers() -> None:
    costs = Costs(alpha_s=1.0, beta_s_per_byte=0.5, gamma_s_per_byte=0.25)
    # 2·log2 8 rounds, 2·7/8 of the bytes, 7/8 of the work; the last rank's arcs of 2 and 4 blocks go in two messages.
    assert closed_forms.allreduce_rabenseifner(8, 64, costs) == Cost(6 + 112 * 0.5 + 56 * 0.25, 112)
    # No fold for a number that is no power of two: 2·3 rounds, 2·4/5 of the bytes; the rest is copied meanwhile.
    assert closed_forms.allreduce_rabenseifner(5, 80, costs) == Cost(6 + 128 * 0.5 + 64 * 0.25, 128)
    assert reduce(8, 64, costs) == Cost(3 * (1 + 32 + 16), 64)
    assert closed_forms.reduce_scatter(8, 64, costs) == Cost(3 + 56 * 0.75, 56)


def test_rabenseifner_is_never_slower_than_a_ring_of_one_segment_without_work() -> None:
    for ranks in (2, 3, 5, 8, 100, 1000):
        for size in (4 * ranks, 1024 * ranks, 60_000 * ranks):
            halved, ring = (
                closed_forms.allreduce(name, ranks, size, NETWORKS[0]).time_s for name in ("rabenseifner", "ring")
            )
            assert halved <= ring * (1 + 1e-9), (ranks, size)


def test_the_core_has_the_same_constants() -> None:
    for file, name, value in (
        ("support/pieces.hpp", "kCardBytes", network.CARD_BYTES),
        ("support/halving.hpp", "kPiecesMost", closed_forms.HALVING_PIECES_MOST),
        ("support/pieces.hpp", "kPiecesUnderWay", network.PIECES_UNDER_WAY),
        ("dense/reduce_scatter.cpp", "kRingBlockBytes", closed_forms.RING_BLOCK_BYTES),
        ("dense/reduce.cpp", "kPairTreeBytes", PAIR_TREE_BYTES),
        ("dense/reduce.cpp", "kTreeBytes", REDUCE_TREE_BYTES),
        ("dense/reduce.cpp", "kLeastBlockBytes", LEAST_BLOCK_BYTES),
    ):
        found = re.search(rf"{name} = (?:std::size_t\{{(\d+)\}} << (\d+)|(\d+));", (COLLECTIVES / file).read_text())
        assert found is not None, name
        assert (int(found[3]) if found[3] else int(found[1]) << int(found[2])) == value, name


def test_bad_arguments_are_refused() -> None:
    for form in FORMS.values():
        with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
            form(0, 4, NETWORKS[0])
        with pytest.raises(ValueError, match="size=6 is no vector of 4-byte floats"):
            form(2, 6, NETWORKS[0])
