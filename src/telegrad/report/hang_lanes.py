"""What is known of each rank of a communicator: by its own report, by its peers, and by what has been completed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from telegrad.report.hang_files import Report, ReportedPeer

# Who completes one of these has heard of every rank, so every rank has called it. A broadcast's root hears of nobody.
_HEARS_OF_ALL = frozenset({"barrier", "allgather", "allreduce", "sparseallreduce"})
_HANGS_S = 1.0  # whoever has waited for less may have been about to go on


@dataclass(frozen=True)
class Lane:
    """What is known of one rank. ``called``: it has called at least the tags below; with ``exact`` no more."""

    rank: int
    host: str | None
    pid: int | None
    report: Report | None
    called: int
    exact: bool
    state: str | None
    heard_s_ago: float | None

    @property
    def name(self) -> str:
        where = [f"host {self.host}"] if self.host else []
        where += [f"pid {self.pid}"] if self.pid is not None else []
        return f"rank {self.rank}" + (f" ({', '.join(where)})" if where else "")


def lanes_of(reports: Mapping[int, Report], size: int, notes: list[str]) -> list[Lane]:
    """A lane for each of ``size`` ranks. ``called`` also counts what its peers know of it, and what has been completed
    anywhere; where that is more than a rank's own report says, a note is added to ``notes``, and what the rank waited
    for is over in its ``report``: it has gone on since.
    """
    heard: dict[int, list[ReportedPeer]] = {}
    for report in reports.values():
        for peer in report.peers:
            if peer.rank != report.rank:
                heard.setdefault(peer.rank, []).append(peer)
    met = [
        operation.tag + 1
        for report in reports.values()
        for operation in report.operations
        if operation.state == "completed" and _plain(operation.operation) in _HEARS_OF_ALL
    ]
    lanes = []
    for rank in range(size):
        own, of_it = reports.get(rank), heard.get(rank, [])
        states = {peer.state for peer in of_it}
        known = max([0, *met, *(peer.called for peer in of_it if peer.called is not None)])
        if own is not None and known > own.called:
            notes.append(
                f"rank {rank}'s report is older than the others': it speaks of {own.called} calls, "
                f"others know of {known}"
            )
            own = _gone_on(own)
        known_of = min(of_it, key=lambda peer: (peer.host is None, peer.pid is None), default=None)
        source = own if own is not None else known_of
        lanes.append(
            Lane(
                rank,
                source.host if source else None,
                source.pid if source else None,
                own,
                called=max(known, own.called if own else 0),
                exact=own is not None and own.called >= known,
                state=next((state for state in ("failed", "closed", "alive") if state in states), None),
                heard_s_ago=min((peer.heard_s_ago for peer in of_it if peer.heard_s_ago is not None), default=None),
            )
        )
    return lanes


def _gone_on(report: Report) -> Report:
    operations = tuple(
        replace(one, state="completed", waits_for=(), sends_to=()) if one.state == "running" else one
        for one in report.operations
    )
    return replace(report, operations=operations, messages=())


def short_wait_s(lanes: Sequence[Lane], tag: int | None) -> float | None:
    """The longest wait of a job that was asked and in which nobody had waited for long: as far as its reports tell, it
    was running. ``None`` for any other. ``tag``: the operation that is not complete everywhere."""
    reports = [lane.report for lane in lanes if lane.report is not None]
    if any(one.why == "timeout" or one.failure is not None for one in reports):
        return None
    if any(lane.state in ("failed", "closed") for lane in lanes):
        return None
    waits_s = [one.called_s_ago for report in reports for one in report.messages]
    waits_s += [
        one.called_s_ago for report in reports for one in report.operations if one.state == "running" or one.tag == tag
    ]
    longest_s = max(waits_s, default=_HANGS_S)
    return longest_s if longest_s < _HANGS_S else None


def _plain(operation: str) -> str:
    return operation.replace("_", "").replace(" ", "")
