"""Made-up rows: their shape, and that who makes them does not matter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from telegrad.linear import TrainingSettings, train
from telegrad.linear.synthetic import SHAPES, Shape, synthetic_rows

SMALL = {True: Shape("small", 1000, 50_021, 40, 1.1, True), False: Shape("small", 1000, 50_021, 40, 1.1, False)}


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "numbers"])
def test_any_division_of_the_rows_makes_the_same(binary: bool) -> None:
    whole = synthetic_rows(SMALL[binary], 0, 300, seed=3)
    borders = [0, 1, 63, 64, 65, 200, 300]
    parts = [synthetic_rows(SMALL[binary], a, b, seed=3) for a, b in itertools.pairwise(borders)]
    assert np.concatenate([part.indices for part in parts]).tolist() == whole.indices.tolist()
    assert np.concatenate([part.values for part in parts]).tolist() == whole.values.tolist()
    assert np.concatenate([part.labels for part in parts]).tolist() == whole.labels.tolist()
    assert len(synthetic_rows(SMALL[binary], 5, 5)) == 0


@pytest.mark.parametrize("name", SHAPES)
def test_the_published_shapes(name: str) -> None:
    shape = SHAPES[name]
    rows = synthetic_rows(shape, 0, 128)
    assert rows.n_features == shape.features
    assert rows.nnz / len(rows) == pytest.approx(shape.entries, rel=0.1)
    assert (rows.values == 1).all() == shape.binary
    if not shape.binary:
        assert np.allclose(np.add.reduceat(rows.values**2, rows.offsets[:-1].astype(np.int64)), 1, atol=1e-4)


def test_popular_features_come_often_and_labels_can_be_learnt() -> None:
    rows = synthetic_rows(SMALL[True], 0, 2000)
    counts = np.sort(np.bincount(rows.indices, minlength=50_021))[::-1]
    assert counts[0] > 1000
    assert (counts == 0).sum() > 10_000
    trained = train(rows, TrainingSettings(epochs=5, batch=50, learning_rate=0.5, held_out=0.2))
    assert trained.epochs[-1].auc > 0.65
    assert 0.3 < (rows.labels > 0).mean() < 0.7


def test_numbers_that_are_no_range() -> None:
    with pytest.raises(ValueError, match="first=3 and last=2 are no range of rows"):
        synthetic_rows(SMALL[True], 3, 2)
