"""The closed forms of operations on streams against the simulator, which runs them with real entries."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from telegrad.cost import Costs, closed_forms
from telegrad.tools.advise import sending
from telegrad.tools.sim.measure import Measurement, Network, Point, measure

COLLECTIVES = Path(__file__).resolve().parents[3] / "core" / "collectives"

# Latency counts, bytes count, work counts, work is all that counts.
NETWORKS = (
    Costs(alpha_s=2e-6, beta_s_per_byte=8e-11),
    Costs(alpha_s=20e-6, beta_s_per_byte=8.5e-9, gamma_s_per_byte=1e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=2e-10),
    Costs(alpha_s=1e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=3e-9),
)
RANKS = [2, 3, 5, 8, 17, 33]
STREAMS = [(10_000, 50), (100_000, 1000), (1 << 20, 10_000), (1 << 20, 100_000)]
TOLERANCE = 0.15
FORMS = {"sparse_allgather": closed_forms.allgather_sparse, "sparse_reduce_scatter": closed_forms.reduce_scatter_sparse}


def found(operation: str, ranks: int, dimension: int, entries: int, costs: Costs, **more: int | str) -> Measurement:
    fields = {"nnz": entries, "wire": "blocked", **more}
    return measure(Point(operation, "auto", ranks, 4 * dimension, Network(costs), **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("operation", FORMS)
def test_gathered_and_scattered(operation: str, ranks: int, costs: Costs) -> None:
    for dimension, entries in STREAMS[: 4 if ranks <= 3 else 3]:
        form = FORMS[operation](ranks, dimension, entries, costs)
        one = found(operation, ranks, dimension, entries, costs)
        about = (operation, ranks, dimension, entries)
        assert form.time_s == pytest.approx(one.finish_s, rel=TOLERANCE), about
        assert form.bytes_per_rank == pytest.approx(int(one.bytes_sent.max()), rel=TOLERANCE), about


@pytest.mark.parametrize("costs", NETWORKS, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_of_which_a_part_is_kept(ranks: int, costs: Costs) -> None:
    """At first, when the threshold is found in equal slices by two or three sums, and with what that leaves."""
    for dimension, entries in STREAMS[: 4 if ranks <= 3 else 3]:
        one, two = (found("allreduce_topk", ranks, dimension, entries, costs, calls=calls) for calls in (1, 2))
        assert two.result_nnz is not None
        first, later = (
            closed_forms.allreduce_topk(
                ranks, dimension, entries, kept, costs, slices="reused", finds_threshold=finds_threshold
            )
            for kept, finds_threshold in ((entries, True), (two.result_nnz, False))
        )
        about = (ranks, dimension, entries)
        tolerance = 0.7 if entries < 100 else 0.3  # of a few entries, whose messages have no header
        assert first.time_s == pytest.approx(one.finish_s, rel=tolerance), about
        assert later.time_s == pytest.approx(two.finish_s - one.finish_s, rel=tolerance), about


def test_cutting_slices_costs_counts_and_two_histograms() -> None:
    costs = NETWORKS[1]
    reused, cut = (
        closed_forms.allreduce_topk(8, 1 << 20, 10_000, 10_000, costs, slices=slices, finds_threshold=False)
        for slices in ("reused", "cut")
    )
    assert 3 * 3 * costs.alpha_s < cut.time_s - reused.time_s < 4 * 3 * costs.alpha_s


@pytest.mark.parametrize("seed", range(15))
def test_drawn_costs(seed: int) -> None:
    draw = random.Random(seed)
    ranks, dimension = draw.randint(2, 24), round(2 ** draw.uniform(12, 20))
    entries = round(dimension * 10 ** draw.uniform(-2.5, -0.5))
    costs = Costs(
        alpha_s=10 ** draw.uniform(-6, -4),
        beta_s_per_byte=10 ** draw.uniform(-11, -8),
        gamma_s_per_byte=10 ** draw.uniform(-11, -8),
    )
    for operation, form in FORMS.items():
        one = found(operation, ranks, dimension, entries, costs)
        assert form(ranks, dimension, entries, costs).time_s == pytest.approx(one.finish_s, rel=TOLERANCE), operation


def test_packed_indices_are_about_as_long_as_they_are() -> None:
    for dimension, entries in STREAMS:
        one = found("sparse_allgather", 4, dimension, entries, NETWORKS[0], wire="indices")
        form = closed_forms.allgather_sparse(4, dimension, entries, NETWORKS[0], packed=True)
        assert form.bytes_per_rank == pytest.approx(int(one.bytes_sent.max()), rel=0.05)


def test_one_rank_alone_and_no_entries() -> None:
    costs = NETWORKS[2]
    for form, operation in ((form, operation) for operation, form in FORMS.items()):
        assert form(1, 1000, 100, costs).time_s == pytest.approx(
            found(operation, 1, 1000, 100, costs).finish_s, rel=TOLERANCE
        )
        assert form(4, 1000, 0, costs).time_s == pytest.approx(
            found(operation, 4, 1000, 0, costs).finish_s, rel=TOLERANCE
        )
    alone = closed_forms.allreduce_topk(1, 1000, 100, 50, costs, slices="cut", finds_threshold=True)
    assert alone.bytes_per_rank == 0
    assert closed_forms.entries_of_sum(3, 0, 0) == 0
    assert closed_forms.entries_of_sum(3, 10, 10) == 10


def test_bytes_do_not_grow_with_the_ranks() -> None:
    def sent(ranks: int) -> int:
        return closed_forms.allreduce_topk(
            ranks, 1 << 24, 10_000, 10_000, NETWORKS[0], slices="reused", finds_threshold=False
        ).bytes_per_rank

    assert sent(1024) < 6 * sent(2)  # of 512 times as many ranks


def test_sizes_that_make_no_sense() -> None:
    costs = NETWORKS[0]
    for form in FORMS.values():
        with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
            form(0, 10, 1, costs)
        with pytest.raises(ValueError, match="entries=11 must be between 0 and dimension=10"):
            form(2, 10, 11, costs)
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        closed_forms.allreduce_topk(2, 10, 1, 0, costs, slices="cut", finds_threshold=True)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("support/allgather_short.hpp", "kShortMessageBytes", closed_forms.SHORT_MESSAGE_BYTES),
        ("sparse/split.cpp", "kShortBytes", closed_forms.SHORT_SHARE_BYTES),
        ("../transport/transport.hpp", "kTurnBytes", closed_forms.TURN_BYTES),
        ("topk/allgather_shares.hpp", "kDoubledShareBytes", closed_forms.DOUBLED_SHARE_BYTES),
    ],
)
def test_lengths_are_those_of_the_core(file: str, name: str, value: int) -> None:
    match = re.search(rf"{name} = std::size_t\{{(\d+)\}} << 10", (COLLECTIVES / file).read_text())
    assert match is not None
    assert int(match[1]) << 10 == value


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("sparse/split.cpp", "kWindow", closed_forms.SHARES_UNDER_WAY),
        ("topk/oktopk.cpp", "kUncountedShareLeast", closed_forms.UNCOUNTED_SHARE_LEAST),
        ("sparse/exchanged_sums.cpp", "kExchangingRanksMost", sending.KNOWN_RANKS_MOST),
        ("sparse/cost.cpp", "kExchangingRanksMost", sending.KNOWN_RANKS_MOST),
    ],
)
def test_numbers_are_those_of_the_core(file: str, name: str, value: int) -> None:
    match = re.search(rf"{name} = (\d+);", (COLLECTIVES / file).read_text())
    assert match is not None
    assert int(match[1]) == value
