"""Hang reports as they lie on disk: which files there are, and what a file may say (kind "telegrad report", version 1).

Everything is checked before use, and control characters are taken out of texts: a report may come from anywhere, and
what it says is printed on somebody's terminal. This module must not know what a verdict is.
"""

from __future__ import annotations

import functools
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

VERSION = 1
MOST_BYTES = 64 << 20
"""Of one file. A report of 1,000 ranks has some 200 KiB."""
MOST_RANKS = 1 << 16
_MOST_COUNT = 1 << 63
_MOST_OPERATIONS = 1 << 16
_MOST_CHARACTERS = 1 << 16
_WHY = ("timeout", "stall", "signal", "asked")
_STATES_OF_PEERS = ("alive", "failed", "closed")
_STATES = ("running", "completed", "failed")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Operation:
    """One operation as one rank saw it; ``waits_for`` and ``sends_to`` are ranks."""

    tag: int
    call: str
    operation: str
    count: int
    dtype: str | None
    reduction: str | None
    algorithm: str | None
    root: int | None
    state: str
    called_s_ago: float
    took_s: float | None
    waits_for: tuple[int, ...]
    sends_to: tuple[int, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Ranks that called alike have the same."""
        return (self.operation, self.count, self.dtype, self.reduction, self.algorithm, self.root, self.call)


@dataclass(frozen=True)
class Message:
    """A send or receive that was not over: with whom (``None``: whoever sends), and the operation that its rank called
    next (``before``)."""

    call: str
    operation: str
    peer: int | None
    message_tag: int
    before: int
    state: str
    called_s_ago: float


@dataclass(frozen=True)
class ReportedPeer:
    """What a rank has heard of another."""

    rank: int
    host: str | None
    pid: int | None
    state: str
    called: int | None
    heard_s_ago: float | None


@dataclass(frozen=True)
class Failed:
    """The error that ended a rank's communicator."""

    error: str
    peer: int | None
    message: str


@dataclass(frozen=True)
class ReportedGroup:
    """What a communicator that was split from another is called, and its ranks' numbers in that one, by rank."""

    name: str
    parent_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """What one rank wrote. ``operations``: oldest first, the last ones only; ``called``: tags below it were called."""

    why: str
    communicator: str
    driver: str
    rank: int
    world_size: int
    host: str | None
    pid: int | None
    written_unix_s: float
    timeout_s: float | None
    liveness_timeout_s: float | None
    called: int
    completed: int
    failure: Failed | None
    peers: tuple[ReportedPeer, ...]
    operations: tuple[Operation, ...]
    messages: tuple[Message, ...] = ()
    group: ReportedGroup | None = None

    def at(self, tag: int) -> Operation | None:
        """The operation with this number, if it is still listed."""
        return next((operation for operation in reversed(self.operations) if operation.tag == tag), None)


class BadReport(ValueError):  # noqa: N818
    """A file is no report, or a damaged one; the text says what is wrong where."""


@dataclass
class FoundReports:
    """``reports`` in the order of (communicator, rank); ``notes`` say what was left out, and why."""

    reports: list[Report] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def default_folder() -> Path:
    """Where ranks write their reports: ``TELEGRAD_REPORT_DIR``, else a folder of this user's own."""
    named = os.environ.get("TELEGRAD_REPORT_DIR")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"telegrad-reports-{os.getuid()}"


def find(folders: Sequence[Path]) -> FoundReports:
    """Reads every ``*.json`` in the folders. What cannot be used becomes a note; of two reports of one rank and
    communicator the later counts. Raises ``OSError`` if a folder cannot be listed.
    """
    found = FoundReports()
    newest: dict[tuple[str, int], tuple[Report, Path]] = {}
    for folder in folders:
        for path in sorted(path for path in folder.iterdir() if path.suffix == ".json"):
            try:
                report = parse(read(path))
            except (OSError, BadReport) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                found.notes.append(f"{clean(str(path))} left out: {reason}")
                continue
            key = (report.communicator, report.rank)
            other = newest.get(key)
            if other is None:
                newest[key] = (report, path)
                continue
            kept, dropped = sorted([other, (report, path)], key=lambda one: one[0].written_unix_s, reverse=True)
            newest[key] = kept
            if kept[1] != dropped[1]:
                found.notes.append(
                    f"{clean(str(dropped[1]))} left out: {clean(str(kept[1]))} is a later report of rank {report.rank}"
                )
    found.reports = [newest[key][0] for key in sorted(newest)]
    return found


def read(path: Path) -> bytes:
    """The bytes of a plain file. Raises ``BadReport`` for other things, which might block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadReport("not a plain file")
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadReport(f"more than {MOST_BYTES >> 20} MiB: no report is so long")
    return data


def parse(data: bytes) -> Report:
    """A report from its bytes. Raises ``BadReport``, which names the field, its value and what it must be."""
    try:
        found = json.loads(data.decode("utf-8"), parse_constant=_no_such_number)
    except (ValueError, RecursionError) as error:
        raise BadReport(f"damaged: no JSON ({clean(str(error))[:200]})") from error
    if not isinstance(found, dict) or found.get("kind") != "telegrad report":
        raise BadReport('foreign: JSON, but its "kind" is not "telegrad report"')
    if found.get("version") != VERSION or isinstance(found.get("version"), bool):
        raise BadReport(
            f"foreign: version {_shown(found.get('version'))} of the report; this telegrad reads version {VERSION}"
        )
    fields = _Fields(found, "")
    size = fields.integer("world_size", 1, MOST_RANKS)
    called = fields.integer("called", 0, _MOST_COUNT)
    return Report(
        why=fields.one_of("why", _WHY),
        communicator=fields.text("communicator"),
        driver=fields.text("driver"),
        rank=fields.integer("rank", 0, size - 1),
        world_size=size,
        host=fields.optional("host", fields.text),
        pid=fields.optional("pid", lambda name: fields.integer(name, 0, _MOST_COUNT)),
        written_unix_s=fields.seconds("written_unix_s"),
        timeout_s=fields.optional("timeout_s", fields.seconds),
        liveness_timeout_s=fields.optional("liveness_timeout_s", fields.seconds),
        called=called,
        completed=fields.integer("completed", 0, called),
        failure=fields.optional("failure", lambda name: _failed(fields.child(name), size)),
        peers=tuple(_peer(one, size) for one in fields.children("peers", size)),
        operations=_operations(fields.children("operations", _MOST_OPERATIONS), size, called),
        messages=tuple(_message(one, size) for one in fields.children("messages", _MOST_OPERATIONS, may_miss=True)),
        group=fields.optional("group", lambda name: _group(fields.child(name), size), may_miss=True),
    )


def _group(fields: _Fields, size: int) -> ReportedGroup:
    return ReportedGroup(fields.text("name"), fields.numbers("parent_ranks", size, MOST_RANKS))


def _failed(fields: _Fields, size: int) -> Failed:
    return Failed(
        error=fields.text("error"),
        peer=fields.optional("peer", lambda name: fields.integer(name, 0, size - 1)),
        message=fields.text("message"),
    )


def _peer(fields: _Fields, size: int) -> ReportedPeer:
    return ReportedPeer(
        rank=fields.integer("rank", 0, size - 1),
        host=fields.optional("host", fields.text),
        pid=fields.optional("pid", lambda name: fields.integer(name, 0, _MOST_COUNT)),
        state=fields.one_of("state", _STATES_OF_PEERS),
        called=fields.optional("called", lambda name: fields.integer(name, 0, _MOST_COUNT)),
        heard_s_ago=fields.optional("heard_s_ago", fields.seconds),
    )


def _message(fields: _Fields, size: int) -> Message:
    return Message(
        call=fields.text("call"),
        operation=fields.one_of("operation", ("send", "recv")),
        peer=fields.optional("peer", lambda name: fields.integer(name, 0, size - 1)),
        message_tag=fields.integer("message_tag", 0, _MOST_COUNT),
        before=fields.integer("before", 0, _MOST_COUNT),
        state=fields.one_of("state", _STATES),
        called_s_ago=fields.seconds("called_s_ago"),
    )


def _operations(all_fields: list[_Fields], size: int, called: int) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    for fields in all_fields:
        least = operations[-1].tag + 1 if operations else 0
        if called == 0:
            raise BadReport(f'damaged: "operations" lists a call, but "called" is {called}')
        operations.append(
            Operation(
                tag=fields.integer("tag", least, called - 1),
                call=fields.text("call"),
                operation=fields.text("operation"),
                count=fields.integer("count", 0, _MOST_COUNT * 2),
                dtype=fields.optional("dtype", fields.text),
                reduction=fields.optional("reduction", fields.text),
                algorithm=fields.optional("algorithm", fields.text),
                root=fields.optional("root", functools.partial(fields.integer, least=0, most=size - 1)),
                state=fields.one_of("state", _STATES),
                called_s_ago=fields.seconds("called_s_ago"),
                took_s=fields.optional("took_s", fields.seconds),
                waits_for=fields.ranks("waits_for", size),
                sends_to=fields.ranks("sends_to", size),
            )
        )
    return tuple(operations)


class _Fields:
    """An object of JSON, of which every field is asked for by type and range. Unknown fields may be there."""

    def __init__(self, found: dict[str, Any], where: str) -> None:
        self._found = found
        self._where = where

    def _raw(self, name: str) -> Any:
        if name not in self._found:
            raise BadReport(f'damaged: "{self._where}{name}" is missing')
        return self._found[name]

    def _wrong(self, name: str, must: str) -> NoReturn:
        raise BadReport(f'damaged: "{self._where}{name}" is {_shown(self._found[name])}: it must be {must}')

    def integer(self, name: str, least: int, most: int) -> int:
        value = self._raw(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._wrong(name, f"an integer from {least} to {most}")
        return value

    def seconds(self, name: str) -> float:
        value = self._raw(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            self._wrong(name, "a number of seconds, not negative")
        return float(value) if math.isfinite(value) else self._wrong(name, "finite")

    def text(self, name: str) -> str:
        value = self._raw(name)
        if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
            self._wrong(name, f"a text of at most {_MOST_CHARACTERS} characters")
        return clean(value)

    def one_of(self, name: str, allowed: Sequence[str]) -> str:
        value = self._raw(name)
        if not isinstance(value, str) or value not in allowed:
            self._wrong(name, f"one of {', '.join(allowed)}")
        return value

    def optional(self, name: str, read_it: Callable[[str], _T], may_miss: bool = False) -> _T | None:
        if may_miss and name not in self._found:
            return None
        return None if self._raw(name) is None else read_it(name)

    def ranks(self, name: str, size: int) -> tuple[int, ...]:
        value = self._raw(name)
        good = isinstance(value, list) and all(
            isinstance(one, int) and not isinstance(one, bool) and 0 <= one < size for one in value
        )
        if not good:
            self._wrong(name, f"a list of ranks from 0 to {size - 1}")
        return tuple(sorted(set(value)))

    def numbers(self, name: str, length: int, end: int) -> tuple[int, ...]:
        value = self._raw(name)
        good = isinstance(value, list) and len(value) == length
        if not good or not all(type(one) is int and 0 <= one < end for one in value):
            self._wrong(name, f"a list of {length} integers from 0 to {end - 1}")
        return tuple(value)

    def child(self, name: str) -> _Fields:
        value = self._raw(name)
        if not isinstance(value, dict):
            self._wrong(name, "an object")
        return _Fields(value, f"{self._where}{name}.")

    def children(self, name: str, most: int, *, may_miss: bool = False) -> list[_Fields]:
        if may_miss and name not in self._found:
            return []
        value = self._raw(name)
        if not isinstance(value, list) or len(value) > most or not all(isinstance(one, dict) for one in value):
            self._wrong(name, f"a list of at most {most} objects")
        return [_Fields(one, f"{self._where}{name}[{at}].") for at, one in enumerate(value)]


def clean(text: str) -> str:
    """The text without what could command a terminal or break a line."""
    return "".join(character if character.isprintable() else "�" for character in text.replace("\n", " "))


def _shown(value: object) -> str:
    text = clean(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:60] + "…"


def _no_such_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")
