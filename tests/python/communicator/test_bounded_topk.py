"""all_reduce_topk with a BoundedTopkState: what fits and what stays, and that messages never depend on the entries."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_ranks import SIZE
from topk_streams import N, streams

from telegrad import BoundedTopkState, Communicator, MismatchedCall, OkTopkState, SparseVector
from telegrad.communicator import TopkSum
from topk_references import Entries, by_bounded_messages

K = 150


def stream(entries: Entries, n: int) -> SparseVector:
    indices = np.array(sorted(entries), np.uint32)
    return SparseVector(indices, np.array([entries[int(index)] for index in indices], np.float32), n)


def entries_of(found: SparseVector) -> Entries:
    return dict(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def called(
    comms: list[Communicator], inputs: list[Any], states: list[BoundedTopkState], **options: Any
) -> list[TopkSum]:
    works = [
        comm.all_reduce_topk(x, state, async_op=True, **options)
        for comm, x, state in zip(comms, inputs, states, strict=True)
    ]
    return [work.result() for work in works]


@pytest.fixture(scope="module", params=[1, 2, 3, 5, 8])
def comms(request: pytest.FixtureRequest) -> Any:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(comm) for comm in Communicator.local(request.param)]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_fits_is_summed_and_nothing_is_lost(comms: list[Communicator], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 20))
    k = data.draw(st.integers(1, 8))
    slack = data.draw(st.sampled_from([1.0, 1.5, 4.0]))
    capacity = min(n, math.ceil(slack * k / len(comms)))
    states = [BoundedTopkState(k, slack=slack, boundaries_every=2) for _ in comms]
    for call in range(3):
        of_rank = st.dictionaries(st.integers(0, n - 1), st.integers(-3, 3).map(float))
        held = [data.draw(of_rank) for _ in comms]
        results = called(comms, [stream(one, n) for one in held], states)
        lengths = states[0].state_dict()["slices"]
        assert sum(lengths) == n
        threshold = float(np.float32(states[0].threshold))
        kept, left, unsent = by_bounded_messages(held, capacity, lengths, threshold)
        for found, own, stays, over in zip(results, held, left, unsent, strict=True):
            assert entries_of(found.sum) == kept
            assert entries_of(found.left) == stays
            report = found.report
            assert (report.selected, report.overflow, report.local_most) == (len(kept), len(over), len(own))
            assert report.words_sent == report.words_received == 4 * capacity * (len(comms) - 1)
            assert report.cut == (call % 2 == 0)
        assert len({state.threshold for state in states}) == 1


def test_counts_follow_k_and_messages_follow_nothing(ranks: list[Communicator]) -> None:
    """Whatever is given, also nothing at all: as many messages, of as many bytes."""
    states = [BoundedTopkState(K, boundaries_every=100) for _ in ranks]
    called(ranks, streams(0), states)
    selected, sent = [], set()
    for call in range(1, 9):
        before = [comm.stats() for comm in ranks]
        inputs = streams(call, entries=200 if call < 7 else 0 if call == 7 else N)
        results = called(ranks, inputs, states)
        for comm, earlier in zip(ranks, before, strict=True):
            after = comm.stats()
            sent.add((after["messages_sent"] - earlier["messages_sent"], after["bytes_sent"] - earlier["bytes_sent"]))
        if call < 7:
            selected.append(results[0].report.selected)
            assert max(found.report.overflow for found in results) <= 30
    assert len(sent) == 1
    assert all(abs(one - K) <= K / 4 for one in selected)
    assert results[0].report.overflow > 0  # of so many entries most do not fit
    assert results[0].sum.nnz <= 3 * math.ceil(1.5 * K / 3)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes_and_the_mean(ranks: list[Communicator], dtype: type[np.floating[Any]]) -> None:
    inputs = streams(dtype=dtype)
    states = [BoundedTopkState(1000, slack=3) for _ in ranks]
    for total, left, report in called(ranks, inputs, states, op="avg", wire="raw"):
        assert total.dtype == left.dtype == {np.float64: "f64", np.float16: "f16"}[dtype]
        assert report.overflow == left.nnz == 0
        right = sum(one.to_dense().astype(np.float64) for one in inputs) / SIZE
        np.testing.assert_allclose(total.to_dense(), right, rtol=4e-3 if dtype == np.float16 else 1e-12, atol=1e-3)


def test_coo_tensors_come_back_as_such(ranks: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")
    shaped = [x.to_coo((N // 10, 10), 2) for x in streams()]
    for total, left, _ in called(ranks, shaped, [BoundedTopkState(K) for _ in ranks]):
        assert total.shape == left.shape == (N // 10, 10)
        assert total.layout == torch.sparse_coo


def test_a_saved_state_goes_on_where_it_was(ranks: list[Communicator]) -> None:
    kept = [BoundedTopkState(K) for _ in ranks]
    called(ranks, streams(0), kept)
    saved = kept[0].state_dict()
    assert (saved["k"], saved["slack"], saved["boundaries_every"], saved["calls"]) == (K, 1.5, 64, 1)
    loaded, copied = [BoundedTopkState(K) for _ in ranks], [copy.deepcopy(state) for state in kept]
    for state in loaded:
        state.load_state_dict(saved)
    right = called(ranks, streams(1), kept)[0]
    for states in (loaded, copied):
        found = called(ranks, streams(1), states)[0]
        assert found.report == right.report
        assert not found.report.cut
        np.testing.assert_array_equal(found.sum.to_dense(), right.sum.to_dense())
    other = BoundedTopkState(K, slack=2)
    other.load_state_dict(saved)
    assert (other.calls, other.threshold, other.state_dict()["slices"]) == (0, 0.0, [])
    with pytest.raises(ValueError, match="state has no 'slack': it must come from state_dict"):
        other.load_state_dict(OkTopkState(K).state_dict())
    assert repr(kept[0]) == f"BoundedTopkState(k={K}, slack=1.5, boundaries_every=64, calls=2)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 0}, ValueError, "k=0 must be at least 1"),
        ({"k": 1, "boundaries_every": 0}, ValueError, "boundaries_every=0 must be"),
        ({"k": 1, "slack": 0.9}, ValueError, "slack=0.9 must be a finite number of 1 or more"),
        ({"k": 1, "slack": math.inf}, ValueError, "slack=inf must be a finite number"),
        ({"k": 1, "slack": math.nan}, ValueError, "slack=nan must be a finite number"),
        ({"k": 1, "slack": "2"}, TypeError, "slack='2' must be a number"),
        ({"k": 1, "slack": True}, TypeError, "slack=True must be a number"),
    ],
)
def test_settings_that_do_not_fit(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        BoundedTopkState(**arguments)


@pytest.mark.parametrize("wire", ["packed", "blocked", "indices", "packed-f32"])
def test_wires_whose_sizes_depend_on_entries_are_refused(ranks: list[Communicator], wire: str) -> None:
    with pytest.raises(
        ValueError, match=f"wire='{wire}' makes messages whose sizes depend on the entries, but those of a B"
    ):
        ranks[0].all_reduce_topk(streams()[0], BoundedTopkState(K), wire=wire)


def test_ranks_of_another_slack_or_kind_get_an_error() -> None:
    for other in (BoundedTopkState(K, slack=2), OkTopkState(K)):
        ranks = Communicator.local(2)
        inputs = streams()
        states = (BoundedTopkState(K), other)
        works = [
            rank.all_reduce_topk(inputs[0], state, async_op=True) for rank, state in zip(ranks, states, strict=True)
        ]
        for work in works:
            with pytest.raises(MismatchedCall, match="algorithm=bounded"):
                work.wait()
        assert states[0].calls == 0
        for rank in ranks:
            rank.close()
