"""all_reduce(stream, algorithm=, wire=, error=): what it gives, sends and refuses. Ranks of this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from local_ranks import SIZE

from telegrad import Communicator, MismatchedCall, OkTopkState, SparseVector, _core
from telegrad.communicator.operands import WIRES, formats_named, formats_of, name_of_formats
from telegrad.cost import Costs, Tuning
from telegrad.cost.closed_forms import layout_that_pays

N = 200_000
ALGORITHMS = ("auto", "split_allgather", "split_dense_allgather", "recursive_doubling", "ring")

WAYS = list(itertools.product(ALGORITHMS, ["raw", "blocked", "packed", "indices", "auto", "f32", "packed-f32"]))

Vector = npt.NDArray[np.float32]


def streams(density: float, dtype: type[np.floating[Any]] = np.float32) -> list[SparseVector]:
    made = []
    for rank in range(SIZE):
        draw = np.random.default_rng(rank)
        indices = np.sort(draw.choice(N, int(N * density), replace=False)).astype(np.uint32)
        made.append(SparseVector(indices, draw.standard_normal(indices.size).astype(dtype), N))
    return made


def total_of(inputs: list[SparseVector]) -> npt.NDArray[np.float64]:
    total = np.zeros(N)
    for one in inputs:
        total[one.indices] += one.values
    return total


def reduced(ranks: list[Communicator], inputs: list[SparseVector], op: str = "sum", **options: Any) -> list[Vector]:
    """Every rank's result, densely."""
    works = [rank.all_reduce(x, op, async_op=True, **options) for rank, x in zip(ranks, inputs, strict=True)]
    return [work.result().to_dense() for work in works]


