"""What was measured of a network: its costs, and the table that chooses algorithms on it. Plain data; JSON for files.

It must not know how it is measured, or where it is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from telegrad.plan.cost import Costs
from telegrad.plan.decision import DecisionTable, allreduce_table

FORMAT = "telegrad tuning"
FORMAT_VERSION = 1

NETWORK_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "TELEGRAD_NETWORK")
"""Of the environment: what decides, besides the hosts, over which network messages go. The last has no other meaning:
it tells apart networks that look the same."""


@dataclass(frozen=True)
class Place:
    """Where a job runs, as far as it matters for the time of its messages: jobs with equal places share a tuning.

    ``hosts``: names with the number of ranks on each, sorted; ``interface``: the network interface that was asked for;
    ``environment``: names and values of those of ``NETWORK_VARIABLES`` that are set, sorted. Raises ``ValueError`` for
    hosts without ranks, named twice or not sorted.
    """

    driver: str
    hosts: tuple[tuple[str, int], ...]
    interface: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.hosts]
        if not names or names != sorted(set(names)) or any(count < 1 for _, count in self.hosts):
            raise ValueError(f"hosts={self.hosts} must be sorted names, each once, with 1 rank or more")

    @property
    def ranks(self) -> int:
        """On all hosts together."""
        return sum(count for _, count in self.hosts)

    def __str__(self) -> str:
        hosts = [name for name, _ in self.hosts]
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts ({hosts[0]}, …)"
        more = [f"interface {self.interface}"] if self.interface else []
        more += [f"{name}={value}" for name, value in self.environment]
        return ", ".join([f"{self.ranks} ranks on {where}", f"driver {self.driver}", *more])


@dataclass(frozen=True)
class Tuning:
    """``costs`` and the ``allreduce`` table of one ``place``.

    ``measured_at``: date and time, UTC, ISO 8601; ``telegrad_version``: of the library that measured;
    ``residual``: how far the costs are from what they were fitted to, as the median of |fitted / measured − 1|. Raises
    ``ValueError`` if the table is for another number of ranks than the place has, and for a residual below 0.
    """

    place: Place
    costs: Costs
    allreduce: DecisionTable
    measured_at: str
    telegrad_version: str
    residual: float

    def __post_init__(self) -> None:
        if self.allreduce.ranks != self.place.ranks:
            raise ValueError(f"the table is for {self.allreduce.ranks} ranks, but the place has {self.place.ranks}")
        if not 0 <= self.residual < math.inf:
            raise ValueError(f"residual={self.residual} must be a finite number, 0 or more")

    @property
    def ranks(self) -> int:
        """Of the jobs that this tuning is for."""
        return self.place.ranks

    def for_part(self, place: Place) -> Self:
        """What is expected of ``place``, where some of these ranks are: the same costs, and the table that the closed
        forms make of them for its number of ranks."""
        return replace(self, place=place, allreduce=allreduce_table(place.ranks, self.costs))

    @property
    def digest(self) -> str:
        """Equal for equal tunings."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Seconds and bytes, as the names end."""
        return json.dumps(
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "place": {
                    "driver": self.place.driver,
                    "hosts": dict(self.place.hosts),
                    "interface": self.place.interface,
                    "environment": dict(self.place.environment),
                },
                "costs": asdict(self.costs),
                "allreduce": self.allreduce.to_data(),
                "measured_at": self.measured_at,
                "telegrad_version": self.telegrad_version,
                "residual": self.residual,
            },
            indent=1,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of ``to_json``. Raises ``ValueError`` that says what is wrong with the text."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no tuning but damaged JSON ({error}): calibrate again") from error
        return cls.from_data(found)

    @classmethod
    def from_data(cls, found: Any) -> Self:
        """The same from what JSON was read into."""
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f'this is no tuning: it lacks "format": "{FORMAT}"; give what Tuning.to_json() returned')
        if found.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"this tuning has format version {found.get('format_version')!r}, but this telegrad reads version "
                f"{FORMAT_VERSION}: calibrate again"
            )
        try:
            return cls._from_data(found)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"this tuning is damaged ({what}): calibrate again") from error

    @classmethod
    def _from_data(cls, found: dict[str, Any]) -> Self:
        place = found["place"]
        return cls(
            Place(
                str(place["driver"]),
                tuple(sorted((str(name), int(count)) for name, count in place["hosts"].items())),
                None if place["interface"] is None else str(place["interface"]),
                tuple(sorted((str(name), str(value)) for name, value in place["environment"].items())),
            ),
            Costs(**{name: float(cost) for name, cost in found["costs"].items()}),
            DecisionTable.from_data(found["allreduce"]),
            str(found["measured_at"]),
            str(found["telegrad_version"]),
            float(found["residual"]),
        )

    def __str__(self) -> str:
        return f"{self.place}; measured {self.measured_at}\n{self.allreduce}"
