"""Replicas of a model whose parameters ``fully_shard`` has sharded (FSDP2): their gradients' averages over telegrad.

HSDP's own mesh has a dimension for shards and one for replicas, and its hook runs after its own sum over the replicas.
So the model is sharded on the first dimension alone, and the second is telegrad's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch._compile import _disable_dynamo

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import has_runtime
from telegrad.communicator.operands import on_device
from telegrad.communicator.texts import all_gather_text
from telegrad.ddp.backward_watch import BackwardSteps, check_no_optimizer_in_backward
from telegrad.ddp.bucket import GradBucket, check_dtype
from telegrad.ddp.choices import ChoiceWatch, watch_choices
from telegrad.ddp.exchange import REMEDY_WITHOUT_SKIP
from telegrad.ddp.hook import DDPState
from telegrad.ddp.options import TopK, Warmup, check_choice
from telegrad.ddp.pass_use import PassUse
from telegrad.ddp.rank_checks import check_alike
from telegrad.ddp.telemetry import DDPStats, Telemetry
from telegrad.synchronizer.gradient_group import zeros
from telegrad.synchronizer.parameter_watch import check_same_parameters
from telegrad.synchronizer.synchronised_model import check_expanded, copy_from_rank_0

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's: the next bucket is filled and selected from while one is under way."""
_OWNER = "the ReplicaSynchronizer"
_NONFINITE = ("raise", "send")  # "skip" would drop the step of this shard alone


