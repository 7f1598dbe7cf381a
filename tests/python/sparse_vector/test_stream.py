"""SparseVector: what it accepts, what it refuses, and that it keeps what it is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from telegrad import SparseVector

ONE = np.ones(1, np.float32)


def _indices(*items: int, dtype: type = np.uint32) -> np.ndarray:
    return np.array(items, dtype)


def test_holds_arrays_without_a_copy() -> None:
    indices, values = _indices(1, 5, 9), np.array([1, -2, 3], np.float32)
    stream = SparseVector(indices, values, 10)
    assert stream.indices is indices
    assert stream.values is values
    assert (stream.n, stream.nnz, stream.density, stream.dtype, stream.is_dense) == (10, 3, 0.3, "f32", False)
    assert stream.to_dense().tolist() == [0, 1, 0, 0, 0, -2, 0, 0, 0, 3]
    assert repr(stream) == "SparseVector(n=10, nnz=3, dtype=f32)"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_torch_in_torch_out(dtype: torch.dtype) -> None:
    values = torch.tensor([1.5, -2.0], dtype=dtype)
    stream = SparseVector(torch.tensor([2, 7]), values, 8)
    assert torch.equal(stream.indices, torch.tensor([2, 7]))
    assert torch.equal(stream.values, values)
    assert stream.values.data_ptr() == values.data_ptr()
    dense = stream.to_dense()
    assert dense.dtype == dtype
    assert torch.equal(torch.nonzero(dense).flatten(), stream.indices)
    assert torch.equal(SparseVector.from_dense(dense.reshape(2, 4)).values, values)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64, np.uint64])
def test_index_types(dtype: type) -> None:
    assert SparseVector(_indices(0, 3, dtype=dtype), np.ones(2, np.float32), 4).indices.dtype == np.uint32


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.float32, "f32"), (np.float64, "f64"), (np.float16, "f16"), (torch.bfloat16, "bf16")]
)
def test_value_types_have_the_names_of_the_wire(dtype: type, name: str) -> None:
    values = torch.ones(1, dtype=dtype) if isinstance(dtype, torch.dtype) else np.ones(1, dtype)
    stream = SparseVector(_indices(0), values, 2)
    assert stream.dtype == name
    assert stream.to_dense().dtype == dtype


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64, np.float16]),
        st.integers(0, 50),
        elements=st.sampled_from([0.0, 1.0, -3.5, float("nan")]),
    )
)
def test_from_dense_and_back(x: np.ndarray) -> None:
    stream = SparseVector.from_dense(x)
    np.testing.assert_array_equal(stream.to_dense(), x)
    assert stream.nnz == np.count_nonzero(x)


@pytest.mark.parametrize(("dtype", "delta"), [("float32", 50), ("float64", 66), ("float16", 33), ("bfloat16", 33)])
def test_from_dense_copies_what_takes_less_memory_so(dtype: str, delta: int) -> None:
    x = torch.zeros(100, dtype=getattr(torch, dtype))
    x[:delta] = 2.0
    assert not SparseVector.from_dense(x).is_dense
    x[delta] = 3.0
    stream = SparseVector.from_dense(x)
    x[0] = 7.0
    assert stream.is_dense
    assert stream.to_dense().tolist() == [2.0] * delta + [3.0] + [0.0] * (99 - delta)
    assert stream.nnz == delta + 1
    assert stream.is_dense


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_entries_of_long_vectors(dtype: torch.dtype, density: float) -> None:
    """Longer than any room that is made for entries at first."""
    draw = torch.Generator().manual_seed(1)
    dense = torch.randn(300_007, generator=draw).to(dtype)
    dense[dense == 0] = 1
    dense[torch.rand(dense.numel(), generator=draw) >= density] = -0.0
    stream = SparseVector.from_dense(dense)
    assert torch.equal(stream.indices, torch.nonzero(dense).flatten())
    assert torch.equal(stream.values, dense[stream.indices])
    assert stream.raw_indices.flags.owndata
    assert torch.equal(stream.to_dense(), dense)


def test_empty() -> None:
    stream = SparseVector(_indices(), np.empty(0, np.float32), 0)
    assert (stream.nnz, stream.density, stream.to_dense().shape) == (0, 0.0, (0,))


def test_dense_stream_becomes_sparse_when_asked() -> None:
    stream = SparseVector.trusted(None, np.array([0, 4, 0, 5], np.float32), 4)
    assert stream.is_dense
    assert stream.to_dense().tolist() == [0, 4, 0, 5]
    assert stream.indices.tolist() == [1, 3]
    assert stream.values.tolist() == [4, 5]
    assert stream.to_dense().tolist() == [0, 4, 0, 5]
    bf16 = SparseVector.trusted(None, np.array([0x8000, 0x3F80], np.uint16), 2, of_torch=True)
    assert bf16.indices.tolist() == [1]  # -0 is no entry
    assert bf16.values.tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("absent", [0.0, 1.0, float("inf"), float("-inf")])
def test_absent_elements_of_a_result(dtype: torch.dtype, absent: float) -> None:
    whole = torch.tensor([absent, 4, absent, -5], dtype=dtype)
    bits = whole.view(torch.int16).numpy().view(np.uint16) if dtype == torch.bfloat16 else whole.numpy()
    held_densely = SparseVector.trusted(None, bits, 4, of_torch=True, absent=absent)
    held_sparsely = SparseVector.trusted(_indices(1, 3), bits[[1, 3]], 4, of_torch=True, absent=absent)
    for stream in (held_densely, held_sparsely):
        assert stream.absent == absent
        assert torch.equal(stream.to_dense(), whole)
        assert stream.indices.tolist() == [1, 3]
        assert stream.values.tolist() == [4, -5]
        assert torch.equal(stream.to_dense(), whole)


@pytest.mark.parametrize(
    ("indices", "values", "n", "error", "message"),
    [
        (_indices(3, 1), np.ones(2, np.float32), 9, ValueError, r"indices\[1\]=1 does not exceed indices\[0\]=3.*sort"),
        (_indices(2, 2), np.ones(2, np.float32), 9, ValueError, "strictly increasing.*add up repeated"),
        (_indices(9), ONE, 9, ValueError, r"indices\[0\]=9 is outside \[0, n=9\)"),
        (_indices(-1, dtype=np.int64), ONE, 9, ValueError, r"indices\[0\]=-1 is outside"),
        (_indices(2**32, dtype=np.int64), ONE, 9, ValueError, "outside"),
        (_indices(1, 2), ONE, 9, ValueError, "indices has 2 entries but values has 1"),
        (_indices(1), ONE, -1, ValueError, "n=-1 must not be negative"),
        (_indices(1), ONE, 2**32, ValueError, "n=4294967296, which must be in .*32 bits.*split the vector"),
        (_indices(1), ONE, 9.0, TypeError, "n=9.0 must be an int"),
        (_indices(1), ONE, True, TypeError, "n=True must be an int"),
        (np.array([1.0]), ONE, 9, TypeError, "indices have dtype float64"),
        ([1], ONE, 9, TypeError, "indices is a list"),
        (_indices(1)[None], ONE, 9, ValueError, "indices have 2 dimensions"),
        (_indices(1), ONE[None], 9, ValueError, "values has 2 dimensions"),
        (_indices(1), ONE.astype(np.int16), 9, TypeError, "values has dtype int16: use .astype"),
        (_indices(1), ONE.astype(">f4"), 9, TypeError, "values has dtype >f4: use .astype"),
        (_indices(1), ONE.astype(np.uint16), 9, TypeError, "values has dtype uint16.*bfloat16 is torch's"),
        (_indices(1), torch.ones(1, dtype=torch.int16), 9, TypeError, r"values has dtype torch.int16: use .to\("),
        (_indices(1), [1.0], 9, TypeError, "values is a list"),
        (_indices(1, 2), np.ones(4, np.float32)[::2], 9, ValueError, "values is not contiguous.*ascontiguousarray"),
        (_indices(1, 2), torch.ones(4)[::2], 9, ValueError, r"values is not contiguous.*contiguous\(\)"),
        (_indices(1), torch.ones(1).to_sparse(), 9, TypeError, "must be dense on the CPU"),
        (_indices(1), torch.ones(1, device="meta"), 9, TypeError, "on meta: it must be dense on the CPU"),
        (torch.ones(1, dtype=torch.int64, device="meta"), ONE, 9, TypeError, "indices are on meta"),
        (
            torch.ones(1, dtype=torch.bfloat16),
            ONE,
            9,
            TypeError,
            r"indices have dtype torch.bfloat16: use .to\(torch.int",
        ),
        (torch.ones(1, dtype=torch.complex64).conj(), ONE, 9, TypeError, "indices have dtype torch.complex64"),
        (torch.ones(1).to_sparse(), ONE, 9, TypeError, r"indices is a tensor of layout torch.sparse_coo.*to_dense\(\)"),
        (_indices(1), torch.ones(1, 1), 9, ValueError, "values has 2 dimensions"),
    ],
)
def test_bad_input(indices: object, values: object, n: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SparseVector(indices, values, n)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@pytest.mark.parametrize(("values", "fewest"), [(np.float32, 500), (np.float64, 667), (np.float16, 334)])
def test_marks_of_what_takes_more_memory_than_a_dense_vector(dtype: type, values: type, fewest: int) -> None:
    n = 1000
    for count in (0, fewest - 1, fewest, n):
        indices = np.sort(np.random.default_rng(count).permutation(n)[:count]).astype(dtype)
        marks = SparseVector(indices, np.ones(count, values), n).marks
        if count < fewest:
            assert marks is None
        else:
            assert marks is not None
            bits = np.unpackbits(marks.view(np.uint8), bitorder="little")
            assert np.array_equal(np.flatnonzero(bits), indices)
            assert bits.size == 1024
    assert SparseVector.from_dense(np.ones(n, values)).marks is None


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@pytest.mark.parametrize(
    ("at", "index", "message"),
    [
        (70, 69, r"indices\[70\]=69 does not exceed indices\[69\]=69"),
        (70, 12, r"indices\[70\]=12 does not exceed indices\[69\]=69"),
        (98, 100, r"indices\[98\]=100 is outside \[0, n=100\)"),
        (98, 2**32 - 1, r"indices\[98\]=4294967295 is outside \[0, n=100\)"),
    ],
)
def test_wrong_indices_of_a_full_stream(dtype: type, at: int, index: int, message: str) -> None:
    indices = np.arange(99).astype(dtype)
    indices[at] = index
    with pytest.raises(ValueError, match=message):
        SparseVector(indices, np.ones(99, np.float32), 100)


def test_from_dense_refuses_other_types() -> None:
    with pytest.raises(TypeError, match="x is a list"):
        SparseVector.from_dense([1.0])
    with pytest.raises(TypeError, match="x has dtype int16"):
        SparseVector.from_dense(np.ones(3, np.int16))


def test_sparse_tensors_are_not_dense_ones() -> None:
    with pytest.raises(TypeError, match=r"x is a tensor of layout torch.sparse_coo.*use SparseVector.from_coo\(\)"):
        SparseVector.from_dense(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"x is a tensor of layout torch._mkldnn.*use .to_dense\(\)"):
        SparseVector.from_dense(torch.eye(3).to_mkldnn())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_lazy_negative_views_have_the_values_that_they_show(dtype: torch.dtype) -> None:
    values = torch.tensor([1.5, 0.0, -2.0], dtype=dtype)
    lazy = torch._neg_view(values)
    assert SparseVector(_indices(1, 2, 3), lazy, 4).values.tolist() == [-1.5, 0.0, 2.0]
    assert SparseVector.from_dense(lazy).to_dense().tolist() == [-1.5, 0.0, 2.0]
    assert SparseVector(torch._neg_view(torch.tensor([-1, -3])), ONE.repeat(2), 4).indices.tolist() == [1, 3]
    coo = torch.sparse_coo_tensor([[1, 2, 3]], lazy, (4,), check_invariants=True)
    assert SparseVector.from_coo(coo).values.tolist() == [-1.5, 0.0, 2.0]
    assert values.tolist() == [1.5, 0.0, -2.0]


def test_masks_are_not_overlooked() -> None:
    masked = np.ma.array([1, 1e20], mask=[False, True], dtype=np.float32)
    with pytest.raises(TypeError, match=r"values is a masked array.*\.filled\(0\)"):
        SparseVector(_indices(0, 1), masked, 2)
    with pytest.raises(TypeError, match="indices is a masked array"):
        SparseVector(np.ma.array([0, 1], mask=[0, 1]), np.ones(2, np.float32), 2)
    with pytest.raises(TypeError, match="x is a masked array"):
        SparseVector.from_dense(masked.reshape(2, 1))
    assert SparseVector.from_dense(masked.filled(0)).to_dense().tolist() == [1, 0]


def test_complex_values_are_not_told_to_drop_a_part() -> None:
    for x in (np.ones(2, np.complex64), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(TypeError, match="x has dtype .*complex64: make streams of .real and .imag"):
            SparseVector.from_dense(x)
