"""The reports of all ranks of one communicator, merged into one verdict: what is stuck, and because of whom.

Pure functions of the reports: the same files give the same verdict, whatever order they were found in. This module must
not know where reports come from or how a verdict is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from telegrad.tools.report.hang_files import Message, Operation, Report, ReportedGroup, ReportedPeer

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
    if any(one.why in ("timeout", "stall") or one.failure is not None for one in reports):
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


def ends_of(waits: Mapping[int, Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The roots of the wait graph (they wait for nobody; who is no key does not wait), and its circles: the groups
    that wait for nobody outside, each as one circle of ranks, from its lowest rank, each waiting for the next.
    """
    nodes = sorted({*waits, *(rank for to in waits.values() for rank in to)})
    components = _components(nodes, waits)
    number = {rank: at for at, component in enumerate(components) for rank in component}
    roots: list[int] = []
    circles: list[list[int]] = []
    for at, component in enumerate(components):
        inside = set(component)
        if any(number[to] != at for rank in component for to in waits.get(rank, ())):
            continue
        if len(component) == 1 and component[0] not in waits.get(component[0], ()):
            roots.append(component[0])
        else:
            circles.append(_circle(min(component), waits, inside))
    return sorted(roots), sorted(circles)


def _components(nodes: Sequence[int], waits: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan), with a stack of our own: a chain may be as long as the job is wide."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    for start in nodes:
        if start in index:
            continue
        path = [(start, iter(waits.get(start, ())))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while path:
            rank, successors = path[-1]
            for to in successors:
                if to not in index:
                    index[to] = low[to] = len(index)
                    stack.append(to)
                    on_stack.add(to)
                    path.append((to, iter(waits.get(to, ()))))
                    break
                if to in on_stack:
                    low[rank] = min(low[rank], index[to])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[rank])
                if low[rank] == index[rank]:
                    cut = stack.index(rank)
                    found.append(stack[cut:])
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
    return found


def _circle(start: int, waits: Mapping[int, Sequence[int]], inside: set[int]) -> list[int]:
    """A shortest circle through ``start``, whose component is ``inside``."""
    before: dict[int, int] = {}
    wave = [start]
    while wave:
        following: list[int] = []
        for rank in wave:
            for to in waits.get(rank, ()):
                if to == start:
                    path = [rank]
                    while path[-1] != start:
                        path.append(before[path[-1]])
                    return path[::-1]
                if to in inside and to not in before:
                    before[to] = rank
                    following.append(to)
        wave = following
    return [start]


def open_messages(lanes: Sequence[Lane]) -> dict[int, list[Message]]:
    """By rank: the sends and receives that are not over, oldest first; ranks without any are left out."""
    return {lane.rank: list(lane.report.messages) for lane in lanes if lane.report is not None and lane.report.messages}


def ends_of_messages(waiting: dict[int, list[Message]], size: int) -> tuple[list[int], list[list[int]]]:
    """Whom it comes down to: the ranks that others wait for and that wait for nobody, and the circles. Who takes
    anybody's message waits for all."""

    def peers(rank: int, messages: list[Message]) -> list[int]:
        if any(message.peer is None for message in messages):
            return [peer for peer in range(size) if peer != rank]
        return sorted({message.peer for message in messages if message.peer is not None})

    return ends_of({rank: peers(rank, messages) for rank, messages in waiting.items()})


def told_message(rank: int, message: Message) -> str:
    """``rank 0 waits in recv(…) for rank 1, which has not sent it``."""
    missing = "sent" if message.operation == "recv" else "received"
    why = "any rank, none of which has" if message.peer is None else f"rank {message.peer}, which has not"
    return f"rank {rank} waits in {message.call} for {why} {missing} it"


_MOST_TOLD_ALONE = 8
_AT_ONCE_S = 10.0  # a process writes the reports of all its communicators together


