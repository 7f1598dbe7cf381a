"""Dense sums of device tensors from device to device: by NCCL, in torch's own group of a communicator's ranks, where
each rank has a device of its own. Ranks find out together, before the first such sum.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from telegrad.communicator.cuda.runtime import DeviceRuntime
from telegrad.cost import Tuning
from telegrad.cost.tuning import DEVICE_ALGORITHMS, HOST_TRANSFER, NCCL

AUTO = "auto"
SETTINGS = (AUTO, *DEVICE_ALGORITHMS)
_NCCL_BACKENDS = {"nccl", "nccl2", "nccl-lazy", "nccl-legacy"}  # torch 2.15 has four that are NCCL

_log = logging.getLogger("telegrad")
_said: set[str] = set()


class SumWork(Protocol):
    """A sum that torch has begun."""

    def wait(self) -> Any:
        """Makes the device's current stream wait for it, and not the host."""


class SumGroup(Protocol):
    """The ranks of a communicator as a group of NCCL's."""

    def begin_sum(self, x: Any) -> SumWork:
        """Begins to sum ``x`` over all ranks, in place, behind what the current stream has by now. Keeps ``x`` as long
        as it needs it, but for the streams that wait."""


class TorchGroup:
    """A process group of torch's (``None``: of the whole job), whose backend for CUDA tensors is NCCL."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def begin_sum(self, x: Any) -> SumWork:
        import torch.distributed as dist

        work: SumWork = dist.all_reduce(x, group=self._group, async_op=True)
        return work


def nccl_group(group: Any, setting: str) -> TorchGroup | None:
    """``group`` of torch's, if its CUDA tensors go by NCCL and ``setting`` does not forbid it. Raises ``ValueError``
    where ``setting`` demands NCCL and there is none."""
    if setting == HOST_TRANSFER:
        return None
    found = _backend_for_cuda(group)
    if found in _NCCL_BACKENDS:
        return TorchGroup(group)
    if setting == NCCL:
        raise ValueError(
            f"device_algorithm={setting!r} needs a group whose CUDA tensors go by NCCL, but they go by {found}: call "
            "init_process_group('cpu:gloo,cuda:nccl') before, or give device_algorithm='auto'"
        )
    return None


def _backend_for_cuda(group: Any) -> str:
    try:
        import torch.distributed as dist
    except ImportError:
        return "nothing (there is no torch)"
    if not (dist.is_available() and dist.is_initialized()):
        return "nothing (torch.distributed is not initialised)"
    if dist.get_rank(group) < 0:
        return "nothing (this process is not in the group)"
    backends = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return backends.get("cuda", "nothing (the group is for other devices)")


def check_setting(setting: Any) -> str:
    """``setting`` if it is one of ``SETTINGS``. Raises ``ValueError``."""
    if setting not in SETTINGS:
        raise ValueError(f"device_algorithm={setting!r} does not exist: use one of {', '.join(SETTINGS)}")
    return str(setting)


@dataclass(frozen=True)
class Verdict:
    """What ranks have found out of their devices, the same on all. ``refusal``: why NCCL cannot sum there, and what to
    do; empty: it can. ``kind``: of all their devices, if that is one."""

    refusal: str
    kind: str | None


class NcclSums:
    """Of one communicator: which of its sums go by ``group``. ``setting``: one of ``SETTINGS``."""

    def __init__(self, group: SumGroup, setting: str, rank: int) -> None:
        self.group = group
        self._setting, self._rank = setting, rank
        self._verdicts: dict[Any, Verdict] = {}
        self._loaded: set[tuple[Any, Any]] = set()

    def verdict_on(self, device: Any, runtime: DeviceRuntime, gather: Callable[[str], list[str]]) -> Verdict:
        """On the device that this rank sums on, and those of the others. The first time that this rank asks about it,
        all ranks must ask about theirs: ``gather`` waits for them, and gives every rank's text, by rank, for one's own.
        Raises ``ValueError`` on all of them, each time, where they have other settings or demand what cannot be."""
        found = self._verdicts.get(device)
        if found is None:
            kind, place = runtime.identity(device)
            own = json.dumps({"setting": self._setting, "kind": kind, "place": place})
            found = agreed([json.loads(text) for text in gather(own)])
            if self._setting == NCCL and found.refusal:
                raise ValueError(f"device_algorithm='nccl' cannot be: {found.refusal}")
            if found.refusal and self._rank == 0:
                _say_once(f"dense sums of device tensors go through host memory: {found.refusal}")
            self._verdicts[device] = found
        return found

    @property
    def always(self) -> bool:
        """Whether sums that name no algorithm go by NCCL, however few bytes they have."""
        return self._setting == NCCL

    def chosen(self, nbytes: int, verdict: Verdict, tuning: Tuning | None) -> str:
        """One of ``DEVICE_ALGORITHMS``, for a sum that names none, where NCCL can sum."""
        measured = None if tuning is None else tuning.on_device
        if self.always or measured is None or measured.nccl is None or measured.device != verdict.kind:
            return NCCL
        return measured.algorithm(nbytes)

    def load_kernels(self, x: Any, runtime: DeviceRuntime) -> None:
        """Has the kernel that scales tensors like ``x`` loaded, for which a device may wait, before a stream waits for
        a peer."""
        if (x.device, x.dtype) not in self._loaded:
            runtime.launch(runtime.current_stream(x.device), lambda one: one.mul_(1.0), x.new_ones(1))
            self._loaded.add((x.device, x.dtype))


def agreed(told: Sequence[dict[str, str]]) -> Verdict:
    """What follows from what all ranks say of themselves, by rank. Raises ``ValueError`` where settings differ."""
    for rank, one in enumerate(told):
        if one["setting"] != told[0]["setting"]:
            raise ValueError(
                f"device_algorithm differs between ranks (rank 0: {told[0]['setting']!r}, rank {rank}: "
                f"{one['setting']!r}): give all the same"
            )
    first_at: dict[str, int] = {}
    kinds = {one["kind"] for one in told}
    kind = kinds.pop() if len(kinds) == 1 else None
    for rank, one in enumerate(told):
        other = first_at.setdefault(one["place"], rank)
        if other != rank:
            refusal = (
                f"rank {other} and rank {rank} share a device ({one['kind']} at {one['place']}), which NCCL refuses; "
                "give each rank a device of its own (torch.cuda.set_device) for NCCL"
            )
            return Verdict(refusal, kind)
    return Verdict("", kind)


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning(text)
