"""Which ranks take part: they agree over a store, form a communicator, and another one when a rank is lost or comes.

Each group has a number, and its list of members is written once: whoever is first decides, and whoever is not on it
is out, or joins anew. A rank that is silent in the store for too long counts as gone, however long its steps take.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from telegrad.communicator.nodes import process_mark, state_here
from telegrad.communicator.rendezvous.store_exchange import StoreExchange
from telegrad.communicator.torch_terms import first_line
from telegrad.errors import RendezvousError, TransportError

_BEAT_S = 0.5  # between two signs of life
_POLL_LEAST_S, _POLL_MOST_S = 0.005, 0.05
_LOOKS_EVERY = 10  # polls of a member before which others stand, who decide first
_EXCHANGE_LOOKS_S = 0.1  # between two looks whether all can still come to an exchange of addresses
_BLAMED_S = 2.0  # so long one that a failure named may be silent
_STOPS_S = 5.0  # so long an answer that is under way may take at the end
_MOST_ATTEMPTS = 20
_ALL_GONE = (
    "all {who}s of the group are gone, so nobody has the parameters: start all again from a checkpoint, with another "
    "name="
)
_ENDED = (
    "the run of this name has ended: its last {who} has left. To train on, start {who}s from a checkpoint, with "
    "another name="
)

Connected = TypeVar("Connected")
Connect = Callable[[int, int, StoreExchange], Connected]
"""Makes the communicator of a rank of so many, whose addresses go by that exchange."""


@dataclass(frozen=True)
class _Members:
    """``tickets``: of those who asked to join, so many were looked at."""

    number: int
    names: list[str]
    tickets: int


class Membership:
    """One process's place in a group that changes. A member is a process, or several that come and go together.

    ``store``: a ``torch.distributed.Store``. ``prefix``: of its keys that are this run's. ``first``: so many that ask
    to join make the first group; ``None``: it is there. ``store_timeout_s``: the limit of the store's answers.
    ``wait_s``: of the wait to be taken in; ``None``: ``timeout_s``. ``who``: what errors call a member.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        *,
        first: int | None = None,
        timeout_s: float,
        liveness_timeout_s: float | None,
        join_timeout_s: float,
        store_timeout_s: float,
        wait_s: float | None = None,
        who: str = "rank",
    ) -> None:
        self._first, self._who = first, who
        self._timeout_s, self._wait_s = timeout_s, timeout_s if wait_s is None else wait_s
        self._store = _StoreThread(store, prefix, store_timeout_s, who)
        self._liveness_s = timeout_s if liveness_timeout_s is None else liveness_timeout_s
        self._join_timeout_s = join_timeout_s
        self._group: _Members | None = None  # to which this process belongs
        self._name, self._ticket = "", -1
        self._common, self._place, self._marks = "", 0, tuple[str, ...]()
        self._attempts = 0
        self._stays = False
        self.kept: tuple[int, ...] = ()
        """By rank in the present group the rank in the one before; -1: it was not in that."""

    def found(self, rank: int, processes: Sequence[str], *, told: str = "") -> None:
        """The first group is made: it has these processes, by rank. ``told``: to those that ask to join."""
        names = [f"{number}@{mark}" for number, mark in enumerate(processes)]
        self._group, self._name, self._stays = _Members(0, names, 0), names[rank], False
        if told and rank == 0:
            self._store.now("set", "group/0", json.dumps([names, 0]))
            self._store.now("set", "options", told)

    def stand_for(self, common: str, place: int, marks: Sequence[str]) -> None:
        """This process is the one at ``place`` of those with these ``marks``, which make one member. All of them give
        the same ``common`` name, which no member has had before."""
        self._common, self._place, self._marks, self._attempts = common, place, tuple(marks), 0

    def stay(self) -> None:
        """Shows signs of life from now on, until ``leave``; else only while a group is agreed on."""
        self._stays = True
        self._store.begin(f"beat/{self._own}")

    @property
    def _own(self) -> str:
        """This process, as ``_processes_of`` names it."""
        return f"{self._name}/{self._place}"

    def _rank_of(self, group: _Members) -> int:
        earlier = group.names[: group.names.index(self._name)]
        return sum(len(_processes_of(name)) for name in earlier) + self._place

    @property
    def store_error(self) -> str:
        """Why the store cannot be used any more; empty while it can. Members need it only for another group."""
        return self._store.error

    def agree(
        self, connect: Connect[Connected], *, admit: bool, blamed: int | None = None, rejoins: bool = True
    ) -> tuple[Connected, bool]:
        """The communicator of the next group, and whether this process was in the last one. ``admit``: those that wait
        are taken in too. ``blamed``: the rank that a failure names. ``rejoins``: if the others have gone on without
        this process, it asks to join. Raises ``RendezvousError`` otherwise, and where the store or all others are
        gone."""
        was_member, last = self._group is not None, self._group
        refused = None if last is None or rejoins else self._rank_of(last)
        if self._group is not None:
            self._store.begin(f"beat/{self._own}")
        suspects = set[str]() if last is None or blamed is None else {last.names[blamed]}
        for _ in range(_MOST_ATTEMPTS):
            before = self._group
            group = self._as_member(before, admit, suspects, refused) if before is not None else None
            if group is None:
                was_member, group = False, self._as_newcomer()
            self._group = group
            rank, size = self._rank_of(group), sum(len(_processes_of(name)) for name in group.names)
            store = _GroupStore(self, group)
            exchange = StoreExchange(
                store,
                rank,
                size,
                self._join_timeout_s,
                call="shrink(), grow() or join(), or make its DiLoCo or Elastic",
            )
            try:
                found = connect(rank, size, exchange)
            except BaseException as error:  # such as that one was lost meanwhile
                with contextlib.suppress(RendezvousError):
                    self._store.call("set", f"broken/{group.number}", "1")
                    self._store.call("set", f"connected/{group.number}/{self._own}", "no")
                if isinstance(error, TransportError):
                    suspects = store.gone
                    continue
                raise
            places = {name: place for place, name in enumerate(last.names)} if last is not None and was_member else {}
            self.kept = tuple(places.get(name, -1) for name in group.names)
            if not self._stays:
                self._store.stop()
            return found, was_member
        raise RendezvousError(
            f"the {self._who}s agreed {_MOST_ATTEMPTS} times on a group, and each time some did not connect: look at "
            "their logs, and at the network between them",
            operation="rendezvous",
        )

    def check_all_connected(self) -> None:
        """Waits for the other processes of this member. Raises ``TransportError`` where one of them has not connected:
        it tries again by itself, and would not hear of what the others meet there."""
        if not self._marks:
            return
        keys = [f"connected/{self._number}/{one}" for one in _processes_of(self._name)]
        self._store.call("set", keys[self._place], "yes")
        watch, said = _Watch(self), list[str | None]()
        while not all(said := self._store.values(keys)) and watch.waited_s <= self._timeout_s:
            self._check_is_whole(watch)
            watch.pause()
        if {*said} != {"yes"}:
            raise TransportError(f"another rank of this {self._who} has not connected", operation="rendezvous")

    def clear(self, exchange: StoreExchange) -> None:
        """All have connected, so nobody needs what they have told each other."""
        with contextlib.suppress(RendezvousError):
            for key in exchange.own_keys():
                self._store.call("delete_key", f"join/{self._number}/{key}")

    @property
    def _number(self) -> int:
        return -1 if self._group is None else self._group.number

    def wanted(self) -> bool:
        """Whether somebody waits to be taken in, as far as is known. Does not wait for the store."""
        return self._group is not None and self._store.tickets > self._group.tickets

    def wait_for(self, count: int, timeout_s: float) -> int:
        """Until so many wait to be taken in, or the time is over. Returns how many do."""
        assert self._group is not None
        until_s = time.monotonic() + timeout_s
        while True:
            found = int(self._store.call("add", "tickets", 0)) - self._group.tickets
            if found >= count or time.monotonic() > until_s:
                break
            time.sleep(_POLL_MOST_S)
        if not self._stays:
            self._store.stop()
        return found

    def tell(self, running: str, options: str) -> None:
        """Those that ask to join find this job by the store's key ``running``."""
        self._store.tell(running)
        self._store.call("set", "options", options)
        if not self._stays:
            self._store.stop()

    def note_parameters(self, *, are_there: bool) -> None:
        """``are_there``: some members had common parameters, else they begin with those of one. Raises
        ``RendezvousError`` where there were some, and nobody is left who has them."""
        own = str(self._number)
        begun = self._store.call("compare_set", "begun", "", own).decode()
        if not are_there and begun != own:
            raise RendezvousError(_ALL_GONE.format(who=self._who), operation="rendezvous")

    def claim(self, what: str) -> bool:
        """Whether this process is the first that asks for it."""
        return bool(self._store.call("compare_set", f"claimed/{what}", "", self._name).decode() == self._name)

    def has_claimed(self, what: str) -> bool:
        """Whether any has asked for it."""
        return self._value(f"claimed/{what}") is not None

    def leave(self, *, ends: bool = False) -> None:
        """The others need not wait for this process, which joins anew if it agrees again. ``ends``: it is done."""
        if self._name:
            with contextlib.suppress(RendezvousError):  # then nobody can look
                for name in (self._name, self._common) if self._marks else (self._name,):
                    self._store.call("set", f"left/{name}", "ends" if ends else "fails")
        self._store.stop()
        self._forget()

    def _forget(self) -> None:
        self._group, self._name, self._ticket = None, "", -1

    def _as_member(self, before: _Members, admit: bool, suspects: set[str], refused: int | None) -> _Members | None:
        """``None``: the others have gone on without this process. Raises ``RendezvousError`` of the rank ``refused``
        then, if it is one."""
        number, turn = before.number + 1, 0
        earlier = before.names[: before.names.index(self._name)]
        self._store.call("set", f"here/{number}/{self._own}", "1")
        # Without a failure nobody tells a member that waits in an operation for a lost one before liveness_timeout_s.
        patience_s = 2 * self._liveness_s + _BLAMED_S if admit and not self._stays else self._liveness_s
        watch = _Watch(self, suspects, patience_s)
        while (found := self._latest(number)) is None:
            turn += 1
            self._check_is_whole(watch)
            watch.look_here(earlier)
            if turn % _LOOKS_EVERY and not all(map(watch.is_gone, earlier)):
                watch.pause()  # an earlier one looks more often
                continue
            watch.look([name for name in before.names if name != self._name])
            ones = [one for name in before.names for one in _processes_of(name)]
            said = dict(zip(ones, self._store.values([f"here/{number}/{one}" for one in ones]), strict=True))
            here = [name for name in before.names if all(map(said.get, _processes_of(name)))]
            here = [name for name in here if not watch.is_gone(name)]
            if self._name in here and all(name in here or watch.is_gone(name) for name in before.names):
                coming, tickets = self._coming(before.tickets) if admit else ([], before.tickets)
                self._decide(_Members(number, here + coming, tickets))
            elif watch.waited_s > self._timeout_s and self._name not in here:
                self.leave()
                raise RendezvousError(
                    f"the other ranks of this {self._who} did not come within {self._timeout_s:g} s: start them again",
                    operation="rendezvous",
                )
            elif watch.waited_s > self._timeout_s:
                self._decide(_Members(number, here, before.tickets))
            else:
                watch.pause()
        if self._name in found.names:
            return found
        if refused is not None:
            self.leave()
            raise RendezvousError(
                f"the other {self._who}s have gone on without this one, which was silent for longer than "
                "liveness_timeout_s, or late: its state is old. close() this communicator, and join anew with "
                "telegrad.join()",
                rank=refused,
                operation="rendezvous",
            )
        self._forget()
        return None

    def _as_newcomer(self) -> _Members:
        watch, found = _Watch(self), None
        while True:
            found = self._latest(int(self._value("latest") or 0) if found is None else found.number)
            if found is not None and len(_processes_of(found.names[0])) != max(1, len(self._marks)):
                self.leave()
                raise ValueError(
                    f"this {self._who} has {max(1, len(self._marks))} ranks, and one of the group has "
                    f"{len(_processes_of(found.names[0]))}: start each {self._who} with as many"
                )
            if found is not None and self._name in found.names:
                return found
            if not self._name or (found is not None and 0 <= self._ticket < found.tickets):
                self._rename()
                watch = _Watch(self)
            self._check_is_whole(watch)
            if self._ticket < 0:
                self._ask_to_join(watch)
            if found is None:
                count = self._first or 0
                names = self._store.values([f"ticket/{ticket}" for ticket in range(count)])
                if count and all(names):
                    self._decide(_Members(0, [name for name in names if name], count))
                    continue
            else:
                watch.look(found.names)
                if all(watch.is_gone(name) for name in found.names):
                    ended = any(self._value(f"left/{name}") == "ends" for name in found.names)
                    raise RendezvousError(
                        (_ENDED if ended else _ALL_GONE).format(who=self._who), operation="rendezvous"
                    )
            if watch.waited_s > self._wait_s:
                wanted = f"are {self._first} {self._who}s running" if self._first else "is the job running"
                raise RendezvousError(
                    f"this {self._who} was not taken in within {self._wait_s:g} s: {wanted}, and do they take "
                    "others in?",
                    operation="rendezvous",
                )
            watch.pause()

    def _rename(self) -> None:
        """Processes of one member have been in, and refused by, the same groups, and so make as many attempts."""
        self._attempts += 1
        name = f"{self._common}.{self._attempts}" if self._marks else uuid.uuid4().hex
        self._name, self._ticket = f"{name}@{','.join(self._marks) or process_mark()}", -1
        self._store.begin(f"beat/{self._own}")

    def _ask_to_join(self, watch: _Watch) -> None:
        """The first process of a member does, once all of them are there."""
        beats = [f"beat/{one}" for one in _processes_of(self._name)]
        if self._place:
            self._ticket = int(self._value(f"asked/{self._name}") or -1)
        elif not self._marks or (all(self._store.values(beats)) and watch.is_alive(self._name)):
            self._ticket = self._store.call("add", "tickets", 1) - 1
            self._store.call("set", f"ticket/{self._ticket}", self._name)
            if self._marks:
                self._store.call("set", f"asked/{self._name}", str(self._ticket))

    def _check_is_whole(self, watch: _Watch) -> None:
        """Raises ``RendezvousError`` once another process of this member has left or ended."""
        if not self._marks:
            return
        watch.look([self._name])
        if any(self._store.values([f"left/{self._name}", f"left/{self._common}"])):
            self.leave()
            raise RendezvousError(
                f"another rank of this {self._who} has left or ended: start all its ranks again", operation="rendezvous"
            )

    def _coming(self, tickets: int) -> tuple[list[str], int]:
        """The newcomers that show a sign of life, and the number of tickets."""
        most = self._store.call("add", "tickets", 0)
        names = [name for name in self._store.values([f"ticket/{one}" for one in range(tickets, most)]) if name]
        watch = _Watch(self)
        watch.look_here(names)
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
        self._store.call("set", "latest", str(group.number))

    def _value(self, key: str) -> str | None:
        return self._store.values([key])[0]