class ReplicaSynchronizer:
    """Averages gradients over the replicas of a sharded model: call ``average()`` between ``backward()`` and
    ``optimizer.step()``.

    - ``model``: ``fully_shard`` has sharded all trained parameters on one mesh of one dimension, on the CPU or on CUDA
      (docs/explanation/gpu.md).
    - ``comm``: a Communicator of the ranks that hold the same shard, one of each replica, such as
      ``Communicator.from_torch(mesh["replica"].get_group())``. Parameters and buffers of replica 0 are copied to all.
    - ``compress``, ``warmup``, ``telemetry``: as for DDPState. Sizes, densities and residuals are of a rank's shards.
    - ``nonfinite``: ``"raise"`` or ``"send"``.

    The average is the same on all replicas, bit for bit. It is over all ranks, because ``fully_shard`` has averaged
    over the shards. Clip after it with ``clip_grad_norm_``. To accumulate gradients, call ``average()`` after the last
    backward pass of a step only. If gradients are set to ``None`` after ``average()`` without an optimizer's step,
    residuals are as before that call. Raises ``TypeError`` and ``ValueError`` for bad arguments, on all ranks of
    ``comm``."""

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        *,
        compress: TopK | None = TopK(),  # noqa: B008  frozen
        warmup: Warmup | None = None,
        nonfinite: str = "raise",
        telemetry: Telemetry | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: give the torch.nn.Module that fully_shard has sharded")
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch(group)")
        error: ValueError | TypeError | None = None
        description: dict[str, str] = {}
        try:
            check_choice(nonfinite, "nonfinite", _NONFINITE)
            _reshard(model)
            self._parameters = sharded_parameters(model)
            check_expanded(model)
            mesh = next(iter(self._parameters.values())).device_mesh
            self._shard = mesh.get_local_rank(), mesh.size()
            # DDPState's parameters are what the buckets have: this rank's shards, which share their memory.
            self._shards = {name: nn.Parameter(one.to_local().detach()) for name, one in self._parameters.items()}
            trained = cast(Mapping[str, nn.Parameter], self._parameters)
            options = {"compress": compress, "warmup": warmup, "nonfinite": nonfinite, "telemetry": telemetry}
            self._state = _ReplicaState(comm, model, self._shards, self._shard, trained, options)
            description = self._state._alike
        except (ValueError, TypeError) as found:
            error = found
        check_alike(comm, {}, error)
        _check_places(comm, self._shard)
        check_alike(comm, description, None)
        self._model, self._comm = model, comm
        self._steps = BackwardSteps(self._parameters, _OWNER, self._state._leave_job)
        self._buckets = list(_buckets_of(self._shards))
        self._is_on_device = any(map(on_device, self._shards.values()))
        for tensor in (*model.parameters(), *model.buffers()):
            copy_from_rank_0(_local(tensor).detach(), comm)
            if self._is_on_device:  # few are in pinned memory at once
                comm.synchronize()

    @property
    def comm(self) -> Communicator:
        """The communicator of the replicas, as it was given."""
        return self._comm

    @property
    def shard(self) -> tuple[int, int]:
        """The number of this rank's shard, and the number of shards."""
        return self._shard

    @property
    def stats(self) -> DDPStats:
        """Counters of what was sent, of this rank."""
        return self._state.stats

    @_disable_dynamo  # as ddp_hook
    def average(self) -> None:
        """Replaces gradients by their averages over the replicas. All ranks call it, once for each step of the
        optimizer. On a GPU the stream waits for averages; the host waits for the other replicas' calls.

        A parameter that has a gradient on some replicas gets one on all of them; one that has none keeps none. Raises
        ``TransportError``; ``NonFiniteGradient`` on the rank that has a NaN or an infinity, unless
        ``nonfinite="send"``; ``RuntimeError`` where parameters have been unfrozen, added, replaced or converted."""
        self._check_model()
        used = np.array([one.grad is not None for one in self._parameters.values()], np.float32)
        self._comm.all_reduce(used)
        futures = []
        for bucket in self._buckets:
            for name, piece in bucket.pieces.items():
                own = self._parameters[name].grad
                if own is None:
                    piece.zero_()
                else:
                    piece.copy_(_local(own).reshape(-1))
            futures.append(self._state.reduce(cast(GradBucket, bucket)))
        for future in futures:
            try:
                future.wait()
            except Exception as error:
                raise self._state.failure or error from None
        somewhere = dict(zip(self._parameters, used.tolist(), strict=True))
        for bucket in self._buckets:
            for name, piece in bucket.pieces.items():
                if somewhere[name]:
                    parameter = self._parameters[name]
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    target = _local(parameter.grad)
                    target.copy_(piece.view(target.shape))
        self._state.close_call()

    def _check_model(self) -> None:
        _reshard(self._model)
        check_same_parameters(
            self._model, self._parameters.values(), owner="ReplicaSynchronizer", remedy="make another one"
        )
        for name, one in self._parameters.items():
            held, local = self._shards[name], _local(one)
            if (local.dtype, local.shape) != (held.dtype, held.shape):
                raise RuntimeError(
                    f"parameter {name!r} was {held.dtype} of shape {tuple(held.shape)} when its ReplicaSynchronizer "
                    f"was made, and is {local.dtype} of shape {tuple(local.shape)}: make another one"
                )

    def state_dict(self) -> dict[str, Any]:
        """A copy of what this rank has not sent yet of its shard, as of DDPState; ``"shard"``: which one. Save every
        rank's; ``RankState`` and ``load_resharded`` take it, ``reshard`` those of all replicas of one shard."""
        return {**self._state.state_dict(), "shard": list(self._shard)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict()`` of the same shard and replica gave, or ``reshard`` made for another number
        of replicas. Raises ``ValueError`` for another shard's, and as DDPState does; then nothing is changed."""
        if isinstance(state, Mapping) and tuple(state.get("shard", ())) != self._shard:
            raise ValueError(
                f"state is of shard {state.get('shard')} (place, number of shards), but this rank holds "
                f"{list(self._shard)}: load that of the same shard, in a job of as many shards"
            )
        self._state.load_state_dict(state)


class _ReplicaState(DDPState):
    """A DDPState whose ranks are not those of the process group, which ``_check_places`` has looked at instead."""

    _ranks_are_those_of_ddp = False
    _remedy = REMEDY_WITHOUT_SKIP

    def __init__(
        self,
        comm: Communicator,
        model: nn.Module,
        shards: Mapping[str, nn.Parameter],
        shard: tuple[int, int],
        trained: Mapping[str, nn.Parameter],
        options: Mapping[str, Any],
    ) -> None:
        self._trained, self._own_shards = trained, shards
        self._place = shard[0]
        self._among = f" of the replicas of shard {shard[0]} of {shard[1]}"
        super().__init__(comm, model, **options)

    def _named_parameters(self, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        return self._own_shards.items()

    def _use_of_passes(self, optimizer: torch.optim.Optimizer | None) -> PassUse:
        return PassUse(self._trained, self._compressor, self._memories, self.stats, optimizer, explicit=True)

    @property
    def _job_rank(self) -> int:
        return self._comm.rank + self._place * self._comm.world_size

    def _watch_of_choices(self) -> ChoiceWatch | None:
        """Averages may be clipped, which takes the norm of all shards, and there is no ``momentum``."""
        given = self._trained, self._compressor, self._warmup
        return watch_choices(*given, rank=self._job_rank, momentum=False, clipping=False)

    def close_call(self) -> None:
        """The gradients are the averages."""
        self._use.close()
        if self._choices is not None and not self._choices.is_over:
            self._choices.averages_came(warmed_up=self._is_warmed_up)


@dataclass(slots=True)
class _Bucket:
    """What DDPState asks of DDP's bucket."""

    place: int
    last: bool
    memory: torch.Tensor
    shards: list[nn.Parameter]
    pieces: dict[str, torch.Tensor]

    def index(self) -> int:
        return self.place

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> torch.Tensor:
        return self.memory

    def parameters(self) -> list[nn.Parameter]:
        return self.shards

    def gradients(self) -> list[torch.Tensor]:
        return list(self.pieces.values())


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    """Those that require a gradient, by name. Raises ``ValueError`` and ``TypeError`` for what a ReplicaSynchronizer
    cannot hold."""
    from torch.distributed.tensor import DTensor  # a second to import; who has a sharded model has it already

    found: dict[str, DTensor] = {}
    for name, one in model.named_parameters():
        if not one.requires_grad:
            continue
        if not isinstance(one, DTensor):
            raise ValueError(
                f"parameter {name!r} is not sharded: call fully_shard(model, mesh=mesh['shard']) before, without "
                "ignored parameters"
            )
        if one.device_mesh.ndim != 1:
            raise ValueError(
                f"parameter {name!r} is on a mesh of {one.device_mesh.ndim} dimensions, whose replicas torch "
                "synchronises itself: call fully_shard(model, mesh=mesh['shard']) with that dimension alone"
            )
        first = next(iter(found.values()), one)
        if one.device_mesh != first.device_mesh:
            raise ValueError(f"parameter {name!r} is on another mesh than those before: shard all of them on one")
        place = one.to_local().device
        if place.type != "cpu" and not has_runtime(place.type):
            raise ValueError(f"parameter {name!r} is on {place}: train on the CPU or on CUDA")
        check_dtype(one.dtype, name, on_device=place.type != "cpu")
        found[name] = one
    check_no_optimizer_in_backward(found, _OWNER)
    if not found:
        raise ValueError("model has no parameter that requires a gradient: there is nothing to synchronise")
    return found


def _reshard(model: nn.Module) -> None:
    """A forward pass without a backward pass leaves modules whose parameters are whole."""
    from torch.distributed.fsdp import FSDPModule

    if all(hasattr(one, "to_local") for one in model.parameters() if one.requires_grad):
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _check_places(comm: Communicator, shard: tuple[int, int]) -> None:
    """Raises ``ValueError`` on all ranks unless they hold the same shard."""
    told = [json.loads(text) for text in all_gather_text(comm, json.dumps(shard))]
    for rank, (place, number) in enumerate(told):
        if [place, number] != told[0]:
            raise ValueError(
                f"comm's rank {rank} holds shard {place} of {number}, and its rank 0 shard {told[0][0]} of "
                f"{told[0][1]}: comm must have the ranks of one shard, as "
                "Communicator.from_torch(mesh['replica'].get_group())"
            )


def _buckets_of(shards: Mapping[str, nn.Parameter]) -> Iterator[_Bucket]:
    """In the opposite order of the parameters, as backward passes go; each of one dtype."""
    groups: list[list[str]] = []
    size = 0
    for name in reversed(list(shards)):
        one = shards[name]
        if not groups or one.dtype != shards[groups[-1][0]].dtype or size + one.nbytes > BUCKET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += one.nbytes
    for place, names in enumerate(groups):
        held = [shards[name] for name in names]
        size, like = sum(one.numel() for one in held), held[0].detach()
        memory = like.new_zeros(size) if on_device(like) else zeros(size, like.dtype)
        pieces = torch.split(memory, [one.numel() for one in held])
        yield _Bucket(place, place == len(groups) - 1, memory, held, dict(zip(names, pieces, strict=True)))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor is whole."""
    return cast("DTensor", tensor).to_local() if hasattr(tensor, "to_local") else tensor
