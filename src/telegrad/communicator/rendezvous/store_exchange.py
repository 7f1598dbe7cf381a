"""An allgather of bytes over a torch store, by which the processes of a job find each other.

A store may outlive a job: torchrun serves one through restarts, and what a process of an earlier attempt has left there
looks like an answer. So rank 0 opens a session of a name that is its own, the others write under that name, and each
believes only what holds its own entry. This module must not know what the bytes say."""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from telegrad._interfaces import host_name
from telegrad.communicator.torch_terms import first_line, torch_timeout
from telegrad.errors import RendezvousError

RANK_0_GIVES_UP_FIRST_S = 5.0
"""So that the others hear from it who is missing."""

# A rank looks whether there is an answer. It does not wait in the store, whose client writes to stderr each time that a
# wait is over. It looks more rarely the longer it waits, and the more ranks ask one store.
_PAUSE_LEAST_S, _PAUSE_MOST_S = 1e-3, 0.05
_PAUSE_LEAST_PER_RANK_S, _PAUSE_MOST_PER_RANK_S = 2e-5, 2e-4
_PAUSE_SHARE = 0.1  # of what it has waited
# Whether rank 0 has opened another session, it looks in intervals that double.
_LOOKS_FIRST_S, _LOOKS_LAST_S = 0.05, 2.0
_SOON_S = 5.0


@dataclass(frozen=True)
class _Entry:
    """What a rank writes: its bytes, and who it is."""

    mark: str  # no other process has it
    size: int
    at: str
    blob: bytes

    def packed(self) -> bytes:
        return json.dumps([self.mark, self.size, self.at]).encode() + b"\n" + self.blob

    @classmethod
    def unpacked(cls, packed: bytes) -> _Entry:
        header, _, blob = packed.partition(b"\n")
        mark, size, at = json.loads(header)
        return cls(mark, size, at, blob)


@dataclass(frozen=True)
class _Answer:
    """What rank 0 publishes: of each rank the entry that it has found (``None``: none), or what is wrong, with the rank
    that it is wrong with, if one."""

    size: int
    marks: list[str | None]
    places: list[str | None]
    error: str
    peer: int | None
    blobs: list[bytes]

    def packed(self) -> bytes:
        header = [self.size, self.marks, self.places, self.error, self.peer, [len(blob) for blob in self.blobs]]
        return json.dumps(header).encode() + b"\n" + b"".join(self.blobs)

    @classmethod
    def unpacked(cls, packed: bytes) -> _Answer:
        header, _, joined = packed.partition(b"\n")
        size, marks, places, error, peer, lengths = json.loads(header)
        blobs, at = [], 0
        for length in lengths:
            blobs.append(joined[at : at + length])
            at += length
        return cls(size, marks, places, error, peer, blobs)


