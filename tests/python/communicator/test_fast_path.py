"""all_reduce as it is called most goes to the core at once: what it does there is what the method does, errors too."""

from __future__ import annotations

import gc
import inspect
import pickle
import pydoc
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import telegrad
from telegrad import Communicator, _core

OnRanks = Callable[..., list[Any]]


def spelled(name: str) -> str:
    """An equal string that is another object, as one that was read from a file is."""
    return "".join(list(name))


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x: c.all_reduce(x),
        lambda c, x: c.all_reduce(x, "sum"),
        lambda c, x: c.all_reduce(x, spelled("sum")),
        lambda c, x: c.all_reduce(x, telegrad.ReduceOp.SUM),
        lambda c, x: c.all_reduce(x, op="sum"),
        lambda c, x: c.all_reduce(x, algorithm="ring"),
        lambda c, x: c.all_reduce(x, op="sum", algorithm=spelled("ring")),
        lambda c, x: c.all_reduce(x, "sum", async_op=False),
        lambda c, x: c.all_reduce(x=x),
        lambda c, x: Communicator.all_reduce(c, x),
        lambda c, x: c.all_reduce(*(x,), **{spelled("op"): "sum"}),
    ],
    ids=[
        *("x", "name", "equal-name", "enumeration", "named-op", "algorithm", "both", "other-argument", "named-x"),
        *("unbound", "equal-argument"),
    ],
)
def test_every_spelling_gives_the_sum(on_ranks: OnRanks, call: Callable[..., Any]) -> None:
    def sum_it(communicator: Communicator) -> Any:
        x = np.arange(5, dtype=np.float32) + communicator.rank
        assert call(communicator, x) is None
        return x

    for found in on_ranks(2, sum_it):
        np.testing.assert_array_equal(found, 2 * np.arange(5, dtype=np.float32) + 1)


@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max", "max_abs"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "recursive_doubling", "rabenseifner", "two_level"])
def test_names_mean_what_they_mean_to_the_method(on_ranks: OnRanks, op: str, algorithm: str) -> None:
    def both(communicator: Communicator) -> Any:
        x = np.array([2.0, -3.0, 0.5], np.float32) * (communicator.rank + 1)
        short, long = x.copy(), np.empty_like(x)
        communicator.all_reduce(short, op, algorithm=algorithm)
        communicator.all_reduce(x, op, out=long, algorithm=algorithm)
        return short, long

    for short, long in on_ranks(3, both):
        np.testing.assert_array_equal(short, long)


@pytest.mark.parametrize(
    ("arguments", "named", "error", "match"),
    [
        ((np.ones((4, 4), np.float32)[:, 1],), {}, ValueError, "not contiguous"),
        ((np.ones(3, np.longdouble),), {}, TypeError, "dtype float128"),
        ((np.ones(3, ">f4"),), {}, TypeError, "dtype >f4"),
        ((np.ones(3, np.int32), "avg"), {}, TypeError, "op='avg' of int32 does not exist"),
        ((np.ones(3), "mean"), {}, ValueError, "op='mean' is not supported"),
        ((np.ones(3), 3), {}, ValueError, "op=3 is not supported"),
        ((np.ones(3), None), {}, ValueError, "op=None is not supported"),
        ((np.ones(3),), {"algorithm": "fast"}, ValueError, "algorithm='fast' does not exist"),
        ((np.ones(3),), {"algorithm": None}, ValueError, "algorithm=None does not exist"),
        ((np.ones(3), "sum"), {"op": "sum"}, TypeError, "multiple values for argument 'op'"),
        ((np.ones(3), "sum", None), {}, TypeError, "positional arguments"),
        ((np.ones(3),), {"way": 1}, TypeError, "unexpected keyword argument 'way'"),
        ((), {}, TypeError, "missing 1 required positional argument: 'x'"),
        ((None,), {}, TypeError, "x is None"),
    ],
    ids=[
        "strided",
        "int8",
        "order",
        "avg",
        "op",
        "number",
        "no-op",
        "algorithm",
        "no-algorithm",
        "twice",
        "three",
        "unknown",
        "none",
        "None",
    ],
)
def test_what_cannot_be_summed_gets_the_methods_error(
    local: Callable[..., list[Communicator]], arguments: Any, named: Any, error: type[Exception], match: str
) -> None:
    communicator = local(1)[0]
    with pytest.raises(error, match=match):
        communicator.all_reduce(*arguments, **named)
    with pytest.raises(error, match=match):
        communicator.all_reduce(*arguments, **named, async_op=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_tensors_take_it_too(on_ranks: OnRanks, dtype: str, shape: tuple[int, ...]) -> None:
    def sum_it(communicator: Communicator) -> list[torch.Tensor]:
        x = torch.full(shape, communicator.rank + 1, dtype=getattr(torch, dtype))
        begun = x.clone()
        assert communicator.all_reduce(x) is None
        assert communicator.all_reduce(begun, async_op=True).result() is begun
        return [x, begun]

    for found in (tensor for both in on_ranks(3, sum_it) for tensor in both):
        assert torch.equal(found, torch.full(shape, 6, dtype=getattr(torch, dtype)))


def test_parameters_and_views_take_it_too(on_ranks: OnRanks) -> None:
    def sum_it(communicator: Communicator) -> tuple[Any, Any]:
        parameter = torch.nn.Parameter(torch.ones(4))
        rows = torch.ones(3, 4)
        communicator.all_reduce(parameter)
        communicator.all_reduce(rows[1])
        return parameter.detach(), rows.sum(1)

    for parameter, rows in on_ranks(2, sum_it):
        assert torch.equal(parameter, torch.full((4,), 2.0))
        assert torch.equal(rows, torch.tensor([4.0, 8.0, 4.0]))


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        (torch.ones(4, 4)[:, 1], ValueError, "not contiguous"),
        (torch.ones(1, dtype=torch.complex64).conj().imag, ValueError, "lazy negative view"),
        (torch.ones(3, device="meta"), TypeError, "is on meta"),
    ],
    ids=["strided", "negative", "meta"],
)
def test_what_a_tensor_may_not_be(
    local: Callable[..., list[Communicator]], x: torch.Tensor, error: type[Exception], match: str
) -> None:
    communicator = local(1)[0]
    for blocking in (True, False):
        with pytest.raises(error, match=match):
            communicator.all_reduce(x, async_op=not blocking)
    with pytest.raises(error, match=match):
        communicator.all_reduce(x)


