"""The law by which made-up features occur: it meets the published counts, and draws follow it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from lab.common.synthetic_rows import Popularity

RANKS = np.arange(1.0, 400_001)


@pytest.mark.parametrize(
    ("entries", "columns", "rows"),
    [(116, 3_231_961, 2_396_130), (3730, 680_715, 350_000), (20, 5000, 2000), (3, 100, 200)],
    ids=["url", "webspam", "small", "few"],
)
def test_both_counts_are_met(entries: int, columns: int, rows: int) -> None:
    law = Popularity.fitted(entries, columns, rows)
    assert law.entries() == pytest.approx(entries, rel=1e-6)
    assert law.columns(rows) == pytest.approx(columns, rel=1e-6)
    chance = np.minimum(1, law.scale * RANKS**-law.exponent)
    beyond = law.scale * RANKS[-1] ** (1 - law.exponent) / (law.exponent - 1)  # the integral, for the sum
    assert chance.sum() + beyond == pytest.approx(entries, rel=1e-3)
    once = 1 - (1 - chance) ** 50
    assert once.sum() + 50 * beyond == pytest.approx(law.columns(50), rel=1e-3)
    assert law.columns(1) == pytest.approx(entries, rel=1e-6)


def test_how_many_are_common() -> None:
    law = Popularity(1.5, 100.0)
    many = law.more_often_than(0.05)
    assert law.chance(np.array([many, many + 1.0])).tolist() == sorted(law.chance(np.array([many, many + 1.0])))[::-1]
    assert law.chance(np.array([float(many)]))[0] >= 0.05 > law.chance(np.array([many + 1.0]))[0]


@pytest.mark.parametrize("columns", [19, 2000 * 20 + 1], ids=["fewer than entries", "more than all entries"])
def test_columns_that_no_law_gives(columns: int) -> None:
    with pytest.raises(ValueError, match=re.escape("no power of the rank between 1.1 and 8 gives")):
        Popularity.fitted(20, columns, 2000)


@pytest.mark.parametrize("exponent", [1.2, 2.4])
def test_drawn_entries_follow_the_law(exponent: float) -> None:
    law, rows = Popularity(exponent, 30.0), 20_000
    after = law.more_often_than(0.2)
    row, rank = law.draw(after, rows, np.random.default_rng(1))
    assert rank.min() > after
    near = rank <= after + 40
    once = np.unique(row[near] * 64 + (rank[near] - after - 1).astype(np.int64))
    found = np.bincount(once % 64, minlength=40)
    chance = law.chance(np.arange(after + 1.0, after + 41))
    deviations = (found - rows * chance) / np.sqrt(rows * chance * (1 - chance))
    assert np.abs(deviations).max() < 4
    assert (deviations**2).sum() == pytest.approx(40, abs=4 * np.sqrt(80))  # χ² of 40 degrees of freedom
    assert np.abs(np.bincount(row, minlength=rows).mean() - row.size / rows) < 1e-9