@dataclass
class HangVerdict:
    """``kind``: not_called, no_report, mismatch, order, failed, waits, cycle, running (it was when it was asked, as far
    as can be told) or nothing. ``culprits``: ranks, lowest first. ``tag`` and ``call``: the stuck operation.
    ``sentence`` says it all; ``details`` and ``notes`` say more.
    """

    communicator: str
    world_size: int
    kind: str
    culprits: list[int]
    tag: int | None
    call: str | None
    waiting: list[int]
    sentence: str
    details: list[str]
    notes: list[str]
    lanes: list[Lane] = field(repr=False)


def verdicts(reports: Iterable[Report]) -> tuple[list[HangVerdict], list[HangVerdict]]:
    """A verdict for each communicator, the latest first; and those of earlier jobs that left files in the same place:
    none of their processes has written for the latest communicator, and all their reports are older.
    """
    groups: dict[str, list[Report]] = {}
    for report in sorted(reports, key=lambda one: (one.communicator, one.rank)):
        groups.setdefault(report.communicator, []).append(report)
    ordered = sorted(
        groups.values(), key=lambda group: (-max(one.written_unix_s for one in group), group[0].communicator)
    )
    if not ordered:
        return [], []
    latest = {(one.host, one.pid) for one in ordered[0]}
    begin_s = min(one.written_unix_s for one in ordered[0])
    current: list[HangVerdict] = []
    stale: list[HangVerdict] = []
    for group in ordered:
        foreign = latest.isdisjoint((one.host, one.pid) for one in group)
        age_s = begin_s - max(one.written_unix_s for one in group)
        made = verdict(group, _open_in_others(group, ordered))
        if age_s > 0:
            made.notes.append(f"its reports are {told_seconds(age_s)} older than those of {ordered[0][0].communicator}")
        (stale if foreign and age_s > 0 else current).append(made)
    return current, stale


def _open_in_others(group: Sequence[Report], groups: Iterable[Sequence[Report]]) -> dict[int, str]:
    """By rank of ``group``: what its process waited in on another communicator when it was asked of this one."""
    found: dict[int, str] = {}
    for report in group:
        for other in (one for others in groups if others is not group for one in others):
            is_it = (other.host, other.pid) == (report.host, report.pid) and report.pid is not None
            at_once = abs(other.written_unix_s - report.written_unix_s) < _AT_ONCE_S
            if report.rank in found or not (is_it and at_once) or other.failure is not None:
                continue
            name = f"the communicator {other.group.name if other.group else other.communicator}"
            running = next((one for one in other.operations if one.state == "running"), None)
            if running is not None:
                found[report.rank] = f"operation {running.tag} of {name}, {running.call}"
            elif other.messages:
                found[report.rank] = f"{other.messages[0].call} of {name}"
    return found


def verdict(group: Sequence[Report], elsewhere: Mapping[int, str] | None = None) -> HangVerdict:
    """The verdict on one communicator's reports, at most one of each rank; ``group`` holds at least one.
    ``elsewhere``: by rank, what its process waits in on another communicator."""
    newest = max(group, key=lambda one: (one.written_unix_s, -one.rank))
    size = newest.world_size
    notes = [
        f"rank {one.rank}'s report speaks of {one.world_size} ranks instead of {size}: left out"
        for one in group
        if one.world_size != size
    ]
    lanes = lanes_of({one.rank: one for one in group if one.world_size == size}, size, notes)
    made = _Judge(newest.communicator, lanes, notes, elsewhere or {}).verdict()
    if newest.group is not None:
        made.details.append(_told_group(newest.group, made.culprits or made.waiting))
    return made


def _told_group(group: ReportedGroup, ranks: Sequence[int]) -> str:
    """What its parent calls those of a group's ``ranks`` that can be told in a line."""
    told = [f"rank {rank} here is rank {group.parent_ranks[rank]} of its parent" for rank in ranks[:_MOST_TOLD_ALONE]]
    return "; ".join([f"this is the communicator {group.name}", *told])


