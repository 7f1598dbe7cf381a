"""What ranks give: entries of recorded gradients, with residuals, and patterns."""

from __future__ import annotations

import numpy as np
import pytest
from topk_recordings import recording

from lab.topk import streams
from lab.topk.streams import PATTERNS, SelectingRank, pattern_stream, streams_of, streams_of_rank, wanted
from telegrad import SparseVector


def test_what_is_not_selected_or_not_kept_comes_again() -> None:
    found = recording()
    rank = SelectingRank(found, 0.01, "topk")
    gradient = found.gradient(0, 0)
    first = rank.select(gradient.copy())
    assert first.nnz == wanted(found, 0.01) == 30 + 5 + 1
    rank.take_back(first)
    again = rank.select(np.zeros_like(gradient) + np.float32(1e-9))
    assert again.indices.tolist() == first.indices.tolist()
    assert np.allclose(again.values, first.values)


def test_ranks_give_the_same_however_many_there_are() -> None:
    found = recording()
    few = streams_of(found, 0.01, "reused", lambda rank: 3, 2)
    many = streams_of(found, 0.01, "reused", lambda rank: 3 if rank < 2 else 1, 4)
    assert [len(call) for call in few] == [2, 2, 2]
    assert [len(call) for call in many] == [4, 2, 2]
    for ours, theirs in zip(few, many, strict=True):
        for one, other in zip(ours, theirs, strict=False):
            assert np.array_equal(one.indices, other.indices)
            assert np.array_equal(one.values, other.values)


def test_gradients_side_by_side_make_a_larger_model() -> None:
    found = recording()
    calls = streams_of_rank(found, 0.01, "topk", 2, 1, 3)
    assert [one.n for one in calls] == [3 * found.elements] * 2
    for one in calls:
        SparseVector(one.indices, one.values, one.n)  # checks the order
        assert [int(np.count_nonzero(one.indices // found.elements == block)) for block in range(3)] == [36] * 3
    alone = streams_of_rank(found, 0.01, "topk", 1, 1, 1)[0]
    first = calls[0].indices < found.elements
    assert np.array_equal(calls[0].indices[first], alone.indices)


def test_more_elements_than_a_stream_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_LENGTH", 5000)
    with pytest.raises(ValueError, match="blocks=2 of 3,520 elements"):
        streams_of_rank(recording(), 0.01, "topk", 1, 0, 2)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_are_what_they_say(name: str) -> None:
    ranks, n, k = 4, 1000, 20
    given = [
        [pattern_stream(name, rank, ranks, call, n, k).indices.astype(int) for rank in range(ranks)]
        for call in range(2)
    ]
    slices = [[sorted({int(index) * ranks // n for index in one}) for one in call] for call in given]
    match name:
        case "one-slice":
            assert slices == [[[0]] * ranks] * 2
        case "one-rank-elsewhere":
            assert slices == [[[3], [0], [0], [0]]] * 2
        case "gone-stale":
            assert slices == [[[0]] * ranks, [[1]] * ranks]
        case "identical":
            assert all(np.array_equal(one, call[0]) for call in given for one in call)
        case "disjoint":
            assert slices == [[[0], [1], [2], [3]]] * 2
    assert all(one.size == k for call in given for one in call)
