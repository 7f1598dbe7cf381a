"""Nodes: how ranks come to the same partition, and what two_level makes of it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import telegrad
from telegrad import Communicator, SparseVector, TransportError
from telegrad.communicator import nodes as nodes_module
from telegrad.communicator.nodes import (
    NODE_VARIABLE,
    checked_node,
    checked_nodes,
    label_of,
    numbered,
    remove_orphans,
    two_levels,
)
from telegrad.communicator.tuning import TuningAgreement
from telegrad.cost import Costs, Place, Tuning, allreduce_table
from telegrad.launch import Ranks

P = 4


def in_threads(communicators: list[Communicator], call: Callable[[Communicator], Any]) -> list[Any]:
    found: list[Any] = [None] * len(communicators)

    def run(rank: int) -> None:
        try:
            found[rank] = call(communicators[rank])
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(communicators))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_nodes_are_numbered_by_their_first_ranks() -> None:
    assert numbered(["b", "a", "b", "c"]) == (0, 1, 0, 2)
    assert two_levels((0, 1, 0))
    assert not two_levels((0, 0, 0))
    assert not two_levels((0, 1, 2))


def test_ranks_that_share_memory_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NODE_VARIABLE, raising=False)
    own = label_of(None)
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() in own
    assert str(os.stat("/proc/self/ns/ipc").st_ino) in own
    monkeypatch.setenv(NODE_VARIABLE, "rack 3")
    assert label_of(None) == "rack 3"
    assert label_of("mine") == "mine"


def test_without_proc_the_host_is_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.delenv(NODE_VARIABLE, raising=False)

    def absent(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    assert label_of(None) == socket.gethostname()


@pytest.mark.parametrize("node", [1.5, True, b"a"])
def test_a_node_is_a_name_or_a_number(node: Any) -> None:
    with pytest.raises(TypeError, match="node=.* must be a str or an int"):
        checked_node(node)


def test_a_node_has_a_name() -> None:
    with pytest.raises(ValueError, match="node='' names no node"):
        checked_node("")


def test_nodes_of_all_ranks_are_checked() -> None:
    assert checked_nodes(None, 3) == (0, 0, 0)
    assert checked_nodes(["x", "y", "x"], 3) == (0, 1, 0)
    assert checked_nodes([np.int64(4), 4, np.int32(7)], 3) == (0, 0, 1)
    with pytest.raises(TypeError, match="nodes='ab' must be a sequence"):
        checked_nodes("ab", 2)
    with pytest.raises(ValueError, match=r"nodes=\(1, 2\) names 2 ranks' nodes: there are 3"):
        checked_nodes((1, 2), 3)
    with pytest.raises(TypeError, match="has None"):
        checked_nodes((1, None), 2)


def test_all_ranks_come_to_the_same_nodes() -> None:
    agreements = [TuningAgreement(rank, 3, list, None, None, node=name) for rank, name in enumerate(("b", "a", "b"))]
    words = [agreement._word.pack() + bytes([rank]) for rank, agreement in enumerate(agreements)]
    for agreement in agreements:
        agreement._exchange = lambda _: words
        assert agreement.swap(b"") == [b"\0", b"\1", b"\2"]
        assert agreement.nodes == (0, 1, 0)
        assert agreement.place is not None
        assert agreement.place.nodes == (0, 1, 0)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1)])
def test_two_level_sums_dense_and_sparse(nodes: tuple[int, ...]) -> None:
    communicators = Communicator.local(P, nodes=nodes)

    def call(one: Communicator) -> tuple[Any, Any]:
        x = np.arange(1000, dtype=np.float32) + one.rank
        one.all_reduce(x, algorithm="two_level")
        indices = np.arange(one.rank, 1000, 3, dtype=np.uint32)
        stream = SparseVector(indices, np.ones(indices.size, np.float32), 1000)
        return x, one.all_reduce(stream, algorithm="two_level").to_dense()

    found = in_threads(communicators, call)
    expected = np.zeros(1000, np.float32)
    for rank in range(P):
        expected[rank::3] += 1
    for dense, sparse in found:
        np.testing.assert_array_equal(dense, np.arange(1000) * P + 6)
        np.testing.assert_array_equal(sparse, expected)
    for one in communicators:
        assert one.nodes == numbered(nodes)
        one.close()


@pytest.mark.parametrize("algorithm", ["two_level", "auto"])
@pytest.mark.parametrize("wire", ["packed-f16", "packed-bf16", "packed-int8"])
def test_means_that_are_rounded_between_nodes(algorithm: str, wire: str) -> None:
    """Sums would be too large for 16 bits; what rounding loses is handed back, of a mean by all ranks together."""
    n = 1 << 18
    communicators = Communicator.local(P, nodes=(0, 0, 1, 1))
    indices = np.arange(0, n, 4096, dtype=np.uint32)
    drawn = np.random.default_rng(2).uniform(20_000.0, 40_000.0, (P, indices.size)).astype(np.float32)

    def call(one: Communicator) -> tuple[Any, Any]:
        error = np.zeros(n, np.float32)
        stream = SparseVector(indices, drawn[one.rank], n)
        return one.all_reduce(stream, "avg", algorithm=algorithm, wire=wire, error=error).to_dense(), error

    found = in_threads(communicators, call)
    errors = np.sum([error for _, error in found], axis=0, dtype=np.float64)
    for mean, _ in found:
        np.testing.assert_array_equal(mean, found[0][0])
        np.testing.assert_allclose(mean[indices], drawn.mean(0), rtol=0.05)
    assert np.abs(errors).max() > 0.0
    np.testing.assert_allclose(P * found[0][0][indices] + errors[indices], drawn.sum(0, dtype=np.float64), rtol=1e-5)
    for one in communicators:
        one.close()


def test_the_choice_knows_of_nodes() -> None:
    together, apart = Communicator.local(P), Communicator.local(P, nodes=(0, 0, 1, 1))
    long = 16 << 20
    assert {str(one._usable().choose_allreduce(long)) for one in together} == {"Algorithm.ring"}
    assert {str(one._usable().choose_allreduce(long)) for one in apart} == {"Algorithm.two_level"}
    assert {str(one._usable().choose_allreduce(64)) for one in apart} == {"Algorithm.recursive_doubling"}
    for one in (*together, *apart):
        one.close()


def test_a_tuning_tells_the_core_what_is_inside_of_nodes_and_of_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []

    class Core:
        def use_allreduce_table(self, *arguments: Any) -> None:
            told.append(arguments)

    between, within, alone = Costs(2e-6, 4e-10), Costs(1e-6, 1e-11), Costs(2e-6, 1e-10)
    place = Place("ucx", (("one", 2), ("two", 2)), nodes=(0, 0, 1, 1))
    flat = Tuning(place, between, allreduce_table(4, between), "2026-11-26T00:00:00Z", "0.1.0", 0.1)
    communicators = Communicator.local(P, nodes=(0, 0, 1, 1))
    for tuning in (replace(flat, within=within, alone=alone), flat):
        communicators[0].use(tuning)  # which the core takes
        with monkeypatch.context() as patch:
            patch.setattr(communicators[0], "_usable", Core)
            communicators[0].use(tuning)
    assert [costs is not None for _, costs, _, _ in told] == [True, True]
    assert [inside is not None for _, _, inside, _ in told] == [True, False]
    assert [beta for *_, beta in told] == [1e-10, None]
    for one in communicators:
        one.close()


def test_parts_know_their_nodes() -> None:
    communicators = Communicator.local(6, nodes=(0, 1, 0, 1, 0, 1))
    found = in_threads(communicators, lambda one: one.split(one.rank // 3))
    assert [part.nodes for part in found] == [(0, 1, 0)] * 3 + [(0, 1, 0)] * 3
    for one in (*found, *communicators):
        one.close()


def test_ranks_with_other_nodes_do_not_call_the_same() -> None:
    communicators = Communicator.local(P, nodes=(0, 0, 1, 1))
    communicators[3]._use_nodes((0, 1, 0, 1))
    found = in_threads(communicators, lambda one: one.all_reduce(np.ones(8, np.float32), algorithm="two_level"))
    assert all(isinstance(error, TransportError) for error in found)
    assert all("nodes=#" in str(error) for error in found)
    for one in communicators:
        one.close()


def test_labels_are_one_for_each_rank() -> None:
    (alone,) = Communicator.local(1)
    with pytest.raises(ValueError, match="there are 2 labels for 1 ranks"):
        alone._usable().use_nodes([0, 1])
    alone.close()


def test_balanced_slices_are_not_for_two_levels() -> None:
    (alone,) = Communicator.local(1)
    stream = SparseVector(np.array([1], np.uint32), np.ones(1, np.float32), 4)
    with pytest.raises(ValueError, match="slices='balanced' is not for algorithm='two_level', whose slices"):
        alone.all_reduce(stream, algorithm="two_level", slices="balanced")
    alone.close()


@pytest.mark.timeout(100)
def test_processes_find_their_nodes() -> None:
    said: list[tuple[int, str]] = []
    with Ranks(
        str(Path(__file__).with_name("nodes_program.py")),
        3,
        timeout_s=60.0,
        environment_of=lambda rank: {NODE_VARIABLE: "left"} if rank == 1 else {},
        on_line=lambda rank, line: said.append((rank, line)),
    ) as ranks:
        ranks.wait()
    assert sorted(said) == [(rank, "(0, 1, 0) 6.0") for rank in range(3)]


@pytest.fixture
def orphan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file as UCX makes it, which nobody has open."""
    monkeypatch.setattr(nodes_module, "_ORPHAN_AGE_S", -1.0)
    path = Path("/dev/shm") / f"ucx_shm_posix_{os.getpid():x}"
    path.write_bytes(bytes(8192))
    yield path
    path.unlink(missing_ok=True)


