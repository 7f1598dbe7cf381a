"""What was measured of a network: its costs, and the table that chooses algorithms on it. Plain data; JSON for files.

It must not know how it is measured, or where it is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from telegrad.cost.closed_forms import Levels
from telegrad.cost.decision import LONGEST_BYTES, DecisionTable, TableEntry, allreduce_table
from telegrad.cost.network import Costs
from telegrad.cost.send_method import LinearCost

# Dense allreduces of device tensors: the time of each way, and the faster one.

NCCL, HOST_TRANSFER = "nccl", "host_transfer"
DEVICE_ALGORITHMS = (NCCL, HOST_TRANSFER)
"""By NCCL, from device to device; or through host memory, by this library's own operations. Where they take equally
long, the first is chosen: it leaves the host's memory and cores alone."""


@dataclass(frozen=True)
class DeviceTuning:
    """The costs of dense sums on a device: seconds by bytes for ``nccl`` (``None``: not available) and
    ``host_transfer``.

    ``device``: the kind of device of all ranks. ``residual``: the median of |fitted / measured − 1|. Raises
    ``ValueError`` for costs and residuals that are NaN, infinite or below 0."""

    device: str
    nccl: LinearCost | None
    host_transfer: LinearCost
    residual: float

    def __post_init__(self) -> None:
        for name, cost in self._costs().items():
            _check_cost(name, cost)
        if not 0 <= self.residual < math.inf:
            raise ValueError(f"residual={self.residual} must be a finite number, 0 or more")

    def algorithm(self, size: int) -> str:
        """The faster one for ``size`` bytes. Raises ``ValueError`` below 0."""
        if size < 0:
            raise ValueError(f"size={size} must be 0 bytes or more")
        costs = self._costs()
        return min(costs, key=lambda name: costs[name](size))

    def __call__(self, size: int) -> float:
        """Seconds of a sum of so many bytes, by the faster one: a group cost, as planners take them."""
        return min(cost(size) for cost in self._costs().values())

    @property
    def choices(self) -> tuple[TableEntry, ...]:
        """The choices as a table: ascending from 0 bytes, two at most."""
        first = self.algorithm(0)
        if self.algorithm(LONGEST_BYTES) == first:
            return (TableEntry(0, first),)
        least, most = 0, LONGEST_BYTES  # first is the faster one at least, not at most
        while most - least > 1:
            middle = (least + most) // 2
            if self.algorithm(middle) == first:
                least = middle
            else:
                most = middle
        return (TableEntry(0, first), TableEntry(most, self.algorithm(most)))

    @classmethod
    def from_data(cls, found: Any) -> Self:
        """The reverse of ``asdict``. Raises ``KeyError``, ``TypeError`` and ``ValueError`` for what is none."""
        return cls(
            str(found["device"]),
            None if found["nccl"] is None else _cost_from(found["nccl"]),
            _cost_from(found["host_transfer"]),
            float(found["residual"]),
        )

    def __str__(self) -> str:
        return "\n".join([f"allreduce on {self.device}", *map(str, self.choices)])

    def _costs(self) -> dict[str, LinearCost]:
        own = {HOST_TRANSFER: self.host_transfer}
        return own if self.nccl is None else {NCCL: self.nccl, **own}


def _check_cost(name: str, cost: LinearCost) -> None:
    if not all(0 <= value < math.inf for value in asdict(cost).values()):
        raise ValueError(f"{name}={cost} must be of finite numbers, 0 or more")


def _cost_from(found: Any) -> LinearCost:
    return LinearCost(float(found["startup_s"]), float(found["s_per_byte"]))


FORMAT = "telegrad tuning"
FORMAT_VERSION = 1

NETWORK_VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "TELEGRAD_NETWORK")
"""Of the environment: what decides, besides the hosts, over which network messages go. The last has no other meaning:
it tells apart networks that look the same."""


