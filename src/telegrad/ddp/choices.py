"""Warnings about choices that work but train worse than they need to, such as AdamW on sparse averages from the first
step. Each is one sentence with the remedy, once in a process, on rank 0.

docs/how-to/choose-what-is-sent.md lists them. A set-up that is only perhaps wrong gives none.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from telegrad.compress import Compressor
from telegrad.ddp.options import LowRank, Warmup
from telegrad.errors import ChoiceWarning

SETTING = "TELEGRAD_WARN"
"""``0``: no ``ChoiceWarning``."""

_WITH_MOMENTS = re.compile(r"adam|lamb(?!da)", re.IGNORECASE)
_SGD = re.compile("sgd", re.IGNORECASE)
_STEPS = 32  # on sparse averages, in which clipping is looked for
_AGREE = 3  # steps that must show the same limit
_PARAMETERS, _PREFIX, _ENTRIES = 4, 1 << 16, 16  # of so many small parameters, of their first entries, the largest ones
_SAME, _SAME_VALUE = 1e-4, 1e-6
_ROUNDING, _ROUNDING_OF_BF16 = 1e-4, 1e-2  # by how much factors of entries may differ

_told: set[str] = set()
_lock = threading.Lock()


def warns() -> bool:
    """Whether the environment leaves these warnings on."""
    return os.environ.get(SETTING) != "0"


def tell(choice: str, message: str, *, rank: int) -> None:
    """A ``ChoiceWarning``, if this is rank 0 and nothing was said of that ``choice`` in this process."""
    if rank != 0 or not warns():
        return
    with _lock:
        if choice in _told:
            return
        _told.add(choice)
    warnings.warn(message, ChoiceWarning, stacklevel=program_level())


def program_level() -> int:
    """The ``stacklevel`` with which the caller's ``warnings.warn`` names the line of the program that led to it, such
    as that of its ``backward()``."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("telegrad", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def tell_of_clipping(limit: str, remedy: str, *, norm: str = "…", rank: int) -> None:
    """``limit``: who clips averages to what; ``remedy``: what to do instead of that."""
    tell(
        "clipping",
        f"{limit}, which cuts off what sparse averages hold of earlier steps: {remedy}, and give telegrad "
        f"clip_norm={norm} if gradients must be clipped (docs/how-to/clipping.md)",
        rank=rank,
    )


def tell_of_local_clipping(norm: float, *, rank: int) -> None:
    """Of each rank's own gradient, where nothing is sparse."""
    tell(
        "local clipping",
        f"clip_norm={norm:g} shortens each rank's own gradient, which is for sparse averages and costs accuracy with "
        f"whole ones: leave it out, and call torch.nn.utils.clip_grad_norm_(parameters, {norm:g}) before "
        "optimizer.step() (docs/how-to/clipping.md)",
        rank=rank,
    )


def tell_of_resuming(what: str, remedy: str, *, rank: int) -> None:
    """``what`` shows that training resumes without the gradients that its ranks had not sent."""
    tell("resuming", f"{what}, so gradients that were not sent yet are lost: {remedy}", rank=rank)


def tell_of_nesting(model: torch.nn.Module, *, rank: int) -> None:
    """Of a DistributedDataParallel around another one that averages the same parameters."""
    for outer in model.modules():
        if not isinstance(outer, DistributedDataParallel):
            continue
        averaged = {
            id(one)
            for name, one in outer.module.named_parameters()
            if one.requires_grad and name not in outer.parameters_to_ignore
        }
        for inner in outer.module.modules():
            if isinstance(inner, DistributedDataParallel) and averaged.intersection(map(id, inner.parameters())):
                tell(
                    "nesting",
                    "the model is a DistributedDataParallel around another DistributedDataParallel, which averages all "
                    "values of the same gradients once more: wrap it once, as DistributedDataParallel(model)",
                    rank=rank,
                )
                return


def tell_of_nothing_compressed(compress: LowRank, *, rank: int) -> None:
    """Of a LowRank that finds no matrix which would travel as less than half."""
    tell(
        "nothing",
        f"{compress} compresses no parameter of this model, so all gradients are sent whole: give a lower rank= or "
        "small_elements=, or a TopK (docs/how-to/low-rank.md)",
        rank=rank,
    )


