"""Data-parallel training with groups of telegrad's choice: which gradients travel together follows from a plan."""

from __future__ import annotations

import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._compile import _disable_dynamo

from telegrad.communicator import Communicator, Work
from telegrad.ddp.backward_pass import checked_norm, clip_own, clip_together
from telegrad.ddp.backward_watch import on_gradient
from telegrad.ddp.node_ranks import NodeRanks
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
from telegrad.synchronizer.gradient_group import GradientGroup, Run, Turns, note_before_others, present_in
from telegrad.synchronizer.group_planning import PLANS, TIMED, AutoPlan, first_groups
from telegrad.synchronizer.measured_timeline import MeasuredTimeline
from telegrad.synchronizer.merge_plan import MergePlan
from telegrad.synchronizer.optimizer_step import WAITS, HiddenGradients, PendingPass, StepWait, checked_optimizers
from telegrad.synchronizer.parameter_watch import ParameterWatch
from telegrad.synchronizer.replanning import LOOK_EVERY
from telegrad.synchronizer.step_planning import StepPlanning
from telegrad.synchronizer.step_report import StepReport, slowest_of
from telegrad.synchronizer.synchronised_model import (
    check_fits,
    check_fits_nodes,
    check_free,
    check_is_seen,
    check_waits,
    claim,
    copy_model_from_rank_0,
    ranks_apart,
    release,
    trained_parameters,
)
from telegrad.synchronizer.trace import Trace

_FIRST_LOOK = 5  # passes after which groups are put in order for the first time, with wait_in="forward"


