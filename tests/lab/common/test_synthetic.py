"""Made-up rows: their shape, and that who makes them does not matter."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from lab.common.synthetic_rows import SHAPES, Shape, synthetic_rows
from telegrad.linear import TrainingSettings, train

SMALL = {
    binary: Shape("small", rows=2000, features=50_021, entries=40, columns=8000, binary=binary)
    for binary in (True, False)
}


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "numbers"])
def test_any_division_of_the_rows_makes_the_same(binary: bool) -> None:
    whole = synthetic_rows(SMALL[binary], 0, 300, seed=3)
    borders = [0, 1, 63, 64, 65, 200, 300]
    parts = [synthetic_rows(SMALL[binary], a, b, seed=3) for a, b in itertools.pairwise(borders)]
    for name in ("indices", "values", "labels"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole, name).tolist()
    assert len(synthetic_rows(SMALL[binary], 5, 5)) == 0
    other = synthetic_rows(SMALL[binary], 0, 300, seed=4)
    assert other.indices.tolist() != whole.indices.tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_the_published_shapes(name: str) -> None:
    shape = SHAPES[name]
    rows = synthetic_rows(shape, 0, 128)
    assert rows.n_features == shape.features
    assert rows.nnz / len(rows) == pytest.approx(shape.entries, rel=0.02)
    assert np.unique(rows.indices).size == pytest.approx(shape.popularity.columns(128), rel=0.05)
    assert (rows.values == 1).all() == shape.binary
    if not shape.binary:
        assert np.allclose(np.add.reduceat(rows.values**2, rows.offsets[:-1].astype(np.int64)), 1, atol=1e-4)


@pytest.mark.parametrize("columns", [1000, 8000, 20_000])
def test_all_rows_have_as_many_columns_as_wanted(columns: int) -> None:
    """Of n columns the standard deviation is below √n; ranks that share a column take a few."""
    shape = dataclasses.replace(SMALL[True], columns=columns, features=5_000_011)
    rows = synthetic_rows(shape, 0, shape.rows)
    assert rows.nnz / len(rows) == pytest.approx(40, abs=5 * np.sqrt(40 / len(rows)))
    assert np.unique(rows.indices).size == pytest.approx(columns, abs=4 * np.sqrt(columns) + 0.01 * columns)


def test_features_are_in_rows_independently_and_as_often_as_their_rank_says() -> None:
    shape = SMALL[True]
    rows = synthetic_rows(shape, 0, 2000)
    counts = np.sort(np.bincount(rows.indices, minlength=shape.features))[::-1]
    chance = shape.popularity.chance(np.arange(1.0, 201))
    assert counts[:200][chance == 1].tolist() == [2000] * int((chance == 1).sum())
    assert counts[:200].sum() / 2000 == pytest.approx(chance.sum(), rel=0.01)
    lengths = np.diff(rows.offsets.astype(np.int64))
    every = shape.popularity.chance(np.arange(1.0, 1e6))
    assert lengths.var() == pytest.approx(every @ (1 - every), rel=0.2)
    common = np.flatnonzero(np.bincount(rows.indices, minlength=shape.features) > 500)
    assert np.abs(np.diff(common)).min() > 1  # scattered


def test_labels_can_be_learnt() -> None:
    rows = synthetic_rows(SMALL[True], 0, 2000)
    trained = train(rows, TrainingSettings(epochs=5, batch=50, learning_rate=0.1, held_out=0.2))
    assert trained.epochs[-1].auc > 0.65
    assert 0.4 < (rows.labels > 0).mean() < 0.6


def test_what_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="first=3 and last=2 are no range of rows"):
        synthetic_rows(SMALL[True], 3, 2)
    with pytest.raises(ValueError, match="gives 5 columns"):
        synthetic_rows(dataclasses.replace(SMALL[True], columns=5), 0, 2)
