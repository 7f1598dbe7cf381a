"""all_reduce_topk with a GTopkState: what the tree keeps, and that nothing is lost. Ranks of this process."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad import Communicator, GTopkState, MismatchedCall, OkTopkState, SparseVector
from telegrad.communicator import TopkSum
from topk_references import Entries, added, by_tree


def stream(entries: Entries, n: int) -> SparseVector:
    indices = np.array(sorted(entries), np.uint32)
    return SparseVector(indices, np.array([entries[int(index)] for index in indices], np.float32), n)


def entries_of(found: SparseVector) -> Entries:
    return dict(zip(found.indices.tolist(), found.values.tolist(), strict=True))


def called(comms: list[Communicator], inputs: list[Any], k: int, **options: Any) -> list[TopkSum]:
    works = [
        comm.all_reduce_topk(x, GTopkState(k), async_op=True, **options) for comm, x in zip(comms, inputs, strict=True)
    ]
    return [work.result() for work in works]


@pytest.fixture(scope="module", params=[1, 2, 3, 5, 8, 13])
def comms(request: pytest.FixtureRequest) -> Any:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(comm) for comm in Communicator.local(request.param)]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_a_tree_keeps_and_that_nothing_is_lost(comms: list[Communicator], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    k = data.draw(st.integers(1, 6))
    of_rank = st.dictionaries(st.integers(0, n - 1), st.integers(-3, 3).map(float))  # many ties, and sums of zero
    held = [data.draw(of_rank) for _ in comms]
    wire = data.draw(st.sampled_from(["raw", "blocked", "packed"]))
    results = called(comms, [stream(one, n) for one in held], k, wire=wire)
    kept, left = by_tree(held, k)
    together = entries_of(results[0].sum)
    for found, expected, own in zip(results, left, held, strict=True):
        assert entries_of(found.sum) == kept
        assert entries_of(found.left) == expected
        report = found.report
        assert (report.selected, report.local_most) == (len(kept), len(own))
        assert report.overflow == max(0, len(own) - k)
        assert max(report.words_sent, report.words_received) <= 2 * k * (len(comms) - 1).bit_length()
        together = added(together, expected)
    assert together == functools.reduce(added, held)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_dtypes_and_the_mean(comms: list[Communicator], dtype: type[np.floating[Any]]) -> None:
    values = np.array([4, -8, 2], dtype)
    inputs = [SparseVector(np.array([1, 5, 9], np.uint32), values, 20)] * len(comms)
    for total, left, _ in called(comms, inputs, 2, op="avg"):
        assert total.dtype == left.dtype == {np.float64: "f64", np.float16: "f16"}[dtype]
        assert entries_of(total) == {1: 4.0, 5: -8.0}
        assert entries_of(left) == {9: 2.0}


def test_coo_tensors_come_back_as_such(comms: list[Communicator]) -> None:
    torch = pytest.importorskip("torch")
    x = stream({3: 2.0, 4: 1.0}, 20).to_coo((2, 10), 2)
    for total, left, _ in called(comms, [x] * len(comms), 1):
        assert total.layout == left.layout == torch.sparse_coo
        assert total.shape == left.shape == (2, 10)
        assert total.to_dense()[0, 3] == 2.0 * len(comms)
        assert left.to_dense()[0, 4] == 1.0


@pytest.mark.parametrize("others", [GTopkState(8), OkTopkState(7)], ids=["k", "kind"])
def test_ranks_of_another_k_or_kind_get_an_error(others: Any) -> None:
    ranks = Communicator.local(2)
    x = stream({3: 2.0}, 20)
    works = [
        rank.all_reduce_topk(x, state, async_op=True)
        for rank, state in zip(ranks, (GTopkState(7), others), strict=True)
    ]
    for work in works:
        with pytest.raises(MismatchedCall, match=re.escape("algorithm=gtopk")):
            work.wait()
    for rank in ranks:
        rank.close()


def test_a_state_has_nothing_but_its_k() -> None:
    state = GTopkState(7)
    assert state.state_dict() == {"k": 7}
    assert repr(state) == "GTopkState(k=7)"
    other = GTopkState(8)
    other.load_state_dict(state.state_dict())
    assert other.k == 8
    with pytest.raises(ValueError, match="state has no 'k': it must come from state_dict"):
        other.load_state_dict({})
    with pytest.raises(ValueError, match="k=0 must be at least 1"):
        GTopkState(0)
    with pytest.raises(TypeError, match=re.escape("k=1.5 must be an int")):
        GTopkState(1.5)  # type: ignore[arg-type]
