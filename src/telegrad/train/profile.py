"""When each gradient of a live model comes: hooks that take the time, and change nothing else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from telegrad.comm import Communicator
from telegrad.plan.trace import Trace
from telegrad.train.arguments import checked_count

_NEVER = -1.0
_SAMPLES_MOST = 200


class Clock(Protocol):
    """Marks moments, and says later how far apart two of them were."""

    def mark(self) -> Any:
        """Now."""

    def between_s(self, before: Any, after: Any) -> float:
        """Seconds."""


class WallClock:
    """Of this process: for models on the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def between_s(self, before: float, after: float) -> float:
        return after - before


class DeviceClock:
    """Events on the current stream of a GPU, which is not waited for until the times are asked for."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_s(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float:
        after.synchronize()
        return float(before.elapsed_time(after)) * 1e-3


@dataclass(slots=True)
class _Pass:
    """A forward and a backward pass: when they began, and when each gradient came, by position."""

    forward: Any
    backward: Any = None
    arrivals: dict[int, Any] = field(default_factory=dict)


class StepProfile:
    """Watches a model train, in a ``with`` statement around some steps: then ``trace()`` is what plans are made from.

    ``model``: a module, or one in DistributedDataParallel, on the CPU or on one GPU. Every pair of a forward and a
    backward pass is one sample; the first ``skip`` are left out, as memory is allocated in them, and after 200 no more
    are taken. A time is the median over the samples. Parameters that do not require a gradient are left out, and so are
    those that never got one.

    Raises ``TypeError`` or ``ValueError`` for a model that is none or has nothing to train, and a bad ``skip``.
    """

    def __init__(self, model: nn.Module, *, skip: int = 2, clock: Clock | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: give the torch.nn.Module that is trained")
        self._model = model
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._parameters = {name: one for name, one in inner.named_parameters() if one.requires_grad}
        if not self._parameters:
            raise ValueError("model has no parameter that requires a gradient: there is nothing to profile")
        self._skip = checked_count(skip, "skip")
        devices = {one.device.type for one in self._parameters.values()}
        self._clock: Clock = clock or (DeviceClock() if devices == {"cuda"} else WallClock())
        self._passes: list[_Pass] = []
        self._open: _Pass | None = None
        self._handles: list[Any] = []
        self._output_handles: list[Any] = []

    def __enter__(self) -> Self:
        if self._handles:
            raise RuntimeError("this StepProfile is in use already: leave its with statement first")
        self._handles = [
            self._model.register_forward_pre_hook(lambda *_: self._begin()),
            self._model.register_forward_hook(lambda _module, _inputs, outputs: self._watch(outputs)),
            *(
                one.register_post_accumulate_grad_hook(lambda _, position=position: self._arrive(position))
                for position, one in enumerate(self._parameters.values())
            ),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._close()

    @property
    def samples(self) -> int:
        """How many have been taken."""
        return max(0, len(self._passes) + bool(self._open and self._open.arrivals) - self._skip)

    def trace(self, comm: Communicator | None = None) -> Trace:
        """The medians. With ``comm``, called on all of its ranks: that of the rank whose step takes longest (the lowest
        of several), the same on all ranks.

        Raises ``RuntimeError`` where no sample was taken, on any rank. With ``comm`` ``ValueError`` where another
        rank's model has another number of parameters.
        """
        self._close()
        forward_s, arrivals = self._medians()
        if comm is not None:
            forward_s, arrivals = _of_the_slowest(comm, forward_s, arrivals)
        if forward_s < 0:
            raise RuntimeError(
                f"{len(self._passes)} steps were watched, and {self._skip} are left out: train for more inside of "
                "StepProfile's with statement"
            )
        names, sizes = [*self._parameters], [one.numel() * one.element_size() for one in self._parameters.values()]
        order = sorted((position for position, at in enumerate(arrivals) if at >= 0), key=lambda p: (arrivals[p], -p))
        times = np.diff([0.0, *(arrivals[position] for position in order)])
        return Trace(
            tuple(names[position] for position in order),
            tuple(sizes[position] for position in order),
            tuple(times.tolist()),
            forward_s,
            f"{type(self._model).__name__}, medians",
        )

    def _begin(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._open is not None and not self._open.arrivals:
            return  # several forward passes before one backward pass: from the first of them on
        self._close()
        if len(self._passes) < self._skip + _SAMPLES_MOST:
            self._open = _Pass(self._clock.mark())

    def _watch(self, outputs: Any) -> None:
        for tensor in _tensors_in(outputs):
            if tensor.requires_grad and self._open is not None:
                self._output_handles.append(tensor.register_hook(lambda _: self._turn()))  # type: ignore[no-untyped-call]

    def _turn(self) -> None:
        if self._open is not None and self._open.backward is None:
            self._open.backward = self._clock.mark()

    def _arrive(self, position: int) -> None:
        if self._open is not None:
            self._turn()  # of outputs that no hook was found for, the backward pass begins with its first gradient
            self._open.arrivals[position] = self._clock.mark()

    def _close(self) -> None:
        for handle in self._output_handles:
            handle.remove()
        self._output_handles = []
        if self._open is not None and self._open.arrivals:
            self._passes.append(self._open)
        self._open = None

    def _medians(self) -> tuple[float, list[float]]:
        """Of the forward pass, and of each gradient from the start of the backward pass; below 0: never seen."""
        kept = self._passes[self._skip :]
        if not kept:
            return _NEVER, [_NEVER] * len(self._parameters)
        between = self._clock.between_s
        forward_s = statistics.median(between(one.forward, one.backward) for one in kept)
        seen = [
            [between(one.backward, one.arrivals[position]) for one in kept if position in one.arrivals]
            for position in range(len(self._parameters))
        ]
        return forward_s, [statistics.median(times) if times else _NEVER for times in seen]


def _of_the_slowest(comm: Communicator, forward_s: float, arrivals: Sequence[float]) -> tuple[float, list[float]]:
    """Of all ranks' medians, those of the rank whose step is longest; of no rank where one has none."""
    own = np.array([forward_s, *arrivals])
    counts = comm.all_gather(np.array([len(arrivals)], np.int64)).ravel().tolist()
    if len({*counts}) > 1:
        raise ValueError(f"the ranks' models have {counts} parameters: give all ranks the same model")
    whole = comm.all_gather(own)
    if (whole[:, 0] < 0).any():
        return _NEVER, [_NEVER] * len(arrivals)
    slowest = whole[int((whole[:, 0] + whole[:, 1:].max(axis=1)).argmax())]
    return float(slowest[0]), slowest[1:].tolist()


def _tensors_in(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for one in outputs.values():
            yield from _tensors_in(one)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        for one in outputs:
            yield from _tensors_in(one)
