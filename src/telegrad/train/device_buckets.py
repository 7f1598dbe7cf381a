"""DDP's buckets on a device: averaged densely, in streams, while the host goes on. Does not know of compression."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from telegrad.comm import Communicator
from telegrad.comm.device.late_read import LateRead
from telegrad.comm.device.runtime import has_runtime, runtime_of
from telegrad.comm.device.work import DeviceWork
from telegrad.train.bucket import GradBucket, check_reducible, name_in
from telegrad.train.nonfinite import Fault, error_of
from telegrad.train.stats import DDPStats

_REMEDY = (
    "the averages of that step were NaN or infinite on all ranks, and the optimiser may have had them: go on from a "
    "state of before; nonfinite='skip' drops such steps on all ranks, 'send' lets the optimiser see them"
)


class _Look(NamedTuple):
    """At one bucket: by parameter, whether its gradient has something in it that is not finite."""

    names: list[str]
    faulty: LateRead
    step: int


class _Verdict(NamedTuple):
    """On one pass: above 0 where some rank wants it dropped, and the sum that says so."""

    dropped: LateRead
    work: DeviceWork


class DeviceBuckets:
    """``names``: parameters' names by id. ``nonfinite``: the policy. ``dropped_value``: what averages of a dropped step
    are. ``settled`` hears of each pass in order, whether it was dropped; with ``"skip"`` once the host knows."""

    def __init__(
        self,
        comm: Communicator,
        names: Mapping[int, str],
        nonfinite: str,
        dropped_value: float,
        stats: DDPStats,
        settled: Callable[[bool], None],
    ) -> None:
        self._comm, self._names, self._nonfinite = comm, names, nonfinite
        self._dropped_value, self._stats, self._settled = dropped_value, stats, settled
        self._looks: deque[_Look] = deque()
        self._verdicts: deque[_Verdict] = deque()
        self._held: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []  # of the pass, with "skip"
        self._faulty: list[torch.Tensor] = []

    def take(self, bucket: GradBucket, step: int) -> torch.futures.Future[torch.Tensor]:
        """Starts the sum of one bucket in a stream. The future is complete by the end of the pass's last call, and who
        waits for it makes the current stream wait. Raises what is known by now to have gone wrong in earlier calls:
        ``NonFiniteGradient``, ``TransportError``."""
        self.look()
        if bucket.index() == 0:
            self._held, self._faulty = [], []  # of a pass that was broken off
        buffer = bucket.buffer()
        name = self._names.get(id(bucket.parameters()[0]), "unknown")
        check_reducible(buffer, name)
        if not has_runtime(buffer.device.type):
            raise TypeError(f"the gradient of {name!r} is on {buffer.device}: train on the CPU or on CUDA")
        self._stats.buckets += 1
        self._stats.elements += buffer.numel()
        self._stats.dense_elements += buffer.numel()
        if self._nonfinite != "send":
            self._find_faults(bucket, step)
        work: DeviceWork = self._comm.all_reduce(buffer, "avg", async_op=True)
        if self._nonfinite == "skip":
            future: torch.futures.Future[torch.Tensor] = runtime_of(buffer.device.type).future(buffer.device)
            self._held.append((buffer, future))
            if bucket.is_last():
                self._agree()
            return future
        if bucket.is_last():
            self._settled(False)
        return work.future_of(buffer)

    def look(self, *, wait: bool = False) -> None:
        """Takes in what the host can know by now; ``wait``: all of what has been called. Raises ``NonFiniteGradient``
        and ``TransportError``."""
        self.settle(wait=wait)
        while self._looks and (wait or self._looks[0].faulty.is_known):
            names, faulty, step = self._looks.popleft()
            if (found := faulty.values()).any():
                self._stats.nonfinite_buckets += 1
                name = names[int(found.nonzero()[0])]
                fault = Fault(name, f"the gradient of {name!r} has entries that are NaN or infinite")
                raise error_of(fault, self._comm.rank, step, remedy=_REMEDY)

    def settle(self, *, wait: bool = False) -> None:
        """As ``look``, of the steps that are dropped or not. Raises ``TransportError``, again and again."""
        while self._verdicts and (wait or self._verdicts[0].dropped.is_known):
            dropped, work = self._verdicts[0]
            found = dropped.values()
            work.communicated()  # the stream has passed it; after a failure nobody ever knows, and each call says so
            self._verdicts.popleft()
            self._settled(bool(found[0] > 0))

    def forget(self) -> None:
        """What is not yet known of earlier passes is of no account."""
        self._looks.clear()
        self._verdicts.clear()

    def _find_faults(self, bucket: GradBucket, step: int) -> None:
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        filled = [(name_in(bucket, one, self._names), x) for one, x in pairs if x.numel()]
        if not filled:
            return
        with torch.no_grad():
            # The largest magnitude is NaN or infinite where an entry is, and cannot overflow as a sum can.
            most = torch._foreach_norm([x for _, x in filled], float("inf"))
            faulty = torch.stack([*most]).isfinite().logical_not()
        if self._nonfinite == "raise":
            self._looks.append(_Look([name for name, _ in filled], LateRead(faulty), step))
        else:
            self._faulty.append(faulty.any())

    def _agree(self) -> None:
        """The averages of the pass stay, or become ``dropped_value``, on all ranks, or NaN where the ranks could not
        agree: in the stream, behind the sums."""
        held, faulty, self._held, self._faulty = self._held, self._faulty, [], []
        like = held[0][0]
        with torch.no_grad():
            own = torch.stack(faulty).any() if faulty else like.new_zeros((), dtype=torch.bool)
            dropped = own.to(torch.int32).view(1)
        work: DeviceWork = self._comm.all_reduce(dropped, "max", async_op=True)
        reads: list[LateRead] = []

        def drop() -> None:
            with torch.no_grad():
                is_dropped, is_unknown = dropped > 0, dropped < 0  # integers of a sum that failed are -1
                for buffer, _ in held:
                    buffer.masked_fill_(is_dropped, self._dropped_value).masked_fill_(is_unknown, math.nan)
            reads.append(LateRead(dropped))

        work.then(drop, [dropped, *(buffer for buffer, _ in held)])
        for buffer, future in held:
            work.complete(future, buffer)
        self._verdicts.append(_Verdict(reads[0], work))


def check_options(options: Mapping[str, Any], parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raises ``TypeError``, with the remedy, for options of DDPState that do not fit parameters on devices.
    ``options``: mode, momentum, clip_norm, telemetry and nonfinite."""
    if options["mode"] != "dense":
        raise TypeError(
            "gradients on a device are averaged densely, and this DDPState compresses: make it with mode='dense', or "
            "train with model.cpu()"
        )
    remedies = {
        "momentum": "leave it to the optimizer",
        "clip_norm": "use torch.nn.utils.clip_grad_norm_ after backward()",
        "telemetry": "leave it out",
    }
    for name, remedy in remedies.items():
        if options[name]:
            raise TypeError(f"{name}= works on gradients in host memory, and these are on a device: {remedy}")
    devices = {one.device for one in parameters}
    if options["nonfinite"] == "skip" and len(devices) > 1:
        raise TypeError(
            f"parameters are on {', '.join(sorted(map(str, devices)))}: nonfinite='skip' takes those of one device; "
            "use 'raise' or 'send'"
        )
