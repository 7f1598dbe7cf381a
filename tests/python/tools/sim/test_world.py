"""Simulated ranks: what a collective costs equals the formulas, and misuse is told."""

from __future__ import annotations

import numpy as np
import pytest

from telegrad import SparseVector, errors
from telegrad.cost import Costs, DecisionTable, Place, TableEntry, Tuning
from telegrad.tools import sim


def _sums(world: sim.World, inputs: list[np.ndarray], op: str = "sum", algorithm: str = "auto") -> list[np.ndarray]:
    outputs = [x.copy() for x in inputs]
    ranks = zip(world.communicators, outputs, strict=True)
    for work in [one.all_reduce(x, op, algorithm=algorithm, async_op=True) for one, x in ranks]:
        work.wait()
    return outputs


def _inputs(size: int, count: int) -> list[np.ndarray]:
    return [np.arange(count, dtype=np.float32) + rank for rank in range(size)]


def test_a_ring_costs_what_its_formula_says() -> None:
    alpha, beta, size, count = 1e-3, 1e-9, 4, 4000
    world = sim.World(size, alpha_s=alpha, beta_s_per_byte=beta)
    outputs = _sums(world, _inputs(size, count), algorithm="ring")
    expected = np.sum(_inputs(size, count), axis=0)
    assert all(np.array_equal(output, expected) for output in outputs)
    finish_s = [world.finish_s(rank) for rank in range(size)]
    assert finish_s == pytest.approx([6 * (alpha + 4 * count / size * beta)] * size, rel=1e-3)
    stats = [one.stats() for one in world.communicators]
    assert [one["bytes_sent"] for one in stats] == [2 * 3 * 4 * count // size] * size
    assert [one["messages_sent"] for one in stats] == [6] * size
    world.close()


def test_doubling_sends_log2_messages() -> None:
    world = sim.World(8)
    outputs = _sums(world, _inputs(8, 10), "avg", "recursive_doubling")
    assert [one.stats()["messages_sent"] for one in world.communicators] == [3] * 8
    assert np.array_equal(outputs[0], np.arange(10) + np.float32(3.5))
    world.close()


def test_a_tuning_chooses_for_simulated_ranks_too() -> None:
    place = Place("sim", (("here", 8),))
    table = DecisionTable(8, (TableEntry(0, "ring"), TableEntry(1000, "recursive_doubling")))
    world = sim.World(8)
    for communicator in world.communicators:
        communicator.use(Tuning(place, Costs(), table, "2026-11-21", "0.1.0", 0.0))
    sent = []
    for count in (249, 250):
        works = [one.all_reduce(np.ones(count, np.float32), async_op=True) for one in world.communicators]
        for work in works:
            work.wait()
        sent.append(world.communicators[0].stats()["messages_sent"])
    assert (sent[0], sent[1] - sent[0]) == (14, 3)
    world.close()


def test_the_same_seed_gives_the_same_times() -> None:
    def times(seed: int) -> list[float]:
        world = sim.World(7, jitter=5.0, seed=seed)
        _sums(world, _inputs(7, 1000))
        return [world.finish_s(rank) for rank in range(7)]

    assert times(1) == times(1) != times(2)


def test_a_world_runs_sparse_sums_in_virtual_time() -> None:
    world = sim.World(3, alpha_s=1.0)
    streams = [SparseVector(np.array([rank], np.uint32), np.ones(1, np.float32), 10) for rank in range(3)]
    works = [
        communicator.all_reduce(stream, async_op=True)
        for communicator, stream in zip(world.communicators, streams, strict=True)
    ]
    assert np.array_equal(works[2].result().to_dense()[:4], [1, 1, 1, 0])
    assert world.now_s >= 2.0
    assert world.communicators[0].driver == "sim"
    world.close()


def test_waiting_for_an_operation_that_others_never_begin_is_an_error() -> None:
    world = sim.World(2)
    with pytest.raises(errors.TransportError, match="begin each operation on all ranks"):
        world.communicators[0].barrier()


@pytest.mark.parametrize("cost", ["alpha_s", "beta_s_per_byte", "gamma_s_per_byte", "jitter"])
def test_negative_costs_are_refused(cost: str) -> None:
    with pytest.raises(ValueError, match=f"{cost}=-1.0 must not be negative"):
        sim.World(2, **{cost: -1.0})


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        sim.World(0)
