"""Data-parallel training with groups of telegrad's choice: which gradients travel together follows from a plan."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from telegrad.communicator import Communicator, Work
from telegrad.compress.arguments import checked_count
from telegrad.ddp.backward_pass import checked_norm, clip_own, clip_together
from telegrad.ddp.backward_watch import on_gradient
from telegrad.ddp.options import (
    Cheapest,
    Compress,
    LowRank,
    Momentum,
    Quantised,
    TopK,
    Warmup,
    check_choice,
    check_objects,
)
from telegrad.ddp.rank_checks import check_alike, described
from telegrad.ddp.telemetry import DDPStats
from telegrad.errors import TransportError
from telegrad.synchronizer.clocks import DeviceClock
from telegrad.synchronizer.compression import NONFINITE, GroupCompression
from telegrad.synchronizer.cuda_groups import (
    CudaGroupCompression,
    check_plan_on_device,
    dense_cost,
    group_of,
    is_on_device,
)
from telegrad.synchronizer.gradient_group import GradientGroup, Run, note_before_others, present_in
from telegrad.synchronizer.group_planning import PLANS, TIMED, first_groups
from telegrad.synchronizer.measured_timeline import MeasuredTimeline
from telegrad.synchronizer.merge_plan import MergePlan
from telegrad.synchronizer.optimizer_step import HiddenGradients, PendingPass, StepWait, checked_optimizers
from telegrad.synchronizer.parameter_watch import ParameterWatch
from telegrad.synchronizer.replanning import LOOK_EVERY, checked_factor
from telegrad.synchronizer.step_planning import StepPlanning
from telegrad.synchronizer.step_report import StepReport, slowest_of
from telegrad.synchronizer.synchronised_model import (
    check_fits,
    check_free,
    check_is_seen,
    claim,
    copy_model_from_rank_0,
    ranks_apart,
    release,
    trained_parameters,
)
from telegrad.synchronizer.trace import Trace


class Synchronizer:
    """Averages the gradients of ``model`` over all ranks in every backward pass, in groups that it plans. Use it
    instead of DistributedDataParallel.

    ``model``: the same on all ranks except for values; rank 0's parameters and buffers are copied to all. Parameters
    are on the CPU, or all on one CUDA device (docs/explanation/gpu.md). A gradient becomes a view of its group's
    memory. The allreduce of a group begins when its last gradient is ready, in the same order on all ranks.
    ``backward()`` returns when all are over; on a GPU the stream waits instead. A parameter that no rank has used keeps
    its gradient, also ``None``. Each rank's pass must give a gradient to at least one parameter.

    ``plan``: how gradients are grouped (docs/explanation/planning.md).

    - ``"auto"``: as ``"optimal"``. Without compression, other groups are then tried, and kept if steps are more than 1
      % faster. All of this is repeated when measured times differ from the prediction by ``replan_factor`` (``None``:
      never).
    - ``"optimal"``: the groups whose last allreduce ends first; ``"greedy"``: MG-WFBP's. Both are planned after pass
      ``plan_after``, from measured times, and once more after as many passes. Before the first plan groups are
      ``"fixed"``.
    - ``"fixed"``: DDP's sizes, in the opposite order of ``model.parameters()``; ``"wfbp"``: each gradient alone;
      ``"single"``: all together. Or lists of parameter names: the groups in the order in which they are sent.

    ``compress``: the format of groups. Gradients that are not float32 or bfloat16 are sent dense.

    - ``None``: all values. ``TopK``: the largest entries. ``LowRank``: products of narrow matrices, in groups that are
      not timed (``"auto"`` is ``"fixed"``). ``Quantised``: all values, rounded. The residual of each parameter keeps
      unsent gradient and rounding errors. ``Cheapest``: the cheapest of ``None``, ``TopK`` and ``Quantised`` by the
      plan; not on a CUDA device.
    - ``momentum``, ``warmup`` and ``optimizer``: as for DDPState.
    - ``nonfinite``: ``"raise"`` (default with compression): NonFiniteGradient on the rank with a NaN or an infinity,
      TransportError on the others, later on a GPU. ``"send"`` (default without): all ranks get the value.

    ``clip_norm``: averages are scaled down to this norm, all together. With compression each rank scales its own
    gradient to clip_norm / sqrt(ranks) after the backward pass, and only then sends. With a GradScaler leave it out:
    call ``scaler.unscale_`` and ``clip_grad_norm_`` after ``backward()``.

    ``wait_in``: all optimizers of the model. Their ``step()`` waits for the averages instead of ``backward()``. Until
    then gradients show NaN: call ``wait()``, on all ranks, before you read, clip or unscale them.

    All ranks pass the same arguments; otherwise all raise ``ValueError``. After an exception in a backward pass call
    ``zero_grad()``. If only some ranks raised, the next pass is a MismatchedCall. If these ranks had no gradient yet,
    it cannot be detected: they go on one pass apart. ``backward()`` raises ``TransportError``; then resume from an
    earlier ``state_dict()``. The model refers to the Synchronizer until ``close()``; a copy of the model has none.
    Raises ``TypeError`` and ``ValueError`` for bad arguments. Source: Shi, Chu, Li, MG-WFBP, TPDS 2021, Algorithm 2,
    with the exact plan of telegrad.synchronizer.merge."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        plan: str | Sequence[Sequence[str]] = "auto",
        clip_norm: float | None = None,
        plan_after: int = 10,
        replan_factor: float | None = 1.5,
        compress: Compress | None = None,
        momentum: Momentum | None = None,
        warmup: Warmup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        nonfinite: str | None = None,
        wait_in: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch()")
        error: ValueError | TypeError | None = None
        try:
            if not isinstance(model, nn.Module) or isinstance(model, nn.parallel.DistributedDataParallel):
                raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module that DDP does not wrap")
            groups = self._take_arguments(model, plan, clip_norm, plan_after, replan_factor)
            self._compression = self._compression_of(
                comm, plan, compress, momentum=momentum, warmup=warmup, optimizer=optimizer, nonfinite=nonfinite
            )
            check_free(self._parameters)
            if self._is_on_device:
                check_plan_on_device(plan, wait_in, compress)
            optimizers = checked_optimizers(wait_in, self._parameters)
            unmeasured = isinstance(compress, LowRank) or (self._is_on_device and compress is not None)
            plans = self._scheme in TIMED and not unmeasured
            check_is_seen(model, plans, optimizers)
            self._waits_in_step = bool(optimizers)
            description = described(
                self._parameters,
                None if self._compression is None else self._compression.description(),
                plan=json.dumps([self._scheme, groups]),
                plan_after=plan_after,
                clip_norm=self._clip_norm,
                replan_factor=self._replan_factor,
                wait_in=self._waits_in_step,
                on_device=self._is_on_device,
            )
        except (ValueError, TypeError) as found:
            error, description = found, {}
        check_alike(comm, description, error)
        own = comm._split_own()  # sums are paired by their order, which nobody else's calls must change
        self._comm = own
        own._usable().hint_at_stalls(
            "has {} begun its first backward pass?", "if {} has fewer batches, give all ranks the same number of steps"
        )
        # A rank's own gradient is clipped, all of it, before any of it leaves.
        self._own_norm: float | None = None
        if self._compression is not None and self._clip_norm is not None:
            self._own_norm = self._clip_norm / math.sqrt(own.world_size)
        self._passes = 0
        self._step_wait: StepWait | None = None
        self._pending: PendingPass | None = None
        self._synchronises = True
        self._earlier: set[int] = set()  # whose gradients have come in passes that were not averaged
        self._groups: list[GradientGroup] = []
        self._handles: list[Any] = []
        self._works: list[list[Work]] = []
        self._graph_task: int | None = None  # autograd's number of the pass that is under way
        self._planning: StepPlanning | None = None
        device = next(iter(self._parameters.values())).device
        with contextlib.ExitStack() as undo:
            undo.callback(release, self._parameters.values())
            undo.callback(own.close)  # another rank may have made its Synchronizer, and hears of it
            if self._compression is not None:
                self._compression.move_to(own)
            self._clock = DeviceClock(device) if self._is_on_device else None
            copy_model_from_rank_0(model, own)
            if self._is_on_device:  # the host waits here, not in a pass
                own.device_algorithms(device)
                own.synchronize()
                undo.callback(self._end_on_device)
            device_cost = dense_cost(own, self._parameters) if self._is_on_device and plans else None
            undo.callback(self._give_back)
            undo.callback(self._drop)
            first = "dense" if self._compression is None else self._compression.ways[0]
            self._set_groups(groups, [first] * len(groups))
            if plans and self._scheme is not None:
                self._planning = StepPlanning(
                    model,
                    own,
                    self._scheme,
                    plan_after=plan_after,
                    replan_factor=replan_factor,
                    compression=self._compression,
                    leaves_at_end=self._own_norm is not None,
                    clock=self._clock,
                    device_cost=device_cost,
                )
                undo.callback(self._planning.close)
            if optimizers:
                self._step_wait = StepWait(optimizers, model, self.wait)
                undo.callback(self._step_wait.close)
            self._watch = ParameterWatch(model, self._parameters, own)
            undo.callback(self._watch.close)
            claim(self._parameters.values())
            self._undo = undo.pop_all()

    def _take_arguments(
        self,
        model: nn.Module,
        plan: str | Sequence[Sequence[str]],
        clip_norm: float | None,
        plan_after: int,
        replan_factor: float | None,
    ) -> list[list[str]]:
        """The first groups. Raises ``ValueError`` and ``TypeError`` for what is wrong on this rank."""
        if isinstance(plan, str):
            check_choice(plan, "plan", tuple(PLANS))
        if checked_count(plan_after, "plan_after") < 3:
            raise ValueError(f"plan_after={plan_after} must be at least 3: the first two passes are not typical")
        self._parameters = trained_parameters(model)
        self._clip_norm = checked_norm(clip_norm)
        self._replan_factor = checked_factor(replan_factor)
        self._scheme = plan if isinstance(plan, str) else None
        self._is_on_device = is_on_device(self._parameters)
        self._first_scheme = "fixed" if plan in TIMED else str(plan)
        return first_groups("fixed" if plan in TIMED else plan, self._parameters)

    def _compression_of(
        self,
        comm: Communicator,
        plan: str | Sequence[Sequence[str]],
        compress: Compress | None,
        *,
        nonfinite: str | None,
        **options: Any,
    ) -> GroupCompression | None:
        """``None`` without ``compress``, which the ``options`` are of."""
        check_objects(compress, options["momentum"], options["warmup"], kinds=(TopK, LowRank, Quantised, Cheapest))
        if nonfinite is not None:
            check_choice(nonfinite, "nonfinite", NONFINITE)
        if compress is None:
            given = {name: value for name, value in options.items() if value is not None}
            if nonfinite == "raise":
                given["nonfinite"] = nonfinite
            for name, value in given.items():
                if name != "warmup":
                    raise ValueError(f"{name}={value!r} is not used with compress=None: give compress=TopK() too")
            return None
        kind = CudaGroupCompression if self._is_on_device else GroupCompression
        made = kind(compress, comm, self._parameters, nonfinite=nonfinite or "raise", **options)
        check_fits(plan, compress)
        return made

    @property
    def groups(self) -> list[list[str]]:
        """The names of the parameters in each group, in the order in which groups are sent."""
        names = {id(one): name for name, one in self._parameters.items()}
        return [[names[id(one)] for one in group.parameters] for group in self._groups]

    @property
    def plan(self) -> MergePlan | None:
        """The plan made from measured times, with the timeline that it predicts; ``None`` before that."""
        return None if self._planning is None else self._planning.plan

    @property
    def comm(self) -> Communicator:
        """A communicator of its own, of the same ranks as the one that it was made with."""
        return self._comm

    @property
    def stats(self) -> DDPStats | None:
        """Counters of what was compressed, of this rank; ``None`` without compression."""
        return None if self._compression is None else self._compression.stats

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's unsent gradient, by parameter, with the step and the options: what ``reshard`` and
        ``RankState`` take. The plan is not in it: to keep the groups, pass the old ``groups`` as ``plan``. Raises
        ``ValueError`` without compression."""
        compression = self._compressed()
        self.wait()
        return compression.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what ``state_dict()`` of the same model and rank returned, or ``reshard`` made of all ranks' states.
        Options stay as they are here. Raises ``ValueError`` as ``DDPState.load_state_dict``, and without compression;
        then nothing is changed."""
        compression = self._compressed()
        self.wait()
        self._drop()
        compression.load_state_dict(state)
        self._set_groups(self.groups, self._ways)

    def _compressed(self) -> GroupCompression:
        if self._compression is None:
            raise ValueError("this Synchronizer compresses nothing, so nothing waits: it has no state")
        return self._compression

    @property
    def trace(self) -> Trace | None:
        """The times of a step that ``plan`` predicts from, of all ranks: taken in its own groups, once it is kept.
        ``None`` before there is a plan."""
        return None if self._planning is None else self._planning.trace

    @property
    def replans(self) -> int:
        """How often measured times have differed so far from the prediction that a new plan was made."""
        return 0 if self._planning is None else self._planning.replans

    @property
    def is_settled(self) -> bool:
        """Whether planning and trials are over, until times differ from the prediction. The same on all ranks."""
        return self._planning is None or self._planning.is_settled

    def report(self, *, slowest: bool = False) -> StepReport:
        """Measured times of the last backward passes beside the predicted ones: ``print()`` it, or call its
        ``to_json()``. It is of this rank, without communication. ``slowest``: of the rank whose
        step takes longest, the same on all ranks; call it on all of them between two passes."""
        own = StepReport.of(
            self.plan.scheme if self.plan else "named" if self._scheme is None else self._first_scheme,
            self.groups,
            self._timeline.medians(),
            self.plan,
            rank=self._comm.rank,
            ranks=self._comm.world_size,
            waits_for=None if self._planning is None else self._planning.waits_for,
        )
        return slowest_of(self._comm, own) if slowest else own

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up on each rank; the next one outside averages all of them. The same on all
        ranks."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    @_disable_dynamo
    def wait(self) -> None:
        """With ``wait_in``, after a backward pass: returns when gradients are the averages; otherwise it does nothing.
        Called on all ranks, which may make a plan together then. Errors are those of ``backward()``."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        restore = pending.hidden.put_back()
        self._receive(pending.works, pending.number, elsewhere_s=time.perf_counter() - pending.since)
        restore()
        if self._compression is not None:
            self._compression.decide()

    def close(self) -> None:
        """Lets go of the model, whose gradients have memory of their own again. Called twice it does nothing."""
        with contextlib.suppress(TransportError):
            self.wait()
        self._undo.close()  # all of it, also where some of it is interrupted

    def _end_on_device(self) -> None:
        with contextlib.suppress(TransportError, ValueError):  # it has failed, or its owner has closed it
            self._comm.synchronize()

    def _give_back(self) -> None:
        """No hook is left on a parameter, and no gradient is a view."""
        while self._handles:
            self._handles.pop().remove()
        for group in self._groups:
            group.give_back()

    def _hook_of(self, number: int, run: Run, position: int) -> Callable[[torch.Tensor], None]:
        """What is called when that gradient has come. Models have hundreds: as little as can be is done for each."""
        task_id = torch._C._current_graph_task_id
        parameter, came, versions, early = run.parameters[position], run.came, run.versions, run.early

        def arrive(_: torch.Tensor) -> None:
            if task_id() != self._graph_task:
                if not self._synchronises:
                    self.wait()
                    self._earlier.add(id(parameter))
                    return
                self._open_pass()
            if came[position]:
                return
            came[position] = 1
            if not early[position]:
                versions[position] = parameter._version
            run.left = left = run.left - 1
            if not left:
                self._take(number, run)

        return arrive

    @_disable_dynamo  # where the step is compiled, it would compile what hooks call, NumPy's work too
    def _open_pass(self) -> None:
        self.wait()
        self._drop()
        if self._earlier:  # zero_grad() may have thrown some of them away
            self._earlier -= {id(one) for one in self._parameters.values() if one.grad is None}
        self._graph_task = torch._C._current_graph_task_id()
        for group in self._groups:
            group.open_pass()
        self._timeline.begin()
        # How autograd lets DistributedDataParallel know that a pass is over.
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self._compression is not None:
            self._compression.open_pass()

    @_disable_dynamo
    def _take(self, number: int, run: Run) -> None:
        """All gradients of a run have come."""
        group = self._groups[number]
        group.take_run(run)
        if not group.is_whole or self._own_norm is not None:
            return
        self._timeline.ready(number)
        while len(self._works) < len(self._groups) and self._groups[len(self._works)].is_whole:
            self._launch()

    def _launch(self) -> None:
        """The next group: all ranks launch them in the same order, whatever order gradients come in."""
        group = self._groups[len(self._works)]
        self._timeline.launched()
        begin_s = time.perf_counter()
        self._works.append(group.launch(self._comm, self._earlier, self._passes))
        if self._compression is not None and self._planning is not None:
            self._planning.leave_out(time.perf_counter() - begin_s)

    @_disable_dynamo
    def _end(self) -> None:
        """The pass is over: launches what had to wait for gradients that did not come, and waits for all, unless the
        optimiser does."""
        if torch._C._current_graph_task_id() != self._graph_task:
            return  # of a pass that was dropped
        if self._own_norm is None:
            self._timeline.backward_over()
        is_whole = all(group.is_whole for group in self._groups)
        self._watch.look(self._groups, everywhere=self._passes % LOOK_EVERY == 0 or not is_whole)
        if self._own_norm is not None:
            present = present_in(self._parameters.values(), self._groups, self._earlier)
            (clip_together if self._is_on_device else clip_own)(present, self._own_norm)
        while len(self._works) < len(self._groups):
            self._launch()
        if self._own_norm is not None:  # clipping and selection hold it up, as plans count them
            self._timeline.backward_over()
        works, self._works, self._graph_task = self._works, [], None
        number, self._passes = self._passes, self._passes + 1
        if self._step_wait is None or self._step_wait.is_inside:
            self._receive(works, number)
        else:
            self._pending = PendingPass(works, number, HiddenGradients(self._parameters.values()), time.perf_counter())

    def _receive(self, works: Sequence[Sequence[Work]], number: int, *, elsewhere_s: float = 0.0) -> None:
        """Waits, and all that follows from the averages of pass ``number``."""
        try:
            works = [[*of, *group.launch_second()] for group, of in zip(self._groups, works, strict=True)]
            for group, of_group in zip(self._groups, works, strict=True):
                for work in of_group:
                    work.wait()
                group.receive()
                apart = group.apart(number, self._comm.world_size)
                if apart is not None:
                    raise ranks_apart(self._comm, apart)
            for group in self._groups:
                group.finish()
            ended = [group.ended(of_group) for group, of_group in zip(self._groups, works, strict=True)]
            self._timeline.close(ended, elsewhere_s=elsewhere_s)
        finally:
            self._earlier.clear()
        if self._compression is not None:
            self._compression.close_pass()
        elif self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
        plan = None if self._planning is None else self._planning.after(self._passes, self._timeline)
        if plan is not None:
            self._adopt(plan)

    def _drop(self) -> None:
        """Another pass begins before one is over, after an exception or inside a reentrant checkpoint. Launched sums
        end before their memory is used again; they count, unless gradients have been set to ``None`` since."""
        if self._graph_task is None:
            return
        self._graph_task = None
        works, self._works = self._works, []
        launched = self._groups[: len(works)]
        with contextlib.suppress(TransportError):  # the next launch says it again
            seconds = [group.launch_second() for group in launched]
            for work in (one for of_group in (*works, *seconds) for one in of_group):
                work.wait()
            for group in launched:
                group.receive()
            if all(group.holds(self._earlier) for group in launched):
                for group in launched:
                    group.finish()
        self._earlier.clear()
        self._passes += 1

    def _adopt(self, plan: MergePlan) -> None:
        assert self._planning is not None
        groups = self._planning.groups_of(plan, self._parameters)
        ways = [*plan.ways] or ["dense"] * len(groups)
        if (groups, ways) != (self.groups, self._ways):
            self._set_groups(groups, ways)
        self._say_what_is_before()

    def _set_groups(self, groups: Sequence[Sequence[str]], ways: Sequence[str]) -> None:
        """``ways``: how each group goes, see ``GroupCompression.ways``."""
        self._give_back()
        self._ways = [*ways]
        self._groups = [
            group_of(
                [self._parameters[name] for name in names], self._compression, way=way, on_device=self._is_on_device
            )
            for names, way in zip(groups, ways, strict=True)
        ]
        self._handles = [
            on_gradient(one, self._hook_of(number, run, position))
            for number, group in enumerate(self._groups)
            for run in group.runs
            for position, one in enumerate(run.parameters)
        ]
        self._handles += note_before_others(run for group in self._groups for run in group.runs)
        self._timeline = MeasuredTimeline([group.bytes for group in self._groups], self._clock)
        self._say_what_is_before()

    def _say_what_is_before(self) -> None:
        if self.trace is not None:
            self._timeline.before_first_s = self.trace.backward_times[0]