def tell_of_density(
    state: Mapping[str, Any], compressor: Compressor, config: Mapping[str, object], *, rank: int
) -> None:
    """``state``: a rank's, which was loaded into ``compressor``; ``config``: the options of this run, as it has them
    of the earlier one."""
    saved, earlier = state["compressor"], state.get("config", {})
    entries = [(saved["parameters"].get(one.name, {}).get("k", one.k), one.k, one.size) for one in compressor.residuals]
    falls = "falling" in (earlier.get("warmup"), config.get("warmup"))
    has_policy = earlier.get("policy") is not None or config.get("policy") is not None
    before, now = saved.get("density"), compressor.residuals.density
    if all(one == other for one, other, _ in entries) or (before == now and falls):
        return
    if before is None or has_policy:
        of_earlier, of_this, elements = map(sum, zip(*entries, strict=True))
        before, now = of_earlier / elements, of_this / elements
    remedy = "the policy= that it was saved with" if has_policy else f"compress=telegrad.TopK(density={before:g})"
    tell(
        "density",
        f"the checkpoint was saved with density={before:.2g}, and this run sends density={now:.2g}: give {remedy} to "
        "go on as before (docs/how-to/checkpoint.md)",
        rank=rank,
    )


class _Change(NamedTuple):
    """What was done to the entries of an average. ``kind``: ``"norm"``, and the factor that all of them have now; or
    ``"value"``, and what none exceeds now."""

    kind: str
    number: float


class _Sample(NamedTuple):
    """The largest of the first entries of a parameter's average, as they were when it had come."""

    parameter: torch.Tensor
    gradient: weakref.ref[torch.Tensor]
    version: int
    where: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, parameter: torch.Tensor) -> _Sample | None:
        """``None`` where there is no gradient in plain memory."""
        gradient = parameter.grad
        if gradient is None or _is_sharded(gradient) or gradient.device.type not in ("cpu", "cuda"):
            return None
        flat = _prefix(gradient)
        where = flat.abs().topk(min(_ENTRIES, flat.numel())).indices
        return cls(parameter, weakref.ref(gradient), gradient._version, where, flat[where])

    def change(self) -> _Change | None:
        """``None`` where it is none of these. The host waits for a GPU only where the gradient was written to."""
        gradient = self.parameter.grad
        if gradient is None or (self.gradient() is gradient and gradient._version == self.version):
            return None
        if _is_sharded(gradient) or gradient.device != self.where.device:
            return None
        before, now = self.values.double().cpu(), _prefix(gradient)[self.where].double().cpu()
        before, now = before[before != 0], now[before != 0]
        if before.numel() < 2 or not bool(before.isfinite().all() and now.isfinite().all()):
            return None
        tolerance = _ROUNDING if gradient.dtype == torch.float32 else _ROUNDING_OF_BF16
        factors, most = now / before, float(now.abs().max())
        factor = float(factors.mean())
        if 0 < factor < 1 - 10 * tolerance and bool(((factors - factor).abs() <= tolerance * factor).all()):
            return _Change("norm", factor)
        cut = before.abs() > most * (1 + tolerance)
        clipped = (now - before.clamp(-most, most)).abs() <= tolerance * most
        return _Change("value", most) if most > 0 and cut.sum() >= 2 and bool(clipped.all()) else None


