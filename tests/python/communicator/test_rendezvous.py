"""How peers find each other, and what is said when they do not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from ports import free_port

from telegrad import Communicator
from telegrad.communicator.rendezvous.joining import check_interface, find_peers
from telegrad.errors import RendezvousError, TransportError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_job() -> None:
    with pytest.raises(
        RendezvousError, match="no peers found.*not initialised.*RANK, WORLD_SIZE, .*torchrun"
    ) as caught:
        Communicator.from_torch()
    assert isinstance(caught.value, TransportError)
    assert caught.value.operation == "rendezvous"


def test_part_of_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RendezvousError, match="the environment has no MASTER_ADDR, MASTER_PORT"):
        Communicator.from_torch()


def _environment(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    for name, value in zip(NAMES, (rank, 2, "127.0.0.1", port), strict=False):
        monkeypatch.setenv(name, str(value))


def test_port_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _environment(monkeypatch, 0, port)
        with pytest.raises(RendezvousError, match=rf"port {port} \(MASTER_PORT\) is taken: choose a free one"):
            Communicator.from_torch(join_timeout_s=2)


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:  # bound but not listening: a port that answers nobody
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        _environment(monkeypatch, 1, port)
        begin_s = time.monotonic()
        with pytest.raises(
            RendezvousError,
            match=f"no peers found at 127.0.0.1:{port} within 1 s: .*does not answer: .*refused",
        ):
            Communicator.from_torch(join_timeout_s=1)
        assert time.monotonic() - begin_s < 20


def test_a_program_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        _environment(monkeypatch, 1, silent.getsockname()[1])
        with pytest.raises(
            RendezvousError, match=r"cannot be used: .* choose a free MASTER_PORT \(no answer within 1 s"
        ):
            Communicator.from_torch(join_timeout_s=0.5)


def test_rank_zero_at_the_address_of_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, 0, free_port())
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(
        RendezvousError,
        match=f"rank 0 does not reach its own .*set MASTER_ADDR to .*runs on, which is {socket.gethostname()}",
    ):
        Communicator.from_torch(join_timeout_s=0.5)


def test_a_host_that_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, 1, 29500)
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(RendezvousError, match=r"at nowhere.invalid:29500 within 0.2 s: .*MASTER_ADDR has no address"):
        Communicator.from_torch(join_timeout_s=0.2)


def test_torchruns_store_is_there_before_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one connection a rank is made, for each of which torch asks a name server."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _environment(monkeypatch, 0, agent.port)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(socket, "create_connection", pytest.fail)
    with Communicator.from_torch() as comm:
        assert comm.world_size == 1
    _environment(monkeypatch, 1, free_port())
    with pytest.raises(RendezvousError, match="torchrun's store at 127.0.0.1:.* does not answer: is torchrun running"):
        Communicator.from_torch(join_timeout_s=0.5)


def test_who_does_not_come_is_named_by_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, 0, free_port())
    with pytest.raises(RendezvousError, match="of 2 ranks, rank 1 did not join within 0.5 s"):
        Communicator.from_torch(join_timeout_s=0.5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "abc", "RANK='abc' must be 0 to 1, as WORLD_SIZE=2"),
        ("RANK", "2", "RANK='2' must be 0 to 1"),
        ("RANK", "-1", "RANK='-1' must be 0 to 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE='0' must be the number of ranks"),
        ("WORLD_SIZE", "two", "WORLD_SIZE='two' must be the number of ranks"),
        ("MASTER_PORT", "http", "MASTER_PORT='http' must be 1 to 65535"),
        ("MASTER_PORT", "99999", "MASTER_PORT='99999' must be 1 to 65535"),
    ],
)
def test_variables_that_cannot_be(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    _environment(monkeypatch, 1, 29500)
    monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=message):
        Communicator.from_torch(join_timeout_s=100)


def test_a_step_of_slurm_with_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "a", "SLURM_JOB_ID": "7"}
    for name, value in {**step, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=r"WORLD_SIZE='2', but this is a step of 4 tasks .* unset WORLD_SIZE"):
        Communicator.from_torch(join_timeout_s=100)


def test_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, 0, free_port())
    monkeypatch.setenv("WORLD_SIZE", "1")
    peers = find_peers()
    assert (peers.rank, peers.size) == (0, 1)
    assert peers.exchange(b"mine") == [b"mine"]


@pytest.mark.usefixtures("job_of_one")
def test_an_initialised_job_is_used_again_and_again() -> None:
    for _ in range(3):
        peers = find_peers()
        assert (peers.rank, peers.size) == (0, 1)
        assert peers.exchange(b"mine") == [b"mine"]
    with Communicator.from_torch() as comm:
        assert (comm.rank, comm.world_size, comm.driver) == (0, 1, "ucx")
        comm.barrier()


@pytest.mark.usefixtures("job_of_one")
def test_torch_2_6_takes_none_for_a_group_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dist.get_process_group_ranks

    def ranks_of(group: object) -> list[int]:
        if group is None:
            raise KeyError(None)  # as torch 2.6 does
        return asked(group)

    monkeypatch.setattr(dist, "get_process_group_ranks", ranks_of)
    for group in (None, dist.group.WORLD):
        peers = find_peers(group)
        assert (peers.rank, peers.size) == (0, 1)
        with Communicator.from_torch(group) as comm:
            comm.barrier()


@pytest.mark.usefixtures("job_of_one")
def test_a_group_without_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0 if group is None else -1)
    with pytest.raises(ValueError, match=r"group does not hold this process \(rank 0\)"):
        Communicator.from_torch(object())


def test_a_group_without_a_job() -> None:
    with pytest.raises(ValueError, match="group was given but torch.distributed is not initialised"):
        Communicator.from_torch(object())


def test_interface() -> None:
    check_interface(None)
    check_interface(socket.if_nameindex()[0][1])
    with pytest.raises(ValueError, match=r"interface='eth99' does not exist on this machine: use one of .*lo"):
        Communicator.from_torch(interface="eth99")
    with pytest.raises(ValueError, match="interface='eth99' does not exist"):
        Communicator.from_exchange(0, 1, lambda blob: [blob], interface="eth99")


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_no_such_rank(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} of size={size} is no rank"):
        Communicator.from_exchange(rank, size, lambda blob: [blob])


def test_other_than_one_rank_of_the_job_for_each() -> None:
    with pytest.raises(
        ValueError, match=r"job_ranks=\[1, 3\] must name 1 ranks of the job, one for each rank, or none"
    ):
        Communicator.from_exchange(0, 1, lambda blob: [blob], job_ranks=[1, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("0", 1, lambda blob: [blob]), "rank='0' must be an int"),
        ((0, 1.0, lambda blob: [blob]), "size=1.0 must be an int"),
        ((0, 1, None), "exchange=None must be callable"),
    ],
)
def test_arguments_of_another_type(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Communicator.from_exchange(*arguments)  # type: ignore[arg-type]


def test_ranks_find_each_other_by_any_exchange() -> None:
    barrier, blobs = threading.Barrier(2), [b"", b""]

    def swap(rank: int) -> Callable[[bytes], list[bytes]]:
        def exchange(blob: bytes) -> list[bytes]:
            blobs[rank] = blob
            barrier.wait(60)
            return list(blobs)

        return exchange

    def run(rank: int) -> Any:
        import numpy as np

        with Communicator.from_exchange(rank, 2, swap(rank)) as comm:
            x = np.full(1000, rank + 1, np.float32)
            comm.all_reduce(x)
            return set(x.tolist())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [{3.0}, {3.0}]