def assert_same_bits(results: list[Vector]) -> None:
    for one in results[1:]:
        np.testing.assert_array_equal(one.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("density", [0.0, 0.001, 0.05, 0.9])
@pytest.mark.parametrize(("algorithm", "wire"), WAYS)
def test_every_algorithm_and_format_of_indices(
    ranks: list[Communicator], algorithm: str, wire: str, density: float
) -> None:
    inputs = streams(density)
    results = reduced(ranks, inputs, algorithm=algorithm, wire=wire)
    assert_same_bits(results)
    np.testing.assert_allclose(results[0], total_of(inputs), atol=1e-5)
    outs = [np.full(N, np.nan, np.float32) for _ in ranks]
    works = [
        rank.all_reduce_into(x, out, algorithm=algorithm, wire=wire, async_op=True)
        for rank, x, out in zip(ranks, inputs, outs, strict=True)
    ]
    for work in works:
        work.wait()
    assert_same_bits(outs)
    np.testing.assert_allclose(outs[0], total_of(inputs), atol=1e-5)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("density", [0.002, 0.7])
@pytest.mark.parametrize("algorithm", ["auto", "split_dense_allgather", "ring"])
@pytest.mark.parametrize("wire", WIRES)
def test_result_and_errors_add_up_to_all_inputs(
    ranks: list[Communicator], wire: str, algorithm: str, density: float, op: str
) -> None:
    inputs = streams(density)
    errors = [np.full(N, 0.25, np.float32) for _ in ranks]  # what rounding loses is added to what is there
    works = [
        rank.all_reduce(x, op, wire=f"packed-{wire}", algorithm=algorithm, error=error, async_op=True)
        for rank, x, error in zip(ranks, inputs, errors, strict=True)
    ]
    results = [work.result().to_dense() for work in works]
    assert_same_bits(results)
    factor = SIZE if op == "avg" else 1
    kept = np.sum([error.astype(np.float64) - 0.25 for error in errors], axis=0)
    total = total_of(inputs)
    assert not np.allclose(results[0] * factor, total, atol=1e-6)
    np.testing.assert_allclose(results[0].astype(np.float64) * factor + kept, total, atol=2e-5)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("density", [0.002, 0.7])
@pytest.mark.parametrize("algorithm", ["auto", "split_allgather", "split_dense_allgather", "two_level"])
@pytest.mark.parametrize("wire", ["sums-packed-bf16", "sums-qsgd8", "sums-raw-int8"])
def test_sums_alone_are_rounded(ranks: list[Communicator], wire: str, algorithm: str, density: float, op: str) -> None:
    """So a rank loses something in its own slice alone, of what all have there; of both halves it loses more."""
    inputs = streams(density)
    kept: dict[str, list[Vector]] = {}
    for chosen in (wire, wire.removeprefix("sums-")):
        errors = [np.zeros(N, np.float32) for _ in ranks]
        works = [
            rank.all_reduce(x, op, wire=chosen, algorithm=algorithm, error=error, async_op=True)
            for rank, x, error in zip(ranks, inputs, errors, strict=True)
        ]
        results = [work.result().to_dense() for work in works]
        assert_same_bits(results)
        lost = np.sum(errors, axis=0, dtype=np.float64)
        total = total_of(inputs)
        np.testing.assert_allclose(results[0] * np.float64(SIZE if op == "avg" else 1) + lost, total, atol=2e-5)
        assert not np.allclose(lost, 0)
        kept[chosen] = errors
    exact, rounded = kept.values()
    for rank, (error, more) in enumerate(zip(exact, rounded, strict=True)):
        own = np.array_split(np.arange(N), SIZE)[rank]
        others = np.ones(N, np.bool_)
        others[own] = False
        assert error[own].any()
        assert not error[others].any()
        assert more[others].any()


def test_where_no_sums_are_rounded(ranks: list[Communicator]) -> None:
    x, rank = streams(0.001)[0], ranks[0]
    for wire in ("sums-packed", "sums-", "sums-f32", "sums-auto"):
        with pytest.raises(ValueError, match=f"wire='{wire}' rounds nothing|wire='.*' does not exist"):
            rank.all_reduce(x, wire=wire)
    with pytest.raises(ValueError, match="wire='sums-bf16' does not exist for sparse vectors"):
        rank.all_gather(x, wire="sums-bf16")
    with pytest.raises(ValueError, match="wire='sums-bf16' does not exist for sparse vectors"):
        rank.all_reduce_topk(x, OkTopkState(5), wire="sums-bf16")
    with pytest.raises(ValueError, match="wire='sums-bf16' does not exist for dense vectors"):
        rank.all_reduce(np.zeros(4, np.float32), wire="sums-bf16")
    with pytest.raises(ValueError, match="algorithm='ring' rounds sums of some ranks: with wire='sums-"):
        rank.all_reduce(x, wire="sums-bf16", algorithm="ring")
    with pytest.raises(ValueError, match="'max' is not supported with wire='bf16', which rounds"):
        rank.all_reduce(x, "max", wire="sums-bf16")


@pytest.mark.parametrize("algorithm", ["split_allgather", "ring"])
def test_values_of_one_sign_go_as_their_mean(ranks: list[Communicator], algorithm: str) -> None:
    inputs = [SparseVector(x.indices, np.abs(x.values), N) for x in streams(0.002)]
    errors = [np.zeros(N, np.float32) for _ in ranks]
    works = [
        rank.all_reduce(x, wire="packed-mean", algorithm=algorithm, error=error, async_op=True)
        for rank, x, error in zip(ranks, inputs, errors, strict=True)
    ]
    results = [work.result() for work in works]
    assert len(np.unique(results[0].values)) <= SIZE  # one a slice
    dense = [result.to_dense() for result in results]
    assert_same_bits(dense)
    np.testing.assert_allclose(dense[0] + np.sum(errors, axis=0, dtype=np.float64), total_of(inputs), atol=2e-5)
    mixed = reduced(ranks, streams(0.002), wire="mean", algorithm=algorithm)
    np.testing.assert_allclose(mixed[0], total_of(streams(0.002)), atol=1e-6)


def test_packed_indices_and_short_values_send_fewer_bytes(ranks: list[Communicator]) -> None:
    sent = {}
    for wire in ("raw", "indices", "packed", "indices-bf16", "packed-bf16", "packed-int8"):
        before = ranks[0].stats()["bytes_sent"]
        reduced(ranks, streams(0.01), wire=wire)
        sent[wire] = ranks[0].stats()["bytes_sent"] - before
    # 64 bits an entry; 8.6 and 32 (the sum is denser: 7.1 at 3 %); 16 and 8 for the value; exponents 3.3 instead of 8.
    assert 0.6 * sent["raw"] < sent["indices"] < 0.65 * sent["raw"]
    assert 0.52 * sent["raw"] < sent["packed"] < 0.57 * sent["raw"]
    assert 0.35 * sent["raw"] < sent["indices-bf16"] < 0.4 * sent["raw"]
    assert 0.28 * sent["raw"] < sent["packed-bf16"] < 0.32 * sent["raw"]
    assert 0.22 * sent["raw"] < sent["packed-int8"] < 0.28 * sent["raw"]


@pytest.mark.parametrize("rounding", ["f32", "bf16"])
def test_packed_values_change_no_bit(ranks: list[Communicator], rounding: str) -> None:
    awkward = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-39, 3e38, 1.0], np.float32)
    inputs = streams(0.01)
    for rank, one in enumerate(inputs):
        one.values[100 + rank :: 97] = np.resize(awkward, one.values[100 + rank :: 97].size)
    plain = reduced(ranks, inputs, wire=f"indices-{rounding}", algorithm="split_allgather")
    packed = reduced(ranks, inputs, wire=f"packed-{rounding}", algorithm="split_allgather")
    for one, other in zip(plain, packed, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_ranks_may_pack_values_or_not(ranks: list[Communicator]) -> None:
    inputs = streams(0.01)
    for algorithm, rounding in (("auto", "f32"), ("recursive_doubling", "f32"), ("split_allgather", "bf16")):
        works = [
            rank.all_reduce(x, wire=f"{layout}-{rounding}", algorithm=algorithm, async_op=True)
            for rank, x, layout in zip(ranks, inputs, itertools.cycle(("packed", "indices", "raw")), strict=False)
        ]
        results = [work.result().to_dense() for work in works]
        assert_same_bits(results)
        np.testing.assert_allclose(results[0], total_of(inputs), atol=1e-5 if rounding == "f32" else 0.1)


def test_randomly_rounded_values_differ_from_call_to_call_and_with_the_seed_do_not(ranks: list[Communicator]) -> None:
    inputs = streams(0.01)
    first, second = (reduced(ranks, inputs, wire="qsgd4", seed=5)[0] for _ in range(2))
    assert not np.array_equal(first, second)
    others = Communicator.local(SIZE, timeout_s=30.0)
    np.testing.assert_array_equal(reduced(others, inputs, wire="qsgd4", seed=5)[0], first)
    for one in others:
        one.close()


def test_calls_that_round_nothing_do_not_change_what_later_ones_round(ranks: list[Communicator]) -> None:
    inputs = streams(0.01)
    first = reduced(ranks, inputs, wire="qsgd4", seed=5)[0]
    others = Communicator.local(SIZE, timeout_s=30.0)
    reduced(others, inputs)
    np.testing.assert_array_equal(reduced(others, inputs, wire="qsgd4", seed=5)[0], first)
    for one in others:
        one.close()


def tuning_of(ranks: list[Communicator], beta_s_per_byte: float) -> Tuning:
    made = Tuning.__new__(Tuning)
    object.__setattr__(made, "costs", Costs(alpha_s=1e-5, beta_s_per_byte=beta_s_per_byte))
    return made


def test_entries_are_packed_where_the_network_is_slow(ranks: list[Communicator]) -> None:
    stream = streams(0.01)[0]
    native, bf16 = _core.ValueEncoding.native, _core.ValueEncoding.bf16
    packed, plain = _core.IndexFormat.packed, _core.IndexFormat.none
    assert formats_of(None, stream, shares_memory=False, tuning=None) == (packed, native, True)
    assert formats_of("auto", stream, shares_memory=True, tuning=None) == (plain, native, False)
    assert formats_of("bf16", stream, shares_memory=True, tuning=tuning_of(ranks, 8e-9)) == (packed, bf16, True)
    assert formats_of("auto", stream, shares_memory=False, tuning=tuning_of(ranks, 1e-10)) == (plain, native, False)
    assert formats_of("indices", stream, shares_memory=False, tuning=None) == (packed, native, False)


@pytest.mark.parametrize(
    ("beta_s_per_byte", "density", "layout"),
    [
        (8.5e-9, 0.01, "packed"),  # 1 Gbit/s
        (8.5e-9, 0.9, "packed"),
        (8.5e-9, 1e-6, "packed"),  # of indices there is little to save, of values as much as ever
        (2.0e-9, 0.01, "blocked"),
        (2.0e-9, 0.2, "indices"),  # values save too little, dense indices enough
        (0.85e-9, 0.2, "blocked"),  # 10 Gbit/s
        (8.5e-9, 0.0, "blocked"),  # an empty stream
        (0.0, 0.5, "blocked"),
    ],
)
def test_auto_packs_where_what_it_saves_takes_longer(beta_s_per_byte: float, density: float, layout: str) -> None:
    assert layout_that_pays(beta_s_per_byte, density) == layout


def test_auto_does_not_pack_values_that_cannot_be() -> None:
    assert layout_that_pays(8.5e-9, 0.01, "f64") == "indices"
    assert layout_that_pays(2e-9, 1e-3, "f64") == "blocked"


@pytest.mark.parametrize("layout", ["raw", "blocked", "packed", "indices"])
@pytest.mark.parametrize("values", ["f32", "bf16", "mean"])
def test_formats_are_named_as_they_are_asked_for(layout: str, values: str) -> None:
    name = f"{layout}-{values}"
    assert name_of_formats(formats_named(name, "f32"), "f32") == name


def test_what_is_refused(ranks: list[Communicator]) -> None:
    alone, stream = ranks[0], streams(0.01)[0]
    for wire in ("zip", "packed-zip", "bf16-packed", "f8", 3, "packed-"):
        with pytest.raises(
            ValueError, match="wire=.* does not exist for sparse vectors: use auto, raw, blocked, packed"
        ):
            alone.all_reduce(stream, wire=wire)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="does not fit a sparse vector of f64: only float32 values can be encoded"):
        alone.all_reduce(streams(0.01, np.float64)[0], wire="bf16")
    with pytest.raises(ValueError, match="algorithm='recursive_doubling' is not supported with wire='bf16'"):
        alone.all_reduce(stream, wire="bf16", algorithm="recursive_doubling")
    with pytest.raises(ValueError, match="error has 3 elements but the sparse vector has n=200000"):
        alone.all_reduce(stream, wire="bf16", error=np.zeros(3, np.float32))
    with pytest.raises(TypeError, match="error has dtype float64: give a float32 one"):
        alone.all_reduce(stream, wire="bf16", error=np.zeros(N))
    with pytest.raises(ValueError, match="op='max' is not supported with wire='bf16', which rounds"):
        alone.all_reduce(stream, "max", wire="bf16")
    out = np.zeros(N, np.float32)
    with pytest.raises(ValueError, match="error shares memory with out"):
        alone.all_reduce_into(stream, out, wire="bf16", error=out)
    with pytest.raises(ValueError, match="seed=-1 is out of range"):
        alone.all_reduce(stream, wire="qsgd4", seed=-1)