def test_a_tensors_subclass_is_the_methods(on_ranks: OnRanks) -> None:
    class Own(torch.Tensor):
        pass

    def sum_it(communicator: Communicator) -> torch.Tensor:
        x = torch.ones(3).as_subclass(Own)
        communicator.all_reduce(x)
        return x.as_subclass(torch.Tensor)

    for found in on_ranks(2, sum_it):
        assert torch.equal(found, torch.full((3,), 2.0))


def test_a_read_only_array_is_refused(local: Callable[..., list[Communicator]]) -> None:
    x = np.ones(3)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        local(1)[0].all_reduce(x)


def test_a_closed_communicator_says_so(local: Callable[..., list[Communicator]]) -> None:
    communicator = local(1)[0]
    communicator.close()
    with pytest.raises(ValueError, match="is closed: make a new one"):
        communicator.all_reduce(np.ones(3))


def test_a_sum_that_takes_long_is_waited_for(on_ranks: OnRanks) -> None:
    def late(communicator: Communicator) -> float:
        x = np.ones(3)
        if communicator.rank == 1:
            time.sleep(0.4)  # longer than the core waits before it looks at signals
        communicator.all_reduce(x)
        return float(x[0])

    assert on_ranks(2, late) == [2.0, 2.0]


def test_a_failure_is_raised_and_names_the_ranks(local: Callable[..., list[Communicator]]) -> None:
    first, second = local(2)
    second.abort("the test says so")
    with pytest.raises(telegrad.TransportError, match="the test says so"):
        first.all_reduce(np.ones(3))
    with pytest.raises(telegrad.TransportError, match="failed earlier"):
        first.all_reduce(np.ones(3))


@pytest.mark.parametrize("after_s", [0.03, 0.25])
def test_what_a_signal_leaves_to_the_network_is_kept_until_close(
    local: Callable[..., list[Communicator]], after_s: float
) -> None:
    class Interrupted(Exception):  # noqa: N818
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    first, _ = local(2)
    x = np.ones(3)
    kept = weakref.ref(x)
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        with pytest.raises(Interrupted):
            first.all_reduce(x)
    finally:
        signal.signal(signal.SIGALRM, handler)
    del x
    gc.collect()
    assert kept() is not None
    first.close()
    gc.collect()
    assert kept() is None


def test_it_is_described_as_the_method_is() -> None:
    described = inspect.signature(Communicator.all_reduce)
    assert list(described.parameters)[:4] == ["self", "x", "op", "out"]
    assert described.parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "every rank gets the same bits" in " ".join(pydoc.plain(pydoc.render_doc(Communicator.all_reduce)).split())
    assert Communicator.all_reduce.__qualname__ == "Reductions.all_reduce"
    assert "Reductions.all_reduce" in repr(Communicator.all_reduce)
    assert pickle.loads(pickle.dumps(Communicator.all_reduce)) is Communicator.all_reduce
    assert weakref.ref(Communicator.all_reduce)() is Communicator.all_reduce


def test_it_is_made_of_something_that_can_be_called() -> None:
    with pytest.raises(TypeError, match="method must be callable"):
        _core.FastPath(3)  # type: ignore[arg-type]