class _Pauses:
    """Between the looks of one of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self._begin_s = time.monotonic()
        self._least_s = max(_PAUSE_LEAST_S, size * _PAUSE_LEAST_PER_RANK_S)
        self._most_s = max(_PAUSE_MOST_S, size * _PAUSE_MOST_PER_RANK_S)

    def sleep(self, most_s: float) -> None:
        waited_s = time.monotonic() - self._begin_s
        time.sleep(max(0.0, min(most_s, self._most_s, max(self._least_s, _PAUSE_SHARE * waited_s))))


class StoreLost(RendezvousError):  # noqa: N818
    """What served the store has gone."""


class StoreExchange:
    """Rank 0 collects and publishes, so P ranks make O(P) requests.

    ``store``: of this exchange alone, but for what earlier attempts have left. ``call``: what every rank must call, for
    errors. ``job`` and ``attempt`` (at it, as far as is known): the same on all its ranks; those that differ in one do
    not meet. ``again(left_s)``: gives another store where this one is lost before rank 0 has answered, as one that
    served an earlier group of the same processes. ``address``: where the store is served, as far as is known."""

    repeats = True

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        call: str = "from_torch()",
        job: str = "",
        attempt: str = "",
        again: Callable[[float], Any] | None = None,
        address: str | None = None,
    ) -> None:
        self.address = address
        self._store, self._rank, self._size, self._timeout_s = store, rank, size, timeout_s
        self._call, self._job, self._again = call, job, again
        self._session_key = f"session/{job}/{attempt}"
        self._at = f"process {os.getpid()} on host {socket.gethostname()}"
        self._session: str | None = None  # known to be this job's
        self._round = 0
        self._other_job: str | None = None  # of which the store was

    def __call__(self, blob: bytes) -> list[bytes]:
        """Every rank's ``blob``, by rank. Raises ``RendezvousError`` naming the ranks that did not come in time."""
        number, self._round = self._round, self._round + 1
        entry = _Entry(uuid.uuid4().hex, self._size, self._at, blob)
        if self._rank == 0:
            return self._collect(number, entry)
        deadline_s = time.monotonic() + self._timeout_s + RANK_0_GIVES_UP_FIRST_S
        while True:
            try:
                return self._hear(number, entry, deadline_s)
            except StoreLost as lost:
                left_s = deadline_s - time.monotonic()
                if self._again is None or self._session is not None or left_s <= 0:
                    raise self._other_job_found() or lost from None
            try:
                self._store = self._again(left_s)
            except RendezvousError as unreachable:
                raise self._other_job_found() or unreachable from None

    @property
    def session(self) -> str:
        """A name that all ranks of this job know, and no other does; after the first exchange."""
        assert self._session is not None
        return self._session

    @property
    def store(self) -> Any:
        """By which the ranks have found each other."""
        return self._store

    def own_keys(self) -> list[str]:
        """What this rank may delete, once all ranks have what they were told: on rank 0 all."""
        rounds = [*range(self._round)] if self._rank == 0 and self._session is not None else []
        told = [self._key(number, of) for number in rounds for of in (*range(1, self._size), "all")]
        return [*told, "job", self._session_key] if rounds else []

    def _collect(self, number: int, own: _Entry) -> list[bytes]:
        deadline_s = time.monotonic() + self._timeout_s
        if self._session is None:
            self._session = uuid.uuid4().hex
            self._put("job", self._job)
            self._put(self._session_key, self._session)
        entries: list[_Entry | None] = [own]
        error, culprit = "", None
        for peer in range(1, self._size):  # once time is up, or something is wrong, only who is there already
            found = self._awaited(self._key(number, peer), deadline_s, once=bool(error))
            entry = None if found is None else _Entry.unpacked(found)
            entries.append(entry)
            if entry is not None and entry.size != self._size and not error:
                culprit = peer
                error = (
                    f"rank 0 ({self._at}) counts {self._size} ranks, rank {peer} ({entry.at}) {entry.size}: give all "
                    "processes the same WORLD_SIZE"
                )
        missing = [peer for peer, entry in enumerate(entries) if entry is None]
        if missing and not error:
            culprit = missing[0] if len(missing) == 1 else None
            error = (
                f"no peers found: of {self._size} ranks, rank {', '.join(map(str, missing))} did not join within "
                f"{self._timeout_s:g} s: look at the logs of those ranks; every rank must call {self._call}"
            )
        answer = _Answer(
            self._size,
            [None if one is None else one.mark for one in entries],
            [None if one is None else one.at for one in entries],
            error,
            culprit,
            [] if error else [one.blob for one in entries if one is not None],
        )
        self._put(self._key(number, "all"), answer.packed())
        if error:
            raise RendezvousError(error, rank=0, peer=culprit)
        return answer.blobs

    def _hear(self, number: int, own: _Entry, deadline_s: float) -> list[bytes]:
        session, stale, gives_up_s = self._session, None, deadline_s
        looks_again_s, interval_s = 0.0, _LOOKS_FIRST_S
        if session is not None:
            self._put(self._key(number, self._rank), own.packed())
        pauses = _Pauses(self._size)
        while (now_s := time.monotonic()) < gives_up_s:
            if self._session is None and (session is None or now_s >= looks_again_s):
                if session is not None:
                    looks_again_s, interval_s = now_s + interval_s, min(2 * interval_s, _LOOKS_LAST_S)
                found = self._value(self._session_key)
                if found is None:
                    self._note_other_job()
                elif found.decode() != session:
                    session = found.decode()
                    self._put(f"{session}/{number}/{self._rank}", own.packed())
            published = None if session is None else self._value(f"{session}/{number}/all")
            if published is not None:
                answer = _Answer.unpacked(published)
                if own.mark in answer.marks:
                    self._session = session
                    if answer.error:
                        raise RendezvousError(answer.error, rank=self._rank, peer=answer.peer)
                    return answer.blobs
                if answer != stale:  # an earlier attempt's, or this rank is too late, or two processes have it
                    stale = answer
                    # A session that follows one that has failed, at the same attempt, is opened soon.
                    gives_up_s = min(deadline_s, time.monotonic() + _SOON_S) if answer.error else deadline_s
            pauses.sleep(gives_up_s - time.monotonic())
        raise self._nothing_heard(stale)

    def _nothing_heard(self, stale: _Answer | None) -> RendezvousError:
        if stale is None:
            text = (
                f"rank {self._rank} of {self._size} heard nothing from rank 0 within {self._timeout_s:g} s: is rank 0 "
                f"running, and has it called {self._call} too?"
            )
            self._note_other_job()
            if (other := self._other_job_found()) is not None:
                return other
        elif stale.error:
            text = stale.error
        elif self._rank >= stale.size:
            text = (
                f"rank 0 ({stale.places[0]}) has joined {stale.size} ranks, and this is rank {self._rank} of "
                f"{self._size}: give all processes the same WORLD_SIZE"
            )
        else:
            text = (
                f"rank 0 ({stale.places[0]}) has joined another process as rank {self._rank}: "
                f"{stale.places[self._rank]}; this is {self._at}. Either these two have one RANK, or two jobs one "
                f"MASTER_PORT; or that was before a restart, and since then rank 0 has not called {self._call}"
            )
        return RendezvousError(text, rank=self._rank, peer=0)

    def _key(self, number: int, of: int | str) -> str:
        return f"{self._session}/{number}/{of}"

    def _note_other_job(self) -> None:
        found = self._value("job")
        self._other_job = None if found is None or found.decode() == self._job else found.decode()

    def _other_job_found(self) -> RendezvousError | None:
        if self._other_job is None:
            return None
        return RendezvousError(
            f"rank {self._rank} of {self._size} is of the job {self._job!r}, and found the job {self._other_job!r} at "
            "this address and port: give each job a MASTER_PORT of its own",
            rank=self._rank,
            peer=0,
        )

    def _awaited(self, key: str, deadline_s: float, *, once: bool) -> bytes | None:
        """What is there by then; with ``once``, what is there now."""
        pauses = _Pauses(self._size)
        while (found := self._value(key)) is None and not once and (left_s := deadline_s - time.monotonic()) > 0:
            pauses.sleep(left_s)
        return found

    def _put(self, key: str, value: str | bytes) -> None:
        """Raises ``RendezvousError`` where the store has gone."""
        try:
            self._store.set(key, value)
        except Exception as error:
            raise self._lost(error) from None

    def _value(self, key: str) -> bytes | None:
        """What is there. Raises ``RendezvousError`` where the store has gone."""
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except Exception as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> StoreLost:
        return StoreLost(
            f"rank {self._rank} of {self._size} lost the store that ranks find each other by: is the process that "
            f"serves it (torchrun, or rank 0) running? ({first_line(error)})",
            rank=self._rank,
            peer=0,
        )