def running_job(store: Any, key: str, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """The prefix and the options of the job that a store has there. Raises ``RendezvousError`` if none comes in time,
    or the store is gone."""
    asked = _StoreThread(store, "", timeout_s, "rank")
    until_s = time.monotonic() + timeout_s
    try:
        while True:
            (prefix,) = asked.values_of_store([key])
            said = prefix and asked.values_of_store([f"{prefix}/options"])[0]
            if prefix and said:
                return prefix, json.loads(said)
            if time.monotonic() > until_s:
                raise RendezvousError(
                    f"no job was found in the store within {timeout_s:g} s: does it run, with this store and name=? "
                    "The first processes give ranks=",
                    operation="rendezvous",
                )
            time.sleep(_POLL_MOST_S)
    finally:
        asked.stop()


class _GroupStore:
    """By which the members of a group exchange addresses. Raises ``TransportError`` once one of them cannot come."""

    def __init__(self, membership: Membership, group: _Members) -> None:
        self._membership, self._store, self._number = membership, membership._store, group.number
        first = group.names[0]
        # The first waits for all, the others for the first.
        self._others = [first]
        if first == membership._name or membership._marks:
            self._others = [name for name in group.names if name != membership._name or membership._marks]
        self._watch, self._looks_s = _Watch(membership), 0.0
        self.gone = set[str]()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.call("set", f"join/{self._number}/{key}", value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.call("get", f"join/{self._number}/{key}"))

    def check(self, keys: list[str]) -> bool:
        if time.monotonic() > self._looks_s:
            self._watch.look(self._others)
            self._looks_s = time.monotonic() + _EXCHANGE_LOOKS_S
            self._watch.count()
            self.gone = {*filter(self._watch.is_gone, self._others)}
            if self.gone or self._membership._value(f"broken/{self._number}"):
                raise TransportError("another rank was lost while the ranks connected", operation="rendezvous")
        return bool(self._store.call("check", [f"join/{self._number}/{key}" for key in keys]))


class _StoreThread:
    """Asks the store in a thread, which also signs life there: a store may never answer, and a thread that is in one
    when the interpreter ends would abort the process. Raises ``RendezvousError`` where there is no answer within
    ``timeout_s``, and from then on at once."""

    def __init__(self, store: Any, prefix: str, timeout_s: float, who: str) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._given = store  # torch keeps the half in C++ only
        self._prefix, self._store = prefix, PrefixStore(prefix, store)
        self._who = who
        self._timeout_s = timeout_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._beat = ""
        self.error, self.tickets = "", 0

    def begin(self, beat: str) -> None:
        """Signs life under this key from now on."""
        self._beat = beat
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="telegrad-members", daemon=True)
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
        return list(self._asked(lambda: _values(self._store, keys)))

    def values_of_store(self, keys: list[str]) -> list[str | None]:
        """As ``values``, of keys without the prefix."""
        return list(self._asked(lambda: _values(self._given, keys)))

    def tell(self, key: str) -> None:
        """Those that have the store find the prefix there."""
        self._asked(lambda: self._given.set(key, self._prefix))

    def now(self, name: str, *arguments: Any) -> None:
        """As ``call``, in this thread, for a store that was asked just now. Raises what torch raises."""
        getattr(self._store, name)(*arguments)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        answer: Future[Any] = Future()
        if not self.error:
            if self._thread is None:
                self.begin(self._beat)
            self._calls.put((ask, answer))
            waited_s = 0.0
            while not answer.done() and waited_s < self._timeout_s:
                wait([answer], min(_BEAT_S, self._timeout_s))  # a time in which this process is frozen counts as one
                waited_s += _BEAT_S
            try:
                return answer.result(0)
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
        self.error = f"the store of the {self._who}s is gone: is the process that serves it running? ({what})"


