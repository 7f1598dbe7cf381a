"""Judges a trial by what its ranks said: did it end, was every result right, did everyone blame the right rank, was
anything left. Pure: what was seen goes in, violations and times come out.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.faults.trials import MISMATCHES, Trial

Said = Mapping[int, Sequence[Mapping[str, Any]]]
"""Per rank, the lines of JSON that it printed."""

HANG, WRONG_SUM, WRONG_CULPRIT, WRONG_ERROR, LEFT = "hang", "wrong sum", "wrong culprit", "wrong error", "left behind"
SORTS = (HANG, WRONG_SUM, WRONG_CULPRIT, WRONG_ERROR, LEFT)
"""Sorts of violations, the worst first."""

KILLED_LIMIT_S = 1.0
MISMATCH_LIMIT_S = 0.1
FROZEN_SLACK_S = 2.0


@dataclass(frozen=True)
class Seen:
    """All that is known of a trial after it. ``returncodes`` by rank (None: had to be killed by the launcher), ``hung``
    the ranks that did not end in time, ``left`` what was found afterwards: processes, shared memory. All ranks ran on
    ``host``."""

    said: Said
    returncodes: Sequence[int | None]
    hung: tuple[int, ...] = ()
    where: str = ""
    left: tuple[str, ...] = ()
    stderr: Mapping[int, str] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Violation:
    """What must not be. ``sort`` is one of ``SORTS``."""

    sort: str
    rank: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.sort}: {'' if self.rank is None else f'rank {self.rank}: '}{self.text}"


@dataclass(frozen=True)
class Verdict:
    """``detected_s``: per rank, from the fault (in a mismatch: from the last rank's call) to the error; ``closed_s``:
    the longest ``close()``."""

    trial: Trial
    violations: tuple[Violation, ...]
    detected_s: Mapping[int, float]
    closed_s: float | None
    checked: int

    @property
    def limit_s(self) -> float | None:
        """Within which every survivor has to hear of it; None where nothing happens."""
        return limit_s(self.trial.kind, self.trial.liveness_timeout_s)

    @property
    def late(self) -> bool:
        return self.limit_s is not None and any(time > self.limit_s for time in self.detected_s.values())

    def row(self) -> dict[str, object]:
        """For a result file."""
        trial = self.trial
        return {
            "seed": trial.seed,
            "kind": trial.kind,
            "ranks": trial.size,
            "network": trial.network,
            "trial": str(trial),
            "blamed": trial.blamed(),
            "detected_s": {str(rank): time for rank, time in self.detected_s.items()},
            "limit_s": self.limit_s,
            "closed_s": self.closed_s,
            "checked": self.checked,
            "violations": [{"sort": one.sort, "rank": one.rank, "text": one.text} for one in self.violations],
        }


def limit_s(kind: str, liveness_timeout_s: float) -> float | None:
    """What issue and documentation promise."""
    if kind == "none":
        return None
    if kind == "freeze":
        return liveness_timeout_s + FROZEN_SLACK_S
    return MISMATCH_LIMIT_S if kind in MISMATCHES else KILLED_LIMIT_S


def judge(trial: Trial, seen: Seen) -> Verdict:
    """The verdict on one trial."""
    ends = {rank: line for rank in range(trial.size) for line in seen.said.get(rank, ()) if "ended" in line}
    violations = [*_hangs(trial, seen, ends), *_results(trial, ends), *_left(seen, ends)]
    for rank, line in ends.items():
        violations += _blame(trial, rank, line, seen.host)
    if not seen.hung:
        violations += _exits(trial, seen)
    closed = [line["closed_s"] for line in ends.values() if line.get("closed_s") is not None]
    return Verdict(
        trial=trial,
        violations=tuple(sorted(violations, key=lambda one: SORTS.index(one.sort))),
        detected_s=_detected(trial, seen, ends),
        closed_s=max(closed, default=None),
        checked=sum(line["checked"] for line in ends.values()),
    )


def _must_report(trial: Trial, rank: int) -> bool:
    """Whether a rank lives long enough to say how it ended."""
    return rank != trial.culprit or (trial.kind != "kill" and (trial.kind != "freeze" or trial.thaws))


def _hangs(trial: Trial, seen: Seen, ends: Mapping[int, Any]) -> list[Violation]:
    hangs = [Violation(HANG, rank, "not done in time") for rank in seen.hung]
    silent = [rank for rank in range(trial.size) if rank not in ends and _must_report(trial, rank)]
    for rank in silent:
        if rank not in seen.hung:
            last = seen.stderr.get(rank, "").strip().splitlines()
            text = f"ended ({seen.returncodes[rank]}) without saying how: {last[-1] if last else 'no output'}"
            hangs.append(Violation(WRONG_ERROR, rank, text))
    return hangs


def _results(trial: Trial, ends: Mapping[int, Any]) -> list[Violation]:
    found = []
    for rank, line in ends.items():
        found += [Violation(WRONG_SUM, rank, text) for text in line["wrong"]]
        if line["touched"]:
            found.append(Violation(WRONG_SUM, rank, "the output of the mismatched call has changed"))
        if line["passed_mismatch"] and not trial.calls_of(rank)[trial.at].rooted:
            found.append(Violation(WRONG_ERROR, rank, "the mismatched call went through"))
    return found


def _blame(trial: Trial, rank: int, line: Mapping[str, Any], host: str) -> list[Violation]:
    end = line["ended"]
    error, text = end["error"], f"{end['error']}, peer {end.get('peer')}: {end.get('text', '')}"
    culprit = trial.blamed()
    if rank == trial.culprit and not trial.is_mismatch:
        return [] if error in _own_errors(trial.kind) else [Violation(WRONG_ERROR, rank, f"the culprit: {text}")]
    if culprit is None:
        return [Violation(WRONG_ERROR, rank, f"nothing had happened, but {text}")] if error else []
    if error is None:
        return [Violation(WRONG_ERROR, rank, f"heard of nothing; rank {culprit} was to blame")]
    found = []
    wanted = "MismatchedCall" if trial.is_mismatch else "PeerFailed"
    if error != wanted:
        found.append(Violation(WRONG_ERROR, rank, f"not {wanted} but {text}"))
    if end.get("peer") != culprit:
        found.append(Violation(WRONG_CULPRIT, rank, f"not rank {culprit}: {text}"))
    elif end.get("host", host) != host:
        found.append(Violation(WRONG_CULPRIT, rank, f"on host {end['host']}, not {host}: {text}"))
    if end.get("rank") != rank:
        found.append(Violation(WRONG_ERROR, rank, f"says that it is rank {end.get('rank')}: {text}"))
    reason = {"interrupt": "KeyboardInterrupt"}.get(trial.kind, f"mistake {trial.seed}")
    if trial.kind in ("exception", "interrupt", "abort") and reason not in end["text"]:
        found.append(Violation(WRONG_ERROR, rank, f"does not say {reason!r}: {text}"))
    return found


def _own_errors(kind: str) -> tuple[str | None, ...]:
    """What the culprit itself may raise."""
    return {
        "none": (None,),
        "exception": ("DeliberateMistake",),
        "interrupt": ("KeyboardInterrupt",),
        "abort": ("TransportError",),
        "freeze": ("PeerFailed", "TransportError"),  # it wakes up, and the others have gone without it
    }.get(kind, ())


def _exits(trial: Trial, seen: Seen) -> list[Violation]:
    found = []
    for rank, code in enumerate(seen.returncodes):
        if rank != trial.culprit or trial.is_mismatch or trial.kind in ("none", "abort"):
            right = code == 0
        elif trial.kind == "kill" or (trial.kind == "freeze" and not trial.thaws):
            right = code == -9
        else:
            right = (code == 0) != (trial.uncaught and trial.kind in ("exception", "interrupt"))
        if not right:
            last = seen.stderr.get(rank, "").strip().splitlines()
            found.append(Violation(WRONG_ERROR, rank, f"exit status {code}: {last[-1] if last else 'no output'}"))
    return found


def _left(seen: Seen, ends: Mapping[int, Any]) -> list[Violation]:
    found = [Violation(LEFT, None, text) for text in seen.left]
    for rank, line in ends.items():
        if line["descriptors"]:
            found.append(Violation(LEFT, rank, f"{line['descriptors']} more open descriptors than before"))
    return found


def _detected(trial: Trial, seen: Seen, ends: Mapping[int, Any]) -> dict[int, float]:
    errors = {rank: line for rank, line in ends.items() if line["ended"]["error"] is not None}
    if trial.is_mismatch:
        called = [line["called_s"][trial.at] for line in ends.values() if len(line["called_s"]) > trial.at]
        if not called:
            return {}
        # Who was through with a rooted operation, or busy with its own affairs, can hear of it in its next wait only.
        since = {rank: max(max(called), line["ended"]["since_s"]) for rank, line in errors.items()}
    else:
        faults = [line["fault"] for line in seen.said.get(trial.culprit, ()) if "fault" in line]
        since = {rank: faults[0] for rank in errors if faults and rank != trial.culprit}
    return {rank: max(0.0, errors[rank]["ended"]["at_s"] - since[rank]) for rank in since}
