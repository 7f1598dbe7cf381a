"""Replicas in processes that are killed, frozen and started while the others train."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replicas import network, train
from threaded_ranks import on_ranks

import telegrad
from telegrad.communicator.nodes import process_mark
from telegrad.ddp import GatheredState, RankState
from telegrad.diloco import ReplicaGroup, nesterov
from telegrad.errors import RendezvousError

torch = pytest.importorskip("torch")
import membership_program  # noqa: E402 - it needs torch
import torch.distributed.checkpoint as dcp  # noqa: E402
from membership_program import EVERY, RANKS  # noqa: E402
from torch.distributed import HashStore, TCPStore  # noqa: E402
from watched_processes import LIVENESS_S, PATIENCE_S, PATIENT_S, Job, context  # noqa: E402

pytestmark = pytest.mark.timeout(400)  # processes start slowly on a busy machine


class ReplicaJob(Job):
    """Of replicas with several ranks each, where the kind says so."""

    unit = "round"
    several = 5

    def __init__(self, folder: Path, replicas: int, kind: str, *more: Any, port: int = 0) -> None:
        super().__init__(folder, replicas, kind, membership_program.main, *more, port=port)
        self.ranks = RANKS if "ranks" in kind else 1
        self.start(replicas)

    def start(self, count: int = 1) -> int:
        """The number of the last one's first rank."""
        return super().start(count * self.ranks) - self.ranks + 1

    def alike(self, number: int, one: dict[str, Any]) -> dict[Any, Any]:
        position = number % self.ranks  # ranks of a replica have different parts
        found = {(key, position): value for key, value in super().alike(number, one).items()}
        if "weights" in one and "streaming" not in self.kind and "freezes" not in self.kind:  # else some are their own
            found["weights", one["round"], position if "shards" in self.kind else 0] = one["weights"]
        return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., ReplicaJob]]:
    made: list[ReplicaJob] = []

    def make(
        replicas: int, kind: str = "dense", port: int = 0, pause_s: float = 0.01, liveness_s: float = PATIENT_S
    ) -> ReplicaJob:
        made.append(ReplicaJob(tmp_path, replicas, kind, pause_s, liveness_s, port=port))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", ["dense", "sparse", "oktopk", "streaming"])
def test_a_replica_that_is_killed_costs_its_own_round_only(job: Callable[..., ReplicaJob], kind: str) -> None:
    running = job(3, kind)
    running.wait_for_units(0)
    running.send(1, signal.SIGKILL)
    running.wait_for_units(0)
    running.finish([0, 2])
    for number in (0, 2):
        assert "an exchange failed, so the replicas agree on who is left" in running.warnings_of(number)
        rounds = [one for one in running.said(number) if "round" in one]
        assert {one["size"] for one in rounds} == {3, 2}
        if kind != "streaming":
            assert all(one["step"] == EVERY * one["round"] for one in rounds)  # no step is lost


def test_a_round_that_one_replica_has_ended_all_end(job: Callable[..., ReplicaJob]) -> None:
    """Where the last message of a round reaches some replicas only. Nobody loses a step, or a residual."""
    running = job(2, "half a round")
    running.wait_for_units(0, 8)
    running.finish([0, 1])
    for number in (0, 1):
        assert running.units(number)[3] == 4
        assert "a residual of norm" not in running.warnings_of(number)
    assert "the test says so" in running.warnings_of(1)
    steps = {one["round"]: one["step"] for one in running.said(0) if "round" in one}
    assert all(step == EVERY * number for number, step in steps.items())


def test_a_replica_that_has_diverged_leaves_and_may_join_anew(job: Callable[..., ReplicaJob]) -> None:
    running = job(2, "diverges")
    running.wait_for(lambda: any("diverged" in one for one in running.said(1)))
    running.wait_for(lambda: running.said(0)[-1].get("size") == 2 and running.said(1)[-1].get("size") == 2)
    running.wait_for_units(1)
    running.finish([0, 1])
    (told,) = [one["diverged"] for one in running.said(1) if "diverged" in one]
    assert "entries of '0.weight' have become NaN or infinite" in told
    (left,) = [one["left"] for one in running.said(1) if "left" in one]
    assert "this replica has left its ReplicaGroup: close() this DiLoCo, and make another" in left
    assert "have become NaN or infinite" in running.warnings_of(0)


