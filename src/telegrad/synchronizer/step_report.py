"""What a Synchronizer has measured beside what its plan predicted: numbers, a table, a sentence about them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from telegrad.communicator import Communicator
from telegrad.communicator.texts import all_gather_text
from telegrad.synchronizer.measured_timeline import MeasuredPass
from telegrad.synchronizer.merge_plan import MergePlan, in_ms

_FORMAT, _VERSION = "telegrad-step-report", 1
_BAR = 40
_HIDDEN_SHARE, _CLOSE_SHARE = 0.05, 0.15


@dataclass(frozen=True)
class GroupReport:
    """``names``: of its parameters. ``size``: bytes of their gradients. Seconds from the start of the backward pass:
    the last gradient is there, the group leaves, its sum is over; predicted ones are ``None`` without a plan."""

    names: tuple[str, ...]
    size: int
    ready_s: float
    launched_s: float
    finish_s: float
    predicted_ready_s: float | None
    predicted_start_s: float | None
    predicted_finish_s: float | None


@dataclass(frozen=True)
class StepReport:
    """Of one rank; every number is a median over ``passes`` backward passes.

    ``scheme``: how groups were cut. ``of_slowest``: ``rank`` is the one whose step takes longest. ``backward_s``: until
    the last gradient, ``exposed_s``: from there until all sums are over, ``network_s``: time in which a sum was under
    way, ``step_s``: from the end of a pass to that of the next; all 0 before something was measured, and predicted
    ones ``None`` without a plan. ``waits_for``: the number of passes after which there will be a plan.
    """

    rank: int
    ranks: int
    of_slowest: bool
    scheme: str
    passes: int
    groups: tuple[GroupReport, ...]
    backward_s: float
    exposed_s: float
    network_s: float
    step_s: float
    predicted_backward_s: float | None
    predicted_exposed_s: float | None
    predicted_network_s: float | None
    waits_for: int | None

    @classmethod
    def of(
        cls,
        scheme: str,
        names: Sequence[Sequence[str]],
        measured: MeasuredPass | None,
        plan: MergePlan | None,
        *,
        rank: int,
        ranks: int,
        waits_for: int | None,
    ) -> Self:
        """``names``: of the parameters in each group; ``plan``: by which they were cut, if by one."""
        found = measured or MeasuredPass(0, (), 0.0, 0.0, 0.0, 0.0)
        groups = []
        for number, group in enumerate(found.groups):
            times = group.size, group.ready_s, group.launched_s, group.finish_s
            predicted = plan.timeline[number][1:] if plan else (None, None, None)
            groups.append(GroupReport(tuple(names[number]), *times, *predicted))
        expected: tuple[float | None, float | None, float | None] = (None, None, None)
        if plan:  # exposed as measured: after what held the pass up
            expected = plan.backward_s, max(0.0, plan.finish_s - plan.backward_s), sum(plan.costs)
        seconds = found.backward_s, found.exposed_s, found.network_s, found.step_s
        return cls(rank, ranks, False, scheme, found.passes, tuple(groups), *seconds, *expected, waits_for)

    @property
    def bytes(self) -> int:
        """Of all gradients."""
        return sum(group.size for group in self.groups)

    @property
    def finish_s(self) -> float:
        """From the start of the backward pass until all gradients are summed."""
        return self.backward_s + self.exposed_s

    @property
    def predicted_finish_s(self) -> float | None:
        """The same, as the plan has it."""
        if not self.groups:
            return None
        return self.groups[-1].predicted_finish_s

    @property
    def suggestion(self) -> str:
        """What the numbers say, and what could be done."""
        if not self.passes:
            return "nothing is measured yet: the third backward pass with these groups is the first that counts."
        return " ".join(one for one in (self._waiting(), self._prediction()) if one)

    def _waiting(self) -> str:
        share = self.exposed_s / self.finish_s if self.finish_s > 0 else 0.0
        if share < _HIDDEN_SHARE:
            return (
                f"{share:.0%} of the backward pass waits for the network: communication is hidden, neither a faster "
                "network nor compression would help."
            )
        said = f"{share:.0%} of the backward pass waits for the network"
        if self.network_s > self.backward_s:
            return (
                f"{said}: sums take longer than the gradients ({in_ms(self.network_s)} and {in_ms(self.backward_s)}), "
                "so that no cut into groups hides them; fewer bytes (compression, gradients accumulated over several "
                "passes) or a faster network would."
            )
        last = self.groups[-1]
        return (
            f"{said}: sums take {in_ms(self.network_s)}, the gradients {in_ms(self.backward_s)}; the last group has "
            f"{_kib(last.size)} and leaves with the last gradient, so that all of it is seen."
        )

    def _prediction(self) -> str:
        predicted_s = self.predicted_finish_s
        if predicted_s is None or self.predicted_backward_s is None or self.predicted_network_s is None:
            if self.waits_for is not None:
                return f"There is no plan yet: it is made after backward pass {self.waits_for}."
            return (
                "Nothing was predicted, since these groups come of no measured times: "
                'plan="auto" takes them, where the model\'s forward is called.'
            )
        off = self.finish_s / predicted_s - 1 if predicted_s > 0 else 0.0
        if abs(off) <= _CLOSE_SHARE:
            return f"The prediction is off by {off:+.0%}."
        return f"The prediction is off by {off:+.0%}: {self._why_off()}."

    def _why_off(self) -> str:
        assert self.predicted_backward_s is not None
        assert self.predicted_network_s is not None
        backward = self.backward_s / self.predicted_backward_s if self.predicted_backward_s > 0 else 1.0
        network = self.network_s / self.predicted_network_s if self.predicted_network_s > 0 else 1.0
        later_s = abs(self.backward_s - self.predicted_backward_s)
        if later_s > abs(self.network_s - self.predicted_network_s):
            why = "other work shares the processor" if backward > 1 else "the processor was busier when it was profiled"
            return f"gradients take {backward:.2f} times what they took when they were profiled; {why}"
        why = "is busier than when it was measured" if network > 1 else "was busier when it was measured"
        return f"sums take {network:.2f} times what they took alone; the network, or the processor, {why}"

    def __str__(self) -> str:
        """A table, beside it the time line: ``.`` waiting to leave, ``#`` on the network, ``|`` the end of the backward
        pass; after it what the numbers say."""
        whose = "the rank whose step takes longest" if self.of_slowest else "this rank only"
        head = f"rank {self.rank} of {self.ranks} ({whose}), groups: {self.scheme}"
        if not self.passes:
            return f"{head}\n{self.suggestion}"
        lines = [
            f"{head}, {len(self.groups)} of them, {_kib(self.bytes)}; medians over {self.passes} passes",
            f"{'':<26} {'measured':>12} {'predicted':>12}",
            _row("backward pass", self.backward_s, self.predicted_backward_s),
            _row("exposed communication", self.exposed_s, self.predicted_exposed_s),
            _row("all summed after", self.finish_s, self.predicted_finish_s),
            _row("sums under way", self.network_s, self.predicted_network_s),
            _row("step", self.step_s, None),
            f"{'group':>5} {'tensors':>7} {'KiB':>10} {'ready':>18} {'leaves':>18} {'summed':>18}   ms, /predicted",
        ]
        scale = (_BAR - 1) / self.finish_s if self.finish_s > 0 else 0.0
        for number, group in enumerate(self.groups):
            cells = [
                f"{seconds * 1e3:.2f}/{'-' if predicted is None else f'{predicted * 1e3:.2f}'}"
                for seconds, predicted in (
                    (group.ready_s, group.predicted_ready_s),
                    (group.launched_s, group.predicted_start_s),
                    (group.finish_s, group.predicted_finish_s),
                )
            ]
            lines.append(
                f"{number:>5} {len(group.names):>7} {group.size / 1024:>10.1f} {cells[0]:>18} {cells[1]:>18} "
                f"{cells[2]:>18} {_bar(group, self.backward_s, scale)}"
            )
        return "\n".join([*lines, self.suggestion])

    def to_json(self) -> str:
        """What ``from_json`` reads: the same report, bit for bit."""
        about = {"format": _FORMAT, "version": _VERSION, "suggestion": self.suggestion}
        return json.dumps({**about, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ``ValueError`` for what is no report."""
        found: Any = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"this is no report of a step: it must come from StepReport.to_json() ({_FORMAT!r})")
        if found.get("version") != _VERSION:
            raise ValueError(f"this report has version {found.get('version')!r}: this telegrad reads {_VERSION}")
        fields = {name: value for name, value in found.items() if name not in ("format", "version", "suggestion")}
        try:
            fields["groups"] = tuple(_group_of(one) for one in fields["groups"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"this report is damaged ({error!r}): it must come from StepReport.to_json()") from error


def slowest_of(comm: Communicator, own: StepReport) -> StepReport:
    """Of all ranks' reports, that with the longest step (the lowest rank of several), the same on all ranks. Called on
    all of them."""
    reports = [StepReport.from_json(text) for text in all_gather_text(comm, own.to_json())]
    return replace(max(reports, key=lambda one: one.step_s), of_slowest=True)


def _group_of(fields: Mapping[str, Any]) -> GroupReport:
    return GroupReport(**{**fields, "names": tuple(fields["names"])})


def _bar(group: GroupReport, backward_s: float, scale: float) -> str:
    bar = [" "] * _BAR
    ready, launched, finish = (round(one * scale) for one in (group.ready_s, group.launched_s, group.finish_s))
    for place in range(min(ready, _BAR), min(launched, _BAR)):
        bar[place] = "."
    for place in range(min(launched, _BAR - 1), min(max(finish, launched + 1), _BAR)):
        bar[place] = "#"
    end = round(backward_s * scale)
    if end < _BAR and bar[end] == " ":
        bar[end] = "|"
    return "".join(bar).rstrip()


def _row(what: str, seconds: float, predicted: float | None) -> str:
    return f"{what:<26} {in_ms(seconds):>12} {'-' if predicted is None else in_ms(predicted):>12}"


def _kib(size: int) -> str:
    return f"{size / 1024:,.1f} KiB"
