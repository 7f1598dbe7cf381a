"""Which replicas take part: they agree over a store, form a communicator, and another one when a replica is lost or
comes.

Each group has a number, and its list of members is written once: whoever is first decides, and whoever is not on it
joins anew. A replica that is silent in the store for too long counts as gone, however long its steps take.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from telegrad.communicator import Communicator
from telegrad.communicator.rendezvous.store_exchange import StoreExchange
from telegrad.communicator.torch_terms import first_line
from telegrad.communicator.work import check_timeout
from telegrad.compress.arguments import checked_count
from telegrad.errors import RendezvousError, TransportError

_BEAT_S = 0.5  # between two signs of life
_POLL_S = 0.05
_STOPS_S = 5.0  # so long an answer that is under way may take at the end
_MOST_ATTEMPTS = 20
_ALL_GONE = (
    "all replicas of the group are gone, so nobody has the parameters: start all again from a checkpoint, with another "
    "name="
)
_ENDED = (
    "the run of this name has ended: its last replica has closed its DiLoCo. To train on, start replicas from a "
    "checkpoint, with another name="
)


@dataclass(frozen=True)
class _Members:
    """``tickets``: of those who asked to join, so many were looked at."""

    number: int
    names: list[str]
    tickets: int


class ReplicaGroup:
    """Lets DiLoCo go on when replicas are lost, and take in others: give it to DiLoCo instead of a Communicator.

    A replica that is killed, or frozen for longer than ``liveness_timeout_s``, costs its own round only. One that
    comes later, or wakes up, takes the parameters, the outer optimizer's state and the round over from a peer, and
    takes part from the next round. Train until ``diloco.rounds`` is large enough, as replicas take different numbers
    of steps then.

    - ``store``: a ``torch.distributed.Store`` that outlives the replicas, as a TCPStore that none of them serves.
    - ``replicas``: so many make the first group; any number can follow.
    - ``name``: of this run, which no earlier one in the store has had.
    - ``timeout_s``: the limit of each operation, and of the wait for the others. ``join_timeout_s``: of the connections
      of a group that was agreed on. ``liveness_timeout_s`` and ``interface``: as for ``Communicator.from_torch``.

    Raises ``TypeError`` and ``ValueError`` for bad arguments.
    """

    def __init__(
        self,
        store: Any,
        replicas: int,
        *,
        name: str = "replicas",
        timeout_s: float = 1800.0,
        liveness_timeout_s: float = 8.0,
        join_timeout_s: float = 30.0,
        interface: str | None = None,
    ) -> None:
        if not isinstance(store, Store):
            raise TypeError(f"store is a {type(store).__name__}: give a torch.distributed.Store, as a TCPStore")
        if not isinstance(name, str):
            raise TypeError(f"name={name!r} must be a str: one for each run")
        self._replicas = checked_count(replicas, "replicas")
        if self._replicas < 1:
            raise ValueError(f"replicas={replicas} must be at least 1: how many make the first group")
        self._timeout_s = check_timeout(timeout_s, "timeout_s")
        self._store = _StoreThread(store, f"telegrad/{name}", self._timeout_s)
        self._liveness_s = check_timeout(liveness_timeout_s, "liveness_timeout_s")
        self._join_timeout_s = check_timeout(join_timeout_s, "join_timeout_s")
        self._interface = interface
        self._group: _Members | None = None  # to which this replica belongs
        self._name, self._ticket = "", -1

    @property
    def store_error(self) -> str:
        """Why the store cannot be used any more; empty while it can. Members need it only for another group."""
        return self._store.error

    def regroup(self, *, admit: bool) -> tuple[Communicator, bool]:
        """The communicator of the next group, and whether this replica was in the last one. ``admit``: those that wait
        are taken in too. Raises ``RendezvousError`` where the store or all others are gone."""
        was_member = self._group is not None
        for _ in range(_MOST_ATTEMPTS):
            before = self._group
            group = self._as_member(before, admit) if before is not None else None
            if group is None:
                was_member, group = False, self._as_newcomer()
            self._group = group
            exchange = StoreExchange(
                self._store.under(f"join/{group.number}"),
                group.names.index(self._name),
                len(group.names),
                self._join_timeout_s,
                call="telegrad.DiLoCo(…)",
            )
            try:
                comm = Communicator.from_exchange(
                    group.names.index(self._name),
                    len(group.names),
                    exchange,
                    timeout_s=self._timeout_s,
                    liveness_timeout_s=self._liveness_s,
                    interface=self._interface,
                )
            except TransportError:  # one was lost meanwhile
                continue
            return comm, was_member
        raise RendezvousError(
            f"the replicas agreed {_MOST_ATTEMPTS} times on a group, and each time some did not connect: look at their "
            "logs, and at the network between them",
            operation="rendezvous",
        )

    def wanted(self) -> bool:
        """Whether somebody waits to be taken in, as far as is known. Does not wait for the store."""
        return self._group is not None and self._store.tickets > self._group.tickets

    def note_parameters(self, *, are_there: bool) -> None:
        """``are_there``: some members had common parameters, else they begin with those of one. Raises
        ``RendezvousError`` where there were some, and nobody is left who has them."""
        assert self._group is not None
        own = str(self._group.number)
        begun = self._store.call("compare_set", "begun", "", own).decode()
        if not are_there and begun != own:
            raise RendezvousError(_ALL_GONE, operation="rendezvous")

    def claim(self, what: str) -> bool:
        """Whether this replica is the first that asks for it."""
        return bool(self._store.call("compare_set", f"claimed/{what}", "", self._name).decode() == self._name)

    def has_claimed(self, what: str) -> bool:
        """Whether any has asked for it."""
        return self._value(f"claimed/{what}") is not None

    def leave(self, *, ends: bool = False) -> None:
        """The others need not wait for this replica, which joins anew if it regroups. ``ends``: it is done."""
        if self._name:
            with contextlib.suppress(RendezvousError):  # then nobody can look
                self._store.call("set", f"left/{self._name}", "ends" if ends else "fails")
        self._store.stop()
        self._group, self._name, self._ticket = None, "", -1

    def _as_member(self, before: _Members, admit: bool) -> _Members | None:
        """``None``: the others have gone on without this replica."""
        number = before.number + 1
        self._store.call("set", f"here/{number}/{self._name}", "1")
        watch = _Watch(self)
        while (found := self._latest(number)) is None:
            watch.look([name for name in before.names if name != self._name])
            said = self._store.values([f"here/{number}/{name}" for name in before.names])
            here = [name for name, one in zip(before.names, said, strict=True) if one]
            if all(name in here or watch.is_gone(name) for name in before.names):
                coming, tickets = self._coming(before.tickets) if admit else ([], before.tickets)
                self._decide(_Members(number, here + coming, tickets))
            elif watch.waited_s > self._timeout_s:
                self._decide(_Members(number, here, before.tickets))
            else:
                watch.pause()
        if self._name in found.names:
            return found
        self.leave()
        return None

    def _as_newcomer(self) -> _Members:
        watch, found = _Watch(self), None
        while True:
            found = self._latest(0 if found is None else found.number)
            if found is not None and self._name in found.names:
                return found
            if self._ticket < 0 or (found is not None and self._ticket < found.tickets):
                self._ask_to_join()
                watch = _Watch(self)
            if found is None:
                names = self._store.values([f"ticket/{ticket}" for ticket in range(self._replicas)])
                if all(names):
                    self._decide(_Members(0, [name for name in names if name], self._replicas))
                    continue
            else:
                watch.look(found.names)
                if all(watch.is_gone(name) for name in found.names):
                    ended = any(self._value(f"left/{name}") == "ends" for name in found.names)
                    raise RendezvousError(_ENDED if ended else _ALL_GONE, operation="rendezvous")
            if watch.waited_s > self._timeout_s:
                raise RendezvousError(
                    f"this replica was not taken in within {self._timeout_s:g} s: are {self._replicas} replicas "
                    "running, and do they end rounds?",
                    operation="rendezvous",
                )
            watch.pause()

    def _ask_to_join(self) -> None:
        self._name = uuid.uuid4().hex
        self._store.begin(f"beat/{self._name}")
        self._ticket = self._store.call("add", "tickets", 1) - 1
        self._store.call("set", f"ticket/{self._ticket}", self._name)

    def _coming(self, tickets: int) -> tuple[list[str], int]:
        """Who of those that wait shows a sign of life, and how many tickets there are."""
        most = self._store.call("add", "tickets", 0)
        names = [name for name in self._store.values([f"ticket/{one}" for one in range(tickets, most)]) if name]
        watch = _Watch(self)
        while names and watch.waited_s < 4 * _BEAT_S and not all(map(watch.is_alive, names)):
            watch.look(names)
            watch.pause()
        return [name for name in names if watch.is_alive(name)], most

    def _latest(self, least: int) -> _Members | None:
        """The group with the largest number, from ``least`` on."""
        found = None
        while (said := self._value(f"group/{least}")) is not None:
            names, tickets = json.loads(said)
            found, least = _Members(least, names, tickets), least + 1
        return found

    def _decide(self, group: _Members) -> None:
        """Unless it is decided already."""
        said = json.dumps([group.names, group.tickets])
        self._store.call("compare_set", f"group/{group.number}", "", said)

    def _value(self, key: str) -> str | None:
        return self._store.values([key])[0]


class _StoreThread:
    """Asks the store in a thread, which also signs life there: a store may never answer, and a thread that is in one
    when the interpreter ends would abort the process. Raises ``RendezvousError`` where there is no answer within
    ``timeout_s``, and from then on at once."""

    def __init__(self, store: Store, prefix: str, timeout_s: float) -> None:
        self._given = store  # torch keeps the half in C++ only
        self._store: Any = PrefixStore(prefix, store)
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._beat = ""
        self.error, self.tickets = "", 0

    def begin(self, beat: str) -> None:
        """Signs life under this key from now on."""
        self._beat = beat
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="telegrad-replicas", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def stop(self) -> None:
        """The thread ends after what it was asked."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join(_STOPS_S)
            atexit.unregister(self.stop)

    def call(self, name: str, *arguments: Any) -> Any:
        """The method of torch's store."""
        return self._asked(lambda: getattr(self._store, name)(*arguments))

    def values(self, keys: list[str]) -> list[str | None]:
        """``None`` where there is none; the thread is asked once."""

        def found() -> list[str | None]:
            return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

        return list(self._asked(found))

    def under(self, prefix: str) -> SimpleNamespace:
        """What a rendezvous asks a store for, of the keys that begin with ``prefix``."""
        return SimpleNamespace(
            set=lambda key, value: self.call("set", f"{prefix}/{key}", value),
            get=lambda key: self.call("get", f"{prefix}/{key}"),
            check=lambda keys: self.call("check", [f"{prefix}/{key}" for key in keys]),
        )

    def _asked(self, ask: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        if not self.error:
            if self._thread is None:
                self.begin(self._beat)
            self._calls.put((ask, answer))
            try:
                return answer.result(min(self._timeout_s, threading.TIMEOUT_MAX))
            except Exception as error:
                self._note(first_line(error) if answer.done() else f"no answer within {self._timeout_s:g} s")
        raise RendezvousError(self.error, operation="rendezvous")

    def _run(self) -> None:
        count, next_s = 0, 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                call = self._calls.get(timeout=None if self.error else max(0.0, next_s - time.monotonic()))
                if call is None:
                    return
                ask, answer = call
                try:
                    answer.set_result(ask())
                except Exception as error:
                    answer.set_exception(error)
            if time.monotonic() < next_s or self.error:
                continue
            count, next_s = count + 1, time.monotonic() + _BEAT_S
            try:
                if self._beat:
                    self._store.set(self._beat, str(count))
                self.tickets = self._store.add("tickets", 0)
            except Exception as error:
                self._note(first_line(error))

    def _note(self, what: str) -> None:
        self.error = f"the store of the replicas is gone: is the process that serves it running? ({what})"


def broadcast_any(held: Tensor, source: int, comm: Communicator) -> None:
    """Of a contiguous tensor of any dtype, in place."""
    flat = held.view(-1).view(torch.uint8)
    if flat.numel():
        comm.broadcast(flat, source)


def state_of_rank(source: int, state: Any, comm: Communicator) -> Any:
    """The ``state`` of rank ``source``, on all ranks: plain values and tensors in host memory."""
    tensors: list[Tensor] = []
    said = json.dumps(_plain(state, tensors)).encode()
    length = np.array([len(said)])
    comm.broadcast(length, source)
    held = np.frombuffer(said, np.uint8).copy() if comm.rank == source else np.empty(length[0], np.uint8)
    comm.broadcast(held, source)
    return _with_tensors(json.loads(held.tobytes()), iter(tensors) if comm.rank == source else None, source, comm)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """As JSON can hold it: keys need not be strings, and tuples stay what they are."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": [str(value.dtype).removeprefix("torch."), [*value.shape]]}
    if isinstance(value, Mapping):
        return {"pairs": [[_plain(key, tensors), _plain(one, tensors)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_plain(one, tensors) for one in value]}
    return value


def _with_tensors(value: Any, own: Iterator[Tensor] | None, source: int, comm: Communicator) -> Any:
    """What ``_plain`` was given; the tensors follow, which are ``own`` on ``source``."""
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        tensor = torch.empty(held[1], dtype=getattr(torch, held[0])) if own is None else next(own)
        broadcast_any(tensor, source, comm)
        return tensor
    if kind == "pairs":
        return {_with_tensors(key, own, source, comm): _with_tensors(one, own, source, comm) for key, one in held}
    made = [_with_tensors(one, own, source, comm) for one in held]
    return tuple(made) if kind == "tuple" else made


class _Watch:
    """Who shows signs of life while this replica looks. Only time in which it looks counts: it may be frozen itself."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._seen: dict[str, str | None] = {}
        self._since: dict[str, float] = {}
        self._alive: set[str] = set()
        self.waited_s, self._looked_s = 0.0, time.monotonic()

    def look(self, names: Iterable[str]) -> None:
        names = [*names]
        said = self._group._store.values([f"{what}/{name}" for what in ("beat", "left") for name in names])
        for name, beat, left in zip(names, said, said[len(names) :], strict=False):
            if name in self._seen and beat != self._seen[name]:
                self._alive.add(name)
            if name not in self._seen or beat != self._seen[name]:
                self._seen[name], self._since[name] = beat, self.waited_s
            if left:
                self._since[name] = float("-inf")

    def is_gone(self, name: str) -> bool:
        return self.waited_s - self._since.get(name, self.waited_s) > self._group._liveness_s

    def is_alive(self, name: str) -> bool:
        return name in self._alive

    def pause(self) -> None:
        time.sleep(_POLL_S)
        now_s = time.monotonic()
        self.waited_s += min(now_s - self._looked_s, _BEAT_S)
        self._looked_s = now_s
