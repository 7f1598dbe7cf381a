"""Groups of a communicator's ranks: who belongs to which, and how its members find each other over that one."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.communicator.cuda.nccl import SumGroup
from telegrad.communicator.operands import checked_integer
from telegrad.communicator.rendezvous.joining import Exchange
from telegrad.communicator.rendezvous.mpi import MakeDriver
from telegrad.communicator.rendezvous.network_choice import MEMORY
from telegrad.communicator.tuning import AUTO, TuningAgreement
from telegrad.cost import Place, Tuning
from telegrad.errors import TransportError

_NO_GROUP = -1
OF_JOB = "process group of the job"
"""What errors call a communicator whose ranks are some of torch's job: its parent is the job."""
Gather = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Every rank's array, by rank, for one's own of the same shape; all ranks of the communicator call it."""


STALL = "TELEGRAD_STALL_S"
"""After how many seconds of waiting in an operation, at least 2, a rank says which ranks have not called it; ``none``:
never."""
STALL_S = 30.0
_LEAST_STALL_S = 2.0  # two heartbeats, by which ranks hear of calls


def stall_s() -> float:
    """What ``TELEGRAD_STALL_S`` says; infinity for ``none``. Raises ``ValueError`` for anything that is no time."""
    said = os.environ.get(STALL, "")
    if said == "none":
        return math.inf
    try:
        seconds = float(said) if said else STALL_S
    except ValueError:
        seconds = 0.0
    if not _LEAST_STALL_S <= seconds < math.inf:
        raise ValueError(f"{STALL}={said!r} must be a number of seconds, at least {_LEAST_STALL_S:g}, or none")
    return seconds


@dataclass(frozen=True)
class InheritedOptions:
    """What a sub-communicator takes over from the communicator that it is split from."""

    timeout_s: float = 1800.0
    liveness_timeout_s: float | None = 8.0
    interface: str | None = None
    devices: str | None = None
    """What UCX uses where neither ``interface`` nor the environment says it; ``None``: what it likes."""
    group: str = ""
    """What errors call the communicator itself; empty: it was not split from another."""
    tuning: Tuning | str | None = AUTO
    """What its sub-communicators ask for as they join: ``"auto"``, or ``None`` where the job asked for none."""
    node: str | None = None
    """What this rank calls its node, if it was told."""
    make_driver: MakeDriver | None = None
    """Of communicators over MPI; ``None``: over UCX."""
    device_algorithm: str = "auto"
    """What sums of device tensors that name no algorithm take."""
    device_group: SumGroup | None = None
    """Of the same ranks; ``None``: these sums go through host memory."""

    @property
    def driver(self) -> str:
        """Over what the ranks are joined."""
        return "ucx" if self.make_driver is None else "mpi"


@dataclass(frozen=True)
class Group:
    """``members``: ranks of the parent, in the order of their ranks in the group; ``rank``: this rank's place there;
    ``color``: what they all gave."""

    members: list[int]
    rank: int
    color: int

    def name_in(self, parent: str) -> str:
        """What errors call it; ``parent``: the name of the communicator that it is split from, empty for the first."""
        return f"split(color={self.color})" + (f" of {parent}" if parent else "")


def ranks_in_job(ranks: Sequence[int], job_size: int) -> tuple[int, ...]:
    """``ranks`` of torch's job that a process group has, by rank in the group; empty where these are all, in their
    order, so that both numbers are one."""
    return () if list(ranks) == list(range(job_size)) else tuple(ranks)


def check_job_ranks(ranks: Sequence[int], size: int) -> None:
    """Raises ``ValueError`` unless there is one for each of ``size`` ranks, or none."""
    if ranks and len(ranks) != size:
        raise ValueError(f"job_ranks={list(ranks)} must name {size} ranks of the job, one for each rank, or none")


def checked_color(color: Any) -> int:
    """``color`` as the ranks exchange it. Raises ``TypeError`` or ``ValueError``."""
    if color is None:
        return _NO_GROUP
    value = checked_integer(color, "color", "an int or None (this rank joins no group)")
    if not 0 <= value < 1 << 63:
        raise ValueError(f"color={color!r} is out of range: use an int in [0, 2**63), or None to join no group")
    return value


def checked_key(key: Any) -> int:
    """``key`` as an int. Raises ``TypeError`` or ``ValueError``."""
    value = checked_integer(key, "key")
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"key={key!r} is out of range: use an int of 64 bits")
    return value


def group_of(rank: int, color: int, key: int, gather: Gather) -> Group | None:
    """The group of ``rank``, ordered by (key, rank); None without one."""
    told = gather(np.array([color, key], np.int64)).tolist()
    members = sorted((peer for peer in range(len(told)) if told[peer][0] == color), key=lambda peer: told[peer][1])
    return None if color == _NO_GROUP else Group(members, members.index(rank), color)


@dataclass(frozen=True)
class Joined:
    """This rank's end of a new communicator, its place (``None``: in one process), and the tuning kept for there."""

    core: _core.Communicator
    place: Place | None = None
    tuning: Tuning | None = None


