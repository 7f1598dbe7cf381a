"""Messages between two ranks and groups of ranks, on every driver: contents, order, and how they end with a peer."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import messages_program
import program
import pytest
from cases import groups, numbers_of
from cases_moves import DIFFERS_BY_RANK
from joined import DRIVER, MPI_MISSING
from messages_program import ONE_IN

from telegrad import Communicator, _core
from telegrad.launch import SINGLE_THREADED, Ranks
from telegrad.tools import sim

_ENVIRONMENT = {
    **SINGLE_THREADED,
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
}
_needs_ucx = pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")
_OVER_MPI = pytest.param("mpi", marks=pytest.mark.skipif(bool(MPI_MISSING), reason=MPI_MISSING))
pytestmark = pytest.mark.timeout(240)


def _said(function: str, size: int, transports: str = "all") -> dict[int, list[dict[str, Any]]]:
    said: dict[int, list[dict[str, Any]]] = defaultdict(list)

    def take(rank: int, line: str) -> None:
        if line.startswith("{"):  # UCX may complain of a peer that is gone
            said[rank].append(json.loads(line))

    with Ranks(
        f"messages_program:{function}",
        size,
        timeout_s=200.0,
        environment={**_ENVIRONMENT, **({DRIVER: "mpi"} if transports == "mpi" else {"UCX_TLS": transports})},
        on_line=take,
        mpich=transports == "mpi",
    ) as ranks:
        ranks.wait(until_all=True)
    return said


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_messages_of_one_process(size: int) -> None:
    communicators = Communicator.local(size, timeout_s=60.0)
    faults = [fault for first in (True, False) for fault in messages_program.exchange(communicators, sends_first=first)]
    faults += messages_program.from_anybody(communicators)
    for communicator in communicators:
        communicator.close()
    assert faults == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_messages_in_virtual_time(size: int) -> None:
    for seed in range(5):
        communicators = sim.World(size, seed=seed, jitter=20.0).communicators
        for first in (True, False):
            assert list(messages_program.exchange(communicators, sends_first=first)) == []
        assert list(messages_program.from_anybody(communicators)) == []


@_needs_ucx
@pytest.mark.parametrize("transports", ["all", "tcp", _OVER_MPI])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_messages_of_processes(size: int, transports: str) -> None:
    said = _said("exchange_main", size, transports)
    assert said == {rank: [{"done": rank}] for rank in range(size)}


def _look_at(found: list[tuple[int, program.Outcome]]) -> None:
    faults = [f"{outcome['case']}: {outcome['fault']}" for _, outcome in found if outcome["fault"]]
    results: dict[tuple[int, int, int], list[program.Outcome]] = defaultdict(list)
    for color, outcome in found:
        results[color, outcome["group"], outcome["case"]].append(outcome)
    sizes = {0: 3, 1: 5}
    asked = {color: groups(size) for color, size in sizes.items()}
    wanted = {
        (color, number, place)
        for color, of_size in asked.items()
        for number in numbers_of(of_size, ONE_IN)
        for place in range(len(of_size[number].cases))
    }
    assert set(results) == wanted
    for (color, group, index), outcomes in results.items():
        assert sorted(outcome["rank"] for outcome in outcomes) == list(range(sizes[color]))
        case = asked[color][group].cases[index]
        if case.operation not in DIFFERS_BY_RANK and len({outcome["digest"] for outcome in outcomes}) != 1:
            faults.append(f"{case}: ranks hold different bits")
    assert faults == []


@_needs_ucx
@pytest.mark.parametrize("transports", ["all", _OVER_MPI])
def test_collectives_in_groups_of_processes(transports: str) -> None:
    said = _said("groups_main", len(messages_program.COLORS), transports)
    _look_at([(one.pop("color"), program.Outcome(**one)) for lines in said.values() for one in lines])  # type: ignore[typeddict-item]


def test_collectives_in_groups_of_threads() -> None:
    communicators = Communicator.local(len(messages_program.COLORS), timeout_s=60.0)
    _look_at(messages_program.groups_of_threads(communicators))
    for communicator in communicators:
        communicator.close()


@_needs_ucx
@pytest.mark.parametrize("transports", ["all", _OVER_MPI])
def test_what_a_closed_peer_has_sent_is_received_and_what_it_has_not_fails_at_once(transports: str) -> None:
    said = _said("leave_without_sending", 3, transports)
    right, *failures = [*said[0], *said[2]]
    assert right == {"right": True}
    assert len(failures) == 2
    for failure in failures:
        assert (failure["error"], failure["peer"]) == ("PeerFailed", 1)
        assert failure["took_s"] < 20.0  # not after the time-out


@_needs_ucx
@pytest.mark.ranks("exec")
@pytest.mark.parametrize("transports", ["all", _OVER_MPI])
def test_a_death_ends_the_group_and_its_parent(transports: str) -> None:
    said = _said("die_in_a_group", 3, transports)
    assert [(one["error"], one["peer"]) for one in said[0]] == [("PeerFailed", 1)]
    assert [(one["error"], one["peer"]) for one in said[2]] == [("PeerFailed", 0), ("PeerFailed", 1)]
    in_group, in_parent = said[2]
    assert (in_group["group"], in_group["parent_peer"]) == ("split(color=0)", 1)
    assert "[split(color=0): ranks 0, 1 here are ranks 1, 2 of its parent]" in in_group["text"]
    assert (in_parent["group"], in_parent["parent_peer"]) == (None, None)


@_needs_ucx
@pytest.mark.parametrize("transports", ["all", _OVER_MPI])
def test_a_failure_in_a_group_leaves_its_parent_usable(transports: str) -> None:
    said = _said("fail_in_a_group_only", 2, transports)
    assert said == {rank: [{"error": "MismatchedCall", "peer": 1}, {"right": True}] for rank in range(2)}
