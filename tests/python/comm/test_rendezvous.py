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

from telegrad import Communicator
from telegrad.comm.rendezvous import StoreExchange, check_interface, find_peers
from telegrad.errors import RendezvousError, TransportError

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _exchanges(size: int, timeout_s: float = 20.0) -> list[StoreExchange]:
    store = dist.HashStore()
    return [StoreExchange(store, rank, size, timeout_s) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_every_blob(size: int) -> None:
    exchanges = _exchanges(size)

    def run(rank: int) -> list[list[bytes]]:
        return [exchanges[rank](bytes([rank, turn]) * (rank * 100 + turn)) for turn in range(3)]

    with ThreadPoolExecutor(size) as pool:
        for got in pool.map(run, range(size)):
            assert got == [[bytes([r, turn]) * (r * 100 + turn) for r in range(size)] for turn in range(3)]


def test_a_missing_rank_is_named_on_all_others() -> None:
    exchanges = _exchanges(4, timeout_s=0.5)

    def run(rank: int) -> str:
        with pytest.raises(RendezvousError) as caught:
            exchanges[rank](b"here")
        assert caught.value.rank == rank
        return str(caught.value)

    start_s = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        texts = set(pool.map(run, (0, 1, 3)))
    assert time.monotonic() - start_s < 4
    (text,) = texts
    assert "no peers found: of 4 ranks, rank 2 did not join within 0.5 s" in text


def test_rank_zero_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = _exchanges(2, timeout_s=0.2)[1]
    monkeypatch.setattr("telegrad.comm.rendezvous.RANK_0_GIVES_UP_FIRST_S", 0.1)
    with pytest.raises(RendezvousError, match="rank 1 of 2 heard nothing from rank 0 within 0.2 s: is rank 0 running"):
        exchange(b"here")


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
        with pytest.raises(RendezvousError, match=f"no peers found at 127.0.0.1:{port} within 1 s: is rank 0 running"):
            Communicator.from_torch(join_timeout_s=1)


def test_the_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _environment(monkeypatch, 0, free.getsockname()[1])
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
            barrier.wait(10)
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