def test_a_replica_that_leaves_is_not_waited_for(job: Callable[..., ReplicaJob]) -> None:
    running = job(2, "leaves")
    running.wait_for(lambda: any(one.get("size") == 1 for one in running.said(0)))
    running.finish([0])
    assert running.processes[1].exitcode == 0
    steps = [(one["round"], one["step"]) for one in running.said(0) if "round" in one]
    assert all(step == EVERY * number for number, step in steps)


def test_replicas_that_differ_are_told_in_a_group_too(job: Callable[..., ReplicaJob]) -> None:
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
    group = ReplicaGroup(Broken(), 1)
    for _ in range(2):
        with pytest.raises(RendezvousError, match="the store of the replicas is gone: is the process .*no such server"):
            group.regroup(admit=True)
    group.leave()


def test_a_store_that_never_answers() -> None:
    ends = threading.Event()
    group = ReplicaGroup(Broken(ends), 1, timeout_s=0.2)
    with pytest.raises(RendezvousError, match="the store of the replicas is gone: .*no answer within 0.2 s"):
        group.regroup(admit=True)
    ends.set()
    group.leave()


class Broken(torch.distributed.Store):
    """Fails at once, or never answers before ``ends``."""

    def __init__(self, ends: threading.Event | None = None) -> None:
        super().__init__()
        self._ends = ends

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        if self._ends is None:
            raise RuntimeError("no such server")
        self._ends.wait()
        return expected.encode()

    def set(self, key: str, value: str) -> None:
        self.compare_set(key, "", value)


def serve(port: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


@pytest.fixture
def served() -> Iterator[tuple[int, BaseProcess]]:
    """The port of a store in a process of its own, and that."""
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,), daemon=True)
    process.start()
    yield here.recv(), process
    process.kill()
    process.join()


@pytest.mark.parametrize("kind", ["sparse", "streaming"])
def test_replicas_train_on_without_their_store(
    job: Callable[..., ReplicaJob], served: tuple[int, BaseProcess], kind: str
) -> None:
    """And end as they would have, or with an error where one is lost then; never by a signal."""
    port, server = served
    running = job(3, f"{kind} without store", port=port)
    for number in range(3):
        running.wait_for_units(number, 1)
    server.kill()
    server.join()
    for number in range(3):
        running.wait_for(lambda number=number: "training goes on" in running.warnings_of(number))  # type: ignore[misc]
    running.wait_for_units(0)
    rounds = [one for one in running.said(0) if "round" in one]
    assert all(one["size"] == 3 for one in rounds)
    running.send(2, signal.SIGKILL)
    for number in (0, 1):
        running.processes[number].join(PATIENCE_S)
        assert running.processes[number].exitcode == 1  # an exception: a signal would be a negative number
        error = running.said(number)[-1]["error"]
        assert error.startswith("RendezvousError: the store of the replicas is gone: is the process that serves it")
    rounds_of = [{one["round"]: one["checksum"] for one in running.said(n) if "round" in one} for n in (0, 1)]
    assert all(rounds_of[0][number] == rounds_of[1][number] for number in rounds_of[0].keys() & rounds_of[1].keys())
    said = [next(one for one in running.said(number) if "state" in one) for number in (0, 1)]
    assert all(one["state"] == one["round_before"] for one in said)


def test_a_run_ends_well_without_its_store(job: Callable[..., ReplicaJob], served: tuple[int, BaseProcess]) -> None:
    port, server = served
    running = job(2, "ends without store", port=port)
    for number in range(2):
        running.wait_for_units(number, 1)
    server.kill()
    server.join()
    for number in range(2):
        running.processes[number].join(PATIENCE_S)
        assert running.processes[number].exitcode == 0
    last = [next(one for one in running.said(number) if "ended" in one) for number in range(2)]
    assert last[0]["ended"] == last[1]["ended"]
    assert last[0]["checksum"] == last[1]["checksum"]


def test_a_replica_that_wakes_up_takes_part_again(job: Callable[..., ReplicaJob]) -> None:
    running = job(3, "sparse", liveness_s=LIVENESS_S)
    running.wait_for_units(0)
    running.send(1, signal.SIGSTOP)
    running.wait_for(lambda: any(one.get("size") == 2 for one in running.said(0)))
    running.wait_for_units(0)
    running.send(1, signal.SIGCONT)
    running.wait_for(lambda: running.said(0)[-1].get("size") == 3)
    running.wait_for_units(1)
    running.finish([0, 1, 2])
    assert "this replica was away, and takes a peer's parameters over: a residual of norm" in running.warnings_of(1)
    rounds = running.units(1)
    assert rounds[-1] - rounds[0] + 1 > len(rounds)  # it has missed some


