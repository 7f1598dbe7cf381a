"""The closed forms against the simulator, which runs the algorithms themselves."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from telegrad.cost import Cost, Costs, closed_forms
from telegrad.cost.closed_forms import DOUBLING_MESSAGE_BYTES, DOUBLING_SEGMENTS_MOST, MEMORY_MESSAGE_BYTES, RING_BYTES
from telegrad.tools.sim.measure import ALGORITHMS, Network, Point, measure

COLLECTIVES = Path(__file__).resolve().parents[3] / "core" / "collectives"

# Latency counts, bytes count, work counts, work is all that counts; none of them is free.
NETWORKS = (
    Costs(alpha_s=2e-6, beta_s_per_byte=8e-11),
    Costs(alpha_s=20e-6, beta_s_per_byte=8.5e-9, gamma_s_per_byte=1e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=2e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=3e-9),
)
MESSAGE = closed_forms.CARD_BYTES


def compare(operation: str, algorithm: str, ranks: int, size: int, costs: Costs, form: Cost) -> None:
    found = measure(Point(operation, algorithm, ranks, size, Network(costs)))
    assert form.time_s == pytest.approx(found.finish_s, rel=0.01), (ranks, size, costs)
    assert form.bytes_per_rank == found.bytes_sent.max(), (ranks, size)


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 13, 16, 33, 64, 100, 128, 256])
def test_ring(ranks: int, costs: Costs) -> None:
    for size in (4, 4 * ranks - 4, 4 * ranks + 4, 100_000, 4 << 20):
        compare("allreduce", "ring", ranks, size, costs, closed_forms.allreduce_ring(ranks, size, costs))


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16, 33])
def test_ring_of_many_segments(ranks: int, costs: Costs) -> None:
    for segments in (1, 2, 3, 4, 5, 12):
        for size in (segments * MESSAGE * ranks, (segments - 1) * MESSAGE * ranks + 4):
            compare("allreduce", "ring", ranks, size, costs, closed_forms.allreduce_ring(ranks, size, costs))


@pytest.mark.parametrize("segments", [24, 25, 26, 27, 60, 61, 200])
def test_lanes_in_their_rhythm(segments: int) -> None:
    for gamma in (3e-10, 5e-10, 3e-9):
        for ranks in (2, 3, 5):
            costs = Costs(alpha_s=2e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=gamma)
            size = segments * MESSAGE * ranks
            compare("allreduce", "ring", ranks, size, costs, closed_forms.allreduce_ring(ranks, size, costs))


def drawn_costs(draw: random.Random) -> Costs:
    """Over orders of magnitude; each is nothing at all now and then."""
    alpha, beta, gamma = (
        0.0 if draw.random() < 0.15 else 10 ** draw.uniform(*powers) for powers in ((-7, -3), (-11, -8), (-11, -8))
    )
    return Costs(alpha_s=alpha, beta_s_per_byte=beta, gamma_s_per_byte=gamma)


@pytest.mark.parametrize("seed", range(300))
def test_ring_at_drawn_costs(seed: int) -> None:
    draw = random.Random(seed)
    ranks, segments = draw.choice([2, 3, 4, 5, 7, 8, 12]), draw.choice([1, 2, 3, 4, 5, 8, 12, 30])
    least = (segments - 1) * MESSAGE * ranks // 4 + 1
    size = 4 * draw.randint(least, segments * MESSAGE * ranks // 4)
    costs = drawn_costs(draw)
    compare("allreduce", "ring", ranks, size, costs, closed_forms.allreduce_ring(ranks, size, costs))


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 12, 33, 63, 64, 65, 1000, 1024, 2049, 3000, 4095, 4096])
def test_recursive_doubling(ranks: int, costs: Costs) -> None:
    for size in (4, 100_000, 64 << 20) if ranks < 100 else (4, 8192):
        form = closed_forms.allreduce_recursive_doubling(ranks, size, costs)
        compare("allreduce", "recursive_doubling", ranks, size, costs, form)


@pytest.mark.parametrize("seed", range(100))
def test_recursive_doubling_at_drawn_costs(seed: int) -> None:
    draw = random.Random(seed)
    ranks, size = draw.randint(2, 40), 4 * round(2 ** draw.uniform(0, 20))
    costs = drawn_costs(draw)
    form = closed_forms.allreduce_recursive_doubling(ranks, size, costs)
    compare("allreduce", "recursive_doubling", ranks, size, costs, form)


@pytest.mark.parametrize("exchange", [1.5e-9, 1.9e-9])
def test_exchange_between_two_ranks(exchange: float) -> None:
    costs = Costs(alpha_s=10e-6, beta_s_per_byte=1e-9, beta_exchange_s_per_byte=exchange, gamma_s_per_byte=1e-10)
    for size in (4, 1 << 20):
        for ranks in (2, 3, 4, 5, 7, 8, 9, 64):
            form = closed_forms.allreduce_recursive_doubling(ranks, size, costs)
            compare("allreduce", "recursive_doubling", ranks, size, costs, form)
    for size in (4, 100_000, 2 * MESSAGE):
        for ranks in (2, 3, 4):
            compare("allreduce", "ring", ranks, size, costs, closed_forms.allreduce_ring(ranks, size, costs))


def test_figures_of_the_papers() -> None:
    costs = Costs(alpha_s=1.0, beta_s_per_byte=0.5, gamma_s_per_byte=0.25)
    assert closed_forms.allreduce_ring(4, 64, costs) == Cost(6 * (1 + 8) + 3 * 4, 96)
    assert closed_forms.allreduce_recursive_doubling(8, 64, costs) == Cost(3 * (1 + 32 + 16), 192)
    assert closed_forms.allreduce_recursive_doubling(6, 64, costs) == Cost(2 * 49 + 2 * 33 + 16, 192)


def test_aluminum_s_figure() -> None:
    """Dryden et al., MLHPC 2018: at 2,048 ranks and 8 KiB a logarithmic algorithm beats a ring more than 20 times."""
    ring, doubling = (
        closed_forms.allreduce(name, 2048, 8192, NETWORKS[0]).time_s for name in ("ring", "recursive_doubling")
    )
    assert ring > 20 * doubling


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
def test_one_rank_alone_and_no_bytes_at_all(costs: Costs) -> None:
    for name in ALGORITHMS["allreduce"]:
        for ranks, size in ((1, 4096), (8, 0), (7, 0)):
            compare("allreduce", name, ranks, size, costs, closed_forms.allreduce(name, ranks, size, costs))


def test_the_core_has_the_same_constants() -> None:
    lanes = (COLLECTIVES / "support/lanes.hpp").read_text()
    found = re.search(r"kMemoryMessageBytes = std::size_t\{(\d+)\} << (\d+)", lanes)
    assert found is not None
    assert int(found[1]) << int(found[2]) == MEMORY_MESSAGE_BYTES
    assert "lanes = 2;" in lanes
    assert f"kRingMessageBytes = {RING_BYTES >> 10}_KiB;" in (COLLECTIVES / "dense/choice.cpp").read_text()
    assert "net.shares_memory() ? kMemoryMessageBytes : kCardBytes" in (COLLECTIVES / "support/lanes.cpp").read_text()
    assert DOUBLING_MESSAGE_BYTES == closed_forms.CARD_BYTES
    doubling = f"{{.message_bytes = kCardBytes, .segments_most = {DOUBLING_SEGMENTS_MOST}}}"
    assert doubling in (COLLECTIVES / "dense/allreduce_recursive_doubling.hpp").read_text()


@pytest.mark.parametrize("name", ["alpha_s", "beta_s_per_byte", "beta_exchange_s_per_byte", "gamma_s_per_byte"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_costs_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} is no cost: give a finite number of seconds"):
        Costs(**{name: value})


def test_an_exchange_is_no_faster_than_one_way() -> None:
    with pytest.raises(ValueError, match=r"beta_exchange_s_per_byte=1e-10 is below beta_s_per_byte=2e-10: .* or 0 for"):
        Costs(beta_s_per_byte=2e-10, beta_exchange_s_per_byte=1e-10)
    for exchange in (0.0, 2e-10):
        assert Costs(beta_s_per_byte=2e-10, beta_exchange_s_per_byte=exchange).pair_s_per_byte(1 << 20) == 2e-10


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        closed_forms.allreduce_ring(0, 4, NETWORKS[0])
    for size in (-4, 6):
        with pytest.raises(ValueError, match=f"size={size} is no vector of 4-byte floats: use a multiple of 4"):
            closed_forms.allreduce_ring(2, size, NETWORKS[0])
    with pytest.raises(ValueError, match="'magic' has no closed form: use ring, recursive_doubling, rabenseifner"):
        closed_forms.allreduce("magic", 2, 4, NETWORKS[0])