def _processes_of(name: str) -> list[str]:
    """The processes of a member, as the store's keys name them."""
    return [f"{name}/{place}" for place in range(name.count(",") + 1)]


def _values(store: Any, keys: list[str]) -> list[str | None]:
    return [store.get(key).decode() if store.check([key]) else None for key in keys]


class _Watch:
    """Watches the signs of life of other processes. Only time in which it looks counts: it may be frozen itself.
    ``suspects``: who may be silent for a short time only. ``patience_s``: so long, who has given none yet."""

    def __init__(self, membership: Membership, suspects: Iterable[str] = (), patience_s: float | None = None) -> None:
        self._membership, self._suspects = membership, suspects
        self._patience_s = membership._liveness_s if patience_s is None else patience_s
        self._seen: dict[str, str | None] = {}
        self._since: dict[str, float] = {}
        self._alive: set[str] = set()
        self._turn = 0
        self.waited_s, self._looked_s = 0.0, time.monotonic()

    def look(self, names: Iterable[str]) -> None:
        names = [*names]
        store = self._membership._store
        ones = [one for name in names for one in _processes_of(name)]
        said = store.values([*(f"beat/{one}" for one in ones), *(f"left/{name}" for name in names)])
        for one, beat in zip(ones, said, strict=False):
            if one in self._seen and beat != self._seen[one]:
                self._alive.add(one)
            if one not in self._seen or beat != self._seen[one]:
                self._seen[one], self._since[one] = beat, self.waited_s
        left = [name for name, how in zip(names, said[len(ones) :], strict=True) if how]
        for name in left:
            self._since.update(dict.fromkeys(_processes_of(name), float("-inf")))
        for name in self.look_here(name for name in names if name not in left):
            store.call("set", f"left/{name}", "gone")  # so that those on other machines know

    def look_here(self, names: Iterable[str]) -> set[str]:
        """Members of which a process has ended on this machine."""
        gone = set()
        for name in names:
            for one, mark in zip(_processes_of(name), name.partition("@")[2].split(","), strict=True):
                state = state_here(mark)
                if state == "gone":
                    self._since[one] = float("-inf")
                    gone.add(name)
                elif state == "runs":
                    self._alive.add(one)
        return gone

    def is_gone(self, name: str) -> bool:
        """Whether one of its processes is."""
        has_come = self._alive.issuperset(_processes_of(name))
        limit_s = self._membership._liveness_s if has_come else self._patience_s
        if name in self._suspects:
            limit_s = min(limit_s, _BLAMED_S)
        silent_s = [self.waited_s - self._since.get(one, self.waited_s) for one in _processes_of(name)]
        return max(silent_s) > limit_s

    def is_alive(self, name: str) -> bool:
        return self._alive.issuperset(_processes_of(name)) and not self.is_gone(name)

    def pause(self) -> None:
        self._turn += 1
        time.sleep(min(_POLL_LEAST_S * self._turn, _POLL_MOST_S))
        self.count()

    def count(self) -> None:
        """Counts the time since the last look."""
        now_s = time.monotonic()
        self.waited_s += min(now_s - self._looked_s, _BEAT_S)
        self._looked_s = now_s
