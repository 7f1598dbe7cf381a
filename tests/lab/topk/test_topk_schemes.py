"""Schemes that sum what ranks have selected: their words against what goes over the wire, results, bounds, time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.topk.schemes import SCHEMES, Dense, TopkA, TopkDSA, least_words, most_words, overlap_of, paper_words
from telegrad import SparseVector
from telegrad.cost import Costs
from telegrad.tools.sim import World
from telegrad.tools.sim.measure import Network

NETWORK = Network(Costs(alpha_s=1e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=1e-9))
N, K = 10_000, 100
_HEADER_MOST = 32 + 3 * 8  # of a message: a header, and three sections' padding


def _streams(ranks: int, seed: int = 0, n: int = N, k: int = K) -> list[SparseVector]:
    found = []
    for rank in range(ranks):
        random = np.random.default_rng([seed, rank])
        indices = np.sort(random.choice(n, k, replace=False)).astype(np.uint32)
        found.append(SparseVector(indices, random.standard_normal(k).astype(np.float32), n))
    return found


def _sum(streams: list[SparseVector]) -> np.ndarray:
    return np.sum([one.to_dense() for one in streams], axis=0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_words_of_a_split_are_what_goes_over_the_wire(ranks: int) -> None:
    streams = _streams(ranks, n=1000, k=200)  # slices of the sum fill in, and some go densely
    found = TopkDSA(ranks, 1000, 200, NETWORK).call(streams)
    world = World(ranks)
    for work in [
        comm.all_reduce(one, algorithm="split_allgather", wire="raw", async_op=True)
        for comm, one in zip(world.communicators, streams, strict=True)
    ]:
        work.wait()
    for rank, comm in enumerate(world.communicators):
        counted = comm.stats()
        for words, direction in ((found.words_sent, "sent"), (found.words_received, "received")):
            beside = counted[f"bytes_{direction}"] - 4 * int(words[rank])
            assert 0 <= beside <= _HEADER_MOST * counted[f"messages_{direction}"]
    assert found.kept == np.count_nonzero(_sum(streams))
    world.close()


def test_gathering_moves_all_entries_of_all_others() -> None:
    streams = [*_streams(3), *_streams(1, k=7)]
    found = TopkA(4, N, K, NETWORK).call(streams, split=True)
    assert found.words_received.tolist() == [2 * 207, 2 * 207, 2 * 207, 2 * 300]
    assert found.words_sent.sum() == found.words_received.sum()
    assert (found.given, found.kept) == (K, np.count_nonzero(_sum(streams)))
    assert found.communication_s is not None
    assert found.time_s - found.communication_s == pytest.approx(307 * 8 * 1e-9)


def test_ok_topk_keeps_the_largest_sums_and_hands_back_the_rest() -> None:
    scheme = SCHEMES["oktopk"].make(8, N, K, NETWORK)
    for call in range(3):
        streams = _streams(8, call)
        found = scheme.call(streams, split=True)
        assert found.words_max <= most_words(max(found.given, found.kept), 8)
        assert found.left is not None
        assert found.result is not None
        total = _sum(streams)
        kept = found.result.indices.astype(np.int64)
        if call == 0:
            assert found.kept == K
            assert np.abs(total[kept]).min() >= np.sort(np.abs(total))[-K]
        assert np.allclose(found.result.values, total[kept])
        assert abs(found.kept - K) <= K / 4
        for mine, left in zip(streams, found.left, strict=True):
            assert not set(left.indices) & set(kept)
            assert left.nnz + np.isin(mine.indices, kept).sum() == mine.nnz
        assert found.communication_s is not None
        assert 0 < found.communication_s < found.time_s


def test_gtopk_keeps_k_entries_and_loses_nothing() -> None:
    scheme = SCHEMES["gtopk"].make(8, N, K, NETWORK)
    streams = _streams(8)
    found = scheme.call(streams)
    assert found.kept == K
    assert found.words_max <= 4 * K * 3
    assert found.left is not None
    assert found.result is not None
    whole = _sum([found.result, *found.left])
    assert np.allclose(whole, _sum(streams), atol=1e-5)


def test_what_of_the_time_is_communication_is_the_time_where_reduction_costs_nothing() -> None:
    free = replace(NETWORK, costs=replace(NETWORK.costs, gamma_s_per_byte=0.0))
    for name, entry in SCHEMES.items():
        split = entry.make(4, N, K, NETWORK).call(_streams(4), split=True)
        alone = entry.make(4, N, K, free).call(_streams(4))
        assert split.communication_s == alone.time_s, name
        assert alone.communication_s is None, name


def test_a_sum_too_large_to_be_simulated_with_values_is_simulated_with_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = _streams(8)
    with_values = TopkDSA(8, N, K, NETWORK).call(streams)
    monkeypatch.setattr("lab.topk.schemes._LONGEST_RUN", 4)
    with_sizes = TopkDSA(8, N, K, NETWORK).call(streams)
    assert (with_values.payloads, with_sizes.payloads) == ("values", "sizes")
    assert with_sizes.words_max == with_values.words_max
    assert with_sizes.time_s == pytest.approx(with_values.time_s, rel=0.2)


def test_a_dense_sum_moves_the_vector_twice() -> None:
    found = Dense(4, N, K, NETWORK).call(())
    assert found.words_max == pytest.approx(2 * 3 / 4 * N, rel=0.01)
    assert (found.kept, found.given) == (N, N)


def test_bounds() -> None:
    assert (least_words(100, 4), paper_words(100, 4), most_words(100, 4)) == (150, 450, 720)
    assert most_words(100, 64) == 728


def test_overlap_is_found_from_the_entries_of_a_sum() -> None:
    assert overlap_of(N, K, 8, K) == pytest.approx(1.0, abs=1e-3)
    independent = N * (1 - (1 - K / N) ** 8)
    assert overlap_of(N, K, 8, round(independent)) == pytest.approx(0.0, abs=0.01)
    assert 0.3 < overlap_of(N, K, 8, (K + round(independent)) // 2) < 0.7


def test_a_network_of_two_levels_is_refused() -> None:
    with pytest.raises(ValueError, match="two levels or noise"):
        Dense(4, N, K, replace(NETWORK, ranks_per_node=2))