def wait_until_frozen(running: ReplicaJob, number: int) -> None:
    stat = Path(f"/proc/{running.processes[number].pid}/stat")
    running.wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def test_a_freeze_in_the_middle_of_a_streaming_exchange(job: Callable[..., ReplicaJob]) -> None:
    """Longer than the liveness time-out: the others do not apply that exchange, and do it again without that replica,
    which comes back."""
    running = job(3, "freezes", liveness_s=LIVENESS_S)
    wait_until_frozen(running, 1)
    running.wait_for(lambda: any(one.get("size") == 2 for one in running.said(0)))
    running.wait_for_units(0)
    running.send(1, signal.SIGCONT)
    running.wait_for(lambda: running.said(0)[-1].get("size") == 3)
    running.wait_for_units(1)
    running.finish([0, 1, 2])
    assert "an exchange failed, so the replicas agree on who is left" in running.warnings_of(1)
    assert max(running.units(1)) >= max(running.units(0)) - 3  # of three fragments, which fail together


def test_a_short_freeze_in_the_middle_of_a_streaming_exchange(job: Callable[..., ReplicaJob]) -> None:
    """Shorter than the time-out: the round completes on all."""
    running = job(3, "freezes for a moment")
    wait_until_frozen(running, 1)
    running.send(1, signal.SIGCONT)
    running.wait_for_units(1)
    running.finish([0, 1, 2])
    for number in range(3):
        assert running.warnings_of(number) == ""
        assert {one["size"] for one in running.said(number) if "round" in one} == {3}


@pytest.mark.parametrize("kind", ["dense", "streaming"])
def test_a_replica_that_comes_later_is_in_by_the_next_round(job: Callable[..., ReplicaJob], kind: str) -> None:
    running = job(2, kind)
    running.wait_for_units(0)
    number = running.start()
    running.wait_for_units(number)
    running.finish([0, 1, number])
    (began,) = [one for one in running.said(number) if "began" in one]
    assert began["began"] >= 5
    (peer,) = [one for one in running.said(0) if one.get("round") == began["began"]]
    assert began["checksum"] == peer["checksum"]
    assert running.units(number)[0] == began["began"] + 1
    assert running.warnings_of(0) == ""


def test_the_last_replica_goes_on_alone_and_takes_others_in(job: Callable[..., ReplicaJob]) -> None:
    running = job(3)
    running.wait_for_units(2)
    running.send(0, signal.SIGKILL)  # also the one that looks for newcomers
    running.send(1, signal.SIGKILL)
    running.wait_for(lambda: any(one.get("size") == 1 for one in running.said(2)))
    number = running.start()
    running.wait_for_units(number)
    running.finish([2, number])


def disturb(running: ReplicaJob, chance: random.Random, events: int) -> tuple[list[int], Counter[int]]:
    """Kills, freezes and starts replicas at random moments, of three to five, also while others are frozen or start; of
    replicas of several ranks one rank, and of two to three. After each event the first replica ends a round. Returns
    those that are left, and how often each was frozen, by their first ranks."""
    alive, wakes = [*running.processes][:: running.ranks], dict[int, int]()  # after which event a frozen one does
    frozen, least, most = Counter[int](), 4, 5
    if running.ranks > 1:
        least = most = 3
    for event in range(events):
        time.sleep(chance.uniform(0, 0.8))
        for victim in [one for one, when in wakes.items() if when <= event]:
            running.send(victim, signal.SIGCONT)
            del wakes[victim]
        choices = ["kill", "freeze", "start" if len(alive) < most else "kill"]
        what = "start" if len(alive) < least else chance.choice(choices)
        replica = victim = chance.choice(alive[1:])
        if running.ranks > 1:
            victim += chance.randrange(running.ranks)
        if what == "start":
            alive.append(running.start())
        elif what == "kill":
            running.send(victim, signal.SIGKILL)
            alive.remove(replica)
            for one in range(replica, replica + running.ranks):
                if wakes.pop(one, None) is not None and one != victim:
                    running.send(one, signal.SIGCONT)
        else:
            running.send(victim, signal.SIGSTOP)
            frozen[replica] += victim not in wakes
            wakes[victim] = event + chance.choice([1, 1, 4])  # mostly before it counts as gone, or long after
        running.wait_for_units(alive[0], 1)
    for victim in wakes:
        running.send(victim, signal.SIGCONT)
    for number in alive:
        for one in range(number, number + running.ranks):
            running.wait_for_units(one, 1)
    return alive, frozen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["dense", "sparse", "streaming"])
