"""The few numbers below a table, from rows made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from telegrad.tools.cli.bench import Worst, lines_of, summary_of


def _row(algorithm: str, size: int, median_s: float, gloo_s: float | None, mpich_s: float | None, **more: Any) -> Any:
    return {
        "network": "1gbit",
        "ranks": 4,
        "algorithm": algorithm,
        "bytes": size,
        "median_s": median_s,
        "gloo_median_s": gloo_s,
        "mpich_median_s": mpich_s,
        "bound_s": None,
        "chosen": None,
        **more,
    }


def test_the_summary_counts_rows_and_finds_the_worst() -> None:
    big = 16 << 20
    found = summary_of(
        [
            _row("ring", 4, 9e-6, 5e-6, 8e-6),
            _row("auto", 4, 6.5e-6, 5e-6, 8e-6, chosen="ring"),  # 30 % slower than Gloo, but by less than 2 µs
            _row("ring", 1024, 1e-4, 9e-5, None),
            _row("auto", 1024, 1.2e-4, 9e-5, None, chosen="ring"),  # slower than both
            _row("ring", big, 0.25, 0.5, 0.3, bound_s=0.2),
            _row("auto", big, 0.25, 0.5, 0.3, bound_s=0.2),
        ]
    )
    assert (found.compared, found.as_fast) == (3, 2)
    assert found.worst == Worst(1024, "gloo", pytest.approx(4 / 3))
    assert (found.chosen, found.well_chosen) == (3, 2)
    assert found.worst_choice == Worst(1024, "ring", pytest.approx(1.2))
    assert (found.twice, found.unlike, found.most_unlike) == (2, 2, Worst(4, "ring", pytest.approx(9 / 6.5)))
    assert found.ratios_at_16mib == {"gloo": 0.5, "mpich": pytest.approx(0.25 / 0.3)}
    assert found.bound_shares == {big: pytest.approx(0.8)}
    assert lines_of(found) == [
        "auto within 10% or 2 µs of the better peer: 2 of 3 rows; worst 1.33x as long as Gloo at 1 KiB",
        "auto at 16 MiB: 2.00x as fast as Gloo, 1.20x as fast as MPICH",
        "auto within 5% or 2 µs of our best algorithm: 2 of 3 rows; worst 1.20x as long as ring at 1 KiB",
        "the algorithm that auto chose, under its own name: apart by more than that in 2 of 2 rows, "
        "at most 1.38x as long as ring at 4 B: so two measurements of one thing differ",
        "auto, share of the bound: 80.0% (76.5% of the line rate) at 16 MiB",
    ]


def test_nothing_is_said_about_what_was_not_measured() -> None:
    assert lines_of(summary_of([_row("auto", 4, 1e-6, None, None, network="shm")])) == []
    assert lines_of(summary_of([_row("ring", 4, 1e-6, 1e-6, None, network="shm")])) == []
