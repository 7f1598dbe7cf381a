"""A cut of a backward pass into groups, and the timeline that it predicts. Does not know how one is found."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Self

_FORMAT, _VERSION = "telegrad-merge-plan", 2
_BAR = 48


class Slot(NamedTuple):
    """One group on the network. Seconds from the start of the backward pass: its last gradient is there; it begins,
    once the group before is through; it is summed on all ranks."""

    size: int
    ready_s: float
    start_s: float
    finish_s: float


@dataclass(frozen=True)
class MergePlan:
    """``scheme``: how the cut was found. ``sizes``: bytes of each gradient, and ``backward_times``: seconds that the
    backward pass takes for it, in backward order. ``groups``: the positions in each group, which follow each other.
    ``costs``: seconds of each group, and ``delays``: by which it holds the backward pass up. ``ways``: the name of the
    way in which each group goes; empty where all go in one that has no name.

    Compares and hashes by what it holds. Raises ``ValueError`` for groups that do not cut the tensors.
    """

    scheme: str
    sizes: tuple[int, ...]
    backward_times: tuple[float, ...]
    groups: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    delays: tuple[float, ...]
    ways: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        numbers = (*self.sizes, *self.backward_times, *self.costs, *self.delays)
        if not all(isinstance(one, (int, float)) and 0 <= one < math.inf for one in numbers):
            raise ValueError("sizes, backward_times, costs and delays must be finite numbers, 0 or more")
        if len(self.sizes) != len(self.backward_times):
            raise ValueError(f"{len(self.sizes)} sizes and {len(self.backward_times)} backward_times: give one of each")
        if not all(self.groups) or [one for group in self.groups for one in group] != list(range(len(self.sizes))):
            raise ValueError(f"groups must hold the positions 0 to {len(self.sizes) - 1} in order, at least one each")
        if not len(self.groups) == len(self.costs) == len(self.delays):
            raise ValueError(f"{len(self.groups)} groups, {len(self.costs)} costs and {len(self.delays)} delays")
        if self.ways and len(self.ways) != len(self.groups):
            raise ValueError(f"{len(self.groups)} groups and {len(self.ways)} ways: give one for each group, or none")

    @cached_property
    def timeline(self) -> tuple[Slot, ...]:
        """When each group is there, begins and ends."""
        ready = list(accumulate(self.backward_times))
        slots: list[Slot] = []
        late, free = 0.0, 0.0
        for group, cost, delay in zip(self.groups, self.costs, self.delays, strict=True):
            late += delay
            there = ready[group[-1]] + late
            start = max(free, there)
            free = start + cost
            slots.append(Slot(sum(self.sizes[one] for one in group), there, start, free))
        return tuple(slots)

    @property
    def backward_s(self) -> float:
        """The backward pass, with all that holds it up."""
        return sum(self.backward_times) + sum(self.delays)

    @property
    def finish_s(self) -> float:
        """From the start of the backward pass until all gradients are summed."""
        return self.timeline[-1].finish_s if self.groups else 0.0

    @property
    def exposed_s(self) -> float:
        """What the communication adds to the backward pass."""
        return max(0.0, self.finish_s - sum(self.backward_times))

    def to_json(self) -> str:
        """What ``from_json`` reads: the same plan, bit for bit."""
        held = {**asdict(self), "groups": [len(group) for group in self.groups]}
        return json.dumps({"format": _FORMAT, "version": _VERSION, **held})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ``ValueError`` for what is no plan."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise ValueError(f"this is no merge plan: it must come from MergePlan.to_json() ({_FORMAT!r})")
        if found.get("version") != _VERSION:
            raise ValueError(f"this merge plan has version {found.get('version')!r}: this telegrad reads {_VERSION}")
        fields = ("scheme", "sizes", "backward_times", "groups", "costs", "delays", "ways")
        if missing := [name for name in fields if name not in found]:
            raise ValueError(f"this merge plan has no {missing[0]!r}: it must come from MergePlan.to_json()")
        try:
            sizes, lengths = (tuple(map(operator.index, found[name])) for name in ("sizes", "groups"))
            times, costs, delays = (tuple(map(float, found[name])) for name in ("backward_times", "costs", "delays"))
            ways = tuple(_name(one) for one in found["ways"])
        except (TypeError, ValueError) as error:
            raise ValueError(f"this merge plan is damaged ({error}): it must come from MergePlan.to_json()") from error
        return cls(str(found["scheme"]), sizes, times, _groups(lengths), costs, delays, ways)

    def __str__(self) -> str:
        """The groups and their timeline: ``.`` waiting for the network, ``#`` on it, ``|`` the end of the backward
        pass."""
        lines = [
            f"{self.scheme}: {len(self.sizes)} tensors in {_counted(len(self.groups), 'group')}, backward pass "
            f"{in_ms(self.backward_s, 3)}, all summed after {in_ms(self.finish_s, 3)}, {in_ms(self.exposed_s, 3)} of "
            "communication exposed"
        ]
        if not self.groups:
            return lines[0]
        widest = max(map(len, ("way", *self.ways))) + 1 if self.ways else 0
        ways = ("way", *self.ways) if self.ways else ("",) * (len(self.groups) + 1)
        heads = f"{'KiB':>10} {'ready':>10} {'start':>10} {'finish':>10}"
        lines.append(f"{'group':>5} {'tensors':>11} {ways[0]:<{widest}}{heads}")
        scale = (_BAR - 1) / self.finish_s if self.finish_s > 0 else 0.0
        for number, (group, slot) in enumerate(zip(self.groups, self.timeline, strict=True)):
            bar = [" "] * _BAR
            at = [round(second * scale) for second in slot[1:]]
            bar[at[0] : at[1]] = "." * (at[1] - at[0])
            bar[at[1] : max(at[2], at[1] + 1)] = "#" * max(at[2] - at[1], 1)
            end = round(self.backward_s * scale)
            if end < _BAR and bar[end] == " ":
                bar[end] = "|"
            tensors = f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0])
            lines.append(
                f"{number:>5} {tensors:>11} {ways[number + 1]:<{widest}}{slot.size / 1024:>10.1f} "
                f"{in_ms(slot.ready_s, 3):>10} {in_ms(slot.start_s, 3):>10} {in_ms(slot.finish_s, 3):>10} "
                f"{''.join(bar).rstrip()}"
            )
        return "\n".join(lines)


def _groups(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ends = list(accumulate(lengths))
    return tuple(tuple(range(end - length, end)) for end, length in zip(ends, lengths, strict=True))


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def in_ms(seconds: float, decimals: int = 2) -> str:
    """``12.34 ms``."""
    return f"{seconds * 1e3:.{decimals}f} ms"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