def _prefix(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().reshape(-1)[:_PREFIX]


class _Clip(NamedTuple):
    """A step before which all entries were multiplied by ``factor``. ``norms``: after that, of all that is averaged and
    of the optimizer's parameters."""

    factor: float
    norms: tuple[float, float]

    def same_norm(self, other: _Clip) -> float | None:
        """The norm to which this factor and another one have led."""
        if math.isclose(self.factor, other.factor, rel_tol=_SAME):
            return None
        pairs = zip(self.norms, other.norms, strict=True)
        return next((one for one, two in pairs if math.isclose(one, two, rel_tol=_SAME)), None)


class ChoiceWatch:
    """Looks at the first steps of the optimizers that hold a parameter of ``averaged``, by name, which ``compressor``
    compresses. On rank 0 of the job.

    ``sparse``: whether only the largest entries are sent; ``warms_up``: whether all are at first. ``momentum`` and
    ``clipping``: whether it looks for these. Its owner tells it of each pass, until it ``is_over``."""

    def __init__(
        self,
        averaged: Mapping[str, torch.Tensor],
        compressor: Compressor,
        *,
        sparse: bool,
        warms_up: bool,
        momentum: bool,
        clipping: bool,
    ) -> None:
        compressed = [one for one in compressor.residuals if one.name in averaged]
        self._averaged = [*averaged.values()]
        self._compressed = {id(averaged[one.name]) for one in compressed}
        cut = [averaged[one.name] for one in compressed if sparse and one.k < one.size]
        self._sparse = {*map(id, cut)}
        self._sampled = sorted(cut, key=torch.Tensor.numel)[:_PARAMETERS] if clipping else []
        self._warms_up, self._looks_for_momentum = warms_up, momentum and compressor.momentum is None
        self._has_averages, self._steps_left = False, _STEPS
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._samples: list[_Sample] = []
        self._clips: list[_Clip] = []
        self._limits: list[float] = []
        self.is_loaded = False
        """Whether the owner has what an earlier run had not sent."""
        _follow(self)

    @property
    def is_over(self) -> bool:
        """Whether there is no more to look for."""
        return self._steps_left <= 0

    def after_last_bucket(self, *, warmed_up: bool) -> None:
        """Inside DistributedDataParallel's backward pass; ``averages_came`` follows when they have."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        with contextlib.suppress(RuntimeError):  # no pass is under way: somebody calls the hook by hand
            queue(lambda: queue(lambda: self.averages_came(warmed_up=warmed_up)))  # behind DDP's own, queued meanwhile

    def averages_came(self, *, warmed_up: bool) -> None:
        """From now on gradients are the averages of a pass. ``warmed_up``: it sent no more than later ones will."""
        self._has_averages, self._samples = True, []
        if warmed_up and self._sampled and not _is_captured(self._sampled[0]):
            with torch.no_grad():
                self._samples = [one for one in map(_Sample.of, self._sampled) if one is not None]
        self._steps_left -= warmed_up

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Of any optimizer, also of those that hold none of the parameters."""
        if not self._has_averages or (optimizer in self._seen and not self._samples):
            return
        if optimizer not in self._seen:
            self._seen.add(optimizer)
            self._look_at_state(optimizer)
            self._look_at_kind(optimizer)
        if self._samples:
            self._look_for_clipping(optimizer)

    def _look_at_state(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.is_loaded and any(
            _is_of_checkpoint(_remembered(optimizer, one), is_fused=bool(group.get("fused")))
            for group in optimizer.param_groups
            for one in group["params"]
            if id(one) in self._compressed
        ):
            tell_of_resuming(
                "the optimizer resumes from a checkpoint but the residuals begin at zero",
                "save state.state_dict() of each rank beside the model, and call state.load_state_dict() before the "
                "first step (docs/how-to/checkpoint.md)",
                rank=0,
            )

    def _look_at_kind(self, optimizer: torch.optim.Optimizer) -> None:
        kinds = [one.__name__ for one in type(optimizer).__mro__]
        has_moments, is_sgd = (any(map(kind.search, kinds)) for kind in (_WITH_MOMENTS, _SGD))
        for group in optimizer.param_groups:
            held = [one for one in group["params"] if id(one) in self._sparse]
            begins = not self.is_loaded and not any(_remembered(optimizer, one) for one in held)
            if held and has_moments and begins and not self._warms_up:
                tell(
                    "moments",
                    f"{kinds[0]} takes its first steps on sparse averages, which fill its moments with a few large "
                    "entries and slow training for long: send matrices of low rank, by "
                    "compress=telegrad.LowRank(), or all values at first, by "
                    "warmup=telegrad.Warmup(steps=total_steps // 10) (docs/how-to/adamw.md)",
                    rank=0,
                )
            if held and is_sgd and group.get("momentum") and self._looks_for_momentum:
                momentum = float(group["momentum"])
                tell(
                    "momentum",
                    f"{kinds[0]} has momentum={momentum:g}, which repeats entries that waited for several steps: let "
                    f"telegrad apply it, by momentum=telegrad.Momentum({momentum:g}) and optimizer=, which has "
                    "momentum=0 then (docs/how-to/sgd-momentum.md)",
                    rank=0,
                )

    def _look_for_clipping(self, optimizer: torch.optim.Optimizer) -> None:
        params = [one for group in optimizer.param_groups for one in group["params"]]
        ids = {*map(id, params)}
        changes = [one.change() for one in self._samples if id(one.parameter) in ids]
        self._samples = [one for one in self._samples if id(one.parameter) not in ids]
        limits = [one.number for one in changes if one is not None and one.kind == "value"]
        factors = [one.number for one in changes if one is not None and one.kind == "norm"]
        if limits:
            limit = max(limits)
            self._limits.append(limit)
            if sum(math.isclose(one, limit, rel_tol=_SAME_VALUE) for one in self._limits) >= _AGREE:
                what = f"averaged gradients are clipped to values of at most {limit:.3g} before step()"
                tell_of_clipping(what, "leave out clip_grad_value_", rank=0)
        if factors:
            clip = _Clip(factors[0], (_norm_of(self._averaged), _norm_of(params)))
            same = [norm for one in self._clips if (norm := clip.same_norm(one)) is not None]
            self._clips.append(clip)
            if len(same) >= _AGREE - 1:
                what = f"averaged gradients are clipped to a norm of {same[0]:.3g} before step()"
                tell_of_clipping(what, "leave out clip_grad_norm_", norm=f"{same[0]:.3g}", rank=0)


def _norm_of(parameters: Iterable[torch.Tensor]) -> float:
    """Of their gradients; NaN where some are sharded, whose norm all ranks would have to ask for."""
    gradients = [one.grad.detach() for one in parameters if one.grad is not None]
    return math.nan if any(map(_is_sharded, gradients)) else float(torch.nn.utils.get_total_norm(gradients))


def _is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def _remembered(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Mapping[str, Any]:
    """What an optimizer has of a parameter; nothing where it keeps that otherwise than torch's own."""
    state = getattr(optimizer, "state", None)
    entry = state.get(parameter) if isinstance(state, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def _is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_of_checkpoint(entry: Mapping[str, Any], *, is_fused: bool) -> bool:
    """Whether an optimizer has read what it remembers of a parameter. Every step writes to these tensors, which count
    that; those that were read have been written to once or twice. Not of what a fused optimizer writes uncounted."""
    step, velocity = entry.get("step"), entry.get("momentum_buffer")
    if any(isinstance(one, torch.Tensor) and _is_sharded(one) for one in (step, velocity)):
        return False
    if isinstance(step, torch.Tensor):
        return step._version <= 2 and float(step) > step._version + 2
    if step is not None or is_fused or not isinstance(velocity, torch.Tensor):
        return False
    versions = (1,) if velocity.device.type == "cpu" else (0, 1)  # 0: after one step here, or moved to a GPU
    return velocity._version in versions and bool(velocity.any())


def watch_choices(
    averaged: Mapping[str, torch.Tensor],
    compressor: Compressor,
    warmup: Warmup,
    *,
    rank: int,
    sparse: bool = True,
    momentum: bool = True,
    clipping: bool = True,
) -> ChoiceWatch | None:
    """A watch on the rank that warns, where something is compressed."""
    if rank != 0 or not warns() or not len(compressor.residuals):
        return None
    warms_up = warmup.steps > 0
    return ChoiceWatch(averaged, compressor, sparse=sparse, warms_up=warms_up, momentum=momentum, clipping=clipping)


_watches: weakref.WeakSet[ChoiceWatch] = weakref.WeakSet()
_handles: list[Any] = []


def _follow(watch: ChoiceWatch) -> None:
    """From now on it hears of the steps of all optimizers, while it lives."""
    with _lock:
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before_step))
        _watches.add(watch)


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():
        return
    with _lock:
        watches = [*_watches]
    for one in watches:
        one.before_step(optimizer)
