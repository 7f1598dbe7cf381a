"""Replicas in processes that are killed, frozen and started while the others train."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from replicas import network, train
from threaded_ranks import on_ranks

import telegrad
from telegrad.diloco import ReplicaGroup
from telegrad.diloco.membership import state_of_rank
from telegrad.errors import RendezvousError

torch = pytest.importorskip("torch")
import membership_program  # noqa: E402 - it needs torch
from membership_program import EVERY, LIVENESS_S  # noqa: E402
from torch.distributed import HashStore, TCPStore  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # processes start slowly on a busy machine
PATIENCE_S = 100.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["telegrad.diloco", "pytest"])  # which Python 3.11 finds, as it does not find tests


class Job:
    """Replicas, their store, and what they have said."""

    def __init__(self, folder: Path, replicas: int, kind: str) -> None:
        self._folder, self._replicas, self._kind = folder, replicas, kind
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[int, BaseProcess] = {}
        for _ in range(replicas):
            self.start()

    def start(self) -> int:
        number = len(self.processes)
        arguments = (self.store.port, self._replicas, number, self._kind, str(self._folder / f"{number}.jsonl"))
        self.processes[number] = _context.Process(target=membership_program.main, args=arguments, daemon=True)
        self.processes[number].start()
        return number

    def send(self, number: int, what: signal.Signals) -> None:
        process = self.processes[number].pid
        assert process is not None
        os.kill(process, what)

    def said(self, number: int) -> list[dict[str, Any]]:
        path = self._folder / f"{number}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rounds(self, number: int) -> list[int]:
        return [one["round"] for one in self.said(number) if "round" in one]

    def wait_for(self, happens: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happens():
            assert time.monotonic() < deadline_s, {number: self.said(number)[-3:] for number in self.processes}
            time.sleep(0.02)

    def wait_for_rounds(self, number: int, more: int = 5) -> None:
        goal = len(self.rounds(number)) + more
        self.wait_for(lambda: len(self.rounds(number)) >= goal)

    def finish(self, numbers: list[int]) -> None:
        """These end with one round, and in each round all who have ended it have the same bits."""
        self.store.set("last", str(max(self.rounds(numbers[0])) + 12))
        for number in numbers:
            self.processes[number].join(PATIENCE_S)
            assert self.processes[number].exitcode == 0, self.said(number)[-3:]
        bits: defaultdict[Any, set[Any]] = defaultdict(set)
        for number in self.processes:
            for one in self.said(number):
                if "round" in one:
                    bits[one["round"]].add(one["checksum"])
        for number in numbers:
            last = next(one for one in self.said(number) if "ended" in one)
            bits["end"].add((last["ended"], last["checksum"]))
        assert bits
        assert {number: found for number, found in bits.items() if len(found) > 1} == {}

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(replicas: int, kind: str = "dense") -> Job:
        made.append(Job(tmp_path, replicas, kind))
        return made[-1]

    yield make
    for one in made:
        one.close()


def warnings_of(job: Job, number: int) -> str:
    return "\n".join(one["warned"] for one in job.said(number) if "warned" in one)


@pytest.mark.parametrize("kind", ["dense", "sparse", "streaming"])
def test_a_replica_that_is_killed_costs_its_own_round_only(job: Callable[..., Job], kind: str) -> None:
    running = job(3, kind)
    running.wait_for_rounds(0)
    running.send(1, signal.SIGKILL)
    running.wait_for_rounds(0)
    running.finish([0, 2])
    for number in (0, 2):
        assert "an exchange failed, so the replicas agree on who is left" in warnings_of(running, number)
        rounds = [one for one in running.said(number) if "round" in one]
        assert {one["size"] for one in rounds} == {3, 2}
        if kind != "streaming":
            assert all(one["step"] == EVERY * one["round"] for one in rounds)  # no step is lost


def test_a_round_that_one_replica_has_ended_all_end(job: Callable[..., Job]) -> None:
    """Where the last message of a round reaches some replicas only. Nobody loses a step, or a residual."""
    running = job(2, "half a round")
    running.wait_for_rounds(0, 8)
    running.finish([0, 1])
    for number in (0, 1):
        assert running.rounds(number)[3] == 4
        assert "a residual of norm" not in warnings_of(running, number)
    assert "the test says so" in warnings_of(running, 1)
    steps = {one["round"]: one["step"] for one in running.said(0) if "round" in one}
    assert all(step == EVERY * number for number, step in steps.items())


def test_a_replica_that_has_diverged_leaves_and_may_join_anew(job: Callable[..., Job]) -> None:
    running = job(2, "diverges")
    running.wait_for(lambda: any("diverged" in one for one in running.said(1)))
    running.wait_for(lambda: running.said(0)[-1].get("size") == 2 and running.said(1)[-1].get("size") == 2)
    running.wait_for_rounds(1)
    running.finish([0, 1])
    (told,) = [one["diverged"] for one in running.said(1) if "diverged" in one]
    assert "entries of '0.weight' have become NaN or infinite" in told
    (left,) = [one["left"] for one in running.said(1) if "left" in one]
    assert "this replica has left its ReplicaGroup: close() this DiLoCo, and make another" in left
    assert "have become NaN or infinite" in warnings_of(running, 0)


def test_a_replica_that_leaves_is_not_waited_for(job: Callable[..., Job]) -> None:
    running = job(2, "leaves")
    running.wait_for(lambda: any(one.get("size") == 1 for one in running.said(0)))
    running.finish([0])
    assert running.processes[1].exitcode == 0
    steps = [(one["round"], one["step"]) for one in running.said(0) if "round" in one]
    assert all(step == EVERY * number for number, step in steps)


def test_replicas_that_differ_are_told_in_a_group_too(job: Callable[..., Job]) -> None:
    running = job(2, "differs")
    for number in (0, 1):
        running.wait_for(lambda number=number: any("error" in one for one in running.said(number)))  # type: ignore[misc]
        assert "the common parameters of rank 1 and rank 0 differ after round 6" in running.said(number)[-1]["error"]


def test_connections_that_never_come_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise telegrad.TransportError("the test says so")

    monkeypatch.setattr(telegrad.Communicator, "from_exchange", refuse)
    group = ReplicaGroup(HashStore(), 1)
    with pytest.raises(RendezvousError, match="the replicas agreed 20 times on a group, and each time some did not"):
        group.regroup(admit=True)
    group.leave()


def test_a_store_that_is_gone() -> None:
    group = ReplicaGroup(HashStore(), 1)
    group._store = None
    with pytest.raises(RendezvousError, match="the store of the replicas is gone: is the process that serves it"):
        group.regroup(admit=True)


def test_a_replica_that_wakes_up_takes_part_again(job: Callable[..., Job]) -> None:
    running = job(3, "sparse")
    running.wait_for_rounds(0)
    running.send(1, signal.SIGSTOP)
    running.wait_for(lambda: any(one.get("size") == 2 for one in running.said(0)))
    running.wait_for_rounds(0)
    running.send(1, signal.SIGCONT)
    running.wait_for(lambda: running.said(0)[-1].get("size") == 3)
    running.wait_for_rounds(1)
    running.finish([0, 1, 2])
    assert "this replica was away, and takes a peer's parameters over: a residual of norm" in warnings_of(running, 1)
    rounds = running.rounds(1)
    assert rounds[-1] - rounds[0] + 1 > len(rounds)  # it has missed some


@pytest.mark.parametrize("kind", ["dense", "streaming"])
def test_a_replica_that_comes_later_is_in_by_the_next_round(job: Callable[..., Job], kind: str) -> None:
    running = job(2, kind)
    running.wait_for_rounds(0)
    number = running.start()
    running.wait_for_rounds(number)
    running.finish([0, 1, number])
    (began,) = [one for one in running.said(number) if "began" in one]
    assert began["began"] >= 5
    (peer,) = [one for one in running.said(0) if one.get("round") == began["began"]]
    assert began["checksum"] == peer["checksum"]
    assert running.rounds(number)[0] == began["began"] + 1
    assert warnings_of(running, 0) == ""


def test_the_last_replica_goes_on_alone_and_takes_others_in(job: Callable[..., Job]) -> None:
    running = job(3)
    running.wait_for_rounds(2)
    running.send(0, signal.SIGKILL)  # also the one that looks for newcomers
    running.send(1, signal.SIGKILL)
    running.wait_for(lambda: any(one.get("size") == 1 for one in running.said(2)))
    number = running.start()
    running.wait_for_rounds(number)
    running.finish([2, number])


def disturb(running: Job, chance: random.Random, events: int) -> list[int]:
    """Kills, freezes and starts replicas at random moments, of two to five; returns those that are left."""
    alive = [*running.processes]
    for _ in range(events):
        time.sleep(chance.uniform(0, 1.5))
        what = "start" if len(alive) < 3 else chance.choice(["kill", "freeze", "start" if len(alive) < 5 else "kill"])
        if what == "start":
            alive.append(running.start())
            running.wait_for_rounds(alive[-1], 1)
            continue
        victim = chance.choice(alive[1:])
        if what == "kill":
            running.send(victim, signal.SIGKILL)
            alive.remove(victim)
        else:
            running.send(victim, signal.SIGSTOP)
            time.sleep(chance.choice([0.1, 1.5 * LIVENESS_S, 3 * LIVENESS_S]))
            running.send(victim, signal.SIGCONT)
        running.wait_for_rounds(alive[0], 1)
    for number in alive:
        running.wait_for_rounds(number, 1)
    return alive


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["dense", "sparse", "streaming"])
def test_random_changes_of_members(job: Callable[..., Job], kind: str) -> None:
    running = job(3, kind)
    running.wait_for_rounds(0)
    alive = disturb(
        running, random.Random(f"{kind} {os.environ.get('SEED', '0')}"), int(os.environ.get("EVENTS", "20"))
    )
    running.finish(alive)
    check_is_flat([one for one in running.said(0) if "round" in one])


def check_is_flat(rounds: list[dict[str, Any]]) -> None:
    """The replica that lived through all changes holds no more descriptors at the end than at the start, for as many
    replicas, and little more memory."""
    first, last = rounds[: len(rounds) // 4], rounds[-len(rounds) // 4 :]
    for size in {one["size"] for one in first} & {one["size"] for one in last}:
        before, after = ([one for one in part if one["size"] == size] for part in (first, last))
        print(f"{size} replicas: {spread(before)} -> {spread(after)}")
        assert min(one["descriptors"] for one in after) <= max(one["descriptors"] for one in before)
    assert rounds[-1]["resident"] < 1.2 * max(one["resident"] for one in first)


def spread(rounds: list[dict[str, Any]]) -> str:
    resident, descriptors = ([one[kind] for one in rounds] for kind in ("resident", "descriptors"))
    return (
        f"{min(resident) / 2**20:.1f} to {max(resident) / 2**20:.1f} MiB, {min(descriptors)} to {max(descriptors)} "
        "descriptors"
    )


def test_a_newcomer_with_other_options_is_told_and_the_others_go_on(job: Callable[..., Job]) -> None:
    running = job(2)
    running.wait_for_rounds(0)
    running._kind = "sparse"
    number = running.start()
    running.wait_for(lambda: any("error" in one for one in running.said(number)))
    assert "this replica's model or options differ from those of rank 0" in running.said(number)[-1]["error"]
    running.wait_for_rounds(0)
    running.finish([0, 1])


def test_a_newcomer_does_not_begin_anew_where_all_others_are_gone(job: Callable[..., Job]) -> None:
    running = job(2)
    running.wait_for_rounds(0)
    for number in (0, 1):
        running.send(number, signal.SIGKILL)
    number = running.start()
    running.wait_for(lambda: any("error" in one for one in running.said(number)))
    assert "all replicas of the group are gone, so nobody has the parameters" in running.said(number)[-1]["error"]


def test_a_newcomer_that_nobody_takes_in_is_told() -> None:
    model = network()
    group = ReplicaGroup(HashStore(), 2, timeout_s=0.3)
    with pytest.raises(RendezvousError, match="not taken in within 0.3 s: are 2 replicas running"):
        telegrad.DiLoCo(model, group, torch.optim.SGD(model.parameters(), 0.1))
    group.leave()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"store": 3}, TypeError, "store is a int: give a torch.distributed.Store"),
        ({"replicas": 0}, ValueError, "replicas=0 must be at least 1"),
        ({"replicas": "x"}, TypeError, "replicas='x'"),
        ({"name": 3}, TypeError, "name=3 must be a str"),
        ({"timeout_s": 0}, ValueError, "timeout_s=0 must be above 0"),
        ({"liveness_timeout_s": -1}, ValueError, "liveness_timeout_s=-1 must be above 0"),
        ({"join_timeout_s": 0}, ValueError, "join_timeout_s=0 must be above 0"),
    ],
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    given: dict[str, Any] = {"store": HashStore(), "replicas": 2, **arguments}
    with pytest.raises(error, match=match):
        ReplicaGroup(given.pop("store"), given.pop("replicas"), **given)


def test_a_state_travels_as_it_is() -> None:
    """Also that of an Adam, with a tensor for its rate, numbers as keys, tuples, and nothing."""

    def run(comm: telegrad.Communicator) -> str:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), torch.tensor(0.01), betas=(0.8, 0.9))
        train(model, optimizer, 0, range(2))
        state = {
            "outer": optimizer.state_dict(),
            "none": None,
            "empty": torch.zeros(0),
            "half": torch.ones(3).bfloat16(),
        }
        sent = state if comm.rank == 1 else {"outer": 3}
        found = state_of_rank(1, sent, comm)
        assert isinstance(found["outer"]["param_groups"][0]["betas"], tuple)
        assert str(found) == str(state)
        return str(found)

    first, second = on_ranks(2, run)
    assert first == second