class Synchronizer:
    """Averages the gradients of ``model`` over all ranks in every backward pass, in groups that it plans. Use it
    instead of DistributedDataParallel. All ranks pass the same arguments; otherwise all raise ``ValueError``.

    ``model``: the same on all ranks except for values; rank 0's parameters and buffers are copied to all. Parameters
    are on the CPU, or all on one CUDA device (docs/explanation/gpu.md). A gradient becomes a view of its group's
    memory, whose allreduce begins when its last gradient is ready. ``backward()`` returns when all are over; on a GPU
    the stream waits instead. A parameter that no rank has used keeps its gradient, also ``None``. Each rank's pass must
    give a gradient to at least one parameter.

    ``plan``: how gradients are grouped (docs/explanation/planning.md). ``AutoPlan``: options of timed ones.

    - ``"auto"``: as ``"optimal"``. Without compression, other groups are then tried, and kept if steps are more than 1
      % faster. All of this is repeated when measured times differ from the prediction.
    - ``"optimal"``: the groups whose last allreduce ends first; ``"greedy"``: MG-WFBP's. Both are planned after 10
      passes, from measured times, and once more after as many. Before the first plan groups are ``"fixed"``.
    - ``"fixed"``: DDP's sizes, in the opposite order of ``model.parameters()``; ``"wfbp"``: each gradient alone;
      ``"single"``: all together. Or lists of parameter names: the groups in the order in which they are sent.

    ``compress``: the format of groups; gradients that are not float32 or bfloat16 are sent dense. ``None``: all values.
    ``TopK``: the largest entries. ``LowRank``: products of narrow matrices, in groups that are not timed (``"auto"`` is
    ``"fixed"``). ``Quantised``: all values, rounded. ``Cheapest``: the cheapest of ``None``, ``TopK`` and ``Quantised``
    by the plan; not on a CUDA device. The residual of each parameter keeps unsent gradient and rounding errors.

    - ``momentum``, ``warmup`` and ``optimizer``: as for DDPState.
    - ``nonfinite``: ``"raise"`` (default with compression): NonFiniteGradient on the rank with a NaN or an infinity,
      TransportError on the others, later on a GPU. ``"send"`` (default without): all ranks get the value.

    ``clip_norm``: averages are scaled down to this norm, all together. With compression each rank scales its own
    gradient to clip_norm / sqrt(ranks) after the backward pass, and only then sends. With a GradScaler leave it out:
    call ``scaler.unscale_`` and ``clip_grad_norm_`` after ``backward()``.

    ``wait_in``: where the averages are waited for. ``"backward"``. ``"step"``: in the ``step()`` of ``optimizer``, all
    optimizers of the model. ``"forward"``: each parameter in its next use, and its step is made then, with the same
    result. Gradients show NaN until the averages are there: call ``wait()``, on all ranks, before you read, clip or
    unscale them. ``delay``: with 1, ``backward()`` leaves the averages of the pass before it, and ``None`` the first
    time. After the last step, and before you save, call ``finish()``, and step once more.

    ``node``: for nodes of as many ranks each: as for DDPState. With ``"auto"`` groups are ``"fixed"``. Call
    ``zero_grad()`` before each pass: an average that meets new gradients of some ranks only is a ``RuntimeError``.

    After an exception in a backward pass call ``zero_grad()``. If only some ranks raised, the next pass is a
    MismatchedCall. If these had no gradient yet, they go on one pass apart, undetected. After a ``TransportError``
    resume from an earlier ``state_dict()``. The model refers to the Synchronizer until ``close()``. Raises
    ``TypeError`` and ``ValueError`` for bad arguments. Source: Shi, Chu, Li, MG-WFBP, TPDS 2021, Algorithm 2, with the
    exact plan of telegrad.synchronizer.merge."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        plan: str | AutoPlan | Sequence[Sequence[str]] = "auto",
        clip_norm: float | None = None,
        compress: Compress | None = None,
        momentum: Momentum | None = None,
        warmup: Warmup | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        nonfinite: str | None = None,
        wait_in: str = "backward",
        delay: int = 0,
        node: Any = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch()")
        error: ValueError | TypeError | None = None
        try:
            if not isinstance(model, nn.Module) or isinstance(model, nn.parallel.DistributedDataParallel):
                raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module that DDP does not wrap")
            check_choice(wait_in, "wait_in", WAITS)
            self._delay, self._is_forward = delay == 1, wait_in == "forward"
            if isinstance(delay, bool) or delay not in (0, 1):
                raise ValueError(f"delay={delay!r} must be 0 or 1: averages are of this pass or of the one before")
            times = plan if isinstance(plan, AutoPlan) else AutoPlan(plan) if plan in TIMED else AutoPlan()
            plan = plan.scheme if isinstance(plan, AutoPlan) else plan
            groups = self._take_arguments(model, plan, clip_norm)
            late = "delay=1" if self._delay else "wait_in='forward'" if self._is_forward else ""
            if node is not None:
                check_fits_nodes(plan, compress, late)
            optimizers = () if wait_in == "backward" else checked_optimizers(optimizer, self._parameters)
            if optimizers:
                optimizer = optimizers[0] if compress is not None and len(optimizers) == 1 else None
            self._nodes = None if node is None else NodeRanks(node, comm, self._parameters, compress)
            self._compression = self._compression_of(
                comm, plan, compress, momentum=momentum, warmup=warmup, optimizer=optimizer, nonfinite=nonfinite
            )
            check_free(self._parameters)
            is_late = bool(late)
            self._waits_elsewhere = is_late or wait_in != "backward"
            if self._is_on_device:
                check_plan_on_device(plan, self._waits_elsewhere, compress)
            check_waits(
                wait_in, self._delay, optimizers, self._parameters, plan=plan, compress=compress, clip_norm=clip_norm
            )
            unmeasured = is_late or isinstance(compress, LowRank) or (self._is_on_device and compress is not None)
            unmeasured |= self._nodes is not None
            plans = self._scheme in TIMED and not unmeasured
            check_is_seen(model, plans, optimizers)
            description = described(
                self._parameters,
                None if self._compression is None else self._compression.description(),
                plan=json.dumps([self._scheme, groups]),
                after=times.after,
                clip_norm=self._clip_norm,
                replan_factor=times.replan_factor,
                wait_in=wait_in,
                delay=self._delay,
                on_device=self._is_on_device,
                ranks_of_node=self.ranks_of_node,
            )
            if self._nodes is not None:
                description["what is compressed"] = ""
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
        self._unstepped: set[int] = set()  # with wait_in="forward": whose steps were put off until this pass began
        self._turns = Turns(len(self._parameters)) if self._is_forward or self._delay else None
        # With a delay: of the last pass, by group where the averages are not received, and by parameter.
        self._unreceived: dict[int, list[Work]] = {}
        self._averages: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        self._works: list[list[Work]] = []
        self._timeline = MeasuredTimeline([])
        self._graph_task: int | None = None  # autograd's number of the pass that is under way
        self._planning: StepPlanning | None = None
        device = next(iter(self._parameters.values())).device
        with contextlib.ExitStack() as undo:
            undo.callback(release, self._parameters.values())
            undo.callback(own.close)  # another rank may have made its Synchronizer, and hears of it
            if self._nodes is not None:
                across = self._nodes.connect(own)
                undo.callback(self._nodes.close)
                self._sums = self._compression or self._compression_for(None, own, nonfinite="send")
                check_alike(across, self._sums.description(), None)
                self._sums.move_to(own, across)
            elif self._compression is not None:
                self._compression.move_to(own)
            self._clock = DeviceClock(device) if self._is_on_device else None
            copy_model_from_rank_0(model, own)
            if self._is_on_device:  # the host waits here, not in a pass
                for one in (own,) if self._nodes is None else (own, across):
                    one.device_algorithms(device)
                    one.synchronize()
                    undo.callback(_end_on_device, one)
            device_cost = dense_cost(own, self._parameters) if self._is_on_device and plans else None
            undo.callback(self._give_back)
            undo.callback(self._drop)
            first = "dense" if self._compression is None else self._compression.ways[0]
            self._set_groups(groups, [first] * len(groups))
            if plans:
                self._planning = StepPlanning(
                    model,
                    own,
                    times,
                    compression=self._compression,
                    leaves_at_end=self._own_norm is not None,
                    clock=self._clock,
                    device_cost=device_cost,
                )
                undo.callback(self._planning.close)
            if optimizers:
                receive = self._receive_late if self._is_forward else None
                self._step_wait = StepWait(optimizers, model, self.wait, receive=receive, hidden=self._hidden)
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
    ) -> list[list[str]]:
        """The first groups. Raises ``ValueError`` and ``TypeError`` for what is wrong on this rank."""
        if isinstance(plan, str):
            check_choice(plan, "plan", tuple(PLANS))
        self._parameters = trained_parameters(model)
        self._clip_norm = checked_norm(clip_norm)
        self._scheme = plan if isinstance(plan, str) else None
        self._is_on_device = is_on_device(self._parameters)
        self._first_scheme = "fixed" if plan in TIMED else str(plan)
        return first_groups(plan, self._parameters, small=self._is_forward)

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
        made = self._compression_for(compress, comm, nonfinite=nonfinite or "raise", delayed=self._delay, **options)
        check_fits(plan, compress)
        return made

    def _compression_for(self, compress: Compress | None, comm: Communicator, **options: Any) -> GroupCompression:
        kind = CudaGroupCompression if self._is_on_device else GroupCompression
        return kind(compress, comm, self._parameters, nodes=self._nodes, **options)

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
    def ranks_of_node(self) -> int:
        """How many ranks of a node share its gradients; 1 without ``node=``."""
        return 1 if self._nodes is None else self._nodes.size

    @property
    def stats(self) -> DDPStats | None:
        """Counters of what was compressed, of this rank; ``None`` without compression."""
        return None if self._compression is None else self._compression.stats

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's unsent gradient, by parameter, with the step and the options: what ``reshard`` and
        ``RankState`` take. The plan is not in it: to keep the groups, pass the old ``groups`` as ``plan``. Raises
        ``ValueError`` without compression, and with a delay before ``finish()``."""
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
        if self._unreceived:
            raise ValueError("the last averages are applied to no weights yet: call finish(), and step, before this")
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
        """With ``wait_in``, after a backward pass: returns when gradients are the averages, and steps that were put off
        are made; otherwise it does nothing. Called on all ranks, which may make a plan together then. Errors are those
        of ``backward()``."""
        pending = self._pending
        if pending is None:
            return
        if self._is_forward:
            for number in sorted(pending.left):
                self._receive_group(pending, number)
            self._pending = None
            self._end_pass(pending.works, elsewhere_s=time.perf_counter() - pending.since - pending.waited_s)
        else:
            self._pending = None
            restores = [one.put_back() for one in pending.hidden]
            self._receive(pending.works, pending.number, elsewhere_s=time.perf_counter() - pending.since)
            for restore in restores:
                restore()
        if self._compression is not None:
            self._compression.decide()

    @_disable_dynamo
    def finish(self) -> None:
        """With ``delay``, after the last step: the gradients are the averages of the last backward pass, which another
        step of the optimizer applies. The pass after it is as the first one. Otherwise it is ``wait()``. Called on all
        ranks; errors are those of ``backward()``."""
        self.wait()
        if self._unreceived:
            self._launch_second()
            for number in range(len(self._groups)):
                self._receive_earlier(number)
            self._show_averages()

    def close(self) -> None:
        """Lets go of the model, whose gradients have memory of their own again. Called twice it does nothing. Warns if
        averages were never applied, with a delay."""
        with contextlib.suppress(TransportError):
            self.wait()
        if self._unreceived:
            said = "the averages of the last backward pass were applied to no weights: call finish(), and step, before"
            warnings.warn(f"{said} close()", RuntimeWarning, 2)
            for work in (one for of_group in self._unreceived.values() for one in of_group):
                with contextlib.suppress(TransportError):
                    work.wait()
        self._undo.close()  # all of it, also where some of it is interrupted

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
        if self._step_wait is not None:
            self._unstepped = self._step_wait.due
        self.wait()
        if self._graph_task is not None and self._delay:
            error = RuntimeError(
                "a backward pass has ended with an exception, or another one is inside it, which delay=1 cannot take "
                "back: make the model and its Synchronizer again, from a checkpoint"
            )
            self._comm.abort(f"{type(error).__name__}: {error}")
            raise error
        self._drop()
        if self._is_forward:
            self._order_groups()
        self._launch_second()  # on all ranks in the order of groups, whatever order gradients come in
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
        self._receive_earlier(number)
        group = self._groups[number]
        group.take_run(run)
        if not group.is_whole or self._own_norm is not None:
            return
        self._timeline.ready(number)
        while len(self._works) < len(self._groups) and self._groups[self._order[len(self._works)]].is_whole:
            self._launch()

    def _launch(self) -> None:
        """The next group: all ranks launch them in the same order, whatever order gradients come in."""
        number = self._order[len(self._works)]
        group = self._groups[number]
        self._receive_earlier(number)  # one sum of a group at a time: its residuals are whole again
        self._timeline.launched(number)
        begin_s = time.perf_counter()
        with self._ending_all():
            self._works.append(group.launch(self._comm, self._earlier, self._passes))
        if self._nodes is not None:
            self._go_on(waits=False)
        if self._compression is not None and self._planning is not None:
            self._planning.leave_out(time.perf_counter() - begin_s)

    @contextlib.contextmanager
    def _ending_all(self) -> Iterator[None]:
        """Of nodes, whose ranks wait for others than those whom an error reaches."""
        try:
            yield
        except Exception as error:
            if self._nodes is not None:
                self._comm.abort(f"{type(error).__name__}: {error}")
            raise

    def _go_on(self, *, waits: bool) -> None:
        """All ranks start sums between nodes in the order in which groups were launched."""
        with self._ending_all():
            all(self._groups[number].go_on(waits=waits) for number in self._order[: len(self._works)])

    @_disable_dynamo
    def _end(self) -> None:
        """The pass is over: launches what had to wait for gradients that did not come, and waits for all, unless the
        optimizer does."""
        if torch._C._current_graph_task_id() != self._graph_task:
            return  # of a pass that was dropped
        if self._own_norm is None:
            self._timeline.backward_over()
        is_whole = all(group.is_whole for group in self._groups)
        is_looked_at = self._passes % LOOK_EVERY == 0 or not is_whole
        self._watch.look(self._groups, everywhere=is_looked_at, unstepped=self._unstepped)
        if self._own_norm is not None:
            present = present_in(self._parameters.values(), self._groups, self._earlier)
            (clip_together if self._is_on_device else clip_own)(present, self._own_norm)
        while len(self._works) < len(self._groups):
            self._launch()
        if self._own_norm is not None:  # clipping and selection hold it up, as plans count them
            self._timeline.backward_over()
        self._go_on(waits=True)
        launched, self._works, self._graph_task = self._works, [], None
        works = [of_group for _, of_group in sorted(zip(self._order, launched, strict=True), key=lambda one: one[0])]
        number, self._passes = self._passes, self._passes + 1
        if self._delay:
            self._show_averages()
            self._unreceived = dict(enumerate(works))
            self._earlier.clear()
            if self._compression is not None:
                self._compression.close_pass()
        elif self._step_wait is None or self._step_wait.is_inside:
            self._receive(works, number)
        else:
            hidden = [HiddenGradients(group.parameters) for group in self._groups]
            self._pending = PendingPass(works, number, hidden, time.perf_counter(), {*range(len(works))})

    def _receive(self, works: Sequence[Sequence[Work]], number: int, *, elsewhere_s: float = 0.0) -> None:
        """Waits, and all that follows from the averages of pass ``number``."""
        try:
            with self._ending_all():
                works = [[*of, *group.launch_second()] for group, of in zip(self._groups, works, strict=True)]
                for group, of_group in zip(self._groups, works, strict=True):
                    self._wait_for(group, of_group, number)
                for group in self._groups:
                    group.finish()
        finally:
            self._earlier.clear()
        self._end_pass(works, elsewhere_s=elsewhere_s)

    def _wait_for(self, group: GradientGroup, works: Sequence[Work], number: int) -> None:
        for work in works:
            work.wait()
        group.receive()
        apart = group.apart(number, self._comm.world_size)
        if apart is not None:
            raise ranks_apart(self._comm, apart)

    def _end_pass(self, works: Sequence[Sequence[Work]], *, elsewhere_s: float) -> None:
        """All averages are there."""
        self._earlier.clear()
        ended = [group.ended(of_group) for group, of_group in zip(self._groups, works, strict=True)]
        self._timeline.close(ended, elsewhere_s=elsewhere_s)
        if self._compression is not None:
            self._compression.close_pass()
        elif self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
        plan = None if self._planning is None else self._planning.after(self._passes, self._timeline)
        if plan is not None:
            self._adopt(plan)

    def _hidden(self) -> list[HiddenGradients]:
        """The stand-ins of gradients whose averages nobody has waited for, by group."""
        return [] if self._pending is None else [self._pending.hidden[number] for number in sorted(self._pending.left)]

    @_disable_dynamo
    def _receive_late(self, parameter: torch.nn.Parameter) -> None:
        """Waits for its group alone, and makes the steps that were put off. Without communication."""
        assert self._pending is not None
        self._receive_group(self._pending, self._number_of[id(parameter)])

    def _receive_group(self, pending: PendingPass, number: int) -> None:
        begin_s, group = time.perf_counter(), self._groups[number]
        self._wait_for(group, pending.works[number], pending.number)
        pending.waited_s += time.perf_counter() - begin_s
        pending.left.discard(number)
        restore = pending.hidden[number].put_back()
        group.finish()
        assert self._step_wait is not None
        self._step_wait.step(group.parameters)
        restore()

    def _order_groups(self) -> None:
        """With ``wait_in="forward"``: as many groups leave beside the backward pass as it can hide. The others, evenly
        between them, leave after it, in the order of the next forward pass. All ranks call it, in the same passes."""
        if self._passes == 0 or (self._passes != _FIRST_LOOK and self._passes % LOOK_EVERY):
            return
        backward_s, network_s = self._timeline.totals(LOOK_EVERY) or (1.0, 1.0)
        count = len(self._groups)
        held = np.array([math.ceil(count * max(0.0, 1 - backward_s / max(network_s, 1e-9)))])
        self._comm.all_reduce(held, "max")
        late = [one for one in range(count) if (one + 1) * held[0] // count > one * held[0] // count]
        self._order = [*(one for one in range(count) if one not in late), *late[::-1]]

    def _receive_earlier(self, number: int) -> None:
        """With a delay: the averages of the pass before leave the memory of this group, if they have not."""
        if number in self._unreceived:
            works = self._unreceived.pop(number)
            self._wait_for(self._groups[number], works, self._passes - 1)
            averages = self._groups[number].averages()
            self._averages |= averages
            if self._compression is not None:
                self._compression.settle(self._groups[number].parameters, averages.keys())

    def _launch_second(self) -> None:
        for number, works in self._unreceived.items():
            works += self._groups[number].launch_second()

    def _show_averages(self) -> None:
        """With a delay: those of the pass before are the gradients, and there are no others."""
        averages, self._averages = self._averages, {}
        for one in self._parameters.values():
            one.grad = averages.get(id(one))
        if self._compression is None and self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)

    def _drop(self) -> None:
        """Another pass begins before one is over, after an exception or inside a reentrant checkpoint. Launched sums
        end before their memory is used again; they count, unless gradients have been set to ``None`` since."""
        if self._graph_task is None:
            return
        self._graph_task = None
        launched = [self._groups[number] for number in self._order[: len(self._works)]]
        with contextlib.suppress(TransportError):  # the next launch says it again
            self._go_on(waits=True)
        works, self._works = self._works, []
        with contextlib.suppress(TransportError):
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
        self._order = [*range(len(groups))]
        nodes, sums = self._nodes, self._compression if self._nodes is None else self._sums
        self._groups = [
            group_of([self._parameters[name] for name in names], sums, nodes, way=way, on_device=self._is_on_device)
            for names, way in zip(groups, ways, strict=True)
        ]
        self._number_of = {id(one): number for number, group in enumerate(self._groups) for one in group.parameters}
        for group in self._groups:
            group.turns = self._turns
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


def _end_on_device(comm: Communicator) -> None:
    with contextlib.suppress(TransportError, ValueError):  # it has failed, or its owner has closed it
        comm.synchronize()
