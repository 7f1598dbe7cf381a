"""Rounds of DiLoCo: what exchanges take of the time, the shortest round, and lines of code that run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import telegrad
from telegrad import Communicator
from telegrad.cost.closed_forms import allreduce
from telegrad.tools.advise.outer import FORMATS, MOST_SHARE, OuterLoop, Round
from telegrad.tools.advise.sending import Cluster
from telegrad.tools.advise.workload import Workload, device_of, of_model
from telegrad.tools.sim.measure import network_of

torch = pytest.importorskip("torch")


def workload(**options: float) -> Workload:
    return of_model("gpt2-small", device_of("v100"), **options)


def loop(network: str = "100mbit", replicas: int = 4, compute_s: float = 1.0) -> OuterLoop:
    return OuterLoop.of(workload(compute_s=compute_s), Cluster(replicas, network_of(network).costs))


def test_what_a_round_takes() -> None:
    found = loop()
    assert (found.elements, found.layers, found.step_s) == (124_439_808, 15, pytest.approx(1.0))
    one = found.round_of("float32", 30, streams=False)
    expected_s = min(
        allreduce(name, 4, 4 * found.elements, found.cluster.costs).time_s
        for name in ("ring", "recursive_doubling", "rabenseifner")
    )
    assert one.exchange_s == one.exposed_s == pytest.approx(expected_s, rel=1e-6)
    assert one.share == pytest.approx(expected_s / (30 + expected_s), rel=1e-6)
    assert one.bytes == 1.5 * 4 * found.elements
    sparse = found.round_of("sparse", 30, streams=False)
    assert one.bytes * 2 / sparse.bytes == pytest.approx(4096 / 64 * 32 / 9.62, rel=1e-5)  # of one vector, 213
    assert found.round_of("qsgd4", 30, streams=False).bytes == pytest.approx(one.bytes / 8, rel=0.01)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("streams", [False, True])
def test_the_shortest_round_takes_little_and_a_shorter_one_does_not(kind: str, streams: bool) -> None:
    found = loop()
    least = found.least(kind, streams=streams)
    assert least.share <= MOST_SHARE
    if least.every > 1:
        assert found.round_of(kind, least.every - 1, streams=streams).share > MOST_SHARE


def test_streaming_hides_what_fits_beside_the_steps() -> None:
    found = loop(network="1gbit")
    waits, streams = (found.round_of("qsgd4", 30, streams=streams) for streams in (False, True))
    assert waits.exposed_s > 0
    assert streams.exposed_s == 0
    assert streams.fragments == 5
    assert streams.delay == math.ceil(streams.exchange_s / 5 / found.step_s) >= 1


def test_ranks_of_a_replica_sum_in_each_step() -> None:
    inside = Cluster(8, network_of("10gbit").costs)
    alone, together = (
        OuterLoop.of(replace(workload(compute_s=0.1), accumulate=3), loop().cluster, one) for one in (None, inside)
    )
    assert alone.step_s == pytest.approx(0.3)
    assert together.step_s > alone.step_s


@pytest.mark.parametrize(
    ("network", "compute_s", "expected"),
    [
        ("100gbit", 1.0, ("float32", 30, False)),
        ("1gbit", 1.0, ("float32", 30, True)),
        ("100mbit", 1.0, ("qsgd4", 30, True)),
        ("100mbit", 0.01, ("sparse", 57, True)),
    ],
)
def test_the_format_that_loses_least_is_recommended(
    network: str, compute_s: float, expected: tuple[str, int, bool]
) -> None:
    best = loop(network, compute_s=compute_s).recommended()
    assert (best.kind, best.every, best.streams) == expected
    assert best.share <= MOST_SHARE


def test_rounds_without_end_are_not_recommended() -> None:
    found = loop("1mbit", replicas=64, compute_s=1e-3)
    best = found.recommended()
    assert best.every == min(found.least(kind, streams=True).every for kind in FORMATS) > 500


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 2)])
def test_the_line_runs(kind: str, fragments: int, delay: int) -> None:
    one = Round(kind, 30, fragments, delay, 1.0, 1.0, 1.0, 0.0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with Communicator.local(1)[0] as comm:
        given = {"telegrad": telegrad, "model": model, "comm": comm}
        given["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
        exec(one.line, given)
        made = given["diloco"]
        assert isinstance(made, telegrad.DiLoCo)
        assert (len(made._fragments), made._delay, made._every) == (fragments, delay, 30)


def test_loops_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="1 replica exchanges nothing"):
        loop(replicas=1)
    trace = workload().trace
    idle = replace(trace, backward_times=(0.0,) * len(trace.names), forward_s=0.0)
    with pytest.raises(ValueError, match="a step takes no time"):
        OuterLoop.of(replace(workload(), trace=idle), loop().cluster)
