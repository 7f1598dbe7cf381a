"""The communication hook for torch's DistributedDataParallel: ``ddp.register_comm_hook(DDPState(...), ddp_hook)``.

DDP calls the hook with each bucket when its gradients are ready, in the same order on all ranks. DDP asks a hook for
its annotations, so this file must not postpone their evaluation.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch._compile import _disable_dynamo

from telegrad.communicator import Communicator
from telegrad.communicator.operands import on_device
from telegrad.compress.arguments import checked_count
from telegrad.ddp.backward_pass import Averaging, Buckets, HostBuckets, Progress, checked_norm
from telegrad.ddp.backward_watch import BucketWatch
from telegrad.ddp.bucket import GradBucket
from telegrad.ddp.choices import (
    ChoiceWatch,
    tell_of_density,
    tell_of_local_clipping,
    tell_of_nesting,
    tell_of_nothing_compressed,
    watch_choices,
)
from telegrad.ddp.exchange import NONFINITE_POLICIES, REMEDY, Exchange
from telegrad.ddp.gradient_scales import GradientScales
from telegrad.ddp.low_rank import LowRankRounds, load_remembered
from telegrad.ddp.node_ranks import NodeBuckets, NodeRanks
from telegrad.ddp.options import (
    AUTO,
    LowRank,
    Momentum,
    TopK,
    Warmup,
    averages_are_whole,
    check_choice,
    check_objects,
    checked_parameters,
    compressed_by,
    compressor_of,
    encoding_of,
    plain_options,
    resolved_compress,
)
from telegrad.ddp.pass_use import Memories, PassUse
from telegrad.ddp.rank_checks import (
    HAS_FEWER_BATCHES,
    HOOK_IS_MISSING,
    STATE_IS_MISSING,
    alike_options,
    can_ask,
    check_alike,
    check_group,
    check_ranks,
    described,
    tell_of_broadcasts,
    told_to_all,
)
from telegrad.ddp.rank_state import MemoryOrders, checked_step, own_part, state_of
from telegrad.ddp.telemetry import DDPStats, Telemetry, check_telemetry


class RefusesCopies:
    """Pickling and copying it is a ``TypeError``. DDP holds its hook's state, so who copies or saves the wrapped model
    meets this."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to its process and cannot be pickled or copied, nor can a "
            "DistributedDataParallel that has it: copy or save ddp.module, as AveragedModel(ddp.module); what waits to "
            "be sent is in state.state_dict(), of each rank"
        )


