"""Options that would do nothing for a dense tensor, and switches that are none: refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import Communicator, OkTopkState, SparseVector

Local = Callable[..., list[Communicator]]
STREAM = SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 4)
_NOT_DENSE = "is for sparse vectors: leave it out for a dense x"
_FACTORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"switch_factor": "x"}, TypeError, "switch_factor='x' must be a number"),
    ({"switch_factor": True}, TypeError, "switch_factor=True must be a number"),
    ({"switch_factor": -1}, ValueError, "switch_factor=-1 must be 0 or more"),
    ({"switch_factor": 3}, ValueError, f"switch_factor=3.0 {_NOT_DENSE}"),
]
_SLICES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slices": "x"}, ValueError, "slices='x' does not exist: use one of equal, balanced"),
    ({"slices": np.array(["equal"])}, ValueError, "slices=.* does not exist"),
    ({"slices": "balanced", "algorithm": "ring"}, ValueError, f"slices='balanced' {_NOT_DENSE}"),
]
_BAD_SEEDS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"seed": "x"}, TypeError, "seed='x' must be an int"),
    ({"seed": False}, TypeError, "seed=False must be an int"),
    ({"seed": -1}, ValueError, "seed=-1 is out of range"),
]


def _refused(call: Callable[..., Any], options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(**options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [*_FACTORS, *_SLICES, *_BAD_SEEDS, ({"seed": 4}, ValueError, "seed=4 is for wire=.*: name a wire, or leave seed")],
)
def test_all_reduce(local: Local, options: dict[str, Any], error: type[Exception], text: str) -> None:
    comm = local(2)[0]
    for x in (np.ones(4, np.float32), torch.ones(4)):
        _refused(lambda x=x, **given: comm.all_reduce(x, **given), options, error, text)
    if "seed" not in options and "algorithm" not in options:
        _refused(lambda **given: comm.all_reduce(np.ones(4, np.float32), wire="int8", **given), options, error, text)
    assert comm.stats()["operations"] == 0


@pytest.mark.parametrize(
    ("options", "error", "text"), [*_FACTORS, *_BAD_SEEDS, ({"seed": 4}, ValueError, f"seed=4 {_NOT_DENSE}")]
)
def test_reduce_scatter(local: Local, options: dict[str, Any], error: type[Exception], text: str) -> None:
    comm = local(2)[0]
    _refused(lambda **given: comm.reduce_scatter(np.ones(4, np.float32), **given), options, error, text)
    assert comm.stats()["operations"] == 0


@pytest.mark.parametrize(("options", "error", "text"), [*_BAD_SEEDS, ({"seed": 4}, ValueError, f"seed=4 {_NOT_DENSE}")])
def test_all_gather(local: Local, options: dict[str, Any], error: type[Exception], text: str) -> None:
    comm = local(2)[0]
    _refused(lambda **given: comm.all_gather(np.ones(4), **given), options, error, text)
    assert comm.stats()["operations"] == 0


def test_what_is_the_default_may_be_said(local: Local) -> None:
    (alone,) = local(1)
    x = np.arange(4, dtype=np.float32)
    alone.all_reduce(x, switch_factor=1, slices="equal", seed=0)
    alone.all_reduce(x, switch_factor=np.float64(1), seed=np.int64(0))
    assert alone.reduce_scatter(x, switch_factor=1.0, seed=0).tolist() == [0, 1, 2, 3]
    assert alone.all_gather(x, seed=0).tolist() == [[0, 1, 2, 3]]
    alone.all_reduce(x, wire="bf16", seed=4)
    assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", ["no", 1, 0, None, np.array([False])])
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, **given: comm.all_reduce(np.ones(4, np.float32), **given),
        lambda comm, **given: comm.all_reduce(torch.ones(4), "sum", **given),
        lambda comm, **given: comm.all_reduce(STREAM, **given),
        lambda comm, **given: comm.all_reduce_into(STREAM, np.ones(4, np.float32), **given),
        lambda comm, **given: comm.all_reduce_topk(STREAM, OkTopkState(1), **given),
        lambda comm, **given: comm.reduce(np.ones(4), 0, **given),
        lambda comm, **given: comm.reduce_scatter(np.ones(4), **given),
        lambda comm, **given: comm.all_gather(np.ones(4), **given),
        lambda comm, **given: comm.gather(np.ones(4), 0, **given),
        lambda comm, **given: comm.scatter(np.ones((2, 4)), np.ones(4), 0, **given),
        lambda comm, **given: comm.all_to_all(np.ones(4), **given),
        lambda comm, **given: comm.broadcast(np.ones(4), 0, **given),
        lambda comm, **given: comm.barrier(**given),
        lambda comm, **given: comm.send(np.ones(4), 1, **given),
        lambda comm, **given: comm.recv(np.ones(4), 1, **given),
        lambda comm, **given: comm.sendrecv(np.ones(4), 1, np.ones(4), 1, **given),
    ],
)
def test_async_op_is_true_or_false(local: Local, call: Callable[..., Any], value: object) -> None:
    comm = local(2)[0]
    with pytest.raises(TypeError, match=r"async_op=.* must be True or False"):
        call(comm, async_op=value)
    assert comm.stats()["operations"] == 0
