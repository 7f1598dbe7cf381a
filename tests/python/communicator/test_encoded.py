"""all_reduce(wire=): what it gives, hands back, sends and refuses. Ranks of this process."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import value_formats
from local_ranks import SIZE

from telegrad import Communicator, SparseVector
from telegrad.communicator.operands import WIRES
from telegrad.errors import TransportError

_BITS = {"bf16": 16, "f16": 16, "int8": 8 + 32 / 256, "qsgd8": 8 + 32 / 1024, "qsgd4": 4 + 32 / 1024}
_BITS |= {"qsgd2": 2 + 32 / 1024, "e3m0": 4 + 32 / 1024, "codebook2": 2 + 64 / 512}

Vectors = list[npt.NDArray[np.float32]]


def inputs(count: int, seed: int = 0) -> Vectors:
    return [np.random.default_rng([seed, rank]).standard_normal(count).astype(np.float32) for rank in range(SIZE)]


def reduced(ranks: list[Communicator], xs: Vectors, op: str = "sum", **options: Any) -> tuple[Vectors, Vectors]:
    """Results and errors of all ranks."""
    outs, errors = ([np.full_like(x, np.nan) for x in xs] for _ in range(2))
    works = [
        rank.all_reduce(x, op, out=out, error=error, async_op=True, **options)
        for rank, x, out, error in zip(ranks, xs, outs, errors, strict=True)
    ]
    for work, out in zip(works, outs, strict=True):
        assert work.result() is out
    return outs, errors


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("wire", WIRES)
def test_result_and_errors_add_up_to_all_inputs(ranks: list[Communicator], wire: str, op: str) -> None:
    xs = inputs(10_000)
    outs, errors = reduced(ranks, xs, op, wire=wire)
    for out in outs[1:]:
        np.testing.assert_array_equal(out.view(np.uint32), outs[0].view(np.uint32))
    total = np.sum(xs, axis=0, dtype=np.float64)
    result = outs[0].astype(np.float64) * (SIZE if op == "avg" else 1)
    assert not np.array_equal(result, total)
    np.testing.assert_allclose(result + np.sum(errors, axis=0, dtype=np.float64), total, atol=1e-5)


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_on_the_wire(ranks: list[Communicator], wire: str) -> None:
    count = 96 * 1024
    reduced(ranks, inputs(count), wire=wire)
    wanted = 2 * count * (SIZE - 1) / SIZE * _BITS[wire] / 8
    for rank in ranks:
        assert rank.stats()["bytes_sent"] == pytest.approx(wanted, rel=0.001)


@pytest.mark.parametrize("wire", ["int8", "qsgd8", "qsgd4", "qsgd2", "e3m0", "codebook2"])
def test_error_feedback_loses_nothing_in_the_long_run(ranks: list[Communicator], wire: str) -> None:
    """After many steps all that has been asked for has arrived, but for the last step's errors, which do not grow."""
    count, steps = 5000, 40
    asked, arrived = np.zeros(count), np.zeros(count)
    kept = [np.zeros(count, np.float32) for _ in range(SIZE)]
    for step in range(steps):
        xs = inputs(count, seed=step)
        asked += np.sum(xs, axis=0, dtype=np.float64)
        outs, kept = reduced(ranks, [x + left for x, left in zip(xs, kept, strict=True)], wire=wire)
        arrived += outs[0]
    still_kept = np.sum(kept, axis=0, dtype=np.float64)
    np.testing.assert_allclose(arrived + still_kept, asked, atol=2e-3)
    without = np.zeros(count)
    for step in range(steps):
        without += reduced(ranks, inputs(count, seed=step), wire=wire)[0][0]
    assert np.std(arrived - asked) < 0.6 * np.std(without - asked)


