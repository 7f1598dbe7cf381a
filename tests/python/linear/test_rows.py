"""Rows in compressed form: what they refuse, and scipy's matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import sparse

from telegrad.linear import LinearModel, Rows

GOOD: dict[str, Any] = {
    "offsets": np.array([0, 2, 2, 3], np.uint64),
    "indices": np.array([0, 4, 2], np.uint32),
    "values": np.array([1, 2, 3], np.float32),
    "labels": np.array([1, -1, 1], np.float32),
    "n_features": 5,
}


@pytest.mark.parametrize(
    ("name", "value", "error", "said"),
    [
        ("offsets", np.array([0, 2, 2, 3]), TypeError, "offsets is 1-D int64: it must be a 1-D array of uint64"),
        ("labels", [1, -1, 1], TypeError, "labels is list"),
        ("values", np.arange(6, dtype=np.float32)[::2], ValueError, "values is not contiguous"),
        ("n_features", 2**32, ValueError, "n_features=4294967296 must be from 0"),
        ("n_features", 4, ValueError, "indices has 4, which is not below n_features=4"),
        ("values", np.ones(2, np.float32), ValueError, "indices has 3 elements but values 2"),
        ("labels", np.ones(4, np.float32), ValueError, "offsets has 4 elements but labels 4"),
        ("offsets", np.array([0, 3, 2, 3], np.uint64), ValueError, "offsets must rise from 0 to 3"),
        ("offsets", np.array([0, 2, 2, 4], np.uint64), ValueError, "offsets must rise from 0 to 3"),
        ("offsets", np.array([0, 0, 0, 3], np.uint64), ValueError, "indices do not rise in row 2: sort them"),
        ("indices", np.array([4, 4, 2], np.uint32), ValueError, "indices do not rise in row 0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(name: str, value: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Rows(**{**GOOD, name: value})


def test_there_and_back() -> None:
    rows = Rows(**GOOD)
    matrix = rows.to_csr()
    assert matrix.toarray().tolist() == [[1, 0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 3, 0, 0]]
    again = Rows.from_csr(matrix, rows.labels)
    for name in ("offsets", "indices", "values", "labels"):
        assert np.array_equal(getattr(again, name), getattr(rows, name))
    assert (len(again), again.nnz, again.n_features) == (3, 3, 5)


def test_columns_are_sorted_and_summed_in_a_copy() -> None:
    matrix = sparse.csr_matrix((np.array([1.0, 2.0, 4.0]), np.array([3, 1, 3]), np.array([0, 3])), shape=(1, 4))
    rows = Rows.from_csr(matrix, [1])
    assert rows.indices.tolist() == [1, 3]
    assert rows.values.tolist() == [2, 5]
    assert matrix.indices.tolist() == [3, 1, 3]


@pytest.mark.parametrize(
    ("matrix", "labels", "error", "said"),
    [
        (np.eye(2), [1, 1], TypeError, "matrix is a ndarray: it must be a 2-D scipy CSR matrix"),
        (sparse.csc_matrix(np.eye(2)), [1, 1], TypeError, "matrix is a csc_matrix"),
        (sparse.csr_matrix(np.eye(2)), [1], ValueError, "labels has 1 elements but matrix 2 rows"),
        (sparse.csr_matrix(np.eye(2) * 1e300), [1, 1], ValueError, "matrix has NaN, infinity or what float32"),
        (sparse.csr_matrix(np.eye(2)), [1, np.nan], ValueError, "labels has NaN"),
        (sparse.csr_matrix((1, 2**32)), [1], ValueError, "matrix has 4294967296 columns"),
    ],
    ids=["dense", "csc", "labels", "large", "nan", "wide"],
)
def test_matrices_that_cannot_be_rows(matrix: Any, labels: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Rows.from_csr(matrix, labels)


def test_a_part_of_rows() -> None:
    part = Rows(**GOOD).part(1, 3)
    assert part.to_csr().toarray().tolist() == [[0, 0, 0, 0, 0], [0, 0, 3, 0, 0]]
    assert part.labels.tolist() == [-1, 1]


def test_a_matrix_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(ImportError, match="a CSR matrix needs scipy: pip install scipy"):
        Rows(**GOOD).to_csr()


def test_rows_of_the_first_features() -> None:
    rows = Rows(**GOOD).first_features(3)
    assert rows.offsets.tolist() == [0, 1, 1, 2]
    assert (rows.indices.tolist(), rows.values.tolist(), rows.n_features) == ([0, 2], [1, 3], 3)


def test_features_that_a_model_does_not_know_have_no_weight_and_need_no_memory() -> None:
    model = LinearModel(np.array([2, 0, 5], np.float32), 0.5, "logistic")
    huge = np.array([0, 4_000_000_000, 2], np.uint32)
    rows = Rows(**{**GOOD, "indices": huge, "n_features": 4_000_000_001})
    assert model.scores(rows).tolist() == [2.5, 0.5, 15.5]
