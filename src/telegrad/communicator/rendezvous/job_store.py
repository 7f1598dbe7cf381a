"""The store of a job whose processes torch.distributed has not joined yet: at MASTER_ADDR and MASTER_PORT, where rank 0
or torchrun serves it. And what a forked child has of its parent's."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from telegrad.communicator.torch_terms import first_line, torch_timeout
from telegrad.errors import RendezvousError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_TRIES_AGAIN_S = 0.1
_ANSWERS_S = 5.0  # a host that is there; where one is not, the network may say nothing
_TORCH_GIVES_UP_FIRST_S = 0.5  # its error says more

# Kept while the process lives: rank 0 serves it on MASTER_PORT, and a later init_process_group() joins the same server.
# Were it dropped, that call could reach the old server on its way out, and wait for ever.
_kept: dict[JobPlace, Any] = {}
_inherited: list[Any] = []
_inherited_places: set[JobPlace] = set()


@dataclass(frozen=True)
class JobPlace:
    """What the environment says of this process and its job."""

    rank: int
    size: int
    address: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> JobPlace:
        """Raises ``RendezvousError`` naming the variable that cannot be."""
        size = _number(environment, "WORLD_SIZE", "the number of ranks", least=1)
        rank = _number(environment, "RANK", f"0 to {size - 1}, as WORLD_SIZE={size}", least=0, most=size - 1)
        port = _number(environment, "MASTER_PORT", "1 to 65535", least=1, most=65535)
        return cls(rank, size, environment["MASTER_ADDR"], port)

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


def attempt() -> str:
    """Which one of a job that torchrun may start again; nothing of any other."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


def store_of(place: JobPlace, timeout_s: float) -> Any:
    """The job's store: the same one again and again. Raises ``RendezvousError`` where it cannot be reached in time."""
    if place not in _kept:
        if place in _inherited_places:
            raise _forked()
        _kept[place] = _connected(place, timeout_s)
    return _kept[place]


def store_again(place: JobPlace, timeout_s: float) -> Any:
    """Another connection to the job's store, where what has served the last one has gone. Raises as ``store_of``."""
    _kept.pop(place, None)
    return store_of(place, timeout_s)


def check_not_inherited(store: Any) -> None:
    """Raises ``RendezvousError`` where ``store`` is the one of the process that has forked this one: both would answer
    as the same rank, over one connection."""
    if any(store is one for one in _inherited):
        raise _forked()


def _forked() -> RendezvousError:
    return RendezvousError(
        "this process was forked from a rank that had joined its job, and would answer in that one's place: start "
        "child processes with the 'spawn' method; ranks among them need a RANK each, and a MASTER_PORT of their own",
        operation="rendezvous",
    )


def _connected(place: JobPlace, timeout_s: float) -> Any:
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    deadline_s = time.monotonic() + timeout_s
    if not serves:
        _wait_for_server(place, timeout_s, deadline_s)
    try:
        return _opened(place, serves, max(deadline_s - time.monotonic(), 1.0))
    except Exception as error:
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            text = (
                f"port {place.port} (MASTER_PORT) is taken: choose a free one (under Slurm, export MASTER_PORT before "
                "srun), or let torchrun choose with --standalone"
            )
        elif serves:
            text = (
                f"rank 0 does not reach its own store at {place.where} (MASTER_ADDR, MASTER_PORT): set MASTER_ADDR to "
                f"an address of the host that rank 0 runs on, which is {socket.gethostname()}"
            )
        else:
            text = (
                f"the store at {place.where} (MASTER_ADDR, MASTER_PORT) cannot be used: if rank 0 runs there, another "
                "program has its port: choose a free MASTER_PORT"
            )
        raise RendezvousError(f"{text} ({first_line(error)})", operation="rendezvous") from None


def _opened(place: JobPlace, serves: bool, timeout_s: float) -> Any:
    """Raises ``TimeoutError`` and whatever torch raises. In a thread, which is left where it is if time is up: torch
    waits without end for the first word of a server that accepts connections and says nothing, and tries an address
    where nobody answers for twice as long as it is told."""
    from torch._C._distributed_c10d import TCPStore

    came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open_store() -> None:
        try:
            came.put(
                TCPStore(
                    place.address,
                    place.port,
                    place.size,
                    serves,
                    torch_timeout(timeout_s),
                    wait_for_workers=False,  # who does not come is named by the exchange
                    multi_tenant=True,
                    use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
                )
            )
        except Exception as error:
            came.put(error)

    threading.Thread(target=open_store, name="telegrad-store", daemon=True).start()
    try:
        found = came.get(timeout=min(timeout_s + _TORCH_GIVES_UP_FIRST_S, threading.TIMEOUT_MAX))
    except queue.Empty:
        raise TimeoutError(f"no answer within {round(timeout_s, 1):g} s") from None
    if isinstance(found, Exception):
        raise found
    return found


def _wait_for_server(place: JobPlace, timeout_s: float, deadline_s: float) -> None:
    """A rank that is early waits here, where the error says what is wrong, and torch does not log each try."""
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            with socket.create_connection((place.address, place.port), timeout=max(min(left_s, _ANSWERS_S), 0.1)):
                return
        except OSError as failure:
            if left_s <= _TRIES_AGAIN_S:
                what = (
                    "MASTER_ADDR has no address here: set it to one of rank 0's host"
                    if isinstance(failure, socket.gaierror)
                    else "it does not answer"
                )
                raise RendezvousError(
                    f"no peers found at {place.where} within {round(timeout_s, 1):g} s: is rank 0 running there, and "
                    f"is the port open? ({what}: {failure})",
                    operation="rendezvous",
                ) from None
        time.sleep(_TRIES_AGAIN_S)


def _number(environment: Mapping[str, str], name: str, what: str, *, least: int, most: int | None = None) -> int:
    text = environment[name]
    with suppress(ValueError):
        value = int(text)
        if value >= least and (most is None or value <= most):
            return value
    raise RendezvousError(
        f"{name}={text!r} must be {what}: start the job with torchrun or srun, which set it", operation="rendezvous"
    )


def _note_fork() -> None:
    _inherited.extend(_kept.values())
    _inherited_places.update(_kept)
    _kept.clear()
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None:
        with suppress(Exception):  # it has joined no job
            _inherited.append(dist.distributed_c10d._get_default_store())


os.register_at_fork(after_in_child=_note_fork)
