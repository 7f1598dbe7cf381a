"""DiLoCo: replicas train by themselves, and exchange what they have learnt every so many steps.

Sources: Douillard et al., arXiv 2311.08105 (DiLoCo); Sarfi et al., arXiv 2508.15706 (SparseLoCo).
"""

from __future__ import annotations

import copy
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from telegrad.communicator import Communicator
from telegrad.compress import BucketTopK
from telegrad.compress.arguments import checked_count
from telegrad.ddp.bucket import ParameterSpan, layout_of_members
from telegrad.ddp.exchange import Exchange, Fault, find_fault
from telegrad.ddp.options import TopK, compressor_of, encoding_of
from telegrad.ddp.rank_checks import check_alike, described
from telegrad.ddp.rank_state import MemoryOrders, checked_step, state_of
from telegrad.ddp.telemetry import DDPStats
from telegrad.errors import NonFiniteGradient, TransportError
from telegrad.kernels.floats import count_nonfinite

_STEP_WRAPPER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
_FIRST_ROUND = "has {} made its DiLoCo, and taken as many steps?"
_LATER_ROUND = "all replicas take the same number of steps: has {} fewer batches, or has it skipped one?"
_of_optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[DiLoCo]] = weakref.WeakKeyDictionary()

MakeOuter = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Makes the outer optimizer of the parameters that it is given."""


def nesterov(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """DiLoCo's outer optimizer. Source: arXiv 2311.08105, §3.1."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def plain(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SparseLoCo's outer optimizer: the decayed residual stands for its momentum. Source: arXiv 2508.15706."""
    return torch.optim.SGD(parameters, lr=1.0)


class DiLoCo:
    """Trains one replica of ``model`` on each rank, for networks on which an exchange in each step takes too long.

    Each replica trains with its own ``inner_optimizer``. After ``every`` steps of it, all replicas exchange how far
    their parameters have moved (the pseudo-gradient). An outer optimizer moves the common parameters by the average,
    and all replicas go on from there. The training loop stays as it is: the exchange happens inside of
    ``inner_optimizer.step()``. Call ``exchange()`` after the last step, and before you evaluate or save the model.

    ``model``: a module without DistributedDataParallel or DTensors. Rank 0's parameters and buffers are copied to all
    ranks now; weights that you load later must be the same on all. ``comm``: a Communicator of one rank for each
    replica. ``every``: inner steps in a round, at least 1; ``None``: you call ``exchange()``. ``outer``: called with
    the common parameters, returns an optimizer; ``None``: ``telegrad.diloco.nesterov``, or ``plain`` with ``compress``.
    ``compress``: a ``TopK``: only the largest entries of a pseudo-gradient are sent, and a residual keeps the rest;
    ``None``: all of it is sent. ``decay``: what a residual is multiplied by in each round, in (0, 1]. ``verify``: the
    replicas compare a checksum of their parameters in every so many rounds; 0: never.

    ``inner_optimizer`` keeps its state between rounds. Floating-point buffers, such as BatchNorm's statistics, are
    averaged in each round. All ranks give the same options, and take as many steps. A GradScaler skips steps on one
    rank alone: use ``every=None`` then, and call ``exchange()`` every so many batches.

    Raises ``TypeError`` and ``ValueError`` for bad arguments, on all ranks where they differ. ``step()`` raises
    ``NonFiniteGradient`` on a replica whose parameters have become NaN or infinite, and ``TransportError`` on the
    others, and where a rank fails. Then parameters and residuals are as before the exchange.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Communicator,
        inner_optimizer: torch.optim.Optimizer,
        *,
        every: int | None = 30,
        outer: MakeOuter | None = None,
        compress: TopK | None = None,
        decay: float = 1.0,
        verify: int = 1,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is a {type(comm).__name__}: make one with telegrad.Communicator.from_torch()")
        error: ValueError | TypeError | None = None
        alike: dict[str, str] = {}
        try:
            self._parameters = _checked_parameters(model, inner_optimizer)
            self._verify = checked_count(verify, "verify")
            self._every = None if every is None else checked_count(every, "every")
            if self._every == 0:
                raise ValueError(f"every={every} must be at least 1: the inner steps of a round; None: you exchange")
            if compress is not None and not isinstance(compress, TopK):
                raise TypeError(
                    f"compress={compress!r} must be a telegrad.TopK, or None: all of a pseudo-gradient is sent"
                )
            if compress is not None and compress.feedback != "gradients":
                raise ValueError("feedback='steps' is for gradients: leave it out")
            self._decay = _checked_decay(decay, compressed=compress is not None)
            self._common = {name: _held(one) for name, one in self._parameters.items()}
            self.outer = _checked_outer(outer or (nesterov if compress is None else plain), self._common)
            self._compressor = compressor_of(self._common, compress, None, None)
            chosen = compress or TopK()
            encoding = encoding_of(chosen, self._common)
            self.stats = DDPStats()
            self._exchange = Exchange(comm, self._compressor, chosen.values, encoding, chosen.combine, self.stats)
            self._config = {"every": str(self._every), "verify": str(self._verify), "decay": str(self._decay)}
            self._config |= {"compress": str(compress), "outer": _settings_of(self.outer)}
            alike = described(self._common, self._config)
        except (ValueError, TypeError) as found:
            error = found
        check_alike(comm, alike, error)
        self._model, self._comm = model, comm
        self._sparse = compress is not None
        spans, offset = [], 0
        for name, one in self._common.items():
            spans.append(ParameterSpan(name, offset, one.numel()))
            offset += one.numel()
        self._spans = spans
        self._moved = np.zeros(offset, np.float32)
        self._layout = layout_of_members(spans, offset, self._compressor)
        self._round = self._steps = 0
        self._has_begun = False
        comm._usable().hint_at_stalls(_FIRST_ROUND, _LATER_ROUND)
        self._copy_from_rank_0()
        self._hooks = [
            inner_optimizer.register_step_pre_hook(self._before_step),
            inner_optimizer.register_step_post_hook(self._after_step),
        ]
        _of_optimizers[inner_optimizer] = weakref.ref(self)
        self._optimizer = inner_optimizer

    @classmethod
    def sparse(
        cls,
        model: nn.Module,
        comm: Communicator,
        inner_optimizer: torch.optim.Optimizer,
        *,
        every: int = 30,
        outer: MakeOuter = plain,
        k: int = 64,
        chunk: int = 4096,
        values: str = "packed-codebook2",
        decay: float = 0.95,
    ) -> DiLoCo:
        """SparseLoCo: of every ``chunk`` entries of a parameter the ``k`` largest are sent, in ``values`` of 2 bits,
        and residuals decay. A chunk is a run of entries in memory, where the paper has tiles. Values are rounded to
        the nearest of three levels, where it has four. Source: arXiv 2508.15706, Algorithm 1."""
        compress = TopK(k / chunk, BucketTopK(chunk, k), values=values, combine="allgather")
        return cls(model, comm, inner_optimizer, every=every, outer=outer, compress=compress, decay=decay)

    @property
    def rounds(self) -> int:
        """How many exchanges there were."""
        return self._round

    def close(self) -> None:
        """Takes the hooks off the inner optimizer, which another DiLoCo may have then. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        if (own := _of_optimizers.get(self._optimizer)) is not None and own() is self:
            del _of_optimizers[self._optimizer]

    def _before_step(self, *_: Any) -> None:
        """Before the first step: weights that were loaded after this was made are no move of a replica."""
        if not self._has_begun:
            self._has_begun = True
            for name, common in self._common.items():
                common.data.copy_(self._parameters[name].detach())

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _is_within_step(optimizer):
            return
        self._steps += 1
        if self._steps == self._every:
            self.exchange()

    def exchange(self) -> None:
        """Ends the round now. All ranks call it after as many steps. Without a step since the last round it does
        nothing, unless ``every`` is ``None``.

        Raises ``ValueError`` where the model has got other parameters that require a gradient.
        """
        if self._steps == 0 and self._every is not None:
            return
        self._check_parameters()
        self._before_step()  # where all of them were skipped
        self._gather_moves()
        fault = self._diverged() or find_fault(self._compressor, self._layout, self._moved, self._sparse)
        if fault is not None:
            error = NonFiniteGradient(
                f"rank {self._comm.rank}, round {self._round} after {self._steps} steps: {fault.text}: lower the inner "
                "learning rate, or clip",
                rank=self._comm.rank,
                parameter=fault.parameter,
            )
            self._comm.abort(f"{type(error).__name__}: {error}")
            raise error
        undoable = (self._compressor, *self._exchange.undoable)
        for one in undoable:
            one.begin()
        try:
            self._average()
        except BaseException:
            for one in undoable:
                one.drop_step()
            raise
        for one in undoable:
            one.keep_step()
        for name, offset, size in self._spans:
            average = torch.from_numpy(self._moved[offset : offset + size])
            self._common[name].grad = average.view_as(self._common[name])
        self.outer.step()
        self._round, self._steps = self._round + 1, 0
        if self._verify and self._round % self._verify == 0:
            self._check_same()
        self._write_parameters()

    @torch.no_grad()
    def _gather_moves(self) -> None:
        for name, offset, size in self._spans:
            common, own = self._common[name], self._parameters[name]
            moved = torch.from_numpy(self._moved[offset : offset + size]).view_as(common)
            moved.copy_(own.detach())
            torch.sub(common, moved, out=moved)

    def _diverged(self) -> Fault | None:
        for name, offset, size in self._spans:
            if count := count_nonfinite(self._moved[offset : offset + size]):
                return Fault(name, f"{count} of {size} entries of {name!r} have become NaN or infinite in training")
        return None

    def _average(self) -> None:
        buffers = self._float_buffers()
        flat = torch.cat([one.detach().float().cpu().reshape(-1) for one in buffers]) if buffers else None
        if not self._sparse:
            sending = self._exchange.send_densely(self._moved)
        else:
            self._decay_residuals()
            sending = self._exchange.send(self._layout, self._moved, sound=True)
        if flat is not None:
            self._comm.all_reduce(flat, "avg")
        for work in sending.works:
            work.wait()
        sending.write()
        sending.keep()
        if flat is not None:
            _write_parts(buffers, flat)

    def _decay_residuals(self) -> None:
        if self._decay == 1:
            return
        for entry in self._compressor.residuals:
            self._compressor.residuals.about_to_change(entry)
            entry.values *= np.float32(self._decay)
            entry.peak *= self._decay

    @torch.no_grad()
    def _write_parameters(self) -> None:
        for name, common in self._common.items():
            self._parameters[name].copy_(common)

    def _check_parameters(self) -> None:
        known = {*map(id, self._parameters.values())}
        now = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        other = [name for name, one in now.items() if id(one) not in known]
        other += [name for name, one in self._parameters.items() if not one.requires_grad]
        if other:
            text = (
                f"{other[0]!r} was frozen or unfrozen after DiLoCo was made: close() this one, and make another with "
                "the optimizer of all parameters that are trained"
            )
            self._comm.abort(f"ValueError: {text}")
            raise ValueError(text)

    def _check_same(self) -> None:
        told = self._comm.all_gather(np.array([self.checksum(), self._round], np.int64)).reshape(-1, 2)
        others = np.flatnonzero((told != told[0]).any(axis=1))
        if others.size:
            other = int(others[0])
            theirs, ours = told[other, 1], told[0, 1]
            if theirs != ours:
                text = (
                    f"rank {other} has ended round {theirs} and rank 0 round {ours}: load a state_dict() of one moment "
                    "on all ranks"
                )
            else:
                text = (
                    f"the common parameters of rank {other} and rank 0 differ after round {ours}: they were changed "
                    "from outside, or the ranks' CPUs round differently"
                )
            self._comm.abort(text)
            raise TransportError(text, rank=self._comm.rank, peer=other, operation="DiLoCo.exchange")

    def checksum(self) -> int:
        """CRC-32 of the common parameters' bytes, the same on all ranks after a round."""
        found = 0
        for one in self._common.values():
            found = zlib.crc32(one.detach().contiguous().numpy().data.cast("B"), found)
        return found

    def _float_buffers(self) -> list[Tensor]:
        return [one for one in self._model.buffers() if one.is_floating_point() and one.numel()]

    @torch.no_grad()
    def _copy_from_rank_0(self) -> None:
        trained = {*map(id, self._parameters.values())}
        frozen = [one for one in self._model.parameters() if id(one) not in trained]
        for one in (*self._common.values(), *frozen, *self._model.buffers()):
            held = one.detach().cpu().contiguous().clone()
            flat = held.view(-1).view(torch.uint8) if held.dim() else held.reshape(1).view(torch.uint8)
            if flat.numel():
                self._comm.broadcast(flat, 0)
                one.copy_(flat.view(held.dtype).view_as(one))
        self._write_parameters()

    def state_dict(self) -> dict[str, Any]:
        """A copy of what training needs to go on bitwise, beside the model's and the inner optimizer's states.

        That is the common parameters, the outer optimizer, this rank's residuals, the round and the steps in it.
        ``telegrad.ddp.reshard`` makes the states of another number of replicas.
        """
        return {
            **state_of(self._comm, self._round, self._config, self._compressor, MemoryOrders({})),
            "inner_steps": self._steps,
            "replica": {name: one.detach().cpu().clone() for name, one in self._replica().items()},
            "common": {name: one.detach().clone() for name, one in self._common.items()},
            "outer": copy.deepcopy(self.outer.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict()`` gave on this rank, with the weights and buffers of its replica.

        Load the states of the model and the inner optimizer before or after. Raises ``ValueError`` for a state of
        another model, rank or number of ranks; then nothing is changed.
        """
        step = checked_step(state, self._comm, "DiLoCo")
        steps = checked_count(state.get("inner_steps", 0), "state['inner_steps']")
        common: Any = state.get("common")
        replica: Any = state.get("replica")
        if _shapes_of(common) != _shapes_of(self._common) or _shapes_of(replica) != _shapes_of(self._replica()):
            raise ValueError(
                "state['common'] is not of this model: load what state_dict() gave with the same parameters"
            )
        if self._every is not None and steps >= self._every:
            raise ValueError(
                f"state['inner_steps']={steps} is no step of a round of every={self._every}: use the same every="
            )
        before = copy.deepcopy(self.outer.state_dict())
        if not isinstance(state.get("outer"), Mapping) or not before.keys() <= state["outer"].keys():
            raise ValueError("state has no 'outer' of an optimizer: it must come from DiLoCo.state_dict()")
        self.outer.load_state_dict(copy.deepcopy(state["outer"]))  # which would share its tensors
        try:
            self._compressor.load_state_dict(state["compressor"])
        except ValueError:
            self.outer.load_state_dict(before)
            raise
        with torch.no_grad():
            for name, one in self._common.items():
                one.copy_(common[name])
            for name, held in self._replica().items():
                held.copy_(replica[name])
        self._round, self._steps, self._has_begun = step, steps, True

    def _replica(self) -> dict[str, Tensor]:
        """What ranks may have different in the middle of a round."""
        buffers = {f"buffer {name}": one for name, one in self._model.named_buffers()}
        return {**self._parameters, **buffers}


def _is_within_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that has ended was called by another step of the same optimizer. torch 2.13 runs the hooks for
    both where a class's ``step()`` calls that of torch's class, once such a one was made in the process."""
    calls, frame = 0, sys._getframe(2)
    while frame.f_back is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _STEP_WRAPPER_FILE:
            calls += next(iter(frame.f_locals.get("args", ())), None) is optimizer
        frame = frame.f_back
    return calls > 1


def _checked_parameters(model: Any, inner_optimizer: Any) -> dict[str, nn.Parameter]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give the torch.nn.Module that this rank trains")
    if any(isinstance(one, nn.parallel.DistributedDataParallel) for one in model.modules()):
        raise TypeError("model is a DistributedDataParallel: DiLoCo takes replicas of one rank, so give it ddp.module")
    if not isinstance(inner_optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"inner_optimizer is a {type(inner_optimizer).__name__}: give the torch.optim.Optimizer that steps"
        )
    if (other := _of_optimizers.get(inner_optimizer)) is not None and other() is not None:
        raise ValueError("inner_optimizer belongs to another DiLoCo: close() that one first")
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for name, one in parameters.items():
        if isinstance(one, DTensor):
            raise TypeError(f"parameter {name!r} is a DTensor: DiLoCo takes replicas of one rank, without fully_shard")
        if one.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"parameter {name!r} is {one.dtype}: DiLoCo takes float32, bfloat16 and float16")
    held = {id(one) for group in inner_optimizer.param_groups for one in group["params"]}
    missing = [name for name, one in parameters.items() if id(one) not in held]
    if not parameters or len(missing) == len(parameters):
        raise ValueError("inner_optimizer steps no parameter of the model: give the optimizer of this model")
    if missing:
        raise ValueError(
            f"inner_optimizer does not step {missing[0]!r}: give one optimizer of all parameters, or set requires_grad "
            "to False"
        )
    return parameters


def _held(parameter: nn.Parameter) -> nn.Parameter:
    """A float32 copy in host memory."""
    return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32).copy_(parameter.detach()))