class _Judge:
    def __init__(self, communicator: str, lanes: list[Lane], notes: list[str], elsewhere: Mapping[int, str]) -> None:
        self._communicator, self._elsewhere = communicator, elsewhere
        self._lanes = lanes
        self._notes = notes
        self._reported = [(lane, lane.report) for lane in lanes if lane.report is not None]
        self._missing = [lane.rank for lane in lanes if lane.report is None]
        self._tag = self._stuck_tag()
        self._at = {} if self._tag is None else self._operations_at(self._tag)
        self._waiting = [rank for rank, operation in self._at.items() if operation.state != "completed"]
        self._call = self._usual_call()
        self._details: list[str] = []
        self._messages = open_messages(lanes)

    def verdict(self) -> HangVerdict:
        kind, culprits, sentence = self._found()
        self._detail_missing(culprits)
        for lane, report in self._reported:
            listed = sum(operation.state != "completed" for operation in report.operations)
            if (unlisted := lane.called - report.completed - listed) > 0 and lane.exact:
                self._notes.append(f"rank {lane.rank} has {unlisted} unfinished operations that are no longer listed")
        return HangVerdict(
            communicator=self._communicator,
            world_size=len(self._lanes),
            kind=kind,
            culprits=sorted(culprits),
            tag=self._tag,
            call=self._call,
            waiting=sorted(self._waiting),
            sentence=sentence,
            details=self._details,
            notes=self._notes,
            lanes=self._lanes,
        )

    def _found(self) -> tuple[str, list[int], str]:
        by_a_peer = self._failed()
        mismatch = self._mismatch()
        if mismatch is not None and (self._tag is None or mismatch[0] <= self._tag or not self._late()):
            return self._judge_mismatch(*mismatch)
        if by_a_peer is not None:
            return by_a_peer
        if self._tag is None and not self._messages:
            return self._judge_nothing()
        if (longest_s := short_wait_s(self._lanes, self._tag)) is not None:
            return "running", [], _told_running(longest_s)
        if self._tag is None:
            return self._judge_messages()
        if late := self._late():
            return self._judge_late(late)
        return self._judge_waits()

    # What is stuck

    def _stuck_tag(self) -> int | None:
        """The lowest operation that somebody has called and that is not complete everywhere."""
        unfinished = [
            operation.tag
            for _, report in self._reported
            for operation in report.operations
            if operation.state != "completed"
        ]
        most = max((lane.called for lane in self._lanes), default=0)
        not_called = [lane.called for lane, _ in self._reported if lane.exact and lane.called < most]
        return min([*unfinished, *not_called], default=None)

    def _operations_at(self, tag: int) -> dict[int, Operation]:
        found = ((lane.rank, report.at(tag)) for lane, report in self._reported)
        return {rank: operation for rank, operation in found if operation is not None}

    def _usual_call(self) -> str | None:
        calls = Counter(operation.call for operation in self._at.values())
        return max(calls, key=lambda call: calls[call]) if calls else None  # a tie: the lowest rank's

    def _late(self) -> list[Lane]:
        """Who has not called the stuck operation: known for sure, or not known to have."""
        return [lane for lane in self._lanes if self._tag is not None and lane.called <= self._tag]

    # Somebody has failed

    def _failed(self) -> tuple[str, list[int], str] | None:
        """What the ranks' own errors say; a time-out is no cause, so it says nothing here."""
        told: Counter[int] = Counter()
        errors: dict[int, tuple[str, str]] = {}
        for lane, report in self._reported:
            failure = report.failure
            if failure is None or failure.error == "TimeoutExpired":
                continue
            peer = failure.peer if failure.peer is not None else lane.rank
            told[peer] += 1
            errors.setdefault(peer, (failure.error, f"{failure.error} on rank {lane.rank}: {failure.message}"))
        if not told:
            return None
        culprit = min(told, key=lambda rank: (-told[rank], rank))
        error, text = errors[culprit]
        self._details.append(text)
        if others := sorted(set(told) - {culprit}):
            self._details.append(f"{told_ranks(others)} {'is' if len(others) == 1 else 'are'} named by other ranks")
        sayers = [lane.rank for lane, one in self._reported if one.failure is not None]
        during = f" during operation {self._tag}, {self._call}" if self._call else ""
        kind, how = ("mismatch", "called something else") if error == "MismatchedCall" else ("failed", "failed")
        said = f"{told_ranks(sayers)} {'says' if len(sayers) == 1 else 'say'} so"
        return kind, [culprit], f"{self._lanes[culprit].name} has {how}{during}: {said}"

    # Somebody called something else

    def _mismatch(self) -> tuple[int, list[list[int]]] | None:
        """The lowest operation that ranks called differently, and the ranks in groups: those who are right first."""
        by_tag: dict[int, dict[tuple[object, ...], list[int]]] = {}
        for lane, report in self._reported:
            for operation in report.operations:
                by_tag.setdefault(operation.tag, {}).setdefault(operation.key, []).append(lane.rank)
        different = [tag for tag, calls in by_tag.items() if len(calls) > 1]
        if not different:
            return None
        tag = min(different)
        return tag, sorted(by_tag[tag].values(), key=lambda ranks: (-len(ranks), ranks[0]))

    def _judge_mismatch(self, tag: int, groups: list[list[int]]) -> tuple[str, list[int], str]:
        self._tag = tag
        self._at = self._operations_at(tag)
        self._waiting = [rank for rank, operation in self._at.items() if operation.state != "completed"]
        right, wrong = groups[0], groups[1:]
        self._call = self._at[right[0]].call
        culprits = [rank for ranks in wrong for rank in ranks]
        called = "; ".join(f"{told_ranks(ranks)} called {self._at[ranks[0]].call}" for ranks in wrong)
        who = self._lanes[min(culprits)].name if len(culprits) == 1 else told_ranks(culprits)
        if len(culprits) == 1:
            called = f"it called {self._at[culprits[0]].call}"
        sentence = (
            f"{who} called something else than the others at operation {tag}: {called}; {told_ranks(right)} "
            f"called {self._call}"
        )
        if len(right) == len(wrong[0]):
            self._details.append(
                "as many ranks called the one as the other: the side of the lowest rank is taken for right"
            )
        order = [self._order(tag, ranks[0], right[0]) for ranks in wrong]
        self._details += [text for text in order if text]
        swapped = any(text.endswith("in the other order") for text in order)
        return ("order" if swapped else "mismatch"), culprits, sentence

    def _order(self, tag: int, odd: int, right: int) -> str:
        """How the calls of two ranks part at ``tag``, if they meet again later."""
        theirs, ours = self._keys_from(odd, tag), self._keys_from(right, tag)
        here, there = self._at[odd], self._at[right]
        if there.key in theirs and here.key in ours:
            return f"rank {odd} called {here.call} and then {there.call}, rank {right} called them in the other order"
        if there.key in theirs[:2]:
            return f"it looks as if rank {odd} had made one call more than rank {right}: {here.call}"
        if here.key in ours[:2]:
            return f"it looks as if rank {odd} had left out a call: {there.call}"
        return ""

    def _keys_from(self, rank: int, tag: int) -> list[tuple[object, ...]]:
        report = self._lanes[rank].report
        return [operation.key for operation in report.operations if operation.tag >= tag] if report else []

    # Somebody has not called

    def _judge_late(self, late: list[Lane]) -> tuple[str, list[int], str]:
        sure = [lane for lane in late if lane.exact]
        suspects = sure or _gone(late)
        call = f", {self._call}" if self._call else ""
        who = suspects[0].name if len(suspects) == 1 else told_ranks(lane.rank for lane in suspects)
        verb = "has" if len(suspects) == 1 else "have"
        if sure:
            begin = f"{who} {verb} not called operation {self._tag}{call}"
        else:
            left = "no report" if any(lane.report is None for lane in suspects) else "an older report than the others"
            known = "is not known" if len(suspects) == 1 else "are not known"
            begin = f"{who} {verb} left {left} and {known} to have called operation {self._tag}{call}"
        sentence = begin + self._waited("it" if len(suspects) == 1 else "them")
        for lane in sure:
            self._details.append(self._last_of(lane))
            self._detail_messages(lane.rank)
        return ("not_called" if sure else "no_report"), [lane.rank for lane in suspects], sentence

    def _waited(self, for_whom: str) -> str:
        if not self._waiting:
            return ""
        longest_s = max(self._at[rank].called_s_ago for rank in self._waiting)
        has = "has" if len(self._waiting) == 1 else "have"
        return f": {told_ranks(self._waiting)} {has} waited for {for_whom} since {told_seconds(longest_s)}"

    def _last_of(self, lane: Lane) -> str:
        operation = lane.report.operations[-1] if lane.report and lane.report.operations else None
        if operation is None:
            text = f"rank {lane.rank} has called nothing yet"
        else:
            text = (
                f"rank {lane.rank} last called operation {operation.tag}, {operation.call}, "
                f"{told_seconds(operation.called_s_ago)} ago ({operation.state})"
            )
            if operation.state != "completed" or lane.rank in self._messages:  # which are told on their own
                pass
            elif lane.rank in self._elsewhere:
                text += f"; it waits in {self._elsewhere[lane.rank]}"
            elif operation.took_s is not None:
                since_s = max(0.0, operation.called_s_ago - operation.took_s)
                text += f"; it has been busy with something else for {told_seconds(since_s)}"
        if lane.state in ("failed", "closed"):
            text += f"; its peers hold it for {lane.state}"
        return text

    # All have called it

    def _judge_waits(self) -> tuple[str, list[int], str]:
        roots, cycles = self._ends()
        what = f"operation {self._tag}, {self._call}"
        if roots and not set(roots) <= set(self._waiting):
            roots = [rank for rank in roots if rank not in self._waiting]
        if roots and all(self._lanes[rank].report is None for rank in roots):  # they may wait for each other
            roots = [lane.rank for lane in _gone([self._lanes[rank] for rank in self._missing])]
        if roots:
            who = self._lanes[roots[0]].name if len(roots) == 1 else told_ranks(roots)
            if all(self._lanes[rank].report is None for rank in roots):
                kind, how = "no_report", f"{'has' if len(roots) == 1 else 'have'} left no report"
            elif all(rank in self._waiting for rank in roots):
                kind, how = "waits", f"{'waits' if len(roots) == 1 else 'wait'} for nobody, but did not finish"
            elif all(self._lanes[rank].exact for rank in roots):
                kind, how = "waits", "finished it while others still need messages"
            else:
                kind, how = "waits", f"{'has' if len(roots) == 1 else 'have'} gone on since an older report"
            waited = self._waited("it" if len(roots) == 1 else "them")
            return kind, roots, f"all ranks called {what}; {who} {how}{waited}"
        ring = cycles[0] if cycles else self._waiting
        if not self._call or not ring:
            return "waits", [], f"{what} is not complete, and no report says why"
        _, own = ends_of({rank: sorted({*self._at[rank].waits_for} & {*ring} - {rank}) for rank in ring})
        ring = own[0] if own and len(own[0]) > 1 else ring
        pairs = [f"{one} for {other}" for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)]
        chain = ", ".join(pairs if len(pairs) <= 8 else [*pairs[:3], "…", pairs[-1]])
        return (
            "cycle",
            sorted(ring),
            f"all ranks called {what} alike and wait for each other in a circle (rank {chain}): no rank is to blame, "
            f"messages were lost or are still on their way",
        )

    def _ends(self) -> tuple[list[int], list[list[int]]]:
        at = self._at
        return ends_of({rank: sorted({*at[rank].waits_for, *at[rank].sends_to} - {rank}) for rank in self._waiting})

    # A send or receive is not over

    def _judge_messages(self) -> tuple[str, list[int], str]:
        """No operation of all ranks is stuck: only those between two."""
        roots, circles = ends_of_messages(self._messages, len(self._lanes))
        self._waiting = list(self._messages)
        for rank in self._messages:
            self._detail_messages(rank)
        longest_s = max(message.called_s_ago for messages in self._messages.values() for message in messages)
        since = f"since {told_seconds(longest_s)}"
        waiting = f"{told_ranks(self._waiting)} {'waits' if len(self._waiting) == 1 else 'wait'} for a message"
        if roots:
            who = self._lanes[roots[0]].name if len(roots) == 1 else told_ranks(roots)
            gone = all(self._lanes[rank].report is None for rank in roots)
            plural = "has" if len(roots) == 1 else "have"
            how = f"{plural} left no report" if gone else f"{plural} not made the call that it needs"
            return ("no_report" if gone else "not_called"), roots, f"{waiting} {since}; {who} {how}"
        ring = circles[0]
        pairs = [f"{one} for {other}" for one, other in zip(ring, [*ring[1:], ring[0]], strict=True)]
        return "cycle", sorted(ring), f"{waiting} {since}, and they do so in a circle (rank {', '.join(pairs)})"

    def _detail_messages(self, rank: int) -> None:
        for message in self._messages.get(rank, [])[:_MOST_TOLD_ALONE]:
            text = f"{told_message(rank, message)}, since {told_seconds(message.called_s_ago)}"
            if message.peer in self._waiting and message.peer in self._at:
                text += f"; rank {message.peer} waits in operation {self._tag}, {self._call}"
            self._details.append(text)

    def _judge_nothing(self) -> tuple[str, list[int], str]:
        most = max(lane.called for lane in self._lanes)
        if self._missing:
            sayers = [lane.rank for lane, _ in self._reported]
            return (
                "nothing",
                [],
                f"no operation is stuck on {told_ranks(sayers)}: all {most} that were called are complete there",
            )
        return "nothing", [], f"no operation is stuck: all ranks have completed the {most} that they called"

    def _detail_missing(self, culprits: Sequence[int]) -> None:
        why = "left no report (dead, on another node, or its folder is another one)"
        alone = [rank for rank in self._missing if rank in culprits or len(self._missing) <= _MOST_TOLD_ALONE]
        alone.sort(key=lambda rank: -(self._lanes[rank].heard_s_ago or 0.0))  # the longest silence first
        for rank in alone[:_MOST_TOLD_ALONE]:
            lane = self._lanes[rank]
            told = [why]
            if lane.state is not None:
                told.append(f"its peers hold it for {lane.state}")
            if lane.heard_s_ago is not None:
                told.append(f"last heard of {told_seconds(lane.heard_s_ago)} before a report")
            if lane.called:
                told.append(f"it has called at least {lane.called} operations")
            self._details.append(f"{lane.name} {'; '.join(told)}")
        if rest := sorted(set(self._missing) - set(alone[:_MOST_TOLD_ALONE])):
            self._details.append(f"{told_ranks(rest)} {why}")


def _told_running(longest_s: float) -> str:
    return (
        f"the job was running when it was asked: nobody had waited longer than {told_seconds(longest_s)}; if it hangs, "
        "ask every rank again"
    )


def _gone(missing: list[Lane]) -> list[Lane]:
    """Of ranks without a report, those whom their peers hold for failed or closed; if there are none, all."""
    return [lane for lane in missing if lane.state in ("failed", "closed")] or missing


def told_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 1, 5``, ``ranks 0–6, 9``."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(parts)


def told_seconds(seconds: float) -> str:
    """``0.4 s``, ``31 s``, ``12 min``, ``3.5 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
