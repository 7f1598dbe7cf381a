"""A reduction of the caller's own: compiled by g++ or Numba, evaluated by rank, refused before anything is sent."""

from __future__ import annotations

import ctypes
import math
import subprocess
from functools import reduce
from typing import Any

import numpy as np
import pytest
from local_ranks import SIZE

from telegrad import Communicator, CustomReduction, MismatchedCall

Array = np.ndarray[Any, Any]

_SOURCE = """
#include <cmath>
#include <cstdint>
#define EACH(type, expression) \\
  for (int64_t i = 0; i < n; ++i) { const type a = into[i], b = from[i]; into[i] = expression; }
extern "C" {
void logsumexp(double *into, const double *from, int64_t n) {
  EACH(double, a == -INFINITY ? b : b == -INFINITY ? a : fmax(a, b) + log1p(exp(fmin(a, b) - fmax(a, b))))
}
// x -> factor · x + shift, packed into 64 bits: maps compose, and do not commute.
void compose(uint64_t *into, const uint64_t *from, int64_t n) {
  EACH(uint64_t, uint64_t(uint32_t(a >> 32) * uint32_t(b >> 32)) << 32 |
                     uint32_t(uint32_t(a) * uint32_t(b >> 32) + uint32_t(b)))
}
void last(uint16_t *into, const uint16_t *from, int64_t n) { EACH(uint16_t, b == 0 ? a : b) }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("custom") / "custom.so"
    subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o", path], input=_SOURCE.encode(), check=True)
    return ctypes.CDLL(str(path))


def composed(left: Array, right: Array) -> Array:
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    factor = (left >> high) * (right >> high) & low
    return factor << high | ((left & low) * (right >> high) + (right & low)) & low


def maps(count: int, ranks: int) -> list[Array]:
    return [np.random.default_rng(rank).integers(0, 2**63, count, np.uint64) for rank in range(ranks)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 100, 5003])
def test_evaluated_from_the_first_rank_to_the_last(library: ctypes.CDLL, size: int, count: int) -> None:
    op = CustomReduction(library.compose, np.uint64, 1 << 32, "compose")
    communicators = Communicator.local(size, timeout_s=60.0)
    xs = maps(count, size)
    right = reduce(composed, xs)
    shares = [count // size + (rank < count % size) for rank in range(size)]
    began = [c.all_reduce(x, op, out=np.empty_like(x), async_op=True) for c, x in zip(communicators, xs, strict=True)]
    for work in began:
        np.testing.assert_array_equal(work.result(), right)
    blocks = [c.reduce_scatter(x, op, counts=shares, async_op=True) for c, x in zip(communicators, xs, strict=True)]
    np.testing.assert_array_equal(np.concatenate([work.result() for work in blocks]), right)
    root = size // 2
    works = [c.reduce(x, root, op, async_op=True) for c, x in zip(communicators, xs, strict=True)]
    for rank, work in enumerate(works):
        assert work is not None
        assert (work.result() is xs[rank]) == (rank == root)
    np.testing.assert_array_equal(xs[root], right)
    assert all((x == before).all() for x, before in zip(xs, maps(count, size), strict=True) if x is not xs[root])
    for communicator in communicators:
        communicator.close()


def test_floats_have_the_same_bits_on_all_ranks(ranks: list[Communicator], library: ctypes.CDLL) -> None:
    op = CustomReduction(library.logsumexp, "float64", -math.inf, "logsumexp")
    xs = [np.random.default_rng(rank).normal(size=(7, 501)) for rank in range(SIZE)]
    right = np.logaddexp(np.logaddexp(xs[0], xs[1]), xs[2])
    for work in [r.all_reduce(x, op, async_op=True) for r, x in zip(ranks, xs, strict=True)]:
        work.wait()
    np.testing.assert_allclose(xs[0], right, rtol=1e-13)
    assert len({x.tobytes() for x in xs}) == 1


def test_a_numba_cfunc_is_taken(ranks: list[Communicator]) -> None:
    numba = pytest.importorskip("numba")
    pointer = numba.types.CPointer(numba.types.float32)

    @numba.cfunc(numba.types.void(pointer, pointer, numba.types.int64))
    def hypotenuse(into: Any, other: Any, count: int) -> None:
        for i in range(count):
            into[i] = math.sqrt(into[i] * into[i] + other[i] * other[i])

    for given in (hypotenuse, hypotenuse.address):
        op = CustomReduction(given, np.float32, 0.0, "hypotenuse")
        xs = [np.full(3000, side, np.float32) for side in (2, 3, 6)]
        for work in [r.all_reduce(x, op, async_op=True) for r, x in zip(ranks, xs, strict=True)]:
            work.wait()
        assert all((x == 7).all() for x in xs)


def test_torch_tensors_of_bfloat16(ranks: list[Communicator], library: ctypes.CDLL) -> None:
    torch = pytest.importorskip("torch")
    op = CustomReduction(library.last, torch.bfloat16, 0.0, "last")
    xs = [torch.full((1001,), float(rank % 2), dtype=torch.bfloat16) for rank in range(SIZE)]
    for work in [r.all_reduce(x, op, async_op=True) for r, x in zip(ranks, xs, strict=True)]:
        work.wait()
    assert all((x == 1).all() for x in xs)


def test_ranks_that_name_other_operations_call_different_things(
    ranks: list[Communicator], library: ctypes.CDLL
) -> None:
    xs = maps(10, SIZE)
    ops = [CustomReduction(library.compose, np.uint64, 1 << 32, f"of rank {rank // 2}") for rank in range(SIZE)]
    works = [r.all_reduce(x, op, async_op=True) for r, x, op in zip(ranks, xs, ops, strict=True)]
    for work in works:
        with pytest.raises(MismatchedCall, match=r"reduction=custom.*custom=#"):
            work.wait()
    assert all((x == before).all() for x, before in zip(xs, maps(10, SIZE), strict=True))


def test_what_does_not_fit_is_refused_before_anything_is_sent(ranks: list[Communicator], library: ctypes.CDLL) -> None:
    op = CustomReduction(library.logsumexp, np.float64, -math.inf, "logsumexp")
    x = np.zeros(4)
    with pytest.raises(TypeError, match="op='logsumexp' is for float64: x has float32"):
        ranks[0].all_reduce(x.astype(np.float32), op)
    with pytest.raises(ValueError, match="algorithm='ring' is not for op='logsumexp'"):
        ranks[0].all_reduce(x, op, algorithm="ring")
    with pytest.raises(ValueError, match="op=.* is not supported"):
        ranks[0].all_reduce_into(_vector(), x, op)
    for rank in ranks:
        assert rank.stats()["operations"] == 0


def _vector() -> Any:
    from telegrad import SparseVector

    return SparseVector(np.array([1], np.uint32), np.ones(1), 4)


def test_what_is_no_operation_is_refused(library: ctypes.CDLL) -> None:
    data = np.zeros(1)
    for address in (0, 1, data.ctypes.data):
        with pytest.raises(ValueError, match="is no address of code in this process"):
            CustomReduction(address, np.float64, 0.0, "bad")
    for function in (len, None, 1.5, True):
        with pytest.raises(TypeError, match="a Numba cfunc, a ctypes function or the address of one"):
            CustomReduction(function, np.float64, 0.0, "bad")
    with pytest.raises(TypeError, match="has no reductions"):
        CustomReduction(library.compose, "datetime64[s]", 0, "bad")
    with pytest.raises(TypeError, match="name=''"):
        CustomReduction(library.compose, np.uint64, 1, "")
    with pytest.raises(ValueError, match="neutral=8589934592 of 'compose' is not"):
        CustomReduction(library.compose, np.uint64, 2 << 32, "compose")