@torch.no_grad()
def _write_parts(tensors: Iterable[Tensor], flat: Tensor) -> None:
    start = 0
    for one in tensors:
        one.copy_(flat[start : start + one.numel()].view_as(one))
        start += one.numel()


def _checked_decay(decay: Any, *, compressed: bool) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)):
        raise TypeError(f"decay={decay!r} must be a number in (0, 1]")
    if not 0 < decay <= 1 or math.isnan(decay):
        raise ValueError(f"decay={decay} must be in (0, 1]: what a residual is multiplied by in each round")
    if decay != 1 and not compressed:
        raise ValueError(f"decay={decay} is not used without compress=, which keeps residuals: leave it out")
    return float(decay)


def _checked_outer(outer: Any, common: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(outer, torch.optim.Optimizer) or not callable(outer):
        raise TypeError(
            f"outer={outer!r:.80} must be a function of the parameters that makes an optimizer, as "
            "outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)"
        )
    made = outer(list(common.values()))
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"outer made a {type(made).__name__}: it must return a torch.optim.Optimizer")
    return made


def _shapes_of(tensors: Any) -> Any:
    return {name: tuple(one.shape) for name, one in tensors.items()} if isinstance(tensors, Mapping) else None


def _settings_of(optimizer: torch.optim.Optimizer) -> str:
    groups = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"
