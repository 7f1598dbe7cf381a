"""Hang reports as they lie on disk: which files there are, and what a file may say (kind "telegrad report", version 1).

Everything is checked before use, and control characters are taken out of texts: a report may come from anywhere, and
what it says is printed on somebody's terminal. This module must not know what a verdict is.
"""

from __future__ import annotations

import functools
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

VERSION = 1
MOST_BYTES = 64 << 20
"""Of one file. A report of 1,000 ranks has some 200 KiB."""
MOST_RANKS = 1 << 16
_MOST_COUNT = 1 << 63
_MOST_OPERATIONS = 1 << 16
_MOST_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class _Range:
    """Of an integer; ``most``: ``None`` for the last rank."""

    least: int
    most: int | None


# What fields hold, as ``_value`` checks it. A tuple is a list of at most ``_MOST_OPERATIONS``.
Count = Annotated[int, _Range(0, _MOST_COUNT)]
Rank = Annotated[int, _Range(0, None)]
State = Literal["running", "completed", "failed"]


@dataclass(frozen=True)
class Operation:
    """One operation as one rank saw it; ``waits_for`` and ``sends_to`` are ranks."""

    tag: Count
    call: str
    operation: str
    count: Annotated[int, _Range(0, 2 * _MOST_COUNT)]
    dtype: str | None
    reduction: str | None
    algorithm: str | None
    root: Rank | None
    state: State
    called_s_ago: float
    took_s: float | None
    waits_for: tuple[Rank, ...]
    sends_to: tuple[Rank, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Ranks that called alike have the same."""
        return (self.operation, self.count, self.dtype, self.reduction, self.algorithm, self.root, self.call)


@dataclass(frozen=True)
class Message:
    """A send or receive that was not over: with whom (``None``: whoever sends), and the operation that its rank called
    next (``before``)."""

    call: str
    operation: Literal["send", "recv"]
    peer: Rank | None
    message_tag: Count
    before: Count
    state: State
    called_s_ago: float


@dataclass(frozen=True)
class ReportedPeer:
    """What a rank has heard of another."""

    rank: Rank
    host: str | None
    pid: Count | None
    state: Literal["alive", "failed", "closed"]
    called: Count | None
    heard_s_ago: float | None


@dataclass(frozen=True)
class Failed:
    """The error that ended a rank's communicator."""

    error: str
    peer: Rank | None
    message: str


@dataclass(frozen=True)
class ReportedGroup:
    """What a communicator that was split from another is called, and its ranks' numbers in that one, by rank."""

    name: str
    parent_ranks: tuple[Annotated[int, _Range(0, MOST_RANKS - 1)], ...]


@dataclass(frozen=True)
class Report:
    """What one rank wrote. ``operations``: oldest first, the last ones only; ``called``: tags below it were called."""

    why: Literal["timeout", "stall", "signal", "asked"]
    communicator: str
    driver: str
    rank: Rank
    world_size: Annotated[int, _Range(1, MOST_RANKS)]
    host: str | None
    pid: Count | None
    written_unix_s: float
    timeout_s: float | None
    liveness_timeout_s: float | None
    called: Count
    completed: Count
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
    size = _value(_hints_of(Report)["world_size"], found.get("world_size"), "world_size", 0)
    report: Report = _read(Report, found, "", size)
    _check(report.completed, "completed", _Range(0, report.called), size)
    if report.operations and report.called == 0:
        raise BadReport(f'damaged: "operations" lists a call, but "called" is {report.called}')
    least = 0
    for at, one in enumerate(report.operations):
        least = _check(one.tag, f"operations[{at}].tag", _Range(least, report.called - 1), size) + 1
    if report.group is not None and len(report.group.parent_ranks) != size:
        _wrong(list(report.group.parent_ranks), "group.parent_ranks", f"a list of {size} integers")
    return report


@functools.cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _read(kind: Any, found: Any, where: str, size: int) -> Any:
    """An object of JSON; unknown fields may be there, fields with a default may miss."""
    if not isinstance(found, dict):
        _wrong(found, where.rstrip("."), "an object")
    hints, values = _hints_of(kind), {}
    for one in fields(kind):
        if one.name in found:
            values[one.name] = _value(hints[one.name], found[one.name], where + one.name, size)
        elif one.default is MISSING:
            raise BadReport(f'damaged: "{where}{one.name}" is missing')
    return kind(**values)


def _value(hint: Any, value: Any, where: str, size: int) -> Any:
    """``value``, of a field that is annotated with ``hint``, in a report of ``size`` ranks."""
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return None if value is None else _value(inner[0], value, where, size)
    if get_origin(hint) is Annotated:
        return _check(value, where, inner[1], size)
    if get_origin(hint) is Literal:
        return value if value in inner else _wrong(value, where, f"one of {', '.join(inner)}")
    if get_origin(hint) is tuple:
        return _values(inner[0], value, where, size)
    if hint is str:
        if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
            _wrong(value, where, f"a text of at most {_MOST_CHARACTERS} characters")
        return clean(value)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
            _wrong(value, where, "a number of seconds, not negative")
        return float(value)
    return _read(hint, value, f"{where}.", size)


def _values(hint: Any, value: Any, where: str, size: int) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > _MOST_OPERATIONS:
        _wrong(value, where, f"a list of at most {_MOST_OPERATIONS} objects")
    found = [_value(hint, one, f"{where}[{at}]", size) for at, one in enumerate(value)]
    return tuple(sorted(set(found)) if hint is Rank else found)


def _check(value: Any, where: str, within: _Range, size: int) -> int:
    most = size - 1 if within.most is None else within.most
    if isinstance(value, bool) or not isinstance(value, int) or not within.least <= value <= most:
        _wrong(value, where, f"an integer from {within.least} to {most}")
    return value


def _wrong(value: object, where: str, must: str) -> NoReturn:
    raise BadReport(f'damaged: "{where}" is {_shown(value)}: it must be {must}')


def clean(text: str) -> str:
    """The text without what could command a terminal or break a line."""
    return "".join(character if character.isprintable() else "�" for character in text.replace("\n", " "))


def _shown(value: object) -> str:
    text = clean(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else text[:60] + "…"


def _no_such_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")
