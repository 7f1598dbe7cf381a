"""Ranks in processes that are killed, frozen and started while the others compute, and while they agree."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import signal
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import telegrad
from telegrad.communicator import membership
from telegrad.communicator.membership import Membership
from telegrad.communicator.nodes import process_mark

torch = pytest.importorskip("torch")
import lost_ranks_program  # noqa: E402 - it needs torch
from computing_device import ComputingRuntime, computed_on, model_on  # noqa: E402
from given_gradients import Given, gradients_of, sgd  # noqa: E402
from torch.distributed import HashStore, TCPStore  # noqa: E402
from watched_processes import LIVENESS_S, PATIENCE_S, PATIENT_S, Job  # noqa: E402

pytestmark = pytest.mark.timeout(300)


class RankJob(Job):
    unit = "step"
    several = 10

    def by_rank(self) -> dict[int, int]:
        """Of bare ranks, which process has joined as which rank."""
        self.wait_for(lambda: len(self.all_said("joined")) == self.size)
        return {one["joined"]: one["number"] for one in self.all_said("joined")}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., RankJob]]:
    made: list[RankJob] = []

    def make(
        ranks: int, kind: str = "dense", main: Any = lost_ranks_program.train, liveness_s: float = PATIENT_S
    ) -> RankJob:
        made.append(RankJob(tmp_path, ranks, kind, main, liveness_s))
        made[-1].start(ranks)
        return made[-1]

    before = set(os.listdir("/dev/shm"))
    yield make
    pids = [str(process.pid) for one in made for process in one.processes.values()]
    for one in made:
        one.close()
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if any(pid in name for pid in pids)]


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("kill@sum1", {0, 2, 3}),
        ("kill@sum0", {1, 2, 3}),
        ("kill@sum1 kill@sum2", {0, 3}),  # two at once
        ("kill@sum1 kill@shrink2", {0, 3}),  # another one before it agrees
        ("kill@sum1 kill@connect2", {0, 3}),  # and after it has agreed
        ("kill@sum1 kill@connect0", {2, 3}),
        ("kill@sum0 kill@sum1 kill@sum2", {3}),
    ],
)
def test_survivors_agree_and_compute_again(job: Callable[..., RankJob], kind: str, left: set[int]) -> None:
    running = job(4, kind, lost_ranks_program.bare)
    numbers = [running.by_rank()[rank] for rank in sorted(left)]
    for number in numbers:
        running.wait_for(lambda number=number: len(running.units(number)) > 15)  # type: ignore[misc]
    running.finish(numbers)
    for rank, number in enumerate(numbers):
        said = [one for one in running.said(number) if "step" in one]
        assert (said[-1]["size"], said[-1]["rank"]) == (len(left), rank)  # in their order
        assert running.units(number) == sorted(running.units(number))
        (group,) = [one["group"] for one in running.said(number) if "group" in one]
        assert "is closed" in group


def test_one_that_wakes_up_too_late_is_told(job: Callable[..., RankJob]) -> None:
    running = job(3, "stop@sum1", lost_ranks_program.bare, LIVENESS_S)
    numbers = running.by_rank()
    for rank in (0, 2):
        running.wait_for(lambda rank=rank: len(running.units(numbers[rank])) > 15)  # type: ignore[misc]
    running.send(numbers[1], signal.SIGCONT)
    running.processes[numbers[1]].join(PATIENCE_S)
    error = running.said(numbers[1])[-1]["error"]
    assert "the other ranks have gone on without this one" in error
    assert "telegrad.join()" in error
    running.finish([numbers[0], numbers[2]])


@pytest.mark.parametrize("kind", lost_ranks_program.KINDS)
def test_a_change_of_ranks_frees_what_was_before(kind: str) -> None:
    """At once: Python looks for cycles rarely where it has many objects, and residuals are as large as a model."""
    comm, model = telegrad.join(HashStore(), 1), lost_ranks_program.network()

    def made(model: torch.nn.Module, comm: telegrad.Communicator) -> telegrad.Synchronizer:
        return telegrad.Synchronizer(model, comm, plan="fixed", compress=lost_ranks_program.KINDS[kind])

    def loss_of() -> torch.Tensor:
        x, y = lost_ranks_program.batch(elastic.steps, 0, 1)
        return torch.nn.functional.cross_entropy(model(x), y)

    with telegrad.Elastic(model, sgd(model.parameters()), comm, synchronizer=made) as elastic:
        elastic.step(loss_of)
        gc.collect()
        gc.disable()
        try:
            before: list[Any] = [weakref.ref(elastic.synchronizer)]
            if compression := elastic.synchronizer._compression:
                kept = compression.compressor
                before += map(weakref.ref, [compression, kept, *(one.values for one in kept.residuals)])
            compression = kept = None
            elastic._change()
            assert [one() for one in before] == [None] * len(before)
        finally:
            gc.enable()
    comm.close()


def test_one_that_shrinks_alone_goes_on_alone(job: Callable[..., RankJob]) -> None:
    running = job(3, "kill@sum1 alone@0", lost_ranks_program.bare)
    numbers = running.by_rank()
    running.wait_for(lambda: len(running.units(numbers[0])) > 10)
    running.finish([numbers[0]])
    assert [one for one in running.said(numbers[0]) if "step" in one][-1]["size"] == 1


def test_others_come_to_a_communicator(job: Callable[..., RankJob]) -> None:
    running = job(2, "", lost_ranks_program.bare)
    running.wait_for_units(0)
    number = running.start()
    running.store.set("grow", "1")
    running.wait_for(lambda: any(one.get("size") == 3 for one in running.said(0)))
    running.wait_for(lambda: len(running.all_said("grew")) == 2)
    assert all(one["grew"] == 1 for one in running.all_said("grew"))
    running.wait_for_units(number)
    assert [one["rank"] for one in running.said(number) if "step" in one][-1] == 2
    running.finish([0, 1, number])


def test_shrink_and_grow_refuse_what_cannot_be() -> None:
    alone = telegrad.join(HashStore(), 1)
    with pytest.raises(ValueError, match="shrink\\(\\) is for a communicator that has failed, and this one works"):
        alone.shrink()
    assert alone.grow(0) == 0
    with pytest.raises(telegrad.RendezvousError, match="0 processes have asked to join, and n=1 are wanted within 0.1"):
        alone.grow(1, timeout_s=0.1)
    with pytest.raises(ValueError, match="n=-1 must be at least 0"):
        alone.grow(-1)
    alone.barrier()
    part = alone.split(0)
    assert part is not None
    for call in (part.shrink, lambda: part.grow(1), telegrad.Communicator.local(1)[0].shrink):
        with pytest.raises(ValueError, match="needs a store that outlives its ranks, and this communicator has none"):
            call()
    alone._can_grow = False
    with pytest.raises(ValueError, match="grow\\(\\) is for the first communicator"):
        alone.grow(1)
    alone.close()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"store": 3}, TypeError, "store is a int: give a torch.distributed.Store"),
        ({"ranks": 0}, ValueError, "ranks=0 must be at least 1"),
        ({"name": ""}, TypeError, "name='' must be a str"),
        ({"timeout_s": 0}, ValueError, "timeout_s=0 must be above 0"),
    ],
)
def test_arguments_that_mean_nothing(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        telegrad.join(**{"store": HashStore(), "ranks": 1, **arguments})


def test_a_job_that_is_not_there() -> None:
    with pytest.raises(telegrad.RendezvousError, match="no job was found in the store within 0.1 s"):
        telegrad.join(HashStore(), join_timeout_s=0.1)
    with pytest.raises(telegrad.RendezvousError, match="this rank was not taken in within 0.1 s: are 2 ranks running"):
        telegrad.join(HashStore(), 2, join_timeout_s=0.1)


def test_a_store_that_is_gone(job: Callable[..., RankJob]) -> None:
    running = job(2, "kill@sum1 nostore", lost_ranks_program.bare)
    numbers = running.by_rank()
    running.store = None  # type: ignore[assignment]  # which served it
    running.wait_for(lambda: bool(running.all_said("error")))
    (error,) = running.said(numbers[0])[-1:]
    assert "RendezvousError: the store of the ranks is gone: is the process that serves it" in error["error"]


_KEYS = "telegrad/jobs/job"


def _in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What they return, called at once."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(PATIENCE_S) for one in [pool.submit(call) for call in calls]]


def test_a_newcomer_waits_while_the_others_work() -> None:
    """They give no sign of life in the store meanwhile."""
    store = HashStore()
    comm = telegrad.join(store, 1, liveness_timeout_s=LIVENESS_S)

    def grow() -> int:
        while not store.check([f"{_KEYS}/ticket/1"]):
            time.sleep(0.01)
        time.sleep(2.5 * LIVENESS_S)
        return comm.grow(1)

    came, new = _in_threads(grow, lambda: telegrad.join(store, join_timeout_s=PATIENCE_S))
    assert (came, new.rank) == (1, 1)
    new.abort("over")
    for one in (comm, new):
        one.close()


@pytest.mark.parametrize("after", ["the failure", "shrink"])
def test_a_rank_that_computes_is_not_left_out(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    """It calls nothing for longer than liveness_timeout_s after a failure, and does not know of that."""
    store, clear, failed = HashStore(), Membership.clear, list[int]()

    def clear_or_fail(self: Membership, exchange: Any) -> None:
        if after == "shrink" and self._number == 1 and not failed:
            failed.append(1)  # as if another one were lost, just as all have connected
            raise telegrad.TransportError("the test says so")
        clear(self, exchange)

    monkeypatch.setattr(Membership, "clear", clear_or_fail)
    join = functools.partial(telegrad.join, store, 3, liveness_timeout_s=LIVENESS_S)
    leaves, shrinks, computes = sorted(_in_threads(join, join, join), key=lambda one: one.rank)
    leaves._membership.leave()
    leaves.abort("the test says so")

    def shrunk(comm: telegrad.Communicator, computes_s: float) -> tuple[int, ...]:
        with pytest.raises(telegrad.TransportError):
            comm.barrier()
        kept = comm.shrink()
        time.sleep(computes_s if after == "shrink" else 0.0)
        return kept

    def computing() -> tuple[int, ...]:
        time.sleep(0.0 if after == "shrink" else 3.0 * LIVENESS_S)
        kept = shrunk(computes, 3.0 * LIVENESS_S)
        return shrunk(computes, 0.0) if after == "shrink" else kept

    assert _in_threads(lambda: shrunk(shrinks, 0.0), computing) == [(1, 2), (0, 1) if after == "shrink" else (1, 2)]
    totals = [np.ones(1, np.float32), np.ones(1, np.float32)]
    _in_threads(lambda: shrinks.all_reduce(totals[0]), lambda: computes.all_reduce(totals[1]))
    assert totals == [2, 2]
    _in_threads(leaves.close, shrinks.close, computes.close)


def test_one_that_is_late_does_not_hide_what_others_have_given_up() -> None:
    store = HashStore()
    comm = telegrad.join(store, 1)
    for number in (1, 3, 2, 0):
        comm._membership._give_up(number)  # type: ignore[union-attr]
    assert store.get(f"{_KEYS}/broken") == b"3"
    comm.close()


def test_signs_of_life_go_on_while_many_questions_are_answered_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, signs = [0.0], list[float]()

    class Slow:
        def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
            now_s[0] += 0.3
            return expected.encode()

        def set(self, key: str, value: str) -> None:
            signs.append(now_s[0])

        def add(self, key: str, amount: int) -> int:
            return 0

    monkeypatch.setattr(membership, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=time.sleep))
    thread = membership._StoreThread(Slow(), "", PATIENCE_S, "rank")
    thread.begin("beat", 1)
    assert thread.values("abcdefghij") == [None] * 10
    thread.stop()
    assert max(b - a for a, b in itertools.pairwise([0.0, *signs, now_s[0]])) < 1.0


def test_the_store_does_not_fill() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client() -> TCPStore:
        return TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    def join() -> telegrad.Communicator:
        return telegrad.join(client(), 2, liveness_timeout_s=PATIENT_S)

    def shrunk(comm: telegrad.Communicator) -> tuple[int, ...]:
        with pytest.raises(telegrad.TransportError):
            comm.barrier()
        return comm.shrink()

    first, second = sorted(_in_threads(join, join), key=lambda one: one.rank)
    keys = []
    for _ in range(50):
        *_, new = _in_threads(lambda: first.grow(1), lambda: second.grow(1), join)
        new._membership.leave()
        new.abort("leaves")
        assert _in_threads(lambda: shrunk(first), lambda: shrunk(second), new.close)[:2] == [(0, 1)] * 2
        keys.append(server.num_keys())
    assert keys[-1] <= keys[3]
    _in_threads(first.close, second.close)


def test_a_process_that_ended_before_it_wrote_its_name() -> None:
    store = HashStore()
    store.add(f"{_KEYS}/tickets", 1)
    telegrad.join(store, 1, join_timeout_s=PATIENCE_S).close()


def test_one_that_writes_its_name_late_is_taken_in() -> None:
    store = HashStore()
    comm = telegrad.join(store, 1)
    ticket = store.add(f"{_KEYS}/tickets", 1) - 1
    name = f"late@{process_mark()}"

    def write() -> None:
        time.sleep(0.3)
        store.set(f"{_KEYS}/ticket/{ticket}", name)

    found, _ = _in_threads(lambda: comm._membership._coming(ticket), write)  # type: ignore[union-attr]
    assert found == ([name], ticket + 1)
    comm.close()


def test_a_failed_operation_leaves_its_inputs() -> None:
    first, second = telegrad.Communicator.local(2)
    given = np.arange(1000, dtype=np.float32)
    work = first.all_gather(given, async_op=True)
    second.abort("the test says so")
    with pytest.raises(telegrad.TransportError):
        work.wait()
    assert (given == np.arange(1000)).all()
    first.close()
    second.close()


def test_a_device_model_is_refused_with_compress(device: ComputingRuntime) -> None:
    comm = telegrad.join(HashStore(), 1)
    with device.on(device.new_stream()):
        model = model_on(device, Given(torch.float32))

        def compressed(model: torch.nn.Module, comm: telegrad.Communicator) -> telegrad.Synchronizer:
            return telegrad.Synchronizer(model, comm, plan="fixed", compress=telegrad.TopK(0.1, small_elements=0))

        with pytest.raises(ValueError, match="compress= on a GPU keeps what a repeated step could not undo: leave it"):
            telegrad.Elastic(model, sgd(model.parameters()), comm, synchronizer=compressed)
    comm.close()


def test_a_device_model_trains_without_compress(device: ComputingRuntime) -> None:
    comm, stream = telegrad.join(HashStore(), 1), device.new_stream()
    with device.on(stream):
        model = model_on(device, Given(torch.float32))
        before = [one.memory.clone() for one in model.parameters()]
        given = {name: computed_on(device, one) for name, one in gradients_of(0, 0).items()}
        with telegrad.Elastic(model, sgd(model.parameters()), comm) as elastic:
            for _ in range(3):
                elastic.step(lambda: model(given))
            assert (elastic.steps, elastic.repeated) == (3, 0)
        stream.synchronize()
        assert any((one.memory != was).any() for one, was in zip(model.parameters(), before, strict=True))
    comm.close()


@pytest.mark.parametrize("kind", lost_ranks_program.KINDS)
def test_a_rank_that_is_killed_costs_its_step_only(job: Callable[..., RankJob], kind: str) -> None:
    running = job(3, kind)
    running.wait_for_units(0)
    running.send(1, signal.SIGKILL)
    running.wait_for_units(0)
    number = running.start()
    running.wait_for_units(number)
    running.finish([0, 2, number])
    for survivor in (0, 2):
        said = [one for one in running.said(survivor) if "step" in one]
        assert [one["step"] for one in said] == [*range(1, said[-1]["step"] + 1)]  # none twice, none left out
        assert said[-1]["repeated"] <= 1
        assert {one["size"] for one in said} == {2, 3}
        assert "of 3 were lost in step" in running.warnings_of(survivor)
        has_residuals = kind not in ("dense", "quantised")  # parameters are too small to be quantised
        assert (said[-1]["lost"] > 0) == has_residuals
        assert all(one["epochs"] >= one["step"] - 1 for one in said)
    (began,) = [one for one in running.said(number) if "began" in one]
    assert began["began"] > 10
    assert all(one["epochs"] == one["step"] for one in running.said(number) if "step" in one)  # the scheduler's state


@pytest.mark.parametrize("kind", ["sparse half a step", "sparse half a step twice"])
def test_a_step_that_one_rank_has_taken_all_take(job: Callable[..., RankJob], kind: str) -> None:
    """Where the last message of a step reaches some ranks only; twice: and the ranks fail again as they align."""
    running = job(2, kind)
    running.wait_for_units(0, 12)
    running.finish([0, 1])
    for number in (0, 1):
        assert running.units(number) == [*range(1, len(running.units(number)) + 1)]
        assert [one for one in running.said(number) if "step" in one][-1]["lost"] == 0
    assert all(one["calls"] == one["step"] for one in running.said(1) if "step" in one)  # not repeated


def test_a_rank_that_raises_leaves(job: Callable[..., RankJob]) -> None:
    running = job(3, "dense raises")
    running.wait_for(lambda: any(one.get("size") == 2 for one in running.all_said("step")))
    (error,) = running.all_said("error")
    assert error["error"] == "LookupError: the test says so"


@pytest.mark.parametrize("kind", ["sparse", "sparse away twice"])
def test_a_rank_that_wakes_up_takes_a_peers_state_over(job: Callable[..., RankJob], kind: str) -> None:
    """Twice: and the ranks fail again as they align."""
    running = job(3, kind, liveness_s=LIVENESS_S)
    running.wait_for_units(0)
    running.send(1, signal.SIGSTOP)
    running.wait_for(lambda: any(one.get("size") == 2 for one in running.said(0)))
    running.wait_for_units(0)
    running.send(1, signal.SIGCONT)
    running.wait_for(lambda: running.said(0)[-1].get("size") == 3)
    running.wait_for_units(1)
    running.finish([0, 1, 2])
    assert "this rank was away from step" in running.warnings_of(1)


def test_a_rank_that_ends_alone(job: Callable[..., RankJob]) -> None:
    running = job(2, "dense")
    running.wait_for_units(0)
    running.send(0, signal.SIGKILL)
    running.wait_for_units(1)
    running.finish([1])


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_random_kills_freezes_and_joins(job: Callable[..., RankJob]) -> None:
    """EVENTS=100 SEED=1 RANKS=6 KIND=sparse: after each event all that are left take steps again."""
    events, ranks = int(os.environ.get("EVENTS", "100")), int(os.environ.get("RANKS", "6"))
    draw = random.Random(int(os.environ.get("SEED", "1")))
    running = job(ranks, os.environ.get("KIND", "sparse"), liveness_s=LIVENESS_S)
    alive, seconds = set(range(ranks)), []
    running.wait_for_units(0)
    for event in range(events):
        kind = draw.choice(["kill", "kill two", "freeze", "join"]) if len(alive) > 3 else "join"
        kind = "join" if kind != "join" and len(alive) < ranks and draw.random() < 0.5 else kind
        begin_s = time.monotonic()
        if kind == "join":
            alive.add(running.start())
        elif kind == "freeze":
            victim = draw.choice(sorted(alive))
            running.send(victim, signal.SIGSTOP)
            time.sleep(draw.choice([0.3, LIVENESS_S + 4]))
            running.send(victim, signal.SIGCONT)
        else:
            for victim in draw.sample(sorted(alive), 2 if kind == "kill two" else 1):
                running.send(victim, signal.SIGKILL)
                alive.remove(victim)
        goal = len(alive)
        for number in sorted(alive):
            running.wait_for(
                lambda number=number, goal=goal, begin_s=begin_s: any(  # type: ignore[misc]
                    one.get("size") == goal and one["at"] > begin_s for one in running.said(number)[-5:] if "at" in one
                )
            )
        if kind.startswith("kill"):
            again = [
                min(one["at"] for one in running.said(number) if one.get("at", 0) > begin_s and one["size"] == goal)
                for number in alive
            ]
            seconds.append(max(again) - begin_s)
        print(event, kind, sorted(alive), flush=True)
    running.finish(sorted(alive))
    print(f"{len(seconds)} kills: median {np.median(seconds):.2f} s, p99 {np.percentile(seconds, 99):.2f} s")
    oldest = min(alive)
    said = [one for one in running.said(oldest) if "rss" in one]
    for name in ("rss", "fds", "threads"):
        values = [one[name] for one in said if one["size"] == said[-1]["size"]]
        print(name, values[len(values) // 4], values[-1])
    assert all(one["repeated"] <= 2 * events for one in said)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_training_under_losses_ends_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    """STEPS=300 EVERY=50: of four ranks one is killed every so many steps, and replaced."""
    steps, every = int(os.environ.get("STEPS", "300")), int(os.environ.get("EVERY", "50"))
    losses = []
    for disturbed in (False, True):
        folder = tmp_path / str(disturbed)
        folder.mkdir()
        running = RankJob(folder, 4, "sparse", lost_ranks_program.train, LIVENESS_S)
        running.start(4)
        running.store.set("last", str(steps))
        alive = [*range(4)]
        with contextlib.closing(running):
            for goal in itertools.count(every, every) if disturbed else ():
                if goal >= steps:
                    break
                while max(running.units(alive[0]) or [0]) < goal:
                    time.sleep(0.02)
                running.send(alive[1], signal.SIGKILL)
                alive = [alive[0], *alive[2:], running.start()]
            for number in alive:
                running.processes[number].join(PATIENCE_S)
            last: defaultdict[int, list[float]] = defaultdict(list)
            for one in running.all_said("loss"):
                last[one["step"]].append(one["loss"])
            losses.append(float(np.mean([np.mean(last[step]) for step in range(steps - 20, steps + 1)])))
    print(losses)
    assert abs(losses[1] - losses[0]) / losses[0] < 0.01