def test_a_file_of_ucx_that_nobody_has_open_is_removed(orphan: Path) -> None:
    other = orphan.with_name(f"mine{orphan.name}")
    other.write_bytes(b"")
    try:
        remove_orphans()
        assert not orphan.exists()
        assert other.exists()
    finally:
        other.unlink()


def test_a_file_of_ucx_that_a_process_has_open_stays(orphan: Path) -> None:
    command = [sys.executable, "-c", "import sys; file = open(sys.argv[1]); print(flush=True); input()", str(orphan)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        remove_orphans()
        assert orphan.exists()
        process.communicate(b"\n")
    remove_orphans()
    assert not orphan.exists()


@pytest.mark.parametrize("protection", [1, 3])  # to read, and to write, too
def test_a_file_of_ucx_that_is_mapped_stays(orphan: Path, protection: int) -> None:
    c = ctypes.CDLL(None)
    c.mmap.restype = ctypes.c_void_p
    c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    file = os.open(orphan, os.O_RDONLY if protection == 1 else os.O_RDWR)
    mapped = c.mmap(None, 8192, protection, 1, file, 0)
    os.close(file)
    remove_orphans()
    assert orphan.exists()
    assert c.munmap(mapped, 8192) == 0
    remove_orphans()
    assert not orphan.exists()


def test_a_file_of_ucx_that_was_just_made_stays(orphan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "_ORPHAN_AGE_S", 1000.0)
    remove_orphans()
    assert orphan.exists()


def test_a_file_of_another_user_stays(orphan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    remove_orphans()
    assert orphan.exists()


def test_ranks_that_join_and_leave_remove_what_killed_ones_left(orphan: Path) -> None:
    from torch._C._distributed_c10d import HashStore

    with telegrad.join(HashStore(), 1) as comm:
        assert comm.world_size == 1
        assert not orphan.exists()
        orphan.write_bytes(b"")
        assert comm._membership is not None
        comm._membership.leave(ends=True)
    assert not orphan.exists()