@dataclass(frozen=True)
class Place:
    """The hosts and network of a job, as far as they matter for message times: jobs with equal places share a tuning.

    ``hosts``: names with the number of ranks on each, sorted. ``interface``: the network interface that was asked for.
    ``environment``: names and values of those of ``NETWORK_VARIABLES`` that are set, sorted. ``nodes``: by rank the
    number of its node, if ranks live on two levels, else empty. Raises ``ValueError`` for hosts without ranks, named
    twice or not sorted, and for ``nodes`` that are not two levels of as many ranks."""

    driver: str
    hosts: tuple[tuple[str, int], ...]
    interface: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.nodes and (len(self.nodes) != self.ranks or not 1 < len(set(self.nodes)) < len(self.nodes)):
            raise ValueError(
                f"nodes={self.nodes} must be the node of each of {self.ranks} ranks, two on one, two apart"
            )
        names = [name for name, _ in self.hosts]
        if not names or names != sorted(set(names)) or any(count < 1 for _, count in self.hosts):
            raise ValueError(f"hosts={self.hosts} must be sorted names, each once, with 1 rank or more")

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts together."""
        return sum(count for _, count in self.hosts)

    def is_alike(self, other: Self) -> bool:
        """Whether the same ranks are on the same hosts and nodes."""
        return (self.hosts, self.nodes) == (other.hosts, other.nodes)

    def __str__(self) -> str:
        hosts = [name for name, _ in self.hosts]
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts ({hosts[0]}, …)"
        if self.nodes:
            where += f" ({len(set(self.nodes))} nodes)"
        more = [f"interface {self.interface}"] if self.interface else []
        more += [f"{name}={value}" for name, value in self.environment]
        return ", ".join([f"{self.ranks} ranks on {where}", f"driver {self.driver}", *more])


@dataclass(frozen=True)
class Tuning:
    """``costs`` and the ``allreduce`` table of one ``place``.

    With two levels ``costs`` are those between nodes while all ranks send. ``alone``: those while one rank of each node
    sends. ``within``: those inside a node. ``on_device``: of sums of device tensors. ``gloo``: of dense sums of all
    ranks by torch's Gloo, as plain DDP makes them. Each is ``None`` if not measured. ``measured_at``: date and time,
    UTC, ISO 8601. ``telegrad_version``: of the library that measured. ``residual``: the median of |fitted / measured −
    1|. Raises ``ValueError`` if the table is for another number of ranks than the place has, and for costs of Gloo and
    a residual that are NaN, infinite or below 0."""

    place: Place
    costs: Costs
    allreduce: DecisionTable
    measured_at: str
    telegrad_version: str
    residual: float
    within: Costs | None = None
    alone: Costs | None = None
    on_device: DeviceTuning | None = None
    gloo: LinearCost | None = None

    def __post_init__(self) -> None:
        if self.allreduce.ranks != self.place.ranks:
            raise ValueError(f"the table is for {self.allreduce.ranks} ranks, but the place has {self.place.ranks}")
        if self.gloo is not None:
            _check_cost("gloo", self.gloo)
        if not 0 <= self.residual < math.inf:
            raise ValueError(f"residual={self.residual} must be a finite number, 0 or more")

    @property
    def ranks(self) -> int:
        """The number of ranks of jobs that this tuning is for."""
        return self.place.ranks

    def for_part(self, place: Place, *, one_node: bool = False, shares_memory: bool = False) -> Self:
        """The expected tuning of ``place``, which has some of these ranks: the same costs, and the closed forms' table
        for its number of ranks. ``one_node``: it is on one node, so its costs are those within, if they are known.
        ``shares_memory``: as for ``allreduce_table``."""
        on_device, gloo = (self.on_device, self.gloo) if place.is_alike(self.place) else (None, None)
        costs, within = self.costs, self.within
        levels: Levels | None = None
        if within is not None and one_node:
            costs, within = within, None
        elif within is not None and place.nodes:
            levels = Levels(place.nodes, within, self.alone)
        else:
            within = None
        alone = None if levels is None else levels.alone
        table = allreduce_table(place.ranks, costs, levels=levels, shares_memory=shares_memory)
        found = replace(self, place=place, costs=costs, allreduce=table, within=within, alone=alone)
        return replace(found, on_device=on_device, gloo=gloo)

    @property
    def digest(self) -> str:
        """Equal for equal tunings."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Seconds and bytes, as the names end."""
        found = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        found["place"] |= {"hosts": dict(self.place.hosts), "environment": dict(self.place.environment)}
        return json.dumps(found, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The reverse of ``to_json``. Raises ``ValueError`` that says what is wrong with the text."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is no tuning but damaged JSON ({error}): calibrate again") from error
        return cls.from_data(found)

    @classmethod
    def from_data(cls, found: Any) -> Self:
        """The tuning of data that was read from JSON."""
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
                tuple(int(node) for node in place.get("nodes", ())),
            ),
            _costs_from(found["costs"]),
            DecisionTable.from_data(found["allreduce"]),
            str(found["measured_at"]),
            str(found["telegrad_version"]),
            float(found["residual"]),
            None if found.get("within") is None else _costs_from(found["within"]),
            None if found.get("alone") is None else _costs_from(found["alone"]),
            None if found.get("on_device") is None else DeviceTuning.from_data(found["on_device"]),
            None if found.get("gloo") is None else _cost_from(found["gloo"]),
        )

    def __str__(self) -> str:
        on_device = "" if self.on_device is None else f"\n{self.on_device}"
        return f"{self.place}; measured {self.measured_at}\n{self.allreduce}{on_device}"


def _costs_from(found: dict[str, Any]) -> Costs:
    costs = {name: float(cost) for name, cost in found.items()}
    for field in fields(Costs):  # their defaults are a network that nobody has measured
        if field.name not in costs:
            raise KeyError(field.name)
    return Costs(**costs)