def test_random_changes_of_members(job: Callable[..., ReplicaJob], kind: str) -> None:
    running = job(5, kind, liveness_s=LIVENESS_S)
    running.wait_for_units(0)
    alive, frozen = disturb(
        running, random.Random(f"{kind} {os.environ.get('SEED', '0')}"), int(os.environ.get("EVENTS", "20"))
    )
    running.finish(alive)
    if kind != "streaming":
        for number in running.processes:
            check_steps([one for one in running.said(number) if "round" in one])
    check_is_flat([one for one in running.said(0) if "round" in one])
    newcomers = [number for number in running.processes if number >= 5 and running.units(number)]
    late = [number for number in running.processes if check_takes_part(running, number, frozen[number])]
    print(f"{len(newcomers)} newcomers ended a round; frozen before their first, so that they joined again: {late}")


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("ranks streaming", 3),
        pytest.param("ranks sparse", 30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param("ranks streaming", 30, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_random_losses_of_one_rank_of_a_replica(job: Callable[..., ReplicaJob], kind: str, events: int) -> None:
    """Nobody hangs: a rank whose replica has lost another one ends with an error."""
    running = job(3, kind, liveness_s=LIVENESS_S)
    running.wait_for_units(0)
    alive, frozen = disturb(running, random.Random(f"{kind} {os.environ.get('SEED', '0')}"), events)
    ranks = [one for number in alive for one in range(number, number + RANKS)]
    for number in running.processes.keys() - ranks:
        running.processes[number].join(PATIENCE_S)
        assert running.processes[number].exitcode in (1, -signal.SIGKILL), running.said(number)[-3:]
    running.finish(ranks)
    for number in running.processes:
        check_takes_part(running, number, frozen[number - number % RANKS])
        if kind == "ranks sparse":
            check_steps([one for one in running.said(number) if "round" in one])


def began(running: ReplicaJob, number: int) -> int:
    """The round after which a replica was taken in."""
    return next(int(one["began"]) for one in running.said(number) if "began" in one)


def check_takes_part(running: ReplicaJob, number: int, freezes: int) -> bool:
    """A replica that was taken in is in from the next round on, and joins again only where it was frozen itself.
    Returns whether it did so before its first round."""
    kinds = [kind for one in running.said(number) for kind in ("joined", "round") if kind in one]
    assert kinds.count("joined") <= freezes, (number, kinds.count("joined"), freezes)
    return kinds[:1] == ["joined"]


def check_steps(rounds: list[dict[str, Any]]) -> None:
    """Of a replica, from one round that it has ended to the next: no step is lost. One that was away has missed some
    rounds."""
    for before, after in itertools.pairwise(rounds):
        if after["round"] == before["round"] + 1:
            assert after["step"] - before["step"] == EVERY, (before, after)


def check_is_flat(rounds: list[dict[str, Any]]) -> None:
    """The replica that lived through all changes holds no more descriptors at the end than at the start, for as many
    replicas, and little more memory."""
    first, last = rounds[: len(rounds) // 4], rounds[-len(rounds) // 4 :]
    for size in {one["size"] for one in first} & {one["size"] for one in last}:
        before, after = ([one for one in part if one["size"] == size] for part in (first, last))
        print(f"{size} replicas: {spread(before)} -> {spread(after)}")
        assert min(one["descriptors"] for one in after) <= max(one["descriptors"] for one in before)
    assert rounds[-1]["resident"] < 1.2 * max(one["resident"] for one in first)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["dense", "sparse", "oktopk", "streaming"])
def test_rounds_of_two_hours_leave_nothing_behind(job: Callable[..., ReplicaJob], kind: str) -> None:
    """2 h of rounds of 30 steps that take 0.1 s each are 2,400 rounds. Here a round has fewer and shorter steps; of
    memory and descriptors each takes as much."""
    rounds = int(os.environ.get("ROUNDS", "2400"))
    running = job(3, kind, pause_s=0.0)
    while len(running.units(0)) < rounds:
        running.wait_for_units(0, 20)
    running.finish([0, 1, 2])
    for number in range(3):
        assert running.warnings_of(number) == ""
        said = [one for one in running.said(number) if "round" in one]
        assert {one["size"] for one in said} == {3}
        assert len({one["descriptors"] for one in said[len(said) // 4 :]}) == 1
        middle, last = (np.median([one["resident"] for one in part]) for part in (said[500:800], said[-300:]))
        print(f"{kind} {number}: {middle / 2**20:.2f} -> {last / 2**20:.2f} MiB, {said[-1]['descriptors']} descriptors")
        assert last < middle + 2**20  # less than 600 bytes a round


def spread(rounds: list[dict[str, Any]]) -> str:
    resident, descriptors = ([one[kind] for one in rounds] for kind in ("resident", "descriptors"))
    return (
        f"{min(resident) / 2**20:.1f} to {max(resident) / 2**20:.1f} MiB, {min(descriptors)} to {max(descriptors)} "
        "descriptors"
    )


def test_a_newcomer_with_other_options_is_told_and_the_others_go_on(job: Callable[..., ReplicaJob]) -> None:
    running = job(2)
    running.wait_for_units(0)
    running.kind = "sparse"
    number = running.start()
    running.wait_for(lambda: any("error" in one for one in running.said(number)))
    assert "this replica's model or options differ from those of rank 0" in running.said(number)[-1]["error"]
    running.wait_for_units(0)
    running.finish([0, 1])


def test_a_newcomer_does_not_begin_anew_where_all_others_are_gone(job: Callable[..., ReplicaJob]) -> None:
    running = job(2)
    running.wait_for_units(0)
    for number in (0, 1):
        running.send(number, signal.SIGKILL)
    number = running.start()
    running.wait_for(lambda: any("error" in one for one in running.said(number)))
    assert "all replicas of the group are gone, so nobody has the parameters" in running.said(number)[-1]["error"]


def test_a_newcomer_after_a_run_that_ended_well_is_told_so(job: Callable[..., ReplicaJob]) -> None:
    running = job(2)
    running.wait_for_units(0)
    running.finish([0, 1])
    number = running.start()
    running.wait_for(lambda: any("error" in one for one in running.said(number)))
    assert "the run of this name has ended: its last replica has left" in running.said(number)[-1]["error"]


def test_a_newcomer_that_nobody_takes_in_is_told() -> None:
    model = network()
    group = ReplicaGroup(HashStore(), 2, timeout_s=0.3)
    with pytest.raises(RendezvousError, match="not taken in within 0.3 s: are 2 replicas running"):
        telegrad.DiLoCo(model, group, torch.optim.SGD(model.parameters(), 0.1))
    group.leave()


@pytest.mark.parametrize("place", [0, 1])
def test_a_newcomer_whose_other_rank_has_ended_is_told(place: int) -> None:
    """At once: it does not wait for that rank until the time-out."""
    marks = [f"{process_mark().rpartition(':')[0]}:0"]  # a process that had this one's number before
    marks.insert(place, process_mark())
    group = ReplicaGroup(HashStore(), 1, timeout_s=PATIENCE_S)
    group.stand_for("replica", place, marks)
    with pytest.raises(RendezvousError, match="another rank of this replica has left or ended, or was"):
        group.regroup(admit=False)


def on_replicas(replicas: int, run: Callable[[ReplicaGroup, int], Any], *, name: str = "test") -> list[Any]:
    """On replicas of a group that are threads."""
    store = HashStore()

    def one(number: int) -> Any:
        group = ReplicaGroup(store, replicas, name=name, timeout_s=60.0)
        try:
            return run(group, number)
        finally:
            group.leave()

    with ThreadPoolExecutor(replicas) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(one, number) for number in range(replicas)]]


def trained(group: ReplicaGroup, number: int, state: Any, steps: range) -> tuple[telegrad.DiLoCo, dict[str, Any]]:
    """A replica after these steps, from that state, and the state that it had before its first step."""
    model = network(number)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    compress = telegrad.TopK(0.1, small_elements=0)
    diloco = telegrad.DiLoCo(model, group, optimizer, every=3, compress=compress, outer=nesterov)
    if state is not None:
        diloco.load_state_dict(state)
    before = diloco.state_dict()
    train(model, optimizer, number, steps)
    return diloco, before


def residual_norm(state: dict[str, Any]) -> float:
    entries = state["compressor"]["parameters"].values()
    return math.hypot(*(float(entry["residual"].norm()) for entry in entries))


@pytest.mark.parametrize("loaded", [[1, 2, 0], [1, 0], [2, 1, 0, 1]], ids=["other ranks", "fewer", "more"])
def test_a_state_of_a_group_is_for_any_rank_and_number(loaded: list[int]) -> None:
    """Each residual has one owner. Whoever has none, and what nobody has, is told."""

    def save(group: ReplicaGroup, number: int) -> dict[str, Any]:
        diloco, _ = trained(group, number, None, range(7))
        state = diloco.state_dict()
        diloco.comm.barrier()
        return state

    states = {state["rank"]: state for state in on_replicas(3, save)}
    norms = [residual_norm(states[rank]) for rank in range(3)]
    assert min(norms) > 0
    for state in states.values():
        assert state["residual_norms"] == pytest.approx(norms, rel=1e-5)

    def resume(group: ReplicaGroup, number: int) -> tuple[float, int, int, Any]:
        diloco, before = trained(group, number, states[loaded[number]], range(7, 12))
        assert (before["step"], before["inner_steps"]) == (2, 1)
        for name, one in before["common"].items():
            assert torch.equal(one, states[0]["common"][name])
        assert str(before["outer"]) == str(states[0]["outer"])
        found = residual_norm(before), diloco.rounds, diloco.checksum(), diloco.comm.world_size
        diloco.comm.barrier()
        return found

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results = on_replicas(len(loaded), resume)
    assert {one[1:] for one in results} == {(4, results[0][2], len(loaded))}
    assert sorted(one[0] for one in results) == pytest.approx(
        sorted([0.0] * (len(loaded) - len({*loaded})) + [norms[rank] for rank in {*loaded}]), rel=1e-6
    )
    texts = [str(one.message) for one in told]
    lost = [rank for rank in range(3) if rank not in loaded]
    if lost:
        (text,) = [text for text in texts if "were not loaded" in text]
        assert f"of 3 states, those of ranks {lost} were not loaded: residuals of norm {norms[2]:.3g} are lost" in text
    if len(loaded) > len({*loaded}):
        (text,) = [text for text in texts if "another replica has loaded the state of rank 1" in text]
    assert len(texts) == bool(lost) + (len(loaded) > len({*loaded}))


def test_a_distributed_checkpoint_of_a_replica_is_for_any_other(tmp_path: Path) -> None:
    """Each replica of a group saves by itself, as no process group has all of them."""

    def save(group: ReplicaGroup, number: int) -> tuple[int, dict[str, Any]]:
        diloco, _ = trained(group, number, None, range(7))
        with saving:  # torch changes the warnings' filters meanwhile
            dcp.save({"diloco": RankState(diloco)}, checkpoint_id=tmp_path / str(diloco.comm.rank), no_dist=True)
        state = diloco.state_dict()
        diloco.comm.barrier()
        return diloco.comm.rank, state

    def resume(group: ReplicaGroup, number: int) -> dict[str, Any]:
        diloco, _ = trained(group, number, None, range(0))
        with saving:
            other = {"diloco": RankState(diloco)}
            dcp.load(other, checkpoint_id=tmp_path / str(1 - diloco.comm.rank), no_dist=True)
        state = diloco.state_dict()
        diloco.comm.barrier()
        return state

    saving = threading.Lock()
    saved = dict(on_replicas(2, save))
    for state in on_replicas(2, resume):
        other = saved[1 - state["rank"]]
        assert state["step"] == 2
        for kind in ("common", "outer", "compressor", "replica", "inner_steps"):
            assert str(state[kind]) == str(other[kind])


def test_states_of_a_group_that_do_not_fit() -> None:
    def run(group: ReplicaGroup, number: int) -> None:
        diloco, before = trained(group, number, None, range(0))
        with pytest.raises(ValueError, match="must come from DiLoCo.state_dict"):
            diloco.load_state_dict(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is not of this model"):
            diloco.load_state_dict({**before, "common": {}})
        with pytest.raises(TypeError, match="which rank 0 cannot gather: save a RankState"):
            GatheredState(diloco)

    on_replicas(1, run)


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
        found = comm.broadcast_state(sent, 1)
        assert isinstance(found["outer"]["param_groups"][0]["betas"], tuple)
        assert str(found) == str(state)
        return str(found)

    first, second = on_ranks(2, run)
    assert first == second


@pytest.mark.parametrize("kind", ["ranks dense", "ranks streaming", "ranks shards"])
def test_a_replica_that_loses_a_rank_is_out_as_a_whole(job: Callable[..., ReplicaJob], kind: str) -> None:
    """Its other rank ends with an error; the others lose no step. Another replica comes, and takes over what it needs
    by the rank at its own position."""
    running = job(3, kind)
    running.wait_for_units(0)
    running.send(3, signal.SIGKILL)
    running.processes[2].join(PATIENCE_S)
    assert running.processes[2].exitcode == 1
    running.wait_for(lambda: all(running.said(number)[-1].get("size") == 2 for number in (0, 1, 4, 5)))
    first = running.start()
    for number in (first, first + 1):
        running.wait_for_units(number)
    running.finish([0, 1, 4, 5, first, first + 1])
    for number in (0, 1, 4, 5):
        assert "an exchange failed, so the replicas agree on who is left" in running.warnings_of(number)
        if kind != "ranks streaming":
            rounds = [one for one in running.said(number) if "round" in one]
            assert all(one["step"] == EVERY * one["round"] for one in rounds)
    for number in (first, first + 1):
        assert not check_takes_part(running, number, 0)
    assert began(running, first) == began(running, first + 1) >= 5


@pytest.mark.parametrize("kind", ["ranks sparse", "ranks streaming"])
def test_a_replica_of_which_one_rank_freezes_comes_back_as_a_whole(job: Callable[..., ReplicaJob], kind: str) -> None:
    running = job(3, kind, liveness_s=LIVENESS_S)
    running.wait_for_units(0)
    running.send(2, signal.SIGSTOP)
    running.wait_for(lambda: any(one.get("size") == 2 for one in running.said(0)))
    running.wait_for_units(0)
    running.send(2, signal.SIGCONT)
    running.wait_for(lambda: all(running.said(number)[-1].get("size") == 3 for number in range(6)))
    running.finish([*range(6)])
    for number in (2, 3):
        assert not check_takes_part(running, number, 1)
        assert sum("joined" in one for one in running.said(number)) == 1
        if kind == "ranks sparse":
            assert "this replica was away, and takes a peer's parameters over: a residual" in running.warnings_of(
                number
            )


def test_a_replica_of_which_one_rank_has_not_connected_tries_again_as_a_whole(job: Callable[..., ReplicaJob]) -> None:
    running = job(3, "ranks half connected")
    running.wait_for_units(0)
    running.send(4, signal.SIGKILL)
    running.wait_for(lambda: all(running.said(number)[-1].get("size") == 2 for number in range(4)))
    running.finish([*range(4)])


def test_a_rank_that_fails_while_replicas_align_keeps_no_other_waiting(job: Callable[..., ReplicaJob]) -> None:
    running = job(2, "ranks streaming half aligned")
    running.wait_for_units(0)
    running.finish([*range(4)])


def test_a_newcomer_of_whom_one_rank_of_a_replica_has_not_heard_comes_in(job: Callable[..., ReplicaJob]) -> None:
    running = job(2, "ranks half told")
    running.wait_for_units(0)
    first = running.start()
    running.wait_for(lambda: all(running.said(number)[-1].get("size") == 3 for number in range(4)))
    running.finish([*range(4), first, first + 1])
    assert "the test says so" in running.warnings_of(1)


def test_all_ranks_of_a_replica_leave_with_one_that_has_diverged(job: Callable[..., ReplicaJob]) -> None:
    """Each sees a part of the parameters only. The others go on."""
    running = job(2, "ranks diverges")
    for number in (0, 1):
        running.wait_for(lambda number=number: any(one.get("size") == 1 for one in running.said(number)))  # type: ignore[misc]
    for number in (2, 3):
        running.processes[number].join(PATIENCE_S)
    told = [running.said(number)[-1]["error"] for number in (2, 3)]
    (own,) = [one for one in told if one.startswith("NonFiniteGradient")]
    (other,) = [one for one in told if one != own]
    assert "have become NaN or infinite" in own
    assert "another rank of this replica has left, as its own error says" in other
    running.finish([0, 1])
