"""all_reduce_topk: what it gives, remembers and refuses. Ranks of this process."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from local_ranks import SIZE
from topk_streams import N, streams

from telegrad import BoundedTopkState, Communicator, GTopkState, MismatchedCall, OkTopkState, SparseVector
from telegrad.communicator import TopkSum

K = 150
Floats = npt.NDArray[np.float32]


def states(**settings: Any) -> list[OkTopkState]:
    return [OkTopkState(K, **settings) for _ in range(SIZE)]


def called(ranks: list[Communicator], inputs: list[Any], kept: list[OkTopkState], **options: Any) -> list[TopkSum]:
    works = [
        rank.all_reduce_topk(x, state, async_op=True, **options)
        for rank, x, state in zip(ranks, inputs, kept, strict=True)
    ]
    return [work.result() for work in works]


def topk(inputs: list[SparseVector], k: int, divisor: float = 1.0) -> Floats:
    total = np.zeros(N, np.float32)
    for stream in inputs:
        total[stream.indices] += stream.values
    total *= np.float32(1 / divisor)
    least = np.sort(np.abs(total))[-k]
    return np.where(np.abs(total) >= least, total, np.float32(0))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("wire", [None, "auto", "raw", "blocked", "packed", "packed-f32"])
def test_the_largest_of_the_sum_and_what_has_no_part_in_it(
    ranks: list[Communicator], wire: str | None, op: str
) -> None:
    inputs = streams()
    results = called(ranks, inputs, states(), op=op, wire=wire)
    right = topk(inputs, K, SIZE if op == "avg" else 1)
    for given, (total, left, report) in zip(inputs, results, strict=True):
        np.testing.assert_array_equal(total.to_dense(), right)
        stays = right[given.indices] == 0
        np.testing.assert_array_equal(left.indices, given.indices[stays])
        np.testing.assert_array_equal(left.values, given.values[stays])
        assert not report.cut
        assert report.exact
        assert (report.selected, report.local_most) == (K, 200)
        assert max(report.words_sent, report.words_received) <= 6 * 200 + 2 * 84  # 6 sqrt(200)
        assert report.words_sent > 0
        assert report.bytes_sent > report.control_words_sent * 4 + 2 * report.words_sent
        assert report.control_words_sent > 0
    assert sum(r.report.words_sent for r in results) == sum(r.report.words_received for r in results)
    assert sum(r.report.bytes_sent for r in results) == sum(r.report.bytes_received for r in results)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(
    "wire", ["bf16", "f16", "packed-bf16", "int8", "raw-qsgd8", "qsgd4", "e3m0", "packed-codebook2", "mean"]
)
def test_what_rounding_loses_is_added_to_error(ranks: list[Communicator], wire: str, op: str) -> None:
    kept = states(threshold_every=2)
    for call in range(3):
        inputs = streams(call)
        if wire == "mean":
            inputs = [SparseVector(one.indices, np.abs(one.values), N) for one in inputs]
        errors = [np.full(N, 0.25, np.float32) for _ in ranks]
        works = [
            rank.all_reduce_topk(x, state, op, wire=wire, error=error, seed=3, async_op=True)
            for rank, x, state, error in zip(ranks, inputs, kept, errors, strict=True)
        ]
        results = [work.result() for work in works]
        for total, _, _ in results:
            np.testing.assert_array_equal(total.indices, results[0].sum.indices)
            np.testing.assert_array_equal(total.values, results[0].sum.values)
        given = sum(x.to_dense().astype(np.float64) for x in inputs)
        found = results[0].sum.to_dense().astype(np.float64) * (SIZE if op == "avg" else 1)
        found += sum(
            result.left.to_dense().astype(np.float64) + error - 0.25
            for result, error in zip(results, errors, strict=True)
        )
        np.testing.assert_allclose(found, given, atol=1e-5)
        assert any((error != 0.25).any() for error in errors)
        outside = np.setdiff1d(np.arange(N), results[0].sum.indices)
        assert all((error[outside] == 0.25).all() for error in errors)  # what is left is left as it was


def test_bfloat16_streams_go_as_they_are(ranks: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")
    inputs = [
        SparseVector(one.indices, torch.from_numpy(one.values).bfloat16(), N)  # the wire of a model of that type
        for one in streams()
    ]
    plain, named = (called(ranks, inputs, states(), wire=wire) for wire in (None, "bf16"))
    for one, other in zip(plain, named, strict=True):
        assert torch.equal(one.sum.values, other.sum.values)


@pytest.mark.parametrize("state", [OkTopkState, BoundedTopkState, GTopkState])
@pytest.mark.parametrize("wires", [("auto", "auto"), ("raw", "packed"), ("blocked", "indices")])
@pytest.mark.parametrize("k", [40, 200, 600, 3000])
def test_ranks_need_not_agree_on_layouts_nor_all_have_entries(state: Any, wires: tuple[str, str], k: int) -> None:
    if state is BoundedTopkState and wires[0] != "auto":
        pytest.skip("its messages have one layout")
    n = 20_000
    draw = np.random.default_rng(k)
    given = [
        SparseVector(np.sort(draw.choice(n, count, replace=False)).astype(np.uint32), np.ones(count, np.float32), n)
        for count in (k, 0 if wires[0] == "auto" else k)
    ]
    with contextlib.ExitStack() as stack:
        comms = [stack.enter_context(comm) for comm in Communicator.local(2)]
        works = [
            comm.all_reduce_topk(given[comm.rank], state(k), wire=wires[comm.rank], async_op=True) for comm in comms
        ]
        found = [work.result() for work in works]
    total = sum(one.to_dense() for one in given)
    np.testing.assert_array_equal(found[0].sum.to_dense(), found[1].sum.to_dense())
    np.testing.assert_array_equal(found[0].sum.to_dense() + found[0].left.to_dense() + found[1].left.to_dense(), total)


def test_packed_values_take_fewer_bytes_and_keep_every_bit() -> None:
    n, entries = 200_000, 20_000
    found: dict[str, list[TopkSum]] = {}
    sent: dict[str, int] = {}
    for wire in ("indices", "packed"):
        with contextlib.ExitStack() as stack:
            comms = [stack.enter_context(comm) for comm in Communicator.local(SIZE)]
            inputs = []
            for rank in range(SIZE):
                draw = np.random.default_rng(rank)
                indices = np.sort(draw.choice(n, entries, replace=False)).astype(np.uint32)
                inputs.append(SparseVector(indices, draw.normal(size=entries).astype(np.float32), n))
            found[wire] = called(comms, inputs, [OkTopkState(entries) for _ in comms], wire=wire)
            sent[wire] = sum(comm.stats()["bytes_sent"] for comm in comms)
    assert sent["packed"] < 0.95 * sent["indices"]
    for packed, plain in zip(found["packed"], found["indices"], strict=True):
        for mine, theirs in ((packed.sum, plain.sum), (packed.left, plain.left)):
            np.testing.assert_array_equal(mine.indices, theirs.indices)
            np.testing.assert_array_equal(mine.values.view(np.uint32), theirs.values.view(np.uint32))


def test_a_state_after_sums_of_nan_is_saved_and_recovers(ranks: list[Communicator]) -> None:
    inputs = [SparseVector(one.indices, np.full_like(one.values, np.nan), N) for one in streams()]
    kept, loaded = states(), states()
    called(ranks, inputs, kept)
    for state, other in zip(kept, loaded, strict=True):
        other.load_state_dict(state.state_dict())
    results = called(ranks, streams(1), loaded)
    np.testing.assert_array_equal(results[0].sum.to_dense(), topk(streams(1), K))


@pytest.mark.parametrize("state", [None, 5, [("k", 1)]])
def test_what_is_no_mapping_is_not_loaded(state: Any) -> None:
    with pytest.raises(ValueError, match="it must come from state_dict"):
        OkTopkState(K).load_state_dict(state)


def test_settings_do_not_change() -> None:
    with pytest.raises(AttributeError):
        OkTopkState(K).k = 7  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes(ranks: list[Communicator], dtype: type[np.floating[Any]]) -> None:
    for total, left, _ in called(ranks, streams(dtype=dtype), states()):
        assert total.dtype == left.dtype == {np.float64: "f64", np.float16: "f16"}[dtype]
        assert K <= total.nnz < 2 * K


def test_coo_tensors_come_back_as_such(ranks: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")
    inputs = streams()
    shaped = [x.to_coo((N // 10, 10), 2) for x in inputs]
    for total, left, _ in called(ranks, shaped, states()):
        assert total.shape == left.shape == (N // 10, 10)
        assert total.layout == torch.sparse_coo
        np.testing.assert_array_equal(total.to_dense().numpy().ravel(), topk(inputs, K))


def test_thresholds_and_slices_are_reused(ranks: list[Communicator]) -> None:
    kept = states(boundaries_every=4, threshold_every=3)
    exact, cut = [], []
    for call in range(7):
        inputs = streams(call)
        results = called(ranks, inputs, kept)
        report = results[0].report
        exact.append(report.exact)
        cut.append(report.cut)
        assert {state.calls for state in kept} == {call + 1}
        assert len({state.threshold for state in kept}) == 1
        if report.exact:
            np.testing.assert_array_equal(results[0].sum.to_dense(), topk(inputs, K))
        else:
            assert abs(report.selected - K) <= K / 4
    assert exact[0::3] == [True] * 3
    assert not all(exact)
    assert not any(cut)  # equal slices fit evenly spread entries
    crowded = [SparseVector(np.arange(400, dtype=np.uint32), np.ones(400, np.float32), N)] * SIZE
    cuts = [called(ranks, crowded, kept)[0].report.cut for _ in range(2)]
    assert cuts == [True, False]


@pytest.mark.parametrize("factor", [0.6, 1.7])
def test_a_threshold_that_sums_have_left_behind_is_moved(ranks: list[Communicator], factor: float) -> None:
    kept = states()
    called(ranks, streams(0), kept)
    saved = [state.state_dict() for state in kept]
    changed = [SparseVector(x.indices, np.float32(factor) * x.values, N) for x in streams(0)]
    results = called(ranks, changed, kept)
    report = results[0].report
    assert not report.exact
    assert abs(report.selected - K) <= K / 4
    assert kept[0].threshold == pytest.approx(factor * saved[0]["threshold"], rel=0.1)
    for result in results:
        np.testing.assert_array_equal(result.sum.to_dense(), topk(changed, report.selected))
    loaded = states()
    for state, one in zip(loaded, saved, strict=True):
        state.load_state_dict(one)
    assert called(ranks, changed, loaded)[0].report == report
    assert loaded[0].state_dict() == kept[0].state_dict()


def test_one_rank_alone_blocking() -> None:
    with Communicator.local(1)[0] as alone:
        state = OkTopkState(3)
        x = SparseVector(np.array([1, 4, 5, 9], np.uint32), np.array([1.0, -4.0, 0.5, 2.0], np.float32), 10)
        total, left, report = alone.all_reduce_topk(x, state)
        assert total.indices.tolist() == [1, 4, 9]
        assert (left.indices.tolist(), left.values.tolist()) == ([5], [0.5])
        assert (report.words_sent, report.words_received, state.calls) == (0, 0, 1)


def test_a_saved_state_goes_on_where_it_was(ranks: list[Communicator]) -> None:
    kept = states()
    called(ranks, streams(0), kept)
    saved = [state.state_dict() for state in kept]
    assert saved[0] == saved[1]
    assert saved[0]["calls"] == 1
    assert sum(saved[0]["slices"]) == N
    right = called(ranks, streams(1), kept)
    loaded = states()
    for state, one in zip(loaded, saved, strict=True):
        state.load_state_dict(one)
    found = called(ranks, streams(1), loaded)
    assert found[0].report == right[0].report
    assert not found[0].report.cut
    np.testing.assert_array_equal(found[0].sum.to_dense(), right[0].sum.to_dense())
    assert loaded[0].state_dict() == kept[0].state_dict()


def test_sums_are_compared_by_what_a_step_along_them_gains(ranks: list[Communicator]) -> None:
    """By magnitude / v^(1/4), with mean squares v that the last call before an exact threshold has left."""
    tensors = [(0, N // 2), (N // 2, N // 4)]
    kept = states(threshold_every=2, tensors=tensors)

    def given(call: int) -> list[SparseVector]:
        scale = np.where(np.arange(N) < N // 2, np.float32(1), np.float32(0.5))
        return [SparseVector(one.indices, one.values * scale[one.indices], N) for one in streams(call)]

    for call in range(2):
        results = called(ranks, given(call), kept)
    squares = [float(np.square(results[0].sum.to_dense()[a : a + n], dtype=np.float64).mean()) for a, n in tensors]
    np.testing.assert_allclose(kept[0].state_dict()["squares"], squares)
    assert squares[0] > 2 * squares[1]
    results = called(ranks, given(2), kept)
    weight = np.float32((squares[1] / squares[0]) ** 0.25)
    weighed = np.abs(sum(one.to_dense() for one in given(2))) * np.where(np.arange(N) < N // 2, weight, np.float32(1))
    np.testing.assert_array_equal(results[0].sum.indices, np.flatnonzero(weighed >= np.sort(weighed)[-K]))
    assert results[0].report.selected == K


def test_a_state_of_other_settings_starts_anew() -> None:
    state = OkTopkState(K)
    state._core.set(5, 0.5, [N])
    other = OkTopkState(K + 1)
    other.load_state_dict(state.state_dict())
    assert (other.calls, other.threshold, other.state_dict()["slices"]) == (0, 0.0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, "state has no 'k'"),
        ({"calls": -1}, "state['calls'] is -1"),
        ({"calls": True}, "state['calls'] is True"),
        ({"threshold": -0.5}, "state['threshold'] is -0.5"),
        ({"threshold": 1}, "state['threshold'] is 1"),
        ({"slices": "12"}, "state['slices'] must be a list"),
        ({"slices": [3, -1]}, "state['slices'] must be a list"),
        ({"slices": [2**32]}, "state['slices'] must be a list"),
        ({"spread": "no"}, "state['spread'] is 'no'"),
        ({"squares": [-1.0]}, "state['squares'] must be a list"),
        ({"squares": [float("inf")]}, "state['squares'] must be a list"),
    ],
)
def test_what_is_no_state_is_not_loaded(change: dict[str, Any], message: str) -> None:
    state = OkTopkState(K)
    damaged = {name: value for name, value in {**state.state_dict(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        state.load_state_dict(damaged)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ValueError, "k=0 must be at least 1"),
        ({"k": 2**63}, ValueError, "must be at least 1, and below"),
        ({"k": 1.5}, TypeError, "k=1.5 must be an int"),
        ({"k": 1, "boundaries_every": 0}, ValueError, "boundaries_every=0 must be"),
        ({"k": 1, "threshold_every": True}, TypeError, "threshold_every=True must be"),
        ({"k": 1, "balance_factor": 0.5}, ValueError, "balance_factor=0.5 must be 1 or more"),
        ({"k": 1, "balance_factor": float("nan")}, ValueError, "balance_factor=nan must be"),
        ({"k": 1, "balance_factor": "4"}, TypeError, "balance_factor='4' must be a number"),
        ({"k": 1, "as_published": 1}, TypeError, "as_published=1 must be True or False"),
        ({"k": 1, "tensors": [(0, 5), (4, 2)]}, ValueError, "tensors=[(0, 5), (4, 2)] must ascend"),
        ({"k": 1, "tensors": [(-1, 5)]}, ValueError, "tensors=[(-1, 5)] must ascend, from index 0 on"),
        ({"k": 1, "tensors": [(0, 0)]}, ValueError, "tensors=0 must be at least 1"),
        ({"k": 1, "tensors": [(0, 1)], "as_published": True}, ValueError, "is not used with as_published=True"),
    ],
)
def test_settings_that_do_not_fit(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        OkTopkState(**arguments)


def test_what_is_refused_before_anything_is_sent(ranks: list[Communicator]) -> None:
    x, state = streams()[0], OkTopkState(K)
    comm = ranks[0]
    before = comm.stats()["messages_sent"]
    with pytest.raises(TypeError, match="x is a ndarray: it must be a SparseVector or a COO tensor"):
        comm.all_reduce_topk(np.ones(3, np.float32), state)
    with pytest.raises(TypeError, match="state=5 must be an OkTopkState"):
        comm.all_reduce_topk(x, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op='max' is not supported by all_reduce_topk"):
        comm.all_reduce_topk(x, state, "max")
    with pytest.raises(TypeError, match="wire='packed-bf16' does not fit a sparse vector of f16"):
        comm.all_reduce_topk(streams(dtype=np.float16)[0], state, wire="packed-bf16")
    with pytest.raises(ValueError, match="error has 5 elements but the sparse vector has n=20000"):
        comm.all_reduce_topk(x, state, wire="bf16", error=np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="wire='zip' does not exist"):
        comm.all_reduce_topk(x, state, wire="zip")
    with pytest.raises(ValueError, match="tensors of the state end at 20001, but the sparse vector has n=20000"):
        comm.all_reduce_topk(x, OkTopkState(K, tensors=[(0, N), (N, 1)]))
    assert comm.stats()["messages_sent"] == before
    assert state.calls == 0


def test_a_state_serves_one_call_at_a_time(ranks: list[Communicator]) -> None:
    inputs, kept = streams(), states()
    first = ranks[0].all_reduce_topk(inputs[0], kept[0], async_op=True)
    with pytest.raises(ValueError, match="in use by a call that is not over: wait for that before you call again"):
        ranks[0].all_reduce_topk(inputs[0], kept[0], async_op=True)
    with pytest.raises(ValueError, match="before you save it"):
        kept[0].state_dict()
    with pytest.raises(ValueError, match="before you load it"):
        kept[0].load_state_dict({})
    others = [r.all_reduce_topk(x, s, async_op=True) for r, x, s in zip(ranks[1:], inputs[1:], kept[1:], strict=True)]
    for work in (first, *others):
        work.wait()  # without asking for the result: the state goes on all the same
    assert [state.calls for state in kept] == [1] * SIZE
    assert "calls=1" in repr(kept[0])


def test_ranks_of_other_settings_or_another_past_get_an_error() -> None:
    for settle in (lambda state: OkTopkState(K + 1), lambda state: state._core.set(1, 0.5, [N // 2, N // 2]) or state):
        ranks = Communicator.local(2)
        kept = [OkTopkState(K), settle(OkTopkState(K))]
        inputs = streams()
        works = [r.all_reduce_topk(inputs[r.rank], kept[r.rank], async_op=True) for r in ranks]
        for work in works:
            with pytest.raises(MismatchedCall, match="allreduce_topk"):
                work.wait()
        assert kept[0].calls == 0  # as before the call
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_state_goes_on_where_that_one_was(ranks: list[Communicator], again: Any) -> None:
    kept = states(boundaries_every=5)
    called(ranks, streams(), kept)
    copied = [again(state) for state in kept]
    assert copied[0].state_dict() == kept[0].state_dict()
    right, found = (called(ranks, streams(1), some)[0] for some in (kept, copied))
    assert found.report == right.report
    np.testing.assert_array_equal(found.sum.to_dense(), right.sum.to_dense())
    called(ranks, streams(2), copied)
    assert (kept[0].calls, copied[0].calls) == (2, 3)  # they have nothing in common


def test_a_state_in_use_is_not_copied(ranks: list[Communicator]) -> None:
    inputs, kept = streams(), states()
    works = [ranks[0].all_reduce_topk(inputs[0], kept[0], async_op=True)]
    with pytest.raises(ValueError, match="before you save it"):
        copy.deepcopy(kept[0])
    works += [r.all_reduce_topk(x, s, async_op=True) for r, x, s in zip(ranks[1:], inputs[1:], kept[1:], strict=True)]
    for work in works:
        work.wait()