# The store of a job whose processes torch.distributed has not joined yet. Rank 0 or torchrun serves it at MASTER_ADDR
# and MASTER_PORT.

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
        "child processes with the 'spawn' method; ranks among them need a RANK each, and a MASTER_PORT of their own"
    )


def _connected(place: JobPlace, timeout_s: float) -> Any:
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = place.rank == 0 and not of_torchrun
    deadline_s = time.monotonic() + timeout_s
    if not serves and not of_torchrun:  # which serves it before it starts ranks: a connection less to look up names for
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
        elif of_torchrun:
            text = f"torchrun's store at {place.where} (MASTER_ADDR, MASTER_PORT) does not answer: is torchrun running?"
        else:
            text = (
                f"the store at {place.where} (MASTER_ADDR, MASTER_PORT) cannot be used: if rank 0 runs there, another "
                "program has its port: choose a free MASTER_PORT"
            )
        raise RendezvousError(f"{text} ({first_line(error)})") from None


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
            server, limit_s = (host_name(place.address), place.port), max(min(left_s, _ANSWERS_S), 0.1)
            with socket.create_connection(server, timeout=limit_s):
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
                    f"is the port open? ({what}: {failure})"
                ) from None
        time.sleep(_TRIES_AGAIN_S)


def _number(environment: Mapping[str, str], name: str, what: str, *, least: int, most: int | None = None) -> int:
    text = environment[name]
    with suppress(ValueError):
        value = int(text)
        if value >= least and (most is None or value <= most):
            return value
    raise RendezvousError(f"{name}={text!r} must be {what}: start the job with torchrun or srun, which set it")


def _note_fork() -> None:
    _inherited.extend(_kept.values())
    _inherited_places.update(_kept)
    _kept.clear()
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None:
        with suppress(Exception):  # it has joined no job
            _inherited.append(dist.distributed_c10d._get_default_store())


os.register_at_fork(after_in_child=_note_fork)
