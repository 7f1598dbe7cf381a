"""All ranks of a job hold rank 0's tuning, or all raise the same error: over UCX, ranks in threads and in processes."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tunings import exchanges, tuning_of

from telegrad import Communicator, Tuning, _core
from telegrad.communicator.tuning_cache import file_of, store
from telegrad.cost import ALLREDUCE_ALGORITHMS, DecisionTable, Place, TableEntry
from telegrad.errors import MismatchedCall
from telegrad.launch import SINGLE_THREADED, Ranks, join

_HOST = socket.gethostname()
_RING, _DOUBLING = _core.Algorithm.ring, _core.Algorithm.recursive_doubling


def _place(ranks: int = 2) -> Place:
    return Place("ucx", ((_HOST, ranks),))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / "cache"))
    for name in ("UCX_TLS", "UCX_NET_DEVICES", "TELEGRAD_NETWORK"):
        monkeypatch.delenv(name, raising=False)


def _join(wanted: list[Any], change: Callable[[int, bytes], bytes] = lambda _rank, blob: blob) -> list[Any]:
    """What each rank, given this tuning, holds and chooses for 16 bytes and 16 MiB; or its error."""
    exchange = exchanges(len(wanted), change)

    def run(rank: int) -> Any:
        try:
            with Communicator.from_exchange(rank, len(wanted), exchange[rank], tuning=wanted[rank]) as comm:
                x = np.full(1000, rank + 1, np.float32)
                comm.all_reduce(x)
                assert set(x) == {sum(range(1, len(wanted) + 1))}
                assert comm.place == _place(len(wanted))
                return comm.tuning, comm._core.choose_allreduce(16), comm._core.choose_allreduce(16 << 20)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(wanted)) as pool:
        return list(pool.map(run, range(len(wanted))))


_BUILT_IN = (None, _DOUBLING, _RING)


def test_without_a_cache_the_choice_is_built_in() -> None:
    assert _join(["auto", "auto"]) == [_BUILT_IN] * 2
    assert _join([None, "auto"]) == [_BUILT_IN] * 2
    assert _join(["auto", None]) == [_BUILT_IN] * 2


def test_what_was_calibrated_is_used_by_itself_unless_it_is_not_wanted() -> None:
    kept = tuning_of(_place(), 5000)
    store(kept)
    assert _join(["auto", "auto"]) == [(kept, _RING, _DOUBLING)] * 2
    assert _join([None, None]) == [_BUILT_IN] * 2
    assert _join(["auto", "auto", "auto"]) == [_BUILT_IN] * 3  # another number of ranks


def test_a_tuning_that_is_given_is_used() -> None:
    store(tuning_of(_place(), 5000))
    given = tuning_of(Place("ucx", (("far", 1), ("away", 1))[::-1]), 6000)
    for wanted in ([given, given], [given, "auto"]):
        assert _join(wanted) == [(given, _RING, _DOUBLING)] * 2


def test_rank_0_s_host_set_decides_between_candidates() -> None:
    store(tuning_of(_place(3), 5000))
    store(tuning_of(Place("ucx", tuple(sorted(((_HOST, 2), ("elsewhere", 1))))), 6000))
    assert {found[0].allreduce.choices[1].from_bytes for found in _join(["auto"] * 3)} == {5000}


@pytest.mark.parametrize("odd", [None, tuning_of(_place(3), 7000)], ids=["built-in", "another"])
def test_a_rank_with_another_tuning_is_an_error_on_all_ranks(odd: Tuning | None) -> None:
    given = tuning_of(_place(3), 5000)
    errors = _join([given, odd, "auto"])
    assert len(set(errors)) == 1
    assert (
        f"rank 1 was given another tuning than rank 0, which has {given.digest}: give all ranks the same" in errors[0]
    )


def test_a_tuning_damaged_on_its_way_is_an_error_on_all_ranks() -> None:
    given = tuning_of(_place(), 5000)
    for before, after, message in (
        (b"ring", b"wing", "'wing' does not exist"),
        (b"beta_s_p", b"zeta_s_p", "lacks 'beta_s_per_byte'"),
    ):

        def change(_: int, blob: bytes, before: bytes = before, after: bytes = after) -> bytes:
            return blob.replace(before, after)

        errors = _join([given, given], change)
        assert len(set(errors)) == 1
        assert message in errors[0]


def test_what_is_no_address_of_this_library_is_an_error_on_all_ranks() -> None:
    for spoiled in (b"", b"\x02\x00\x00\x00{}address", b"\xff\xff\xff\xff{", os.urandom(64)):
        errors = _join(["auto", "auto"], lambda rank, blob, spoiled=spoiled: spoiled if rank == 1 else blob)
        assert len(set(errors)) == 1
        assert "exchange returned a blob that is no address of rank 1" in errors[0]


@pytest.mark.parametrize(
    ("tuning", "error", "message"),
    [
        ("best", ValueError, "tuning='best' is none: give a Tuning, 'auto' .* or None"),
        (3, TypeError, "tuning is a int: give a Tuning, 'auto' or None"),
        (tuning_of(_place(4), 5000), ValueError, "tuning is for 4 ranks, but this job has 1"),
    ],
)
def test_what_is_no_tuning_of_this_job_is_refused_before_anything_is_sent(
    tuning: Any, error: type[Exception], message: str
) -> None:
    def exchange(_: bytes) -> list[bytes]:
        raise AssertionError("nothing may be sent")

    with pytest.raises(error, match=message):
        Communicator.from_exchange(0, 1, exchange, tuning=tuning)
    if not isinstance(tuning, Tuning):
        with pytest.raises(error, match=message):
            Communicator.from_torch(tuning=tuning)


def test_a_running_communicator_takes_another_tuning(on_ranks: Callable[..., list[Any]]) -> None:
    tuning = tuning_of(Place("local", ((_HOST, 3),)), 5000)

    def run(comm: Communicator) -> list[Any]:
        assert (comm.tuning, comm.place) == (None, None)
        found = []
        for one in (tuning, None):
            comm.use(one)
            x = np.ones(2000, np.float32)
            comm.all_reduce(x)
            found.append((comm.tuning, comm._core.choose_allreduce(16), x[0]))
        with pytest.raises(ValueError, match="tuning is for 4 ranks, but this job has 3"):
            comm.use(tuning_of(_place(4), 5000))
        with pytest.raises(
            ValueError, match=r"tuning='auto' is none: .*'auto' is looked up as the ranks join, by from_torch"
        ):
            comm.use("auto")
        return found

    assert on_ranks(3, run) == [[(tuning, _RING, 3.0), (None, _DOUBLING, 3.0)]] * 3


@pytest.mark.parametrize("name", ALLREDUCE_ALGORITHMS)
def test_the_core_takes_every_algorithm_that_a_table_may_name(
    local: Callable[..., list[Communicator]], name: str
) -> None:
    comm = local(1)[0]
    comm.use(dataclasses.replace(tuning_of(_place(1), 5000), allreduce=DecisionTable(1, (TableEntry(0, name),))))
    assert comm._core.choose_allreduce(16) == getattr(_core.Algorithm, name)


def test_the_core_refuses_what_is_no_table(local: Callable[..., list[Communicator]]) -> None:
    comm = local(1)[0]
    for choices, message in (
        ([(4, _RING)], "no choice from 0 bytes"),
        ([(0, _RING), (8, _RING), (8, _DOUBLING)], "do not ascend after 8 bytes"),
        ([(0, _core.Algorithm.split_allgather)], "split_allgather, which does not sum dense vectors"),
    ):
        with pytest.raises(ValueError, match=message):
            comm._core.use_allreduce_table(choices)


def test_different_tables_would_be_noticed(local: Callable[..., list[Communicator]]) -> None:
    comms = local(2)
    comms[0].use(tuning_of(Place("local", ((_HOST, 2),)), 5000))
    works = [comm.all_reduce(np.ones(4, np.float32), async_op=True) for comm in comms]
    with pytest.raises(MismatchedCall, match="algorithm=ring"):
        works[0].wait()


def main() -> None:
    """A rank of the last test."""
    with join(timeout_s=60.0) as comm:
        x = np.ones(10_000, np.float32)
        comm.all_reduce(x)
        digest = comm.tuning.digest if comm.tuning else None
        print(json.dumps({"digest": digest, "sum": float(x[0])}), flush=True)


def test_processes_with_different_caches_agree_on_rank_0_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    for rank in range(3):
        monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path / f"cache{rank}"))
        kept.append(tuning_of(_place(3), 1000 * (rank + 1)))
        store(kept[-1])
    file_of(_place(3)).write_text("{")  # rank 2's is damaged, which nobody will know
    lines: dict[int, dict[str, Any]] = {}
    with Ranks(
        f"{Path(__file__).stem}:main",
        3,
        timeout_s=60.0,
        environment={**SINGLE_THREADED, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        environment_of=lambda rank: {"TELEGRAD_CACHE": str(tmp_path / f"cache{rank}")},
        on_line=lambda rank, line: lines.update({rank: json.loads(line)}),
    ) as ranks:
        ranks.wait()
    assert lines == {rank: {"digest": kept[0].digest, "sum": 3.0} for rank in range(3)}
