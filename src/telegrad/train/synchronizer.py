"""Data-parallel training with groups of telegrad's choice: which gradients travel together follows from a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from telegrad.calibration.group_cost import measured_group_cost
from telegrad.comm import Communicator, Work
from telegrad.plan import merge
from telegrad.plan.merge_plan import MergePlan
from telegrad.plan.trace import Trace
from telegrad.train.arguments import check_choice, checked_count
from telegrad.train.clipping import checked_norm
from telegrad.train.gradient_group import GradientGroup
from telegrad.train.profile import StepProfile

PLANS: dict[str, Callable[..., MergePlan]] = {
    "auto": merge.optimal,
    "optimal": merge.optimal,
    "greedy": merge.greedy,
    "fixed": merge.fixed,
    "wfbp": merge.wfbp,
    "single": merge.single,
}
"""By name; see telegrad.plan.merge."""

_TIMED = ("auto", "optimal", "greedy")


class Synchronizer:
    """Averages the gradients of ``model`` over all ranks of ``comm`` in every backward pass, as DistributedDataParallel
    does, in groups that it plans.

    ``model``: the same on all ranks but for values: rank 0's parameters and buffers are copied to all. Its parameters
    are on the CPU. Gradients become views of the groups' memory; a group's sum begins when its last gradient is there,
    in the same order on all ranks, and ``backward()`` ends when all are over. What no rank uses keeps its gradient.

    ``plan``: ``"auto"`` or ``"optimal"``: the cut by which the last sum ends first, ``"greedy"``: MG-WFBP's; both are
    made after ``warmup_steps`` passes from the times of these (of the slowest rank) and from sums that are timed then,
    and until then groups are DDP's. ``"fixed"``: DDP's all along, ``"wfbp"``: each gradient alone, ``"single"``: all
    together. Or lists of names of parameters, the groups in the order in which they leave. ``optimizer``: if it is
    given, ``backward()`` does not wait but the optimiser's step does, so look at gradients after ``wait()`` only, and
    use no GradScaler. ``clip_norm``: averaged gradients are scaled down to this norm, all together.

    A NaN or an infinity in a gradient arrives on all ranks. A TransportError comes out of ``backward()``, ``wait()`` or
    the optimiser's step; the gradients of that pass are lost. Raises ``TypeError`` and ``ValueError`` for bad
    arguments.
    Sources: Shi, Chu, Li, MG-WFBP, TPDS 2021, Algorithm 2, with the exact plan of telegrad.plan.merge.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        plan: str | Sequence[Sequence[str]] = "auto",
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        warmup_steps: int = 10,
    ) -> None:
        if not isinstance(model, nn.Module) or isinstance(model, nn.parallel.DistributedDataParallel):
            raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module that DDP does not wrap")
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch()")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}: give the torch.optim.Optimizer that will step")
        if isinstance(plan, str):
            check_choice(plan, "plan", tuple(PLANS))
        if checked_count(warmup_steps, "warmup_steps") < 3:
            raise ValueError(f"warmup_steps={warmup_steps} must be at least 3: the first two passes are not typical")
        self._parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
        if not self._parameters:
            raise ValueError("model has no parameter that requires a gradient: there is nothing to synchronise")
        for name, one in self._parameters.items():
            if one.device.type != "cpu" or not one.is_floating_point():
                raise ValueError(
                    f"parameter {name!r} is {one.dtype} on {one.device}: only floats on the CPU are summed"
                )
        self._model, self._comm = model, comm
        self._clip_norm = checked_norm(clip_norm)
        self._warmup_steps = warmup_steps
        self._passes = 0
        self._synchronises = True
        self._waits_at_once = optimizer is None
        self._present: set[int] = set()  # whose gradients have come since the last average
        self._groups: list[GradientGroup] = []
        self._works: list[list[Work]] = []
        self._is_open = False
        self._plan: MergePlan | None = None
        self._scheme = plan if isinstance(plan, str) else None
        names = [*reversed(self._parameters)]
        if isinstance(plan, str):
            self._group_by(names, "fixed" if plan in _TIMED else plan)
        else:
            self._set_groups(self._checked_names(plan))
        for tensor in (*model.parameters(), *model.buffers()):
            whole = tensor.detach().contiguous()
            comm.broadcast(whole, 0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(whole)
        self._profile = StepProfile(model) if plan in _TIMED else None
        if self._profile is not None:
            self._profile.__enter__()
        self._handles: list[Any] = [
            model.register_forward_pre_hook(lambda *_: self._before_forward()),
            *(
                one.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
                for one in self._parameters.values()
            ),
        ]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.wait()))

    @property
    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group, in the order in which groups leave."""
        names = {id(one): name for name, one in self._parameters.items()}
        return [[names[id(one)] for one in group.parameters] for group in self._groups]

    @property
    def plan(self) -> MergePlan | None:
        """What was planned from measured times, with the timeline that it predicts; ``None`` before that."""
        return self._plan

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up on each rank; the next one outside averages all of them. The same on all
        ranks."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def wait(self) -> None:
        """Until the gradients are averaged. ``backward()`` does it, and with ``optimizer`` that one's step."""
        if not self._works:
            return
        works, self._works = self._works, []
        try:
            for group, of_group in zip(self._groups, works, strict=True):
                for work in of_group:
                    work.wait()
                group.finish()
        finally:
            self._present.clear()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
        self._passes += 1

    def close(self) -> None:
        """Lets go of the model, whose gradients have memory of their own again. Called twice it does nothing."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self._profile = None
        for handle in self._handles:
            handle.remove()
        if self._handles:
            self.wait()
            for group in self._groups:
                group.give_back()
        self._handles = []

    def _before_forward(self) -> None:
        if not torch.is_grad_enabled():
            return
        if self._is_open:  # an exception has ended the last backward pass
            self._drop()
        self.wait()
        if self._profile is not None and self._passes >= self._warmup_steps:
            self._make_plan(self._profile)
            self._profile = None
        for group in self._groups:
            group.lend()

    def _arrive(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        number = self._group_of[id(parameter)]
        self._groups[number].arrived(parameter)
        self._present.add(id(parameter))
        if not self._synchronises:
            return
        if not self._is_open:
            self._is_open = True
            self._missing = [{id(one) for one in group.parameters} for group in self._groups]
            # How autograd lets DistributedDataParallel know that a pass is over.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._missing[number].discard(id(parameter))
        while len(self._works) < len(self._groups) and not self._missing[len(self._works)]:
            self._launch()

    def _launch(self) -> None:
        """The next group: all ranks launch them in the same order, whatever order gradients come in."""
        self._works.append(self._groups[len(self._works)].launch(self._comm, self._present))

    def _end(self) -> None:
        while len(self._works) < len(self._groups):  # of gradients that did not come
            self._launch()
        self._is_open = False
        if self._waits_at_once:
            self.wait()

    def _drop(self) -> None:
        """What was launched ends before its memory is used again, whatever comes of it."""
        self._is_open = False
        works, self._works = self._works, []
        for work in (one for of_group in works for one in of_group):
            with contextlib.suppress(Exception):
                work.wait()
        self._present.clear()

    def _make_plan(self, profile: StepProfile) -> None:
        profile.__exit__(None, None, None)
        trace = profile.trace(self._comm)
        cost = measured_group_cost(self._comm, most_bytes=max(trace.bytes, 1))
        plan = PLANS[self._scheme or "auto"](trace.sizes, trace.backward_times, cost=cost)
        is_last = np.zeros(len(trace.sizes), np.int64)
        is_last[[group[-1] for group in plan.groups]] = 1
        self._comm.broadcast(is_last, 0)  # traces and costs are equal, but processors may round them differently
        stops = (np.flatnonzero(is_last) + 1).tolist()
        self._plan = merge.of_cuts(plan.scheme, trace.sizes, trace.backward_times, stops, cost=cost)
        self._set_groups(self._with_the_unused(trace, self._plan))

    def _with_the_unused(self, trace: Trace, plan: MergePlan) -> list[list[str]]:
        """The plan's groups, the last of which also has what no pass has used so far."""
        groups = [[trace.names[position] for position in group] for group in plan.groups]
        groups[-1] += [name for name in self._parameters if name not in set(trace.names)]
        return groups

    def _group_by(self, names: Sequence[str], scheme: str) -> None:
        sizes = [self._parameters[name].numel() * self._parameters[name].element_size() for name in names]
        plan = PLANS[scheme](sizes, [0.0] * len(sizes), cost=lambda _: 0.0)
        self._set_groups([[names[position] for position in group] for group in plan.groups])

    def _set_groups(self, groups: Sequence[Sequence[str]]) -> None:
        for group in self._groups:
            group.give_back()
        self._groups = [GradientGroup([self._parameters[name] for name in names]) for names in groups]
        self._group_of = {id(one): number for number, group in enumerate(self._groups) for one in group.parameters}

    def _checked_names(self, groups: Sequence[Sequence[str]]) -> list[list[str]]:
        if any(isinstance(group, str) or not group for group in groups):
            raise ValueError(f"plan={groups!r} must be lists of names of parameters, none of them empty")
        named = [name for group in groups for name in group]
        for name in named:
            if name not in self._parameters:
                raise ValueError(f"plan names {name!r}, which is no parameter of model that requires a gradient")
        if len(set(named)) < len(named):
            raise ValueError("plan names a parameter twice: each gradient travels once")
        if missing := [name for name in self._parameters if name not in set(named)]:
            raise ValueError(f"plan leaves {missing[0]!r} out: every parameter that requires a gradient must be in it")
        return [[*group] for group in groups]
