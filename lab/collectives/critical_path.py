"""Why an operation took as long as it did: the chain of activities from its start to its last rank's end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad.tools.sim.measure import Counts, Floats, Numbers, Point, call_in_processes, simulated


@dataclass(frozen=True)
class Activities:
    """What kept ports and processors busy: ``kind`` 0 is a message in its sender's port out, 1 in its receiver's port
    in, 2 work. ``rank`` is whose port or processor it is, ``peer`` the message's other end. In virtual seconds."""

    kind: npt.NDArray[np.uint8]
    rank: Numbers
    peer: Numbers
    operation: Numbers
    step: Numbers
    bytes: Counts
    start_s: Floats
    end_s: Floats


@dataclass(frozen=True)
class Links:
    """One entry for each pair of ranks that exchanged messages: what went from ``source`` to ``destination``."""

    source: Numbers
    destination: Numbers
    messages: Counts
    bytes: Counts


@dataclass(frozen=True)
class Recording:
    """Of a run of ``point``: what each link carried, and all that ports and processors did."""

    point: Point
    finish_by_rank_s: Floats
    links: Links
    activities: Activities


def record(point: Point) -> Recording:
    """Runs ``point`` again. Raises as ``measure``."""
    found = simulated(point, links=True, timeline=True)
    counts = found["links"]
    links = Links(counts["from"], counts["to"], counts["messages"], counts["bytes"])
    return Recording(point, found["finish_by_rank_s"], links, Activities(**found["timeline"]))


def record_apart(point: Point) -> Recording:
    """As ``record``, in a process of its own, so that Ctrl-C ends it at once."""
    found: list[Recording] = []
    call_in_processes(record, [point], 1, lambda _, recorded: found.append(recorded))
    return found[0]


SEND, RECEIVE, COMPUTE = 0, 1, 2

KINDS = ("latency", "port out", "port in", "compute", "waiting")
_SAME = 1e-13  # of the whole: times that are further apart than this are different


@dataclass(frozen=True)
class Stretch:
    """One link of the chain. ``kind``: ``latency`` (a message of ``rank`` on its way to ``peer``, uplinks included),
    ``port out`` or ``port in`` (a message in ``rank``'s port; ``peer`` is its other end), ``compute``, or ``waiting``
    (``rank`` had nothing to do: it began late). ``peer``, ``step`` and ``bytes`` are None where there is none."""

    kind: str
    rank: int
    start_s: float
    end_s: float
    peer: int | None = None
    step: int | None = None
    bytes: int | None = None

    @property
    def time_s(self) -> float:
        return self.end_s - self.start_s


def critical_path(activities: Activities, finish_by_rank_s: Floats) -> list[Stretch]:
    """From time 0 to the last finish without a gap: the stretches' times add up to it.

    It is walked from its end. What let a rank go on is what ended at that moment: work, or an arrival. An arrival came
    when it did because the receiver's port was busy with another message until then, or else its latency after it had
    left; and it left when the sender's port was done with the message before it, or else when the sender posted it.
    A rank whose message is taken late goes on together with the one that took it. Where several ended at one moment,
    one chain out of several is shown. Raises ``ValueError`` for activities in which a message was not received.
    """
    last = int(np.argmax(finish_by_rank_s))
    walk = _Walk(activities, last, float(finish_by_rank_s[last]))
    return [one for one in reversed(list(walk.backwards())) if one.time_s > 0]


def shares(path: list[Stretch]) -> dict[str, float]:
    """Seconds of the path by kind, in the order of ``KINDS``; kinds without any are 0."""
    return {kind: sum(one.time_s for one in path if one.kind == kind) for kind in KINDS}


