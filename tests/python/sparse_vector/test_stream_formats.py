"""Streams made from torch COO tensors and scipy CSR rows, and made into them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from telegrad import SparseVector

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DENSE_ROWS = hnp.arrays(
    st.sampled_from([np.float32, np.float64]), st.integers(1, 60), elements=st.sampled_from([0.0, 1.0, -3.5])
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "sparse_dim"), [((20,), 1), ((4, 5), 2), ((6, 3), 1), ((3, 4, 2), 2)])
def test_coo_there_and_back(dtype: torch.dtype, shape: tuple[int, ...], sparse_dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    dense = torch.randint(-1, 2, shape, generator=generator).to(dtype)
    x = dense.to_sparse(sparse_dim)
    stream = SparseVector.from_coo(x)
    assert stream.n == dense.numel()
    assert torch.equal(stream.to_dense(), dense.reshape(-1))
    back = stream.to_coo(shape, sparse_dim)
    assert back.is_coalesced()
    assert (back.sparse_dim(), back.dtype) == (sparse_dim, dtype)
    assert torch.equal(back.to_dense(), dense)
    assert torch.equal(stream.to_coo().to_dense(), dense.reshape(-1))


def test_coo_adds_up_repeated_indices_and_leaves_the_tensor_alone() -> None:
    x = torch.sparse_coo_tensor([[3, 1, 3]], torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True)
    stream = SparseVector.from_coo(x)
    assert stream.indices.tolist() == [1, 3]
    assert stream.values.tolist() == [2.0, 5.0]
    assert not x.is_coalesced()


def test_a_numpy_stream_as_coo_and_a_row_that_has_only_some_entries() -> None:
    stream = SparseVector(np.array([1, 4], np.uint32), np.array([2, 3], np.float32), 6)
    assert stream.to_coo((3, 2)).to_dense().tolist() == [[0, 2], [0, 0], [3, 0]]
    least = SparseVector.trusted(np.array([1], np.uint32), np.array([2], np.float32), 4, absent=float("inf"))
    assert least.to_coo((2, 2), 1).coalesce().values().tolist() == [[float("inf"), 2.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absent", [0.0, 1.0, float("inf"), float("-inf")])
def test_a_result_that_is_held_densely_has_all_elements_where_a_missing_one_would_be_zero(
    dtype: torch.dtype, absent: float
) -> None:
    whole = torch.tensor([absent, 4, absent, 0], dtype=dtype)
    bits = whole.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else whole.numpy()
    result = SparseVector.trusted(None, bits, 4, of_torch=True, absent=absent)
    assert torch.equal(result.to_coo((2, 2)).to_dense().reshape(-1), whole)
    assert torch.equal(result.to_coo((2, 2), 1).to_dense().reshape(-1), whole)
    assert result.to_coo()._nnz() == (4 if absent else 1)
    if dtype in (torch.float32, torch.float64):
        np.testing.assert_array_equal(result.to_csr().toarray()[0], whole.numpy())
    assert result.nnz == (2 if absent else 1)


@given(DENSE_ROWS, st.sampled_from([sparse.csr_array, sparse.csr_matrix]))
def test_csr_there_and_back(x: np.ndarray, kind: type) -> None:
    row = kind(x[None])
    stream = SparseVector.from_csr(row)
    assert (stream.n, stream.nnz) == (x.size, np.count_nonzero(x))
    assert stream.values.dtype == x.dtype
    np.testing.assert_array_equal(stream.to_dense(), x)
    back = stream.to_csr()
    assert (back.shape, back.dtype, back.has_canonical_format) == ((1, x.size), x.dtype, True)
    np.testing.assert_array_equal(back.toarray()[0], x)


def test_csr_row_of_a_matrix_shares_its_values() -> None:
    matrix = sparse.csr_array(np.array([[0, 1, 2], [3, 0, 4]], np.float32))
    row = matrix[1:2]
    stream = SparseVector.from_csr(row)
    assert stream.indices.tolist() == [0, 2]
    assert np.shares_memory(stream.values, row.data)
    assert SparseVector.from_csr(sparse.csr_array(np.array([0, 1.0]))).indices.tolist() == [1]  # of shape (n,)


def test_csr_out_of_order_is_sorted_in_a_copy() -> None:
    row = sparse.csr_array((np.array([1, 2, 4], np.float32), np.array([3, 1, 3]), np.array([0, 3])), shape=(1, 5))
    stream = SparseVector.from_csr(row)
    assert stream.indices.tolist() == [1, 3]
    assert stream.values.tolist() == [2, 5]
    assert row.indices.tolist() == [3, 1, 3]


def test_csr_arrays_may_be_longer_than_their_entries() -> None:
    for columns in ([0, 2, 4], [2, 0, 4]):  # in order, and not
        row = sparse.csr_matrix((np.array([1, 2, 3], np.float32), np.array(columns), np.array([0, 3])), shape=(1, 5))
        row.indptr[1] = 2
        stream = SparseVector.from_csr(row)
        assert stream.indices.tolist() == [0, 2]
        np.testing.assert_array_equal(stream.to_dense(), row.toarray()[0])
    nothing = sparse.csr_matrix((np.ones(1), np.array([3]), np.array([0, 0])), shape=(1, 5))
    assert SparseVector.from_csr(nothing).nnz == 0


def test_csr_columns_beyond_int32() -> None:
    n = 2**32 - 1
    stream = SparseVector(np.array([7, n - 1], np.uint32), np.ones(2, np.float64), n)
    back = stream.to_csr()
    assert back.shape == (1, n)
    assert SparseVector.from_csr(back).indices.tolist() == [7, n - 1]


def test_what_is_too_long_is_refused() -> None:
    row = sparse.csr_array((np.ones(1), np.array([0]), np.array([0, 1])), shape=(1, 2**32))
    with pytest.raises(ValueError, match="row has 4294967296 columns.*split the vector"):
        SparseVector.from_csr(row)
    x = torch.sparse_coo_tensor([[0], [0]], torch.ones(1), (2**16, 2**16), check_invariants=True)
    with pytest.raises(ValueError, match="x has 4294967296 elements.*split the vector"):
        SparseVector.from_coo(x)
    for count in (0, 2):  # torch makes none of 2**63 elements
        x = torch.sparse_coo_tensor([[1] * count] * 2, torch.ones(count), (2**31, 2**31), check_invariants=True)
        with pytest.raises(ValueError, match="x has 4611686018427387904 elements.*split the vector"):
            SparseVector.from_coo(x)


def test_what_is_no_row_or_no_coo_tensor_is_refused() -> None:
    matrix = sparse.csr_array(np.eye(3, dtype=np.float32))
    for given_row, error, message in [
        (np.ones(3), TypeError, "row is a ndarray: it must be a scipy CSR row"),
        (matrix.tocsc(), TypeError, "of format 'csc'.*use .tocsr"),
        (matrix, ValueError, r"shape \(3, 3\): it must have one row"),
        (matrix[0:1].astype(np.int16), TypeError, "values has dtype int16"),
    ]:
        with pytest.raises(error, match=message):
            SparseVector.from_csr(given_row)
    for given_x, message in [
        (torch.ones(3), r"x is a Tensor: it must be a torch.sparse_coo tensor; use .to_sparse_coo\(\)"),
        (np.ones(3), r"x is a ndarray: it must be a torch.sparse_coo tensor; SparseVector.from_dense\(\) takes arrays"),
        (matrix, r"x is a csr_array: it must be a torch.sparse_coo tensor; SparseVector.from_csr\(\) takes a CSR row"),
        (torch.sparse_coo_tensor((3,), device="meta", check_invariants=False), "x is on meta"),
        (torch.ones(3, dtype=torch.int16).to_sparse(), "values has dtype torch.int16"),
    ]:
        with pytest.raises(TypeError, match=message):
            SparseVector.from_coo(given_x)


def test_what_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 6)
    with pytest.raises(ValueError, match=r"shape=\(4, 2\) has not the stream's n=6 elements"):
        stream.to_coo((4, 2))
    with pytest.raises(ValueError, match=r"sparse_dim=3 must be in \[0, 2\]"):
        stream.to_coo((3, 2), 3)
    for sparse_dim in ("a", 1.0, True):
        with pytest.raises(TypeError, match=f"sparse_dim={sparse_dim!r} must be an int"):
            stream.to_coo((3, 2), sparse_dim)  # type: ignore[arg-type]
    assert stream.to_coo((3, 2), np.int64(1)).sparse_dim() == 1
    with pytest.raises(ValueError, match="negative size"):
        stream.to_coo((-3, -2))
    with pytest.raises(TypeError, match="sequence of ints"):
        stream.to_coo((3.0, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sequence of ints"):
        stream.to_coo(6)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="hold no float16"):
        SparseVector(np.array([1], np.uint32), np.ones(1, np.float16), 6).to_csr()
    with pytest.raises(TypeError, match="hold no bfloat16"):
        SparseVector(torch.tensor([1]), torch.ones(1, dtype=torch.bfloat16), 6).to_csr()
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)  # as if it were not installed
    with pytest.raises(ImportError, match="needs scipy: pip install scipy"):
        stream.to_csr()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="needs torch: import torch first"):
        stream.to_coo()


def test_a_row_needs_no_scipy() -> None:
    """What looks like a row is one: only to_csr() imports scipy."""
    row = SimpleNamespace(
        format="csr",
        shape=(1, 4),
        has_canonical_format=True,
        indptr=np.array([0, 1]),
        indices=np.array([2]),
        data=np.ones(1, np.float32),
    )
    assert SparseVector.from_csr(row).indices.tolist() == [2]


def test_coo_without_sparse_dimensions() -> None:
    assert SparseVector.from_coo(torch.tensor(3.0).to_sparse()).to_dense().tolist() == [3.0]
    hybrid = torch.sparse_coo_tensor(torch.zeros((0, 2), dtype=torch.int64), torch.ones((2, 3)), (3,))
    assert SparseVector.from_coo(hybrid).to_dense().tolist() == [2.0] * 3
