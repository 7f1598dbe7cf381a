"""The table that measurements make: where they move crossings, what noise may do, and what holds beyond them."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from telegrad.cost import ALLREDUCE_ALGORITHMS, DecisionTable, TableEntry, measured_allreduce_table

_DOUBLING, _RING = "recursive_doubling", "ring"
_PREDICTED = DecisionTable(4, (TableEntry(0, _DOUBLING), TableEntry(65_536, _RING)))
_SIZES = [1 << power for power in range(2, 25)]


def _samples(crossing: float, count: int = 9, scatter: float = 0.0) -> dict[int, dict[str, list[float]]]:
    """Two straight lines that cross at so many bytes; ``scatter``: relative, of each sample."""
    noise = random.Random(1)

    def drawn(seconds: float) -> list[float]:
        return [seconds * (1 + noise.uniform(-scatter, scatter)) for _ in range(count)]

    return {
        size: {_DOUBLING: drawn(1e-5 + size * 2e-9), _RING: drawn(1e-5 + crossing * 1e-9 + size * 1e-9)}
        for size in _SIZES
    }


@pytest.mark.parametrize("crossing", [100.0, 5_000.0, 300_000.0, 2_000_000.0])
def test_crossings_go_where_measurements_put_them(crossing: float) -> None:
    table = measured_allreduce_table(4, _samples(crossing), _PREDICTED)
    # Within 2 µs or 5 % of each other either is good.
    samples = _samples(crossing)
    for size, of in samples.items():
        best = min(times[0] for times in of.values())
        assert of[table.algorithm(size)][0] <= max(1.05 * best, best + 2e-6), size
    assert table.algorithm(1 << 24) == _RING
    if crossing > 10_000:  # where it is worth more than the tolerance
        assert [choice.algorithm for choice in table.choices] == [_DOUBLING, _RING]
        assert table.choices[1].from_bytes == pytest.approx(crossing, rel=0.5)


def test_mpis_own_collective_is_chosen_for_the_sizes_at_which_it_wins_and_for_no_other() -> None:
    samples = _samples(300_000.0)
    for size, of in samples.items():
        best_s = min(of[_DOUBLING][0], of[_RING][0])
        of["mpi"] = [best_s * (0.5 if 4096 <= size <= 65_536 else 2)] * 9
    table = measured_allreduce_table(4, samples, _PREDICTED)
    assert [choice.algorithm for choice in table.choices] == [_DOUBLING, "mpi", _DOUBLING, _RING]
    assert {size for size in samples if table.algorithm(size) == "mpi"} == {1 << power for power in range(12, 17)}
    for of in samples.values():  # the fastest everywhere: beyond twice the largest size nobody knows
        of["mpi"] = [1e-6] * 9
    assert measured_allreduce_table(4, samples, _PREDICTED).algorithm(1 << 26) == _RING


def test_the_choice_is_good_at_every_size_whatever_was_measured() -> None:
    draw = random.Random(5)
    for _ in range(200):
        samples = {
            size: {name: [draw.uniform(1e-6, 1e-3)] * 5 for name in ALLREDUCE_ALGORITHMS}
            for size in sorted(draw.sample(_SIZES, 8))
        }
        table = measured_allreduce_table(4, samples, _PREDICTED)
        for size, of in samples.items():
            best = min(times[0] for times in of.values())
            assert of[table.algorithm(size)][0] <= max(1.05 * best, best + 2e-6)
        begins = [choice.from_bytes for choice in table.choices]
        assert begins == sorted(set(begins))
        assert all(a.algorithm != b.algorithm for a, b in itertools.pairwise(table.choices))


@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.3])
def test_noise_does_not_fill_the_table(scatter: float) -> None:
    table = measured_allreduce_table(4, _samples(300_000.0, 9, scatter), _PREDICTED)
    assert [choice.algorithm for choice in table.choices] == [_DOUBLING, _RING]


def test_one_wild_sample_in_nine_changes_nothing() -> None:
    samples = _samples(300_000.0)
    expected = measured_allreduce_table(4, samples, _PREDICTED)
    for of in samples.values():
        of[_DOUBLING][3] *= 1000
        of[_RING][0] /= 1000
    assert measured_allreduce_table(4, samples, _PREDICTED) == expected


def test_a_hopeless_algorithm_needs_no_times() -> None:
    samples = _samples(300_000.0)
    for size in _SIZES:
        del samples[size][_RING if size < 100_000 else _DOUBLING]
    table = measured_allreduce_table(4, samples, _PREDICTED)
    assert [choice.algorithm for choice in table.choices] == [_DOUBLING, _RING]
    assert table.choices[1].from_bytes == pytest.approx(92_680, abs=4)  # half way from 64 KiB to 128 KiB


def test_beyond_the_measurements_the_formulas_hold_if_they_agree_so_far() -> None:
    samples = {size: {_DOUBLING: [1e-5], _RING: [1e-4]} for size in (4, 1024)}
    assert measured_allreduce_table(4, samples, _PREDICTED).choices == _PREDICTED.choices
    samples = {size: {_DOUBLING: [1e-4], _RING: [1e-5]} for size in (4, 1024)}
    assert measured_allreduce_table(4, samples, _PREDICTED).choices == (TableEntry(0, _RING),)


def test_far_beyond_the_measurements_the_longest_vectors_go_as_the_formulas_say() -> None:
    long = 16 << 20  # where the formulas have the ring, and a cache makes recursive doubling look good
    samples = {size: {_DOUBLING: [size * 1e-9], _RING: [size * 1.2e-9]} for size in (1 << 20, long)}
    assert measured_allreduce_table(4, samples, _PREDICTED).choices == (
        TableEntry(0, _DOUBLING),
        TableEntry(2 * long, _RING),
    )


@pytest.mark.parametrize("samples", [{}, {0: {_RING: [1.0]}}, {4: {}}, {4: {_RING: []}}])
def test_without_samples_there_is_no_table(samples: dict[int, dict[str, list[float]]]) -> None:
    with pytest.raises(ValueError, match="give one size or more, from 4 bytes up, each with some"):
        measured_allreduce_table(4, samples, _PREDICTED)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="'magic' does not exist: use recursive_doubling, "):
        measured_allreduce_table(4, {4: {"magic": [1.0]}}, _PREDICTED)


@pytest.mark.parametrize("time_s", [0.0, -1e-6, math.nan, math.inf])
def test_times_that_are_none_are_refused(time_s: float) -> None:
    with pytest.raises(ValueError, match=f"a sample of ring is {time_s} s: give times above 0, and finite"):
        measured_allreduce_table(4, {4: {_DOUBLING: [1e-6], _RING: [1e-6, time_s]}}, _PREDICTED)
