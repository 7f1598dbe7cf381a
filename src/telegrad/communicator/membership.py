"""Which ranks take part: they agree over a store, form a communicator, and another one when a rank is lost or comes.

The store holds one group, which whoever is first replaces by the next: whoever is not on that is out, or joins anew. A
rank gives signs of life in the store while it agrees, and before by its old connections, however long its steps take.
One that is silent for too long counts as gone."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from telegrad.communicator.nodes import process_mark, remove_orphans, state_here
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
_QUIET = "quiet"  # a sign of life for as long as it stands: its process takes part in a group that works
_NOTHING = "\0"  # no value is that
_HEARD_ANEW_S = 0.01  # more than rounding
_ROUNDS_MOST = 4  # of an exchange of addresses
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

    @property
    def text(self) -> str:
        """As the store holds it."""
        return json.dumps([self.number, self.names, self.tickets])


class Membership:
    """One process's place in a group that changes. A member is a process, or several that come and go together.

    ``store``: a ``torch.distributed.Store``. ``prefix``: of its keys that are this run's. ``first``: so many that ask
    to join make the first group; ``None``: it is there. ``store_timeout_s``: the limit of the store's answers.
    ``wait_s``: of the wait to be taken in; ``None``: ``timeout_s``. ``who``: what errors call a member."""

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
        self._links, self._ending = list[tuple[list[str], Any]](), contextlib.ExitStack()
        self._past: list[_Members] = []  # groups before the present one, of which the store may hold something
        self.kept: tuple[int, ...] = ()
        """By rank in the present group the rank in the one before; -1: it was not in that."""

    def found(self, rank: int, processes: Sequence[str], *, told: str = "") -> None:
        """The first group is made: it has these processes, by rank. ``told``: to those that ask to join."""
        names = [f"{number}@{mark}" for number, mark in enumerate(processes)]
        self._group, self._name, self._stays = _Members(0, names, 0), names[rank], False
        if told and rank == 0:
            self._store.store.set("group", self._group.text)  # in this thread: it has answered just now
            self._store.store.set("options", told)

    def stand_for(self, common: str, place: int, marks: Sequence[str]) -> None:
        """This process is the one at ``place`` of those with these ``marks``, which make one member. All of them give
        the same ``common`` name, which no member has had before."""
        self._common, self._place, self._marks, self._attempts = common, place, tuple(marks), 0

    def stay(self) -> None:
        """Shows signs of life from now on, until ``leave``; else only while a group is agreed on."""
        self._stays = True
        self._store.begin(f"beat/{self._own}", self._number)

    def hear_by(self, connected: Any, *, closes: bool = False) -> None:
        """Signs of life of the present members come by this communicator, too, until the next group works. It is
        closed then if it ``closes``."""
        if self._group is not None:
            self._links.append((self._group.names, connected))
        if closes:
            self._ending.callback(connected.close)

    def heard(self) -> dict[str, float]:
        """By member when it was heard last over a connection of an earlier group."""
        found = dict[str, float]()
        for names, connected in self._links:
            for peer in connected.report()["peers"]:
                when_s, name = time.monotonic() - peer["heard_s_ago"], names[peer["rank"]]
                found[name] = max(when_s, found.get(name, when_s))
        return found

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
        last = self._group
        refused = None if last is None or rejoins else self._rank_of(last)
        suspects = set[str]() if last is None or blamed is None else {last.names[blamed]}
        was_member, cleared = last is not None, len(self._past)
        with self._ending as ending:
            ending.callback(self._links.clear)
            for _ in range(_MOST_ATTEMPTS):
                before = self._group
                group = self._as_member(before, admit, suspects, refused) if before is not None else None
                if group is None:
                    was_member, group = False, self._as_newcomer()
                if before is not None:
                    self._past.append(before)
                self._group = group
                rank, size = self._rank_of(group), sum(len(_processes_of(name)) for name in group.names)
                store = _GroupStore(self, group)
                call = "shrink(), grow() or join(), or make its DiLoCo or Elastic"
                exchange = StoreExchange(store, rank, size, self._join_timeout_s, call=call)
                try:
                    found = connect(rank, size, exchange)
                except BaseException as error:  # such as that one was lost meanwhile
                    with contextlib.suppress(RendezvousError):
                        self._give_up(group.number)
                        self._store.call("set", f"connected/{self._own}", f"{group.number} no")
                    if isinstance(error, TransportError):
                        suspects = store.gone
                        continue
                    raise
                names = last.names if last is not None and was_member else []
                self.kept = tuple(names.index(name) if name in names else -1 for name in group.names)
                self._clear_past(group, rank, cleared)
                remove_orphans()
                self._rest()
                return found, was_member
        raise RendezvousError(
            f"the {self._who}s agreed {_MOST_ATTEMPTS} times on a group, and each time some did not connect: look at "
            "their logs, and at the network between them"
        )

    def check_all_connected(self) -> None:
        """Waits for the other processes of this member. Raises ``TransportError`` where one of them has not connected:
        it tries again by itself, and would not hear of what the others meet there."""
        if not self._marks:
            return
        keys = [f"connected/{one}" for one in _processes_of(self._name)]
        self._store.call("set", keys[self._place], yes := f"{self._number} yes")
        watch, no = _Watch(self), f"{self._number} no"
        while not {yes, no}.issuperset(said := self._store.values(keys)) and watch.waited_s <= self._timeout_s:
            self._check_is_whole(watch)
            latest = self._latest()
            if latest is None or latest.number > self._number:  # what these ranks have said may have been removed
                break
            watch.pause()
        if {*said} != {yes}:
            raise TransportError(f"another rank of this {self._who} has not connected", operation="rendezvous")

    def clear(self, exchange: StoreExchange) -> None:
        """All have connected, so nobody needs what they have told each other."""
        with contextlib.suppress(RendezvousError):
            self._store.delete(f"join/{self._number}/{key}" for key in exchange.own_keys())

    def _clear_past(self, present: _Members, rank: int, cleared: int) -> None:
        """Rank 0 removes what the store holds of members that have gone. Others do if they are rank 0 next, but for
        what an earlier rank 0 has ``cleared``."""
        past, self._past = self._past, [] if rank == 0 else self._past[cleared:]
        if rank or not past:
            return
        with contextlib.suppress(RendezvousError):
            keys = [f"ticket/{ticket}" for ticket in range(past[0].tickets, present.tickets)]
            names = {*self._store.values(keys), *(name for group in past for name in group.names)}
            gone = [one for name in names.difference(present.names) if name for one in (name, *_processes_of(name))]
            keys += [f"{what}/{one}" for one in gone for what in ("beat", "left", "asked", "connected")]
            for group in past:  # one that did not connect may have left addresses
                place, ranks = f"join/{group.number}", range(sum(len(_processes_of(name)) for name in group.names))
                if session := self._value(f"{place}/session//"):
                    told = [f"{session}/{number}/{of}" for number in range(_ROUNDS_MOST) for of in (*ranks, "all")]
                    keys += [f"{place}/{key}" for key in (*told, "job", "session//")]
            self._store.delete(keys)

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
        before = self._group.tickets
        while (found := self._store.call("add", "tickets", 0) - before) < count and time.monotonic() <= until_s:
            time.sleep(_POLL_MOST_S)
        self._rest()
        return int(found)

    def tell(self, running: str, options: str) -> None:
        """Those that ask to join find this job by the store's key ``running``."""
        self._store.tell(running)
        self._store.call("set", "options", options)
        self._rest()

    def _rest(self) -> None:
        """Asks no more of the store for now. After ``stay`` the signs of life go on."""
        if self._stays:
            return
        if beat := self._store.pause():
            with contextlib.suppress(RendezvousError):
                self._store.call("set", beat, _QUIET)
        self._store.stop()

    def note_parameters(self, *, are_there: bool) -> None:
        """``are_there``: some members had common parameters, else they begin with those of one. Raises
        ``RendezvousError`` where there were some, and nobody is left who has them."""
        own = str(self._number)
        begun = self._store.call("compare_set", "begun", "", own).decode()
        if not are_there and begun != own:
            raise RendezvousError(_ALL_GONE.format(who=self._who))

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
        remove_orphans()

    def _forget(self) -> None:
        self._group, self._name, self._ticket = None, "", -1

    def _as_member(
        self, before: _Members, admit: bool, suspects: Collection[str], refused: int | None
    ) -> _Members | None:
        """``None``: the others have gone on without this process. Raises ``RendezvousError`` of the rank ``refused``
        then, if it is one."""
        number, turn = before.number + 1, 0
        earlier = before.names[: before.names.index(self._name)]
        self._store.begin(f"beat/{self._own}", number)
        watch = _Watch(self, suspects)
        while (found := self._latest()) is None or found.number < number:
            turn += 1
            self._check_is_whole(watch)
            watch.look_here(earlier)
            if turn % _LOOKS_EVERY and not all(map(watch.is_gone, earlier)):
                watch.pause()  # an earlier one looks more often
                continue
            watch.look([name for name in before.names if name != self._name])
            own = "" if self._marks else self._name
            come = [name for name in before.names if name == own or watch.has_come(name, number)]
            here = [name for name in come if not watch.is_gone(name)]
            if self._name in here and all(name in here or watch.is_gone(name) for name in before.names):
                coming, tickets = self._coming(before.tickets) if admit else ([], before.tickets)
                self._decide(before, _Members(number, here + coming, tickets))
            elif watch.waited_s > self._timeout_s and self._name not in here:
                self.leave()
                raise RendezvousError(
                    f"the other ranks of this {self._who} did not come within {self._timeout_s:g} s: start them again"
                )
            elif watch.waited_s > self._timeout_s:
                self._decide(before, _Members(number, here, before.tickets))
            else:
                watch.pause()
        if self._name in found.names:
            return found
        self._store.delete([self._store.pause()])
        if refused is not None:
            self._store.stop()
            self._forget()
            raise RendezvousError(
                f"the other {self._who}s have gone on without this one, which was silent for longer than "
                "liveness_timeout_s, or late: its state is old. close() this communicator, and join anew with "
                "telegrad.join()",
                rank=refused,
            )
        self._forget()
        return None

    def _as_newcomer(self) -> _Members:
        watch = _Watch(self, waits=True)
        while True:
            found = self._latest()
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
                watch = _Watch(self, waits=True)
            self._check_is_whole(watch)
            if self._ticket < 0:
                self._ask_to_join(watch)
            if found is None:
                count, asked = self._first or 0, self._store.call("add", "tickets", 0)
                names = self._store.values(f"ticket/{one}" for one in range(asked if 0 < count <= asked else 0))
                if count and len(come := [ticket for ticket, name in enumerate(names) if name]) >= count:
                    self._decide(None, _Members(0, [names[one] or "" for one in come[:count]], come[count - 1] + 1))
                    continue
            else:
                watch.look(found.names)
                # Of a store that answers slowly the group may be an old one, whose members have taken others in.
                if all(watch.is_gone(name) for name in found.names) and found == self._latest():
                    ended = any(self._value(f"left/{name}") == "ends" for name in found.names)
                    raise RendezvousError((_ENDED if ended else _ALL_GONE).format(who=self._who))
            if watch.waited_s > self._wait_s:
                wanted = f"are {self._first} {self._who}s running" if self._first else "is the job running"
                raise RendezvousError(
                    f"this {self._who} was not taken in within {self._wait_s:g} s: {wanted}, and do they take "
                    "others in?"
                )
            watch.pause()

    def _rename(self) -> None:
        """Processes of one member have been in, and refused by, the same groups, and so make as many attempts."""
        self._attempts += 1
        name = f"{self._common}.{self._attempts}" if self._marks else uuid.uuid4().hex
        self._name, self._ticket = f"{name}@{','.join(self._marks) or process_mark()}", -1
        self._store.delete(filter(None, [self._store.pause()]))
        self._store.begin(f"beat/{self._own}", 0)

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
        left = self._store.values([f"left/{self._name}", f"left/{self._common}"])
        most_s = self._liveness_s + self._join_timeout_s  # one that was frozen may wake up
        if any(left) or watch.look_here([self._name]) or watch.silent_s(self._name) > most_s:
            self.leave()
            raise RendezvousError(
                f"another rank of this {self._who} has left or ended, or was silent for {most_s:g} s: start all its "
                "ranks again"
            )

    def _coming(self, tickets: int) -> tuple[list[str], int]:
        """The newcomers that show a sign of life, and the number of tickets."""
        most = self._store.call("add", "tickets", 0)
        names, watch = list[str | None](), _Watch(self)
        while True:  # who has a ticket writes its name next
            names = self._store.values([f"ticket/{one}" for one in range(tickets, most)])
            watch.look_here(filter(None, names))
            if watch.waited_s >= 4 * _BEAT_S or all(name and watch.is_alive(name) for name in names):
                return [name for name in names if name and watch.is_alive(name)], most
            watch.look(filter(None, names))
            watch.pause()

    def _latest(self) -> _Members | None:
        said = self._value("group")
        return None if said is None else _Members(*json.loads(said))

    def _decide(self, before: _Members | None, group: _Members) -> None:
        """Unless another one has decided already. Of a group that ``from_torch()`` made the store may hold nothing."""
        expected = "" if before is None else before.text
        if self._store.call("compare_set", "group", expected, group.text).decode() == expected and expected:
            self._store.call("compare_set", "group", "", group.text)

    def _give_up(self, number: int) -> None:
        """Nobody need wait for this group. One that is late must not hide that a later one was given up."""
        broken, found = None, self._value("broken") or ""
        while int(found or -1) < number and found != broken:  # a key that has gone answers with what was expected
            broken = found
            found = self._store.call("compare_set", "broken", broken, str(number)).decode()

    def _value(self, key: str) -> str | None:
        return self._store.values([key])[0]