@pytest.mark.parametrize("wire", [None, "auto", "raw", "packed", "f32", "packed-f32"])
def test_what_only_rounding_looks_at_is_refused_where_nothing_is_rounded(
    ranks: list[Communicator], wire: str | None
) -> None:
    alone, stream, out = ranks[0], streams(0.01)[0], np.zeros(N, np.float32)
    before = alone.stats()["operations"]
    calls: list[Callable[..., Any]] = [
        lambda **given: alone.all_reduce(stream, **given),
        lambda **given: alone.all_reduce_into(stream, out, **given),
        lambda **given: alone.reduce_scatter(stream, **given),
        lambda **given: alone.all_gather(stream, **given),
        lambda **given: alone.all_reduce_topk(stream, OkTopkState(3), **given),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="seed=3 is for a wire= that may round at random: name one, or leave seed"):
            call(wire=wire, seed=3)
        with pytest.raises(ValueError, match="error takes what wire= loses, and wire=.* loses nothing: name one that"):
            call(wire=wire, error=np.zeros(N, np.float32))
    assert alone.stats()["operations"] == before


def test_a_wire_that_leaves_this_dtype_as_it_is_may_have_an_error(ranks: list[Communicator]) -> None:
    """As of the bfloat16 part of a model, whose other gradients are rounded."""
    errors = [np.ones(3, np.float32) for _ in ranks]
    stream = SparseVector(torch.tensor([1]), torch.ones(1, dtype=torch.bfloat16), 3)
    works = [rank.all_reduce(stream, wire="bf16", error=errors[rank.rank], seed=3, async_op=True) for rank in ranks]
    for work, error in zip(works, errors, strict=True):
        assert work.result().values.tolist() == [SIZE]
        assert error.tolist() == [1, 1, 1]


