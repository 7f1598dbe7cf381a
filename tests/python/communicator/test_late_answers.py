"""A process wakes up and answers what another one has sent it from a communicator that is closed by then."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import telegrad
from telegrad.communicator.rendezvous.store_exchange import StoreExchange

pytest.importorskip("torch")
from torch.distributed import PrefixStore, TCPStore

pytestmark = pytest.mark.timeout(800)
_PATIENCE_S = 200.0
_context = multiprocessing.get_context("spawn")  # in forked processes an address of one is one of any
_LARGE = np.ones(1 << 20, np.float32)  # whoever gets it must answer, so UCX asks for its name there first


def join(port: int, name: str, rank: int, liveness_s: float = 60.0) -> telegrad.Communicator:
    store = PrefixStore(name, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    exchange = StoreExchange(store, rank, 2, _PATIENCE_S)
    return telegrad.Communicator.from_exchange(rank, 2, exchange, timeout_s=60.0, liveness_timeout_s=liveness_s)


def goes_on(port: int, test: Connection) -> None:
    """Loses its peer, and goes on with another one, whose sums must be right."""
    first = join(port, "first", 0, 1.0)
    test.send("joined")
    test.recv()
    with pytest.raises(telegrad.TransportError, match="rank 1 has been silent"):
        first.send(_LARGE, 1)
    first.close()
    second = join(port, "second", 0)
    test.send("gone on")
    test.recv()
    check_sums(second)
    second.close()


def check_sums(comm: telegrad.Communicator) -> None:
    for _ in range(20):
        found = _LARGE.copy()
        comm.all_reduce(found)
        assert np.array_equal(found, 2 * _LARGE)


def is_frozen(port: int, test: Connection) -> None:
    first = join(port, "first", 1)
    test.send("joined")
    with pytest.raises(telegrad.TransportError):
        first.recv(_LARGE.copy(), 0)
    test.send("has answered")
    test.recv()  # closed no sooner than the others have ended


def helps(port: int, test: Connection) -> None:
    second = join(port, "second", 1)
    check_sums(second)
    second.close()


def test_a_late_answer_to_a_closed_communicator_harms_no_other() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[Any] = []

    def start(run: Callable[..., None]) -> tuple[Any, Connection]:
        here, there = _context.Pipe()
        processes.append(_context.Process(target=run, args=(store.port, there), daemon=True))
        processes[-1].start()
        return processes[-1], here

    def wait(pipe: Connection) -> None:
        assert pipe.poll(_PATIENCE_S)
        pipe.recv()

    try:
        frozen, of_frozen = start(is_frozen)
        other, of_other = start(goes_on)
        helper, _ = start(helps)
        wait(of_frozen)
        wait(of_other)
        os.kill(frozen.pid, signal.SIGSTOP)
        of_other.send("the peer is frozen")
        wait(of_other)
        os.kill(frozen.pid, signal.SIGCONT)
        wait(of_frozen)
        of_other.send("the peer has answered")
        for process in (other, helper):
            process.join(_PATIENCE_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