class DDPState(RefusesCopies):
    """What ``ddp_hook`` needs to know and to remember: ``DDPState(comm, ddp)`` compresses gradients to 1 or 2 % of
    their bytes. docs/reference/options.md says what each option is good for. All ranks pass the same.

    ``comm``: a Communicator of the same ranks as DDP. ``model``: the DistributedDataParallel, whose parameters that
    require a gradient are averaged; residuals are kept under their names in it. ``group``: the process group that DDP
    was given (``None``: the whole job), which must have the ranks of ``comm``.

    ``compress``: a ``telegrad.TopK`` or a ``telegrad.LowRank``. ``"auto"``: ``LowRank()``, with ``momentum`` or a
    falling ``warmup`` ``TopK()``. ``None``: plain averages of all values. ``warmup``: a ``telegrad.Warmup``: the first
    steps send more. ``momentum``: a ``telegrad.Momentum``, which the hook applies, to dense tensors too, for an
    ``optimizer`` that is an SGD with ``momentum=0``. ``optimizer``: who steps; ``momentum`` and
    ``TopK(feedback="steps")`` need it. If gradients are cleared before a step, residuals and velocities are as before
    that pass (docs/how-to/several-losses.md).

    ``clip_norm``: each rank scales its gradient down to a norm of at most clip_norm / sqrt(ranks) before residuals take
    it up; communication then begins after the backward pass. ``scaler``: the GradScaler that scales the loss;
    ``clip_norm`` is of gradients without the scale. ``telemetry``: where figures of each tensor go.

    ``node``: for nodes of as many ranks each: the process group of this rank's node, or ``"auto"``: the ranks that
    share a number in ``comm.nodes``. Gradients are averaged inside the node first. Each of its ranks exchanges its own
    pieces of them between nodes; residuals are of these pieces (docs/how-to/nodes.md).

    ``nonfinite``: what happens when a gradient of a rank holds NaN or infinity, or makes its residual or velocity
    overflow. Neither ever holds such a value. Finite gradients whose sum overflows give infinity.

    - ``"raise"``: NonFiniteGradient on that rank, naming rank, step and parameter, and TransportError with its text
      on the others. The bucket at fault has changed nothing. On a GPU it comes as soon as the host knows, in a later
      call or in ``synchronize()`` or ``state_dict()``, when the optimizer may have had that NaN.
    - ``"skip"``: all ranks drop the whole step: all averages are zero (infinite with ``scaler``, which then skips the
      step and lowers its scale), and what is remembered is as before. Without a scaler write ``if not state.skipped:
      optimizer.step()``. It costs a sum of one number per step, and memory for a copy of residuals and velocities.
    - ``"send"``: the optimizers of all ranks see it; an overflow arrives as infinity.

    A step that fails in another way leaves residuals that are finite, but what they gave to the step is lost, unless
    with ``"skip"``: go on from an earlier ``state_dict()``. DDP reports a failed operation as a RuntimeError with its
    text; the error itself is then in ``failure``.

    Gradients are float32 or bfloat16, on the CPU or on CUDA, where the backward pass never waits for the device
    (docs/explanation/gpu.md). On the CPU others are sent densely. Residuals belong to a rank: save each rank's
    (``RankState`` for torch.distributed.checkpoint, ``reshard`` for another number of ranks). Raises ``TypeError`` and
    ``ValueError`` for bad arguments, of which the other ranks hear."""

    _ranks_are_those_of_ddp = True
    _remedy, _among = REMEDY, ""  # what NonFiniteGradient says

    def __init__(
        self,
        comm: Communicator,
        model: torch.nn.Module,
        *,
        compress: TopK | LowRank | Literal["auto"] | None = "auto",
        momentum: Momentum | None = None,
        warmup: Warmup | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        nonfinite: str = "raise",
        telemetry: Telemetry | None = None,
        group: Any = None,
        node: Any = None,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch()")
        comm.stats()  # raises where it is closed
        asks = self._ranks_are_those_of_ddp and can_ask(comm)
        if asks:
            comm._usable().hint_at_stalls(STATE_IS_MISSING, STATE_IS_MISSING)
        with told_to_all(comm, asks=asks) as alike:
            sends: TopK | LowRank | None = resolved_compress(compress, momentum, warmup)
            check_objects(sends, momentum, warmup, kinds=(TopK, LowRank))
            check_choice(nonfinite, "nonfinite", NONFINITE_POLICIES)
            check_telemetry(telemetry)
            check_group(group)
            if isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled():
                scaler = None  # it scales nothing, and steps whatever comes
            self._warmup = warmup or Warmup(0)
            self._parameters, frozen = checked_parameters(self._named_parameters(model))  # alive: their ids stay theirs
            self._names = {id(parameter): name for name, parameter in self._parameters.items()}
            self._nodes = None if node is None else NodeRanks(node, comm, self._parameters, sends)
            held = None if self._nodes is None else self._nodes.held()
            topk = sends.as_topk(self._parameters) if isinstance(sends, LowRank) else sends or TopK()
            encoding = encoding_of(topk, self._parameters)
            self._low_rank: LowRankRounds | None = None
            if isinstance(sends, LowRank):
                self._low_rank = LowRankRounds(comm, self._parameters, sends, held)
                self._compressor = self._low_rank.compressor
            else:
                self._compressor = compressor_of(self._parameters, sends, momentum, optimizer, held)
            self._scales = GradientScales(self._compressor, self._parameters, optimizer, scaler)
            if scaler is not None and nonfinite == "raise":
                raise ValueError(
                    "nonfinite='raise' does not fit scaler=, which finds its scale by overflows: use nonfinite='skip'"
                )
            self._clip_norm = checked_norm(clip_norm)
            self.stats = DDPStats()
            self._exchange = Exchange(comm, self._compressor, topk.values, encoding, topk.combine, self.stats)
            self._config = plain_options(sends, momentum, warmup, clip_norm=self._clip_norm, nonfinite=nonfinite)
            self._combine = topk.combine
            on_devices = any(map(on_device, self._parameters.values()))
            if on_devices:
                self._check_device_options()
            options = alike_options(self._config, self._compressor)
            alike |= described(self._parameters, {**options, "whether a scaler": str(scaler is not None)})
            if self._nodes is not None:
                alike |= {"what is compressed": "", "ranks of a node": str(self._nodes.size)}
        self._comm = comm
        self._across = comm if self._nodes is None else self._connect_node(self._nodes, asks=asks)
        self._alike, self._asked = alike, asks
        self._group = group
        self._memories = Memories([self._compressor])
        self._use = self._use_of_passes(optimizer)
        self._progress = Progress()
        self._orders = MemoryOrders(self._parameters)
        averaging = Averaging(
            comm,
            self._names,
            self._compressor,
            self._scales,
            self._warmup,
            None if self._clip_norm is None or self._nodes is not None else self._most_norm,
            nonfinite,
            0.0 if scaler is None else math.inf,
            self._remedy,
            self._among if self._nodes is None else ", for its node",
            telemetry,
            self.stats,
            self._progress,
            self._use.open,
            self._use.close,
            self._failed,
        )
        self._averaging, self._wire, self._scaler = averaging, (topk.values, encoding), scaler
        host = HostBuckets(averaging, self._exchange, self._orders, self._low_rank)
        self._host = self._with_node(host, self._unit_on_host)
        self._device: Buckets | None = None  # once a parameter or a gradient is on one
        self._buckets: Buckets = self._host
        if on_devices:
            self._device = self._device_buckets()
            self._device.prepare(self._parameters.values())
        self._watch = BucketWatch(self._parameters, frozen, self._leave_job)
        self._is_loaded = self._has_checked_ranks = False
        self.failure: Exception | None = None
        self._choices = self._watch_of_choices()
        tell_of_nesting(model, rank=self._job_rank)
        if self._ranks_are_those_of_ddp:
            tell_of_broadcasts(model, comm)
        if self._clip_norm is not None and averages_are_whole(sends):
            tell_of_local_clipping(self._clip_norm, rank=self._job_rank)
        if isinstance(sends, LowRank) and compress != AUTO and not len(self._compressor.residuals):
            tell_of_nothing_compressed(sends, rank=self._job_rank)

    def _connect_node(self, nodes: NodeRanks, *, asks: bool) -> Communicator:
        """Averages are made between nodes from now on."""
        across = nodes.connect(self._comm)
        if asks:
            check_alike(across, {"what is compressed": str(compressed_by(self._compressor))}, None)
        self._exchange.move_to(across)
        if self._low_rank is not None:
            self._low_rank.move_to(across)
        return across

    def _with_node(self, buckets: Buckets, unit_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Buckets:
        """These, with the sums inside of a node around them."""
        if self._nodes is None:
            return buckets
        most, comm = None if self._clip_norm is None else self._most_norm, self._across
        given = buckets, self._nodes, comm, self._parameters, most, unit_of, self.stats, lambda: self.failure
        return NodeBuckets(*given)

    @property
    def _most_norm(self) -> float:
        """Of one rank's own gradients."""
        assert self._clip_norm is not None
        return self._clip_norm / math.sqrt(self._comm.world_size)

    def _unit_on_host(self, _: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self._scales.gradient_unit(), dtype=torch.float64)

    @property
    def _job_rank(self) -> int:
        """0 on the rank that warns of choices."""
        return self._comm.rank

    def _watch_of_choices(self) -> ChoiceWatch | None:
        sparse = self._low_rank is None
        return watch_choices(self._parameters, self._compressor, self._warmup, rank=self._job_rank, sparse=sparse)

    def _named_parameters(self, model: torch.nn.Module) -> Iterable[tuple[str, torch.nn.Parameter]]:
        """Raises ``TypeError`` for what has none."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}: give the DistributedDataParallel itself, as DDPState(comm, ddp)"
            )
        return model.named_parameters()

    def _use_of_passes(self, optimizer: torch.optim.Optimizer | None) -> PassUse:
        keeps_all = self._exchange.topk_states is None and (self._low_rank is None or self._low_rank.keeps_all)
        return PassUse(self._parameters, self._compressor, self._memories, self.stats, optimizer, keeps_all=keeps_all)

    @property
    def step(self) -> int:
        """Backward passes that were synchronised so far, without those that were dropped."""
        self._buckets.settle()
        return self._progress.step

    @property
    def skipped(self) -> bool:
        """True if the last synchronised backward pass was dropped on all ranks (``nonfinite="skip"``)."""
        self._buckets.settle()
        return self._progress.skipped

    @property
    def comm(self) -> Communicator:
        """The communicator that it was made with."""
        return self._comm

    @property
    def ranks_of_node(self) -> int:
        """How many ranks of a node share its gradients; 1 without ``node=``."""
        return 1 if self._nodes is None else self._nodes.size

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that training needs to go on. Where it does so bitwise: docs/explanation/bitwise-resume.md.

        Residuals and velocities (flat float32 tensors), their units, thresholds and calls by parameter, the step, the
        passes of the warm-up, the options; and of ``combine="oktopk"`` and ``"bounded"`` thresholds of sums and
        slices, by the parameters of a bucket. If buckets differ, these are found anew.
        Raises ``ValueError`` while such a sum is under way, and of gradients on a device, for which it waits, what
        ``synchronize()`` does. See the class for what it says after a failed step."""
        self.synchronize()
        self._use.decide()
        self._buckets.save()
        state = state_of(self._comm, self.step, self._config, self._compressor, self._orders)
        sums = self._exchange.topk_states
        if self._low_rank is not None:
            state["factors"] = self._low_rank.state_dict()
        return {
            **state,
            **({} if self._nodes is None else {"node": self._nodes.as_saved()}),
            "warmup_passes": self._progress.warmup_passes,
            "sums": () if sums is None else sums.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict()`` of the same model and rank gave, or ``reshard`` made of all ranks' ones.

        Options stay as they are here; with another density the thresholds are evaluated anew. Raises ``ValueError``
        naming missing, unknown or misshapen parameters, and for the state of another rank; then nothing is changed."""
        step = checked_step(state, self._comm, "DDPState")
        own = None if self._nodes is None else self._nodes.as_saved()
        state = own_part(state, own, {} if self._low_rank is None else self._low_rank.state_dict())
        passes = checked_count(state.get("warmup_passes", step), "state['warmup_passes']")
        self._buckets.leave()
        kept = self._compressor, self._exchange.topk_states, self._low_rank
        entries, least = self._orders.from_rows(state["compressor"]), self._warmup.least_density(passes)
        load_remembered(state, entries, *kept, least_density=least)
        self._progress.step, self._progress.warmup_passes, self._progress.skipped = step, passes, False
        self._buckets.forget()
        self._is_loaded, self._has_checked_ranks = True, False
        if self._choices is not None:
            self._choices.is_loaded = True
        tell_of_density(state, self._compressor, self._config, rank=self._job_rank)

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Starts the sum of one bucket; the future gives its buffer with the average in it."""
        started_s = time.perf_counter()
        try:
            self._watch.look(bucket)
            outcome = self._buckets_for(bucket).take(bucket)
        except Exception as error:
            self._leave_job(error)
            raise
        self._watch.started(bucket, outcome)
        if self._choices is not None and bucket.is_last() and torch._C._current_graph_task_id() != -1:
            self._look_at_choices()
        self.stats.hook_s += time.perf_counter() - started_s
        return outcome

    def _look_at_choices(self) -> None:
        assert self._choices is not None
        if self._choices.is_over:
            self._choices = None
        else:
            self._choices.after_last_bucket(warmed_up=self._is_warmed_up)

    @property
    def _is_warmed_up(self) -> bool:
        return self._warmup.kind != "dense" or self._progress.warmup_passes > self._warmup.steps

    def synchronize(self) -> None:
        """For gradients on a device: waits until all that was called is over there, and raises what has gone wrong in
        it, ``TransportError`` and ``NonFiniteGradient``. Otherwise it does nothing: ``backward()`` has waited."""
        try:
            self._buckets.synchronize()
        except Exception as error:
            self._leave_job(error)
            raise

    def _leave_job(self, error: Exception) -> None:
        """The others must not wait for this rank."""
        self.failure = error
        self._comm.abort(f"{type(error).__name__}: {error}")
        self._buckets.leave(error)

    def _buckets_for(self, bucket: GradBucket) -> Buckets:
        """Those of where the bucket lies: models move."""
        if not self._has_checked_ranks:
            self._check_ranks()
        wanted: Buckets = self._host
        if bucket.buffer().device.type != "cpu":
            if self._device is None:
                self._check_device_options()
                self._device = self._device_buckets()
            wanted = self._device
        if wanted is not self._buckets:
            self._buckets.save()
            self._buckets.settle()
            self._buckets.forget()
            wanted.prepare([bucket.buffer()])
            self._buckets = wanted
        return wanted

    def _device_buckets(self) -> Buckets:
        from telegrad.ddp.cuda.buckets import DeviceBuckets  # a third of the package, which the host does not need
        from telegrad.ddp.cuda.exchange import CudaExchange
        from telegrad.ddp.cuda.feedback import LossScale
        from telegrad.ddp.cuda.telemetry import DeviceTelemetry

        (wire, encoding), telemetry, scaler = self._wire, self._averaging.telemetry, self._scaler
        scale = None if scaler is None else LossScale(scaler)
        figures = DeviceTelemetry(telemetry, self._comm, self.stats)
        sums = self._combine, self._exchange.topk_states
        about = self._across, self._compressor, wire, encoding, *sums, self.stats, self._low_rank
        compression = CudaExchange(*about, figures, scale)
        self._memories.add(compression.feedback)
        unit_of: Callable[[torch.Tensor], torch.Tensor | None] = (lambda _: None) if scale is None else scale.unit
        return self._with_node(DeviceBuckets(self._averaging, compression), unit_of)

    def _check_device_options(self) -> None:
        from telegrad.ddp.cuda.buckets import check_options as check_device_options
        from telegrad.ddp.cuda.selection import check_selections

        check_device_options(self._config, self._parameters.values())
        check_selections(self._compressor)

    def _check_ranks(self) -> None:
        if self._ranks_are_those_of_ddp:
            self._asked = check_ranks(self._comm, self._group, self._alike, asked=self._asked)
            if self._is_loaded and can_ask(self._comm):
                check_alike(self._comm, {"step of the loaded state": str(self._progress.step)}, None)
            self._is_loaded = False
            for comm in {self._comm, self._across}:
                comm._usable().hint_at_stalls(HOOK_IS_MISSING, HAS_FEWER_BATCHES)
        self._has_checked_ranks = True

    def _failed(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error


@_disable_dynamo  # a compiled step would follow it into the core
def ddp_hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket's gradients over all ranks: ``ddp.register_comm_hook(DDPState(comm, ddp), ddp_hook)``."""
    if isinstance(state, Communicator) or not hasattr(state, "reduce"):
        raise TypeError(f"state is a {type(state).__name__}: register ddp_hook with telegrad.DDPState(comm, ddp)")
    return state.reduce(bucket)
