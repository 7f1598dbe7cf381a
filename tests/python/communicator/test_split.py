"""Sub-communicators of ranks in threads: who is in which, and what one has to do with another."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from telegrad import Communicator
from telegrad.communicator import groups
from telegrad.communicator.base import Stats
from telegrad.errors import MismatchedCall, TransportError
from telegrad.tools import sim
from telegrad.tools.report.hang_files import ReportedGroup, parse

Local = Callable[..., list[Communicator]]
OnRanks = Callable[..., list[Any]]


def _sum_of_ranks(comm: Communicator, rank: int) -> float:
    x = np.full(1000, rank, np.float32)
    comm.all_reduce(x)
    return float(x[-1])


def test_groups_by_color_ordered_by_key_then_rank(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> tuple[int, int, list[int]]:
        child = comm.split(comm.rank % 2, key=-comm.rank if comm.rank % 2 else 0)
        assert child is not None
        with child:
            return child.rank, child.world_size, child.all_gather(np.array([comm.rank]))[:, 0].tolist()

    assert on_ranks(5, run) == [(0, 3, [0, 2, 4]), (1, 2, [3, 1]), (1, 3, [0, 2, 4]), (0, 2, [3, 1]), (2, 3, [0, 2, 4])]


def test_who_gives_no_color_gets_no_communicator(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> int | None:
        child = comm.split(None if comm.rank == 1 else 7)
        if child is None:
            return None
        with child:
            return int(child.all_gather(np.array([comm.rank])).sum())

    assert on_ranks(3, run) == [2, None, 2]


def test_parent_and_children_side_by_side_from_one_thread_and_several(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> None:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        assert row is not None
        assert column is not None
        works = []
        for _ in range(20):
            for one in (comm, column, row):
                x = np.full(100, comm.rank, np.float32)
                works.append((one, x, one.all_reduce(x, async_op=True)))
        wanted = {id(comm): 6, id(row): 4 * (comm.rank // 2) + 1, id(column): 2 * (comm.rank % 2) + 2}
        for one, x, work in reversed(works):
            work.wait()
            assert (x == wanted[id(one)]).all()
        wrong: list[int] = []

        def use(one: Communicator) -> None:
            for _ in range(50):
                if _sum_of_ranks(one, comm.rank) != wanted[id(one)]:
                    wrong.append(id(one))

        threads = [threading.Thread(target=use, args=(one,)) for one in (row, column)]
        for thread in threads:
            thread.start()
        use(comm)
        for thread in threads:
            thread.join()
        assert wrong == []
        comm.barrier()
        (row if comm.rank % 2 else column).close()
        (column if comm.rank % 2 else row).close()

    on_ranks(4, run)


def test_a_child_outlives_its_parent_and_splits_again(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> float:
        child = comm.split(0 if comm.rank < 3 else 1)
        assert child is not None
        comm.close()
        grandchild = child.split(0, key=-child.rank)
        assert grandchild is not None
        with child, grandchild:
            assert grandchild.rank == grandchild.world_size - 1 - child.rank
            return _sum_of_ranks(grandchild, child.rank)

    assert on_ranks(4, run) == [3.0, 3.0, 3.0, 0.0]


def test_the_failure_of_one_leaves_the_other_usable(on_ranks: OnRanks) -> None:
    all_have_one = threading.Barrier(3)

    def run(comm: Communicator) -> float:
        child = comm.split(0)
        assert child is not None
        all_have_one.wait(60)  # an abort ends also what another rank has not finished
        if comm.rank == 1:
            child.abort("enough of it")
        with pytest.raises(TransportError, match="enough of it"):
            child.barrier()
        child.close()
        return _sum_of_ranks(comm, comm.rank)

    assert on_ranks(3, run) == [3.0] * 3


def test_the_parents_timeout_is_the_childs(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> float:
        child = comm.split(0)
        assert child is not None
        with child:
            return float(child.report()["timeout_s"])

    assert on_ranks(2, run, timeout_s=77.0) == [77.0, 77.0]


def test_integers_of_other_libraries_are_colors(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> int:
        child = comm.split(np.int32(3) if comm.rank else torch.tensor(3), np.int64(comm.rank))  # type: ignore[arg-type]
        assert child is not None
        with child:
            return child.world_size

    assert on_ranks(2, run) == [2, 2]


@pytest.mark.parametrize(
    ("error", "message", "color", "key"),
    [
        (TypeError, "color=1.5 must be an int or None", 1.5, 0),
        (TypeError, "color=True must be an int or None", True, 0),
        (ValueError, "color=-1 is out of range", -1, 0),
        (ValueError, "is out of range: use an int of 64 bits", 0, 1 << 63),
        (TypeError, "key='a' must be an int", 0, "a"),
    ],
)
def test_bad_arguments_are_refused(local: Local, error: type[Exception], message: str, color: Any, key: Any) -> None:
    comm = local(2)[0]
    with pytest.raises(error, match=message):
        comm.split(color, key)
    assert comm.stats()["operations"] == 0


def test_the_simulator_refuses() -> None:
    with pytest.raises(ValueError, match="sim.World"):
        sim.World(2).communicators[0].split(0)


def test_a_member_that_cannot_open_its_network_is_named_to_the_others(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        @staticmethod
        def local(*_: object) -> None:
            raise OSError("no memory")

    def run(comm: Communicator) -> str:
        with pytest.raises((OSError, TransportError)) as found:
            comm.split(0, key=-comm.rank)
        return str(found.value)

    monkeypatch.setattr(groups, "_core", SimpleNamespace(Communicator=Broken))
    told = on_ranks(3, run)
    assert told[2] == "no memory"
    assert all("rank 2 could not open its network" in text for text in told[:2])


def test_a_member_that_cannot_be_joined_says_why_and_is_named_to_the_others(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join_core(rank: int, _: int, exchange: Callable[[bytes], list[bytes]], *__: object) -> None:
        if rank == 1:
            raise OSError("no such device")
        exchange(b"address")

    def run(comm: Communicator) -> str:
        group = groups.group_of(comm.rank, 0, 0, comm.all_gather)
        with pytest.raises((OSError, TransportError)) as found:
            groups.connect(group, comm.all_gather, groups.InheritedOptions(), "")
        return str(found.value)

    monkeypatch.setattr(groups, "join_core", join_core)
    told = on_ranks(3, run)
    assert told[1] == "no such device"
    assert all("rank 1 could not open its network" in told[rank] for rank in (0, 2))


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_without_memory_asks_again_and_the_others_answer(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Of four ranks that share memory the first two do without it, and one of the others may have failed by then."""

    def join_core(rank: int, _: int, exchange: Callable[[bytes], list[bytes]], options: Any, *more: Any) -> Any:
        members = more[2]
        if fails and members[rank] == 3:
            raise OSError("no such device")
        told = exchange(f"{members[rank]} {options.devices}".encode())
        if members == [0, 1] and options.devices == "memory":  # as the core does where it misses memory
            exchange(b"again")
        return told

    def run(comm: Communicator) -> Any:
        group = groups.group_of(comm.rank, comm.rank // 2, 0, comm.all_gather)
        try:
            made = groups.connect(group, comm.all_gather, groups.InheritedOptions(devices="memory"), "")
        except (OSError, TransportError) as error:
            made = SimpleNamespace(core=str(error))
        comm.barrier()
        assert made is not None
        return made.core

    monkeypatch.setattr(groups, "join_core", join_core)
    told = on_ranks(4, run)
    assert told[0] == told[1] == [b"0 None", b"1 None"]
    if fails:
        assert "rank 3 could not open its network" in told[2]
        assert told[3] == "no such device"
    else:
        assert told[2] == told[3] == [b"2 memory", b"3 memory"]


def _mismatch_of(child: Communicator, x: np.ndarray[Any, Any]) -> MismatchedCall:
    with pytest.raises(MismatchedCall) as found:
        child.all_reduce(x)
    return found.value


def test_errors_name_the_group_and_the_ranks_of_its_parent(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> MismatchedCall | None:
        child = comm.split(7 if comm.rank % 2 else None, key=-comm.rank)
        if child is None:
            return None
        with child:
            return _mismatch_of(child, np.zeros(3 if comm.rank == 1 else 2, np.float32))

    _, last, _, middle, _, first = on_ranks(6, run)
    for rank, error in enumerate((first, middle, last)):
        assert (error.group, error.rank, error.peer) == ("split(color=7)", rank, 2)
        assert (error.parent_rank, error.parent_peer) == (5 - 2 * rank, 1)
        assert str(error).endswith("[split(color=7): ranks 0, 1, 2 here are ranks 5, 3, 1 of its parent]")
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_errors_of_a_group_within_a_group_name_both(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> MismatchedCall | None:
        child = comm.split(0 if comm.rank else None)
        if child is None:
            return None
        grandchild = child.split(4 if child.rank else None)
        if grandchild is None:
            return None
        with grandchild:
            return _mismatch_of(grandchild, np.zeros(1 + grandchild.rank, np.float32))

    for error in on_ranks(4, run)[2:]:
        assert error.group == "split(color=4) of split(color=0)"
        assert "ranks 0, 1 here are ranks 1, 2 of its parent]" in str(error)


def test_errors_of_many_ranks_name_two(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> str:
        child = comm.split(0, key=-comm.rank)
        assert child is not None
        with child:
            return str(_mismatch_of(child, np.zeros(1 + (comm.rank == 0), np.float32)))

    told = on_ranks(10, run)
    assert told[3].endswith("[split(color=0): ranks 6, 9 here are ranks 3, 0 of its parent]")
    assert told[0].endswith("[split(color=0): rank 9 here is rank 0 of its parent]")


def test_a_report_names_the_group(on_ranks: OnRanks) -> None:
    def run(comm: Communicator) -> dict[str, Any]:
        child = comm.split(3, key=-comm.rank)
        assert child is not None
        with child:
            assert comm.report()["group"] is None
            return child.report()

    for written in on_ranks(2, run):
        assert written["group"] == {"name": "split(color=3)", "parent_ranks": [1, 0]}
        assert parse(json.dumps(written).encode()).group == ReportedGroup("split(color=3)", (1, 0))


def test_the_first_communicators_errors_name_no_group(on_ranks: OnRanks) -> None:
    for error in on_ranks(2, lambda comm: _mismatch_of(comm, np.zeros(1 + comm.rank, np.float32))):
        assert (error.group, error.parent_rank, error.parent_peer) == (None, None, None)
        assert "split" not in str(error)


def _added(*stats: Stats) -> dict[str, float]:
    keys = ("operations", "messages_sent", "messages_received", "bytes_sent", "bytes_received")
    return {key: sum(one[key] for one in stats) for key in keys}  # type: ignore[literal-required]


def _by_parent(comm: Communicator, part: Stats, members: list[int]) -> list[int]:
    """What was sent to each rank of ``comm``."""
    sent = list(comm.stats(own=True)["bytes_sent_to"])
    for peer, count in zip(members, part["bytes_sent_to"], strict=True):
        sent[peer] += count
    return sent


def test_the_parents_counters_include_its_groups(on_ranks: OnRanks) -> None:
    together = threading.Barrier(5, timeout=60)  # so that nobody sends while another one reads

    def run(comm: Communicator) -> None:
        members = [[4, 2, 0], [1, 3]][comm.rank % 2]
        child = comm.split(comm.rank % 2, key=members.index(comm.rank))
        assert child is not None
        before = comm.stats()
        assert before["bytes_sent"] == comm.stats(own=True)["bytes_sent"]
        child.all_gather(np.zeros(1000, np.float32))
        together.wait()
        part = child.stats()
        sent = 4000 * (child.world_size - 1)
        assert part["bytes_sent"] == sent
        assert comm.stats()["bytes_sent"] == before["bytes_sent"] + sent
        assert _added(comm.stats()) == _added(comm.stats(own=True), part)
        assert comm.stats()["bytes_sent_to"] == _by_parent(comm, part, members)
        assert sum(comm.stats()["bytes_received_from"]) == comm.stats()["bytes_received"]
        assert comm.stats()["waiting_s"] == comm.stats(own=True)["waiting_s"] + part["waiting_s"]
        together.wait()
        work = child.barrier(async_op=True)
        work.wait()
        assert comm.stats()["in_flight"] == child.stats()["in_flight"] == 0
        child.close()

    on_ranks(5, run)


def test_counters_of_closed_groups_stay(on_ranks: OnRanks) -> None:
    """Whichever of a group and the groups that were split from it is closed first."""
    together = threading.Barrier(3, timeout=60)

    def run(comm: Communicator) -> None:
        sent = 0
        for grandchild_first in (True, False):
            child = comm.split(0, key=-comm.rank)
            assert child is not None
            grandchild = child.split(0)
            assert grandchild is not None
            grandchild.all_gather(np.zeros(10, np.float32))
            together.wait()
            first, second = (grandchild, child) if grandchild_first else (child, grandchild)
            of_grandchild = grandchild.stats()
            of_both = _added(child.stats(own=True), of_grandchild)
            assert _added(child.stats()) == of_both
            assert grandchild.stats()["bytes_sent"] == 40 * 2
            together.wait()
            first.close()
            if first is child:
                grandchild.all_gather(np.zeros(10, np.float32))  # it still counts for the first of all
                of_both["bytes_sent"] += 40 * 2
            second.close()
            sent += int(of_both["bytes_sent"])
            total = comm.stats()
            assert total["bytes_sent"] == comm.stats(own=True)["bytes_sent"] + sent
            assert sum(total["bytes_sent_to"]) == total["bytes_sent"]
            assert total["bytes_sent_to"][comm.rank] == total["in_flight"] == 0
        assert comm._counts.parts == []  # a program that splits often keeps no more and more of them

    on_ranks(3, run)


def test_operations_that_a_closed_group_has_not_ended_are_not_in_flight(local: Local) -> None:
    comms = local(2)
    with ThreadPoolExecutor(2) as pool:
        children = [one for one in pool.map(lambda comm: comm.split(0), comms) if one is not None]
    works = [children[0].barrier(async_op=True)]  # the other rank never calls it
    assert comms[0].stats()["in_flight"] == 1
    children[0].abort("enough")
    for one in children:
        one.close()
    with pytest.raises(TransportError):
        works[0].wait()
    assert comms[0].stats()["in_flight"] == 0


def test_counters_while_groups_close(on_ranks: OnRanks) -> None:
    """What is read meanwhile never falls, and never counts a group twice."""

    def run(comm: Communicator) -> None:
        seen: list[int] = []
        over = threading.Event()

        def read() -> None:
            while not over.is_set():
                seen.append(comm.stats()["operations"])

        reader = threading.Thread(target=read)
        reader.start()
        most = 0
        try:
            for _ in range(20):
                child = comm.split(0)
                assert child is not None
                child.barrier()
                child.close()
                most = comm.stats()["operations"]
        finally:
            over.set()
            reader.join()
        assert seen == sorted(seen)
        assert all(one <= most for one in seen)

    on_ranks(2, run)