def messages_of(activities: Activities) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of all sends, and of the receive that belongs to each.

    Raises ``ValueError`` where a message has only one of them.
    """
    sends, receives = (np.flatnonzero(activities.kind == kind) for kind in (SEND, RECEIVE))
    of = activities
    sends = sends[np.lexsort((of.step[sends], of.operation[sends], of.peer[sends], of.rank[sends]))]
    receives = receives[np.lexsort((of.step[receives], of.operation[receives], of.rank[receives], of.peer[receives]))]
    pairs = ((of.rank, of.peer), (of.peer, of.rank), (of.operation, of.operation), (of.step, of.step))
    if len(sends) != len(receives) or any(not np.array_equal(a[sends], b[receives]) for a, b in pairs):
        raise ValueError("some message was sent and not received: give the activities of an operation that is over")
    return sends, receives


class _Ends:
    """Some activities by the rank and the moment at which they end."""

    def __init__(self, activities: Activities, indices: npt.NDArray[np.int64], same_s: float) -> None:
        self._indices = indices[np.lexsort((activities.end_s[indices], activities.rank[indices]))]
        self._ends_s = activities.end_s[self._indices]
        self._ranks = activities.rank[self._indices]
        self._same_s = same_s

    def at(self, rank: int, time_s: float) -> list[int]:
        """Those of ``rank`` that end then."""
        first, last = self._of(rank)
        ends_s = self._ends_s[first:last]
        begin = first + int(np.searchsorted(ends_s, time_s - self._same_s, "left"))
        end = first + int(np.searchsorted(ends_s, time_s + self._same_s, "right"))
        return [int(index) for index in self._indices[begin:end]]

    def latest_before(self, rank: int, time_s: float) -> float:
        """When the last one of ``rank`` before that moment ends; 0 if there is none."""
        first, last = self._of(rank)
        ends_s = self._ends_s[first:last]
        count = int(np.searchsorted(ends_s, time_s - self._same_s, "left"))
        return float(ends_s[count - 1]) if count else 0.0

    def _of(self, rank: int) -> tuple[int, int]:
        return int(np.searchsorted(self._ranks, rank, "left")), int(np.searchsorted(self._ranks, rank, "right"))


class _Walk:
    """Stands at ``rank`` and ``time_s`` and goes back to time 0."""

    def __init__(self, activities: Activities, rank: int, time_s: float) -> None:
        self.of, self.rank, self.time_s = activities, rank, time_s
        self.same_s = time_s * _SAME
        self.sends, self.receives = messages_of(activities)
        self.send_of = dict(zip(self.receives.tolist(), self.sends.tolist(), strict=True))
        by_kind = (np.flatnonzero(activities.kind == kind) for kind in (SEND, RECEIVE, COMPUTE))
        self.departures, self.arrivals, self.works = (_Ends(activities, which, self.same_s) for which in by_kind)
        self.seen: set[int] = set()

    def backwards(self) -> Iterator[Stretch]:
        together = {self.rank}  # these went on at this very moment, each because the next took its message
        while self.time_s > self.same_s:
            if (work := self._fresh(self.works)) is not None:
                yield self._spent("compute", work)
            elif (arrival := self._fresh(self.arrivals)) is not None:
                yield from self._came(arrival)
            elif (taker := self._taker(together)) is not None:
                together.add(taker)
                self.rank = taker
                continue
            else:
                before_s = max(ends.latest_before(self.rank, self.time_s) for ends in (self.works, self.arrivals))
                yield Stretch("waiting", self.rank, before_s, self.time_s)
                self.time_s = before_s
            together = {self.rank}

    def _came(self, arrival: int) -> Iterator[Stretch]:
        """Back to when the message was posted, or one before it in the same port."""
        yield self._spent("port in", arrival)
        while (before := self._fresh(self.arrivals, busy=True)) is not None:
            arrival = before
            yield self._spent("port in", arrival)
        send = self.send_of[arrival]
        left_s = float(self.of.start_s[send])
        sender, step, size = (int(field[send]) for field in (self.of.rank, self.of.step, self.of.bytes))
        yield Stretch("latency", sender, left_s, self.time_s, self.rank, step, size)
        self.rank, self.time_s = sender, left_s
        while (before := self._fresh(self.departures, busy=True)) is not None:
            yield self._spent("port out", before)

    def _taker(self, together: set[int]) -> int | None:
        """Who went on now, and had a message of this rank to take."""
        ranks = self.of.rank[self.sends]
        mine = slice(int(np.searchsorted(ranks, self.rank, "left")), int(np.searchsorted(ranks, self.rank, "right")))
        there = self.of.end_s[self.receives[mine]] <= self.time_s + self.same_s
        for peer in np.unique(self.of.peer[self.sends[mine]][there]).tolist():
            if peer not in together and (self.works.at(peer, self.time_s) or self.arrivals.at(peer, self.time_s)):
                return int(peer)
        return None

    def _fresh(self, ends: _Ends, *, busy: bool = False) -> int | None:
        """One that ends here and now and was not yet walked; ``busy``: and took time."""
        for index in ends.at(self.rank, self.time_s):
            if index not in self.seen and not (busy and self.of.end_s[index] - self.of.start_s[index] <= self.same_s):
                self.seen.add(index)
                return index
        return None

    def _spent(self, kind: str, index: int) -> Stretch:
        start_s, end_s = float(self.of.start_s[index]), self.time_s
        self.time_s = start_s
        rank, peer, step, size = (
            int(field[index]) for field in (self.of.rank, self.of.peer, self.of.step, self.of.bytes)
        )
        if kind == "compute":
            return Stretch(kind, rank, start_s, end_s, bytes=size)
        return Stretch(kind, rank, start_s, end_s, peer, step, size)


# A run's activities as a trace that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) open.
# Trace Event Format: one process per rank with a track for each of port out, port in and processor; an arrow for each
# message; the critical path, where it is given, as a process of its own above all.

_TRACKS = {SEND: (1, "port out"), RECEIVE: (2, "port in"), COMPUTE: (3, "processor")}
_MICROSECONDS = 1e6


def write_trace(path: Path, activities: Activities, critical_path: Sequence[Stretch] = ()) -> int:
    """Writes the trace; the number of its events. Raises ``ValueError`` for messages without a receive, ``OSError``."""
    count = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for event in trace_events(activities, critical_path):
            file.write((",\n" if count else "") + json.dumps(event, allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def trace_events(activities: Activities, critical_path: Sequence[Stretch] = ()) -> Iterator[dict[str, Any]]:
    """The events one by one: names of ranks and tracks, what happened on them, arrows. Times in microseconds."""
    ranks = sorted({int(rank) for rank in activities.rank})
    path_process = (max(ranks) if ranks else 0) + 1
    if critical_path:
        yield _named("process_name", path_process, 0, "critical path")
        yield {"name": "process_sort_index", "ph": "M", "pid": path_process, "tid": 0, "args": {"sort_index": -1}}
        yield from (_of_path(one, path_process) for one in critical_path)
    for rank in ranks:
        yield _named("process_name", rank, 0, f"rank {rank}")
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for track, name in _TRACKS.values():
            yield _named("thread_name", rank, track, name)

    columns = (activities.kind, activities.rank, activities.peer, activities.operation, activities.step)
    values = zip(*(column.tolist() for column in columns), activities.bytes.tolist(), strict=True)
    times = zip(activities.start_s.tolist(), activities.end_s.tolist(), strict=True)
    for (kind, rank, peer, operation, step, size), (start_s, end_s) in zip(values, times, strict=True):
        names = {SEND: f"to {peer}", RECEIVE: f"from {peer}", COMPUTE: "work"}
        about = {"bytes": size} if kind == COMPUTE else {"bytes": size, "step": step, "operation": operation}
        yield _slice(names[kind], rank, _TRACKS[kind][0], start_s, end_s, about)
    for number, (send, receive) in enumerate(zip(*messages_of(activities), strict=True)):
        yield _arrow("s", number, activities, int(send), SEND)
        yield _arrow("f", number, activities, int(receive), RECEIVE) | {"bp": "e"}


def _named(name: str, process: int, track: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": {"name": value}}


def _slice(
    name: str, process: int, track: int, start_s: float, end_s: float, about: dict[str, int | None]
) -> dict[str, Any]:
    start, length = start_s * _MICROSECONDS, (end_s - start_s) * _MICROSECONDS
    return {"name": name, "ph": "X", "pid": process, "tid": track, "ts": start, "dur": length, "args": about}


def _of_path(one: Stretch, process: int) -> dict[str, Any]:
    name = f"{one.kind}, rank {one.rank}"
    return _slice(name, process, 1, one.start_s, one.end_s, {"peer": one.peer, "step": one.step, "bytes": one.bytes})


def _arrow(phase: str, number: int, activities: Activities, index: int, kind: int) -> dict[str, Any]:
    """An arrow begins and ends at the beginning of its slice, which it needs to find."""
    return {
        "name": "message",
        "cat": "message",
        "ph": phase,
        "id": number,
        "pid": int(activities.rank[index]),
        "tid": _TRACKS[kind][0],
        "ts": float(activities.start_s[index]) * _MICROSECONDS,
    }