def join_core(
    rank: int,
    size: int,
    exchange: Exchange,
    options: InheritedOptions,
    report_folder: str,
    group: str = "",
    parent_ranks: Sequence[int] = (),
) -> _core.Communicator:
    """The core's communicator of ranks that are processes, over the driver that ``options`` name. Raises
    ``TransportError`` and ``ValueError``."""
    timeouts_s = options.timeout_s, options.liveness_timeout_s
    more: dict[str, Any] = {"group": group, "parent_ranks": parent_ranks, "stall_s": stall_s()}
    if options.make_driver is not None:
        driver = options.make_driver(rank, size)
        return _core.Communicator.over(driver, exchange, *timeouts_s, report_folder, **more)
    network = (options.interface, report_folder)
    return _core.Communicator.ucx(rank, size, exchange, *timeouts_s, *network, devices=options.devices, **more)


def connect(group: Group | None, gather: Gather, options: InheritedOptions, report_folder: str) -> Joined | None:
    """Connects the members of each group over the network. All ranks take part, also those without a group: the
    addresses go over the communicator that they share. Raises ``TransportError`` on all members if one of them fails.
    """
    joined, asks, error = None, True, None
    while True:
        try:
            joined = _connected(group if asks else None, gather, options, report_folder) or joined
            asks = False
        except _AsksAgain:
            asks = True
        except Exception as failure:  # the others ask this rank all the same; Ctrl-C does not wait for that
            asks, error = False, failure
        if options.devices != MEMORY or not gather(np.array([asks])).any():
            break
        options = replace(options, devices=None)
    if error is not None:
        raise error
    return joined


class _AsksAgain(Exception):  # noqa: N818
    """A rank of the group has no memory to share after all."""


def _connected(group: Group | None, gather: Gather, options: InheritedOptions, report_folder: str) -> Joined | None:
    if group is None:
        told_by(gather, b"", ())
        return None
    members, swapped = group.members, False

    def swap(blob: bytes) -> list[bytes]:
        nonlocal swapped
        if swapped:
            raise _AsksAgain
        swapped = True
        blobs = told_by(gather, blob, members)
        _check_all_there(group, [bool(blob) for blob in blobs])
        return blobs

    rank, size = group.rank, len(members)
    agreement = TuningAgreement(rank, size, swap, options.tuning, options.interface, options.driver, options.node)
    try:
        core = join_core(rank, size, agreement.swap, options, report_folder, group.name_in(options.group), members)
    except Exception:
        if not swapped:  # the others wait for an address, and are to hear that there is none
            told_by(gather, b"", ())
        raise
    return Joined(core, agreement.place, agreement.tuning)


def told_by(gather: Gather, blob: bytes, members: Sequence[int]) -> list[bytes]:
    """The bytes of ``members``, in their order; every rank gives its own."""
    lengths = gather(np.array([len(blob)], np.int64))[:, 0].tolist()
    padded = np.zeros(max(lengths), np.uint8)
    padded[: len(blob)] = np.frombuffer(blob, np.uint8)
    table = gather(padded)
    return [table[peer, : lengths[peer]].tobytes() for peer in members]


# Made by one rank of this process, not yet fetched by the others; by token, then by rank in the group.
_shared: dict[int, dict[int, _core.Communicator]] = {}
_tokens = itertools.count()
_lock = threading.Lock()


def share(group: Group | None, gather: Gather, options: InheritedOptions, report_folder: str) -> Joined | None:
    """The same among ranks of one process: a group's first member makes the ends of all."""
    token, error = -1, None
    if group is not None and group.rank == 0:
        try:
            name = group.name_in(options.group)
            made = _core.Communicator.local(
                len(group.members), options.timeout_s, report_folder, name, group.members, stall_s()
            )
        except BaseException as failure:
            error = failure
        else:
            with _lock:
                token = next(_tokens)
                _shared[token] = dict(enumerate(made))
    tokens = gather(np.array([token], np.int64))[:, 0].tolist()
    if error is not None:
        raise error
    if group is None:
        return None
    token = tokens[group.members[0]]
    _check_all_there(group, [token >= 0])
    with _lock:
        core = _shared[token].pop(group.rank)
        if not _shared[token]:
            del _shared[token]
    return Joined(core)


def _check_all_there(group: Group, there: Sequence[bool]) -> None:
    if all(there):
        return
    missing = group.members[list(there).index(False)]
    raise TransportError(
        f"rank {missing} could not open its network for the group {group.members}: look at the log of that rank",
        peer=missing,
        operation="split",
    )
