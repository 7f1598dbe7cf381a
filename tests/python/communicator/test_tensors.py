"""What the collectives accept, and what they say about the rest, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from torch._subclasses.fake_tensor import FakeTensorMode

from telegrad import BoundedTopkState, Communicator, ReduceOp, SparseVector

Local = Callable[..., list[Communicator]]
STREAM = SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 4)


@pytest.fixture
def alone(local: Local) -> Communicator:
    return local(1)[0]


def _read_only() -> np.ndarray:
    x = np.ones(3, np.float32)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.ones(3, ">c8"), TypeError, r"use .astype\(numpy.complex64\)"),
        (np.ones(3, np.clongdouble), TypeError, r"use .astype\(numpy.complex128\)"),
        (torch.ones(3, dtype=torch.complex64).conj(), ValueError, r"x is a lazy conjugate view.*use .resolve_conj\(\)"),
        (np.ones(3, np.longdouble), TypeError, r"use .astype\(numpy.float64\)"),
        (np.zeros(3, "M8[s]"), TypeError, r"use .astype\(numpy.int64\)"),
        (np.zeros(3, "S2"), TypeError, "give numbers"),
        (np.ones(3, ">f4"), TypeError, r"x has dtype >f4: .*use .astype\(numpy.float32\)"),
        (torch.ones(3).to(torch.float8_e5m2), TypeError, r"torch.float8_e5m2: .*use .to\(torch.float32\)"),
        (np.ones((3, 4), np.float32).T, ValueError, "x is not contiguous.*ascontiguousarray"),
        (torch.ones(3, 4).t(), ValueError, r"x is not contiguous \(shape \(4, 3\).*contiguous\(\)"),
        (torch.ones(3, device="meta"), TypeError, r"x is on meta.*move it with .cpu\(\)"),
        (_read_only(), ValueError, "x is read-only.*copy"),
        ([1.0, 2.0], TypeError, "x is a list: it must be a torch tensor or a numpy array"),
        (None, TypeError, r"x is None: a parameter has no gradient before backward\(\)"),
        (torch.ones(3, 3).to_mkldnn(), TypeError, "layout torch._mkldnn"),
        (
            sparse.csr_array(np.eye(1)),
            TypeError,
            r"x is a csr_array: .*SparseVector.from_csr\(\) makes a stream of a CSR",
        ),
    ],
)
def test_all_reduce_refuses(alone: Communicator, x: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        alone.all_reduce(x)


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.broadcast(STREAM, 0),
        lambda comm: comm.reduce(STREAM, 0),
        lambda comm: comm.gather(STREAM, 0),
        lambda comm: comm.all_to_all(STREAM),
        lambda comm: comm.send(STREAM, 0),
        lambda comm: comm.all_reduce(np.ones(4, np.float32), out=STREAM),
    ],
)
def test_what_takes_no_stream_says_what_does(local: Local, call: Callable[[Communicator], Any]) -> None:
    with pytest.raises(TypeError, match=r"SparseVector: .*; a sparse vector is for all_reduce\(\), .* .to_dense\(\)"):
        call(local(2)[1])


def test_a_parameter_without_gradient(alone: Communicator) -> None:
    with pytest.raises(TypeError, match="x is None: a parameter has no gradient"):
        alone.all_reduce(torch.nn.Linear(2, 2).weight.grad)


_TORCH = torch.distributed.ReduceOp
_OF_FLOATS = tuple(ReduceOp)[:6]
_OPS = [*_OF_FLOATS, *map(str, _OF_FLOATS), _TORCH.SUM, _TORCH.PRODUCT, _TORCH.MIN, _TORCH.MAX, _TORCH.AVG]


@pytest.mark.parametrize("op", _OPS)
def test_operations_by_every_name(alone: Communicator, op: object) -> None:
    x = np.ones(3, np.float32)
    assert alone.all_reduce(x, op) is None
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("op", "name"), [(_TORCH.BAND, "band"), (_TORCH.BOR, "bor"), (_TORCH.BXOR, "bxor")])
def test_bitwise_operations_by_torch_name(alone: Communicator, op: object, name: str) -> None:
    x = torch.tensor([5, -3], dtype=torch.int8)
    alone.all_reduce(x, op)
    assert x.tolist() == [5, -3]
    with pytest.raises(TypeError, match=f"op='{name}' of float32 does not exist"):
        alone.all_reduce(np.ones(3, np.float32), op)


@pytest.mark.parametrize("op", ["", "median", None, 1])
def test_unknown_operation(alone: Communicator, op: object) -> None:
    with pytest.raises(ValueError, match="op=.* is not supported: use 'sum', 'avg', .*'lor' or 'lxor'"):
        alone.all_reduce(np.ones(3, np.float32), op)


@pytest.mark.parametrize("op", _OPS)
def test_operations_on_streams_by_every_name(alone: Communicator, op: object) -> None:
    result = alone.all_reduce(STREAM, op)
    assert result.indices.tolist() == STREAM.indices.tolist()
    assert result.values.tolist() == STREAM.values.tolist()


@pytest.mark.parametrize("op", ["", "median", _TORCH.BAND])
def test_unknown_operation_on_streams(alone: Communicator, op: object) -> None:
    with pytest.raises(ValueError, match="op=.* is not supported: use 'sum'"):
        alone.all_reduce(STREAM, op)
    with pytest.raises(ValueError, match="op=.* is not supported"):
        alone.all_reduce(torch.eye(3).to_sparse(), op)
    with pytest.raises(ValueError, match="op=.* is not supported"):
        alone.all_reduce_into(STREAM, np.ones(4, np.float32), op)


@pytest.mark.parametrize("x", [np.ones(3, np.int32), torch.ones(3, dtype=torch.int64), np.ones(3, bool)])
def test_integers_have_no_average(alone: Communicator, x: object) -> None:
    with pytest.raises(TypeError, match=r"op='avg' of \w+ does not exist: use 'sum' and divide, or convert"):
        alone.all_reduce(x, ReduceOp.AVG)


def _table() -> dict[str, set[str]]:
    """The documented table: the reductions that each dtype has."""
    page = Path(__file__).parents[3] / "docs" / "reference" / "api" / "communicator.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(\w+)`", cell) for cell in rows[0][1:]]
    return {
        dtype: {op for ops, cell in zip(named, row[1:], strict=True) if cell == "yes" for op in ops}
        for row in rows[1:]
        for dtype in row[0].split(", ")
    }


_TABLE = _table()


def test_the_table_has_every_dtype_and_reduction() -> None:
    assert len(_TABLE) == 15
    assert set().union(*_TABLE.values()) == {op.value for op in ReduceOp}


@pytest.mark.parametrize("dtype", _TABLE)
def test_a_reduction_that_a_dtype_does_not_have_is_refused_by_every_operation(alone: Communicator, dtype: str) -> None:
    for op in ReduceOp:
        x: Any = torch.ones(3, dtype=torch.bfloat16) if dtype == "bfloat16" else np.ones(3, dtype)
        calls = (lambda x, op: alone.reduce(x, 0, op), alone.all_reduce, alone.reduce_scatter)
        for call in calls:
            if op.value in _TABLE[dtype]:
                call(x, op)
                assert (x == 1).all()
                continue
            with pytest.raises(TypeError, match=rf"op='{op.value}' of {dtype} does not exist: use 'sum'"):
                call(x, op)


def test_one_rank_alone_gives_what_several_would(alone: Communicator) -> None:
    x = np.array([0, 5, -3, 2], np.int16)
    alone.all_reduce(x, "land")
    assert x.tolist() == [0, 1, 1, 1]
    odd = np.array([0, 2, 255], np.uint8).view(bool)
    np.testing.assert_array_equal(alone.reduce_scatter(odd).view(np.uint8), [0, 1, 1])
    alone.reduce(odd, 0, "bxor")
    np.testing.assert_array_equal(odd.view(np.uint8), [0, 1, 1])


def test_unknown_algorithm(alone: Communicator) -> None:
    with pytest.raises(ValueError, match="algorithm='tree' does not exist.*ring, recursive_doubling, rabenseifner"):
        alone.all_reduce(np.ones(3, np.float32), algorithm="tree")
    with pytest.raises(ValueError, match=r"algorithm=\['ring'\] does not exist"):
        alone.all_reduce(np.ones(3, np.float32), algorithm=["ring"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="algorithm='rabenseifner' does not exist.*auto, split_allgather"):
        alone.all_reduce(STREAM, algorithm="rabenseifner")


@pytest.mark.parametrize(("factor", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_switch_factor(alone: Communicator, factor: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="switch_factor="):
        alone.all_reduce(STREAM, switch_factor=factor)  # type: ignore[arg-type]


def test_all_reduce_into_refuses(alone: Communicator) -> None:
    with pytest.raises(TypeError, match="stream is a ndarray: it must be a SparseVector"):
        alone.all_reduce_into(np.ones(4, np.float32), np.ones(4, np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out has 5 elements but the sparse vector has n=4"):
        alone.all_reduce_into(STREAM, np.ones(5, np.float32))
    with pytest.raises(TypeError, match="out has dtype torch.bfloat16 but the sparse vector holds f32"):
        alone.all_reduce_into(STREAM, torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="out is None: give a torch tensor or a numpy array"):
        alone.all_reduce_into(STREAM, None)
    with pytest.raises(ValueError, match="out is read-only"):
        alone.all_reduce_into(STREAM, _read_only())


@pytest.mark.parametrize("root", [-1, 1])
def test_broadcast_refuses_a_root_that_is_no_rank(alone: Communicator, root: int) -> None:
    with pytest.raises(ValueError, match=r"is no rank: use an int in \[0, 1\)"):
        alone.broadcast(np.ones(3), root)


@pytest.mark.parametrize("root", [0.0, None, True])
def test_broadcast_refuses_a_root_that_is_no_integer(alone: Communicator, root: object) -> None:
    with pytest.raises(TypeError, match=f"root={root!r} must be an int"):
        alone.broadcast(np.ones(3), root)  # type: ignore[arg-type]


_COMPLEX = torch.ones(2, dtype=torch.complex64) * 1j
_LAZY = [
    (_COMPLEX.conj(), r"is a lazy conjugate view, whose memory holds other values: use .resolve_conj\(\)"),
    (_COMPLEX.conj().imag, r"is a lazy negative view, whose memory holds other values: use .resolve_neg\(\)"),
    (torch._neg_view(torch.ones(2)), r"is a lazy negative view.*resolve_neg\(\)"),
]


@pytest.mark.parametrize(("x", "message"), _LAZY)
def test_lazy_views_of_torch_are_not_taken_raw(alone: Communicator, x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"x {message}"):
        alone.all_gather(x)
    with pytest.raises(ValueError, match=f"out {message}"):
        alone.all_gather(torch.zeros_like(x[:1]), out=x)
    if not x.is_complex():
        with pytest.raises(ValueError, match=f"x {message}"):
            alone.all_reduce(x)


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", ">M8[s]", [("a", ">f4"), ("b", "<i4")]])
def test_foreign_byte_order_is_not_moved_as_if_it_were_native(alone: Communicator, dtype: Any) -> None:
    x = np.zeros(3, dtype)
    with pytest.raises(
        TypeError, match=r"x has dtype .*another byte order.*use .astype\(x.dtype.newbyteorder\('='\)\)"
    ):
        alone.all_gather(x)
    assert alone.all_gather(x.astype(x.dtype.newbyteorder("="))).shape == (1, 3)


def test_bytes_of_objects_cannot_be_moved(alone: Communicator) -> None:
    with pytest.raises(TypeError, match="x has dtype object, which holds Python objects"):
        alone.all_gather(np.array([object()]))


MASKED = np.ma.array([1, 1e20], mask=[False, True], dtype=np.float32)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda comm: comm.all_reduce(MASKED.copy()), "x"),
        (lambda comm: comm.all_reduce(MASKED, out=np.zeros(2, np.float32)), "x"),
        (lambda comm: comm.all_reduce(np.zeros(2, np.float32), out=MASKED.copy()), "out"),
        (lambda comm: comm.broadcast(MASKED.copy(), 0), "x"),
        (lambda comm: comm.all_gather(MASKED), "x"),
    ],
)
def test_masks_are_not_overlooked(alone: Communicator, call: Callable[[Communicator], Any], argument: str) -> None:
    with pytest.raises(TypeError, match=rf"{argument} is a masked array.*\.filled\(0\)"):
        call(alone)


def test_numbers_of_numpy_are_numbers() -> None:
    one, other = Communicator.local(np.int64(2), timeout_s=np.float32(30))  # type: ignore[arg-type]
    works = [comm.all_reduce(STREAM, switch_factor=np.float32(0.5), async_op=np.True_) for comm in (one, other)]
    assert [work.wait(np.int64(20)) for work in works] == [True, True]
    one.close()
    other.close()


def test_what_is_no_number_is_not_made_one(alone: Communicator) -> None:
    for value in (True, np.True_, "1", None, 1j):
        with pytest.raises(TypeError, match=r"timeout_s=.* must be a number of seconds"):
            Communicator.local(1, timeout_s=value)  # type: ignore[arg-type]
        if value is None:  # the default
            continue
        with pytest.raises(TypeError, match=r"switch_factor=.* must be a number"):
            alone.all_reduce(STREAM, switch_factor=value)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"slack=.* must be a number"):
            BoundedTopkState(1, slack=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [(0, ValueError, "n=0 must be at least 1"), (2.0, TypeError, "n=2.0 must be an int"), (True, TypeError, "n=True")],
)
def test_local_refuses(n: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Communicator.local(n)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("9", TypeError)]
)
def test_time_outs(value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout_s="):
        Communicator.local(1, timeout_s=value)  # type: ignore[arg-type]
    with pytest.raises(error, match="liveness_timeout_s="):
        Communicator.from_exchange(0, 1, lambda blob: [blob], liveness_timeout_s=value)  # type: ignore[arg-type]
    with pytest.raises(error, match="join_timeout_s="):
        Communicator.from_torch(join_timeout_s=value)  # type: ignore[arg-type]


def _freed() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


def _pretended() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("make", [_freed, _pretended, lambda: torch._efficientzerotensor(4)])
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, x: comm.all_reduce(x),
        lambda comm, x: comm.all_reduce(torch.ones(4), out=x),
        lambda comm, x: comm.all_reduce(x, wire="bf16"),
        lambda comm, x: comm.broadcast(x, 0),
        lambda comm, x: comm.all_gather(x),
        lambda comm, x: comm.reduce_scatter(x),
        lambda comm, x: comm.all_reduce_into(SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 4), x),
    ],
)
def test_tensors_without_memory(
    alone: Communicator, make: Callable[[], torch.Tensor], call: Callable[[Communicator, torch.Tensor], Any]
) -> None:
    with pytest.raises(ValueError, match=r"has no memory \(a .*Tensor of 4 elements\): its storage was freed, as FSDP"):
        call(alone, make())