_KINDS = {  # of values
    "normal": lambda random, count: random.standard_normal(count),
    "heavy tails": lambda random, count: random.standard_t(2, count),
    "far apart": lambda random, count: -np.exp(random.standard_normal(count) * 8),
    "denormal": lambda random, count: random.standard_normal(count) * 1e-42,
    "near the largest": lambda random, count: random.uniform(-3.4e38, 3.4e38, count),
    "whole numbers, many zero": lambda random, count: np.round(random.standard_normal(count)),
    "of one sign": lambda random, count: np.abs(random.standard_normal(count)) + 5,
    "alike": lambda random, count: np.full(count, -0.3),
    "zeros": lambda random, count: np.zeros(count),
    "with NaN": lambda random, count: np.where(random.random(count) < 0.001, np.nan, random.standard_normal(count)),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("wire", ["e3m0", "codebook2"])
def test_values_are_those_of_the_reference(wire: str, kind: str) -> None:
    (alone,) = Communicator.local(1)
    random = np.random.default_rng(0)
    for count in (1, 2, 3, 63, 64, 65, 511, 512, 513, 1024, 5000):
        x = _KINDS[kind](random, count).astype(np.float32)
        out, error = np.empty_like(x), np.empty_like(x)
        expected = getattr(value_formats, wire)(x)
        alone.all_reduce(x, wire=wire, out=out, error=error)
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
        np.testing.assert_array_equal(error, np.where(np.isnan(expected), 0, x - expected))
        alone.all_reduce(x, wire=wire, seed=count, out=out)  # without an error, they are rounded in the same way
        np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("wire", ["e3m0", "codebook2"])
def test_values_of_entries_are_those_of_the_reference(ranks: list[Communicator], wire: str) -> None:
    values = inputs(1500)[0]
    stream = SparseVector(np.arange(0, 6000, 4, dtype=np.uint32), values, 6001)
    works = [rank.all_gather(stream, wire=f"packed-{wire}", async_op=True) for rank in ranks]
    expected = getattr(value_formats, wire)(values)
    for work in works:
        for gathered in work.result():
            np.testing.assert_array_equal(gathered.values, expected)


@pytest.mark.parametrize("wire", ["qsgd8", "qsgd4", "qsgd2"])
def test_errors_that_are_kept_stay_small_beside_one_large_value(ranks: list[Communicator], wire: str) -> None:
    """Rounded at random, each small value would now and then become the level above zero, hundreds of times itself."""
    count = 2048
    kept = [np.zeros(count, np.float32) for _ in range(SIZE)]
    for step in range(30):
        xs = [1e-3 * x for x in inputs(count, seed=step)]
        for x in xs:
            x[:: count // 2] = 8
        _, kept = reduced(ranks, [x + left for x, left in zip(xs, kept, strict=True)], wire=wire)
        small = np.concatenate(kept)[np.arange(SIZE * count) % (count // 2) != 0]
        assert np.abs(small).max() <= 1e-3 * 5 * (step + 1) * SIZE


def test_the_same_is_rounded_to_the_nearest_in_every_call_if_errors_are_kept(ranks: list[Communicator]) -> None:
    xs = inputs(5000)
    (first, lost), (second, lost_again) = (reduced(ranks, xs, wire="qsgd4") for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    for one, other in zip(lost, lost_again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_rounding_is_another_in_every_call_and_seed_and_the_same_in_every_run(ranks: list[Communicator]) -> None:
    def rounded(group: list[Communicator], **options: Any) -> npt.NDArray[np.float32]:
        outs = [np.empty_like(x) for x in xs]
        works = [
            rank.all_reduce(x, out=out, wire="qsgd4", async_op=True, **options)
            for rank, x, out in zip(group, xs, outs, strict=True)
        ]
        for work in works:
            work.wait()
        return outs[0]

    xs = inputs(5000)
    first, second = (rounded(ranks) for _ in range(2))
    assert not np.array_equal(first, second)
    again = Communicator.local(SIZE, timeout_s=30.0)
    other = Communicator.local(SIZE, timeout_s=30.0)
    np.testing.assert_array_equal(rounded(again), first)
    assert not np.array_equal(rounded(other, seed=1), first)
    for communicator in again + other:
        communicator.close()


def test_torch_tensors_in_place(ranks: list[Communicator]) -> None:
    xs = [torch.full((4, 5), float(rank)) for rank in range(SIZE)]
    works = [rank.all_reduce(x, wire="qsgd8", async_op=True) for rank, x in zip(ranks, xs, strict=True)]
    for work, x in zip(works, xs, strict=True):
        assert work.result() is x
        assert torch.equal(x, torch.full((4, 5), 3.0))


def test_a_rank_alone_rounds_too() -> None:
    (alone,) = Communicator.local(1)
    x = np.array([1.0, 0.3, -0.2], np.float32)
    kept, error = x.copy(), np.empty_like(x)
    assert alone.all_reduce(x, wire="qsgd2", error=error) is None
    assert set(np.abs(x)) <= {0.0, 1.0}
    np.testing.assert_array_equal(x + error, kept)
    alone.close()


def test_ranks_that_disagree_are_told(ranks: list[Communicator]) -> None:
    works = [
        rank.all_reduce(np.ones(4, np.float32), wire="qsgd4" if rank.rank else "int8", async_op=True) for rank in ranks
    ]
    with pytest.raises(TransportError, match="wire=(qsgd4|int8)"):
        works[0].wait()


_X = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("x", "options", "kind", "message"),
    [
        (_X, {"wire": "qsgd3"}, ValueError, "wire='qsgd3' does not exist for dense vectors: use one of bf16, f16"),
        (_X, {"wire": 4}, ValueError, "wire=4 does not exist"),
        (np.ones(4), {"wire": "int8"}, TypeError, "x has dtype float64: wire= is for float32"),
        (torch.ones(4, dtype=torch.bfloat16), {"wire": "int8"}, TypeError, "x has dtype torch.bfloat16: wire="),
        (_X, {"wire": "int8", "op": "max"}, ValueError, "op='max' is not supported with wire=: use 'sum' or 'avg'"),
        (_X, {"wire": "int8", "algorithm": "ring"}, ValueError, "algorithm='ring' is not supported with wire="),
        (_X, {"error": np.empty_like(_X)}, ValueError, "error takes what wire= loses: name a wire"),
        (_X, {"wire": "int8", "error": np.empty(4)}, TypeError, "error has dtype float64 but x has float32"),
        (_X, {"wire": "int8", "error": np.empty(5, np.float32)}, ValueError, "error has shape (5,) but x has (4,)"),
        (_X, {"wire": "int8", "error": _X}, ValueError, "error shares memory with x or out"),
        (_X, {"wire": "int8", "seed": -1}, ValueError, "seed=-1 is out of range"),
        (_X, {"wire": "int8", "seed": 2**64}, ValueError, "is out of range: use 0 to 2**64 - 1"),
        (_X, {"wire": "int8", "seed": 0.5}, TypeError, "seed=0.5 must be an int"),
    ],
)
def test_refused(
    ranks: list[Communicator], x: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        ranks[0].all_reduce(x, **options)


def test_error_must_not_share_memory_with_out(ranks: list[Communicator]) -> None:
    out = np.empty_like(_X)
    with pytest.raises(ValueError, match="error shares memory with x or out"):
        ranks[0].all_reduce(_X, out=out, wire="int8", error=out)
