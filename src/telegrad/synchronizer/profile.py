"""When each gradient of a live model comes: hooks that take the time, and change nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import has_runtime
from telegrad.compress.arguments import checked_count
from telegrad.ddp.backward_watch import on_gradient
from telegrad.synchronizer.clocks import Clock, DeviceClock, Mark, WallClock
from telegrad.synchronizer.forward_hooks import ForwardHooks, check_takes_hooks
from telegrad.synchronizer.trace import Trace

_NEVER = -1.0
_SAMPLES_MOST = 200


@dataclass(slots=True)
class _ProfiledPass:
    """A forward and a backward pass: when they began, and when each gradient came, by position."""

    forward: Mark
    backward: Mark = None
    arrivals: dict[int, Mark] = field(default_factory=dict)


@dataclass(slots=True)
class _ProfiledStep:
    """An optimizer step, after so many ``passes``."""

    passes: int
    begin: Mark
    end: Mark = None


class StepProfile:
    """Watches a model train, in a ``with`` statement around some steps: then ``trace()`` is what plans are made from.

    ``model``: a module, or one in DistributedDataParallel, on the CPU or on one GPU. Every pair of a forward and a
    backward pass is one sample; the first ``skip`` are left out, as memory is allocated in them, and after 200 no more
    are taken. A time is the median over the samples. Parameters that do not require a gradient are left out, and so are
    those that never got one.

    ``optimizer``: the one that trains the model. Then the trace also says how long its step takes, and how many passes
    each step has; without it none and one.

    Raises ``TypeError`` or ``ValueError`` for a model that is none, has nothing to train or is TorchScript, a bad
    ``skip``, and an optimizer that is none or has no parameter of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        skip: int = 2,
        clock: Clock | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: give the torch.nn.Module that is trained")
        check_takes_hooks(model)
        self._model = model
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._parameters = {name: one for name, one in inner.named_parameters() if one.requires_grad}
        if not self._parameters:
            raise ValueError("model has no parameter that requires a gradient: there is nothing to profile")
        self._skip = checked_count(skip, "skip")
        self._optimizer = optimizer
        if optimizer is not None:
            self._check_trains(optimizer)
        device, *others = {one.device for one in self._parameters.values()}
        on_device = has_runtime(device.type) and not others
        self._clock: Clock = clock or (DeviceClock(device) if on_device else WallClock())
        self._passes: list[_ProfiledPass] = []
        self._open: _ProfiledPass | None = None
        self._hooks: ForwardHooks | None = None
        self._handles: list[Any] = []
        self._output_handles: list[Any] = []
        self._steps: list[_ProfiledStep] = []

    def _check_trains(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give the torch.optim.Optimizer of the model")
        own = {id(one) for one in self._parameters.values()}
        if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            raise ValueError("optimizer has no parameter of the model: give the one that trains it")

    def __enter__(self) -> Self:
        if self._handles:
            raise RuntimeError("this StepProfile is in use already: leave its with statement first")
        self._hooks = ForwardHooks(self._model, before=self._begin, after=self._watch)
        try:
            for position, one in enumerate(self._parameters.values()):
                self._handles.append(on_gradient(one, self._hook_of(position)))
            if self._optimizer is not None:
                self._handles.append(self._optimizer.register_step_pre_hook(self._before_step))
                self._handles.append(self._optimizer.register_step_post_hook(self._after_step))
        except BaseException:
            self._remove_hooks()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_hooks()
        self._close()

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
        while self._handles:
            self._handles.pop().remove()

    @property
    def samples(self) -> int:
        """How many have been taken."""
        return max(0, len(self._passes) + bool(self._open and self._open.arrivals) - self._skip)

    @property
    def is_known(self) -> bool:
        """Whether ``trace()`` would wait for no device; asked once the ``with`` statement is over."""
        if not self._passes:
            return True
        last = self._passes[-1]  # streams have come to the others before
        ends = [one.end for one in self._steps[-1:] if one.end is not None]
        return all(map(self._clock.is_known, (last.forward, last.backward, *last.arrivals.values(), *ends)))

    def trace(self, comm: Communicator | None = None) -> Trace:
        """The medians. With ``comm``, called on all of its ranks, the same on all: in every pass each gradient counts
        when the last rank has it, as a sum must wait for that; passes are those that all ranks have, the last ones.

        Raises ``RuntimeError`` where no sample was taken, on any rank. With ``comm`` ``ValueError`` where another
        rank's model has another number of parameters.
        """
        self._close()
        moments, (accumulate, rest_s) = self._moments(), self._between_passes()
        if comm is not None:
            moments, accumulate, rest_s = _of_all(comm, moments, accumulate, rest_s)
        forward_s, arrivals = _medians(moments)
        if forward_s < 0:
            raise RuntimeError(
                f"{len(self._passes)} passes of the model's forward() were watched"
                f"{'' if comm is None else ' on this rank'}, and {self._skip} are left out: more are needed"
                f"{'' if comm is None else ', on every rank'}; call the model itself, not its forward()"
            )
        names, sizes = [*self._parameters], [one.numel() * one.element_size() for one in self._parameters.values()]
        rows = [max(1, one.shape[0]) if one.dim() > 1 else 1 for one in self._parameters.values()]
        order = sorted((position for position, at in enumerate(arrivals) if at >= 0), key=lambda p: (arrivals[p], -p))
        times = np.diff([0.0, *(arrivals[position] for position in order)])
        return Trace(
            tuple(names[position] for position in order),
            tuple(sizes[position] for position in order),
            tuple(times.tolist()),
            forward_s,
            f"{type(self._model).__name__}, medians",
            accumulate=accumulate,
            rest_s=rest_s,
            rows=tuple(rows[position] for position in order),
        )

    @_disable_dynamo  # where the model's call is compiled, what hooks call is not
    def _begin(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._open is not None and not self._open.arrivals:
            return  # several forward passes before one backward pass: from the first of them on
        self._close()
        if len(self._passes) < self._skip + _SAMPLES_MOST:
            self._open = _ProfiledPass(self._clock.mark())

    @_disable_dynamo
    def _watch(self, outputs: Any) -> None:
        for tensor in _tensors_in(outputs):
            if tensor.requires_grad and self._open is not None:
                self._output_handles.append(tensor.register_hook(lambda _: self._turn()))  # type: ignore[no-untyped-call]

    def _turn(self) -> None:
        if self._open is not None and self._open.backward is None:
            self._open.backward = self._clock.mark()

    def _hook_of(self, position: int) -> Callable[[Tensor], None]:
        return lambda _: self._arrive(position)

    def _arrive(self, position: int) -> None:
        if self._open is not None:
            self._turn()  # of outputs that no hook was found for, the backward pass begins with its first gradient
            self._open.arrivals[position] = self._clock.mark()

    @_disable_dynamo
    def _before_step(self, *_: Any) -> None:
        passes = len(self._passes) + bool(self._open and self._open.arrivals)
        if not self._steps or self._steps[-1].passes != passes:  # else it is a step inside of this one
            self._steps.append(_ProfiledStep(passes, self._clock.mark()))

    @_disable_dynamo
    def _after_step(self, *_: Any) -> None:
        if self._steps:
            self._steps[-1].end = self._clock.mark()

    def _between_passes(self) -> tuple[int, float]:
        """Passes of an optimizer step, and its seconds: medians. One pass and no time where no step was seen."""
        counts = [after.passes - before.passes for before, after in itertools.pairwise(self._steps)]
        counts = [one for one in counts if one > 0] or [one.passes for one in self._steps if one.passes]
        ends = [one for one in self._steps if one.end is not None and one.passes > self._skip]
        rest_s = [self._clock.between_s(one.begin, one.end) for one in ends]
        return (
            round(float(np.median(counts))) if counts else 1,
            float(np.median(rest_s)) if rest_s else 0.0,
        )

    def _close(self) -> None:
        for handle in self._output_handles:
            handle.remove()
        self._output_handles = []
        if self._open is not None and self._open.arrivals:
            self._passes.append(self._open)
        self._open = None

    def _moments(self) -> npt.NDArray[np.float64]:
        """By pass: from the start of the forward pass to that of the backward pass, and to each gradient; below 0:
        it did not come."""
        kept = self._passes[self._skip :]
        moments = np.full((len(kept), 1 + len(self._parameters)), _NEVER)
        for row, one in zip(moments, kept, strict=True):
            row[0] = self._clock.between_s(one.forward, one.backward)
            for position, arrival in one.arrivals.items():
                row[1 + position] = row[0] + self._clock.between_s(one.backward, arrival)
        return moments


def _medians(moments: npt.NDArray[np.float64]) -> tuple[float, list[float]]:
    """Of the forward pass, and of each gradient from the start of the backward pass; below 0: never seen."""
    if not len(moments):
        return _NEVER, [_NEVER] * (moments.shape[1] - 1)
    forward = moments[:, 0]
    arrivals = []
    for times in moments[:, 1:].T:
        came = times >= 0
        arrivals.append(float(np.median((times - forward)[came])) if came.any() else _NEVER)
    return float(np.median(forward)), arrivals


def _of_all(
    comm: Communicator, own: npt.NDArray[np.float64], accumulate: int, rest_s: float
) -> tuple[npt.NDArray[np.float64], int, float]:
    """The passes that all ranks have, the last ones: of each moment that of the rank that comes last. Of passes and
    seconds of an optimizer step the most."""
    told = np.array([*own.shape, accumulate, round(rest_s * _NANO)], np.int64)
    shapes = comm.all_gather(told).reshape(-1, told.size)
    accumulate, rest_s = int(shapes[:, 2].max()), float(shapes[:, 3].max()) / _NANO
    if len({*shapes[:, 1].tolist()}) > 1:
        counts = (shapes[:, 1] - 1).tolist()
        raise ValueError(f"the ranks' models have {counts} parameters: give all ranks the same model")
    passes = int(shapes[:, 0].min())
    if not passes:
        return own[:0], accumulate, rest_s
    moments = comm.all_gather(own[len(own) - passes :]).reshape(comm.world_size, passes, -1).max(axis=0)
    return moments, accumulate, rest_s


_NANO = 1e9


def _tensors_in(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for one in outputs.values():
            yield from _tensors_in(one)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        for one in outputs:
            yield from _tensors_in(one)