def held_densely(values: Vector) -> SparseVector:
    return SparseVector.trusted(None, values, values.size)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("op", ["sum", "max_abs", "min"])  # min: 0 is no neutral element there, but an entry to none
def test_streams_that_are_held_densely(ranks: list[Communicator], algorithm: str, op: str) -> None:
    draw = np.random.default_rng(3)
    inputs = [draw.integers(-4, 5, N).astype(np.float32) for _ in ranks]
    inputs[0][::2] = 0
    expected = {
        "sum": np.sum(inputs, axis=0),
        "max_abs": np.max(np.abs(inputs), axis=0),
        "min": np.min([np.where(x == 0, np.inf, x) for x in inputs], axis=0),
    }[op]
    kept = [x.copy() for x in inputs]
    results = reduced(ranks, [held_densely(x) for x in inputs], op, algorithm=algorithm, wire="packed")
    assert_same_bits(results)
    np.testing.assert_array_equal(np.abs(results[0]) if op == "max_abs" else results[0], expected)
    outs = [np.full(N, np.nan, np.float32) for _ in ranks]
    works = [
        rank.all_reduce_into(held_densely(x), out, op, algorithm=algorithm, async_op=True)
        for rank, x, out in zip(ranks, inputs, outs, strict=True)
    ]
    for work in works:
        work.wait()
    assert_same_bits([*outs, results[0]])
    for x, before in zip(inputs, kept, strict=True):
        np.testing.assert_array_equal(x, before)