def running_job(store: Any, key: str, timeout_s: float) -> tuple[str, dict[str, Any]]:
    """The prefix and the options of the job that a store has there. Raises ``RendezvousError`` if none comes in time,
    or the store is gone."""
    asked = _StoreThread(store, "", timeout_s, "rank")
    until_s = time.monotonic() + timeout_s
    try:
        while True:
            (prefix,) = asked.values([key])
            said = prefix and asked.values([f"{prefix}/options"])[0]
            if prefix and said:
                return prefix, json.loads(said)
            if time.monotonic() > until_s:
                raise RendezvousError(
                    f"no job was found in the store within {timeout_s:g} s: does it run, with this store and name=? "
                    "The first processes give ranks="
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
        self._watch, self._looks_s, self._found = _Watch(membership), 0.0, dict[str, bytes | None]()
        self.gone = set[str]()

    def set(self, key: str, value: str | bytes) -> None:
        self._store.call("set", f"join/{self._number}/{key}", value)

    def get(self, key: str) -> bytes:
        """What ``check`` has found."""
        return self._found[key] or b""

    def check(self, keys: list[str]) -> bool:
        if time.monotonic() > self._looks_s:
            self._watch.look(self._others)
            self._looks_s = time.monotonic() + _EXCHANGE_LOOKS_S
            self._watch.count()
            self.gone = {*filter(self._watch.is_gone, self._others)}
            broken, latest = self._membership._value("broken"), self._membership._latest()
            if self.gone or broken == str(self._number) or latest is None or latest.number > self._number:
                raise TransportError("another rank was lost while the ranks connected", operation="rendezvous")
        said = self._store.raw([f"join/{self._number}/{key}" for key in keys])
        self._found = dict(zip(keys, said, strict=True))
        return None not in said


class _StoreThread:
    """Asks the store in a thread, which also signs life there: a store may never answer, and a thread that is in one
    when the interpreter ends would abort the process. Raises ``RendezvousError`` where there is no answer within
    ``timeout_s``, and from then on at once."""

    def __init__(self, store: Any, prefix: str, timeout_s: float, who: str) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._given = store  # torch keeps the half in C++ only
        self._prefix, self.store = prefix, PrefixStore(prefix, store) if prefix else store
        self._who, self._timeout_s = who, timeout_s
        self._calls: queue.SimpleQueue[tuple[Sequence[Callable[[], Any]], Future[list[Any]]] | None]
        self._calls = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._beat = self._signed = "", 0
        self._count, self._next_s = 0, 0.0
        self.error, self.tickets = "", 0

    def begin(self, beat: str, number: int) -> None:
        """Signs life under this key from now on, and that this process waits for the group of that number."""
        self._beat = beat, number
        self._calls.put(([], Future()))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="telegrad-members", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def pause(self) -> str:
        """No more signs of life. Returns their key."""
        (beat, _), self._beat = self._beat, ("", 0)
        return beat

    def stop(self) -> None:
        """The thread ends after what it was asked."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join(_STOPS_S)
            atexit.unregister(self.stop)

    def call(self, name: str, *arguments: Any) -> Any:
        """The method of torch's store."""
        return self._asked([lambda: getattr(self.store, name)(*arguments)])[0]

    def delete(self, keys: Iterable[str]) -> None:
        """Whether they are there or not."""
        self._asked([functools.partial(self.store.delete_key, key) for key in keys])

    def raw(self, keys: Iterable[str]) -> list[bytes | None]:
        """``None`` where there is none. Each is read at once: torch's get() waits for one that was removed."""
        said = self._asked([functools.partial(self.store.compare_set, key, _NOTHING, _NOTHING) for key in keys])
        return [None if one == _NOTHING.encode() else bytes(one) for one in said]

    def values(self, keys: Iterable[str]) -> list[str | None]:
        """As ``raw``, of text."""
        return [None if one is None else one.decode() for one in self.raw(keys)]

    def tell(self, key: str) -> None:
        """Those that have the store find the prefix there."""
        self._asked([lambda: self._given.set(key, self._prefix)])

    def _asked(self, asks: Sequence[Callable[[], Any]]) -> list[Any]:
        answer: Future[list[Any]] = Future()
        if not self.error:
            if self._thread is None:
                self.begin(*self._beat)
            self._calls.put((asks, answer))
            waited_s = 0.0
            while not answer.done() and waited_s < self._timeout_s:
                wait([answer], min(_BEAT_S, self._timeout_s))  # a time in which this process is frozen counts as one
                waited_s += _BEAT_S
            try:
                return answer.result(0)
            except Exception as error:
                self._note(first_line(error) if answer.done() else f"no answer within {self._timeout_s:g} s")
        raise RendezvousError(self.error)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                call = self._calls.get(timeout=None if self.error else max(0.0, self._next_s - time.monotonic()))
                if call is None:
                    return
                asks, answer = call
                try:
                    answer.set_result([self._asked_alive(ask) for ask in asks])
                except Exception as error:
                    answer.set_exception(error)
            self._sign()

    def _asked_alive(self, ask: Callable[[], Any]) -> Any:
        """Others are not to miss a sign of life because many questions are answered slowly."""
        self._sign()
        return ask()

    def _sign(self) -> None:
        key, number = beat = self._beat
        if self.error or (time.monotonic() < self._next_s and beat == self._signed):
            return
        self._count, self._next_s, self._signed = self._count + 1, time.monotonic() + _BEAT_S, beat
        try:
            if key:
                self.store.set(key, f"{number} {self._count}")
                self.tickets = self.store.add("tickets", 0)
        except Exception as error:
            self._note(first_line(error))

    def _note(self, what: str) -> None:
        self.error = f"the store of the {self._who}s is gone: is the process that serves it running? ({what})"


def _processes_of(name: str) -> list[str]:
    """The processes of a member, as the store's keys name them."""
    return [f"{name}/{place}" for place in range(name.count(",") + 1)]


class _Watch:
    """Watches the signs of life of other processes. Only time in which it looks counts: it may be frozen itself.
    ``suspects``: who may be silent for a short time only. ``waits``: members may be silent while their group works."""

    def __init__(self, membership: Membership, suspects: Collection[str] = (), *, waits: bool = False) -> None:
        self._membership, self._suspects, self._waits = membership, suspects, waits
        self._seen: dict[str, str | None] = {}
        self._since: dict[str, float] = {}
        self._alive: set[str] = set()
        self._turn = 0
        self.waited_s, self._looked_s = 0.0, time.monotonic()
        self._heard = membership.heard()

    def look(self, names: Iterable[str]) -> None:
        names, store = [*names], self._membership._store
        ones = [one for name in names for one in _processes_of(name)]
        said = store.values([*(f"beat/{one}" for one in ones), *(f"left/{name}" for name in names)])
        before, self._heard = self._heard, self._membership.heard()
        own = {*_processes_of(self._membership._name)} if self._membership._name in names else set()
        heard = {f"{name}/0" for name, when_s in before.items() if self._heard[name] > when_s + _HEARD_ANEW_S}
        for one, beat in zip(ones, said, strict=False):
            if one in heard or (one in self._seen and beat != self._seen[one]):
                self._alive.add(one)
            is_quiet = self._waits and one not in own and (beat is None or beat == _QUIET)
            if one not in self._seen or beat != self._seen[one] or one in heard or is_quiet:
                self._seen[one], self._since[one] = beat, self.waited_s
        left = [name for name, how in zip(names, said[len(ones) :], strict=True) if how]
        for name in left:
            self._since.update(dict.fromkeys(_processes_of(name), float("-inf")))
        ended = self.look_here(name for name in names if name not in left)
        for name in ended if not self._waits else ():
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
        limit_s = self._membership._liveness_s
        if name in self._suspects:
            limit_s = min(limit_s, _BLAMED_S)
        return self.silent_s(name) > limit_s

    def silent_s(self, name: str) -> float:
        """How long the most silent of its processes has been."""
        return max(self.waited_s - self._since.get(one, self.waited_s) for one in _processes_of(name))

    def has_come(self, name: str, number: int) -> bool:
        """Whether all its processes wait for the group of that number."""
        said = [self._seen.get(one) or _QUIET for one in _processes_of(name)]
        return all(one != _QUIET and int(one.split()[0]) >= number for one in said)

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