def test_several_open_sums_in_flight_that_ranks_come_to_different_ends_of(ranks: list[Communicator]) -> None:
    """Short ones are doubled, long ones split, full ones summed densely; what one rank's other calls taught it, others
    do not know."""
    draw = np.random.default_rng(4)
    works, expected = [], []
    for density in (1e-5, 0.002, 0.1, 0.9) * 3:
        inputs = []
        for rank in range(SIZE):
            k = int(N * density * draw.uniform(0, 1.1) if rank else N * density)
            indices = np.sort(draw.choice(N, k, replace=False)).astype(np.uint32)
            inputs.append(SparseVector(indices, draw.integers(-3, 4, k).astype(np.float32), N))
        expected.append(total_of(inputs))
        works.append([comm.all_reduce(x, async_op=True) for comm, x in zip(ranks, inputs, strict=True)])
    for of_ranks, total in zip(works, expected, strict=True):
        results = [work.result().to_dense() for work in of_ranks]
        assert_same_bits(results)
        np.testing.assert_array_equal(results[0], total)


def test_ranks_that_round_shares_and_ranks_that_do_not_are_told() -> None:
    x = SparseVector(np.arange(3), np.ones(3, np.float32), 100)
    comms = Communicator.local(3, timeout_s=20)
    works = [one.all_reduce(x, wire="sums-qsgd8" if one.rank == 2 else "qsgd8", async_op=True) for one in comms]
    for work in works:
        with pytest.raises(MismatchedCall, match=r"rank 2.*wire=sums-qsgd8|wire=sums-qsgd8.*rank 2"):
            work.wait()
    for one in comms:
        one.close()
