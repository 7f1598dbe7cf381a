"""The options that DDPState, Synchronizer, ReplicaSynchronizer and trainers share: what is compressed, momentum,
warm-up.

Each is a frozen object that checks its values when it is made. DDPState and the others check what depends on a model.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from typing import Any

import torch

from telegrad import _core
from telegrad.communicator import BoundedTopkState, OkTopkState
from telegrad.communicator.operands import check_block_wire, formats_named, on_device
from telegrad.compress import (
    BucketTopK,
    ByShape,
    BySize,
    Compressor,
    ParameterCompression,
    ParameterInfo,
    Policy,
    Selection,
    Velocities,
)
from telegrad.compress.arguments import checked_count
from telegrad.compress.compressor import FEEDBACK
from telegrad.compress.policies import check_selections, compressions_of
from telegrad.compress.residual import check_density
from telegrad.ddp.backward_watch import check_no_optimizer_in_backward
from telegrad.ddp.bucket import COMPRESSIBLE, check_dtype
from telegrad.ddp.gradient_scales import check_without_momentum

Named = dict[str, torch.nn.Parameter]

COMBINE = ("allreduce", "oktopk", "gtopk", "bounded", "allgather")
"""What ``combine=`` can be: how the ranks' entries meet. Summed, all of them (SparCML); summed, of which all ranks
together keep about as many as each selects (Ok-Topk; gTopk; bounded, in messages of fixed sizes); or gathered by every
rank, which adds them itself (the simplest)."""
QUANTISED = ("bf16", "int8", "qsgd8", "qsgd4")
"""Formats of dense sums whose rounding errors error feedback bears, and in which no finite float32 overflows."""
FACTOR_VALUES = ("int8", "f32")
"""Of the two matrices of a LowRank. In 8 bits they learn as in 32, and a higher rank is worth more than 16 bits. In 4
bits a lower rank with 8 learns more from as many bytes. QSGD's 8 bits do as well, but choose at random."""
WARMUPS = ("dense", "falling")
FALLING = (0.25, 0.0625, 0.0156, 0.004, 0.001)
"""Densities of equally long stages. Source: Deep Gradient Compression, as RedSync's appendix C quotes it."""


def check_choice(value: object, argument: str, choices: tuple[str, ...]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{argument}={value!r} does not exist: use one of {', '.join(choices)}")


def _check_policy(policy: object, kind: type) -> None:
    if not callable(policy):
        raise TypeError(
            f"policy is a {type(policy).__name__}: give a {kind.__name__}, or a function from ParameterInfo to "
            "ParameterCompression"
        )


def _check_left_out(name: str, value: object, default: object) -> None:
    if value != default:
        raise ValueError(
            f"{name}={value!r} is not used with policy=, which says how each parameter is sent: leave one of the two "
            "out"
        )


def _checked_names(output: Any) -> tuple[str, ...]:
    if isinstance(output, str):
        raise TypeError(f"output={output!r} must be a list of names: output=[{output!r}]")
    if not isinstance(output, Iterable):
        raise TypeError(f"output={output!r} must be a list of names, as named_parameters() gives them")
    return tuple(output)


def _checked_formats(given: str | Sequence[str]) -> tuple[str, ...]:
    """Of dense sums. Raises ``ValueError`` for what is none."""
    if not isinstance(given, Iterable):
        raise TypeError(f"values={given!r} must be one or more of {', '.join(QUANTISED)}")
    formats = (given,) if isinstance(given, str) else tuple(given)
    for one in formats:
        check_choice(one, "values", QUANTISED)
    if not formats or len({*formats}) < len(formats):
        raise ValueError(f"values={given!r} must name one or more of {', '.join(QUANTISED)}, each once")
    return formats


@dataclass(frozen=True, slots=True)
class OkTopk:
    """Settings of Ok-Topk, for other values than its defaults: ``TopK(combine=OkTopk(threshold_every=64))``.

    - ``boundaries_every`` (τ of the paper): steps between two finer checks of the slices that ranks own.
    - ``threshold_every`` (τ′): steps between two exact thresholds of the sum.
    - ``balance_factor``: long or very unlike shares are balanced if one rank has over this times the mean; at least 1.

    Raises ``TypeError`` and ``ValueError``. Source: Li, Hoefler, PPoPP 2022, Algorithm 1."""

    boundaries_every: int = 64
    threshold_every: int = 32
    balance_factor: float = 4.0

    def __post_init__(self) -> None:
        self.state(1)

    def state(self, k: int, tensors: Sequence[Sequence[int]] = ()) -> OkTopkState:
        """The state of sums that keep about ``k`` entries of these ``tensors``."""
        return OkTopkState(k, **asdict(self), tensors=tensors)


@dataclass(frozen=True, slots=True)
class BoundedTopk:
    """Settings of top-k sums in messages of fixed sizes, for other values than their defaults:
    ``TopK(combine=BoundedTopk(slack=2))``.

    - ``slack``: a message has room for ``ceil(slack k / P)`` entries; at least 1. Entries that do not fit stay in the
      residual: raise it where ``state.stats.overflow`` is a large part of ``selected``.
    - ``boundaries_every``: steps between two cuts of the slices that ranks own.

    Raises ``TypeError`` and ``ValueError``."""

    slack: float = 1.5
    boundaries_every: int = 64

    def __post_init__(self) -> None:
        self.state(1)

    def state(self, k: int) -> BoundedTopkState:
        """The state of sums that keep about ``k`` entries."""
        return BoundedTopkState(k, **asdict(self))


Combine = str | OkTopk | BoundedTopk
"""Types of ``combine=``."""


@dataclass(frozen=True)
class TopK:
    """Sends only the largest entries of each gradient. The residual on each rank keeps the other entries, and telegrad
    adds it to the next gradient (error feedback).

    - ``density``: the share of each compressed parameter's entries that is sent, in (0, 1].
    - ``select``: the rule that chooses them: a name in ``telegrad.compress.SELECTIONS``, or a selection.
    - ``interval``: steps between two exact thresholds, for selections that reuse one (``None``: their own).
    - ``small_elements``: parameters of at most this many elements are sent dense.
    - ``same_sign``: a step sends entries of one sign, as their mean.
    - ``output``: names of the output layer's parameters, to which ``same_sign`` does not apply. ``None``: the last
      parameter with two dimensions or more.
    - ``values``: the format of values in messages, such as ``"packed-bf16"`` or ``"qsgd4"``: the names that ``wire`` of
      ``Communicator.all_reduce`` takes. The rounding error stays in the residual.
    - ``combine``: how ranks combine entries. ``"allreduce"``: the sum of all. ``"oktopk"``, or an ``OkTopk``: about
      ``density`` of the sum's entries; no rank's traffic grows with the number of ranks. ``"gtopk"``: the same by a
      tree. ``"bounded"``, or a ``BoundedTopk``: the same in messages of fixed sizes. ``"allgather"``: every rank gets
      every rank's entries.
    - ``feedback``: residuals hold ``"gradients"``, or ``"steps"``: gradients times the learning rate of their step.
      Then a change of the rate does not change the weight of unsent gradient. It needs ``optimizer=``.
    - ``policy``: options for each parameter: a ``BySize``, or a function from ParameterInfo to ParameterCompression.

    ``TopK.sparcml``, ``TopK.redsync`` and ``TopK.oktopk`` are the choices of papers. ``dataclasses.replace`` changes a
    field. Raises ``TypeError`` and ``ValueError`` that name the argument."""

    density: float = 0.01
    select: str | Selection = "reused"
    interval: int | None = None
    small_elements: int = 2048
    same_sign: bool = False
    output: Sequence[str] | None = None
    values: str = "auto"
    combine: Combine = "allreduce"
    feedback: str = "gradients"
    policy: Policy | None = None

    def __post_init__(self) -> None:
        check_density(self.density)
        check_selections(
            {"select": self.select, "large": "reused"},
            ("large_elements", None),
            self.interval,
            same_sign=self.same_sign,
        )
        checked_count(self.small_elements, "small_elements")
        if self.output is not None:
            object.__setattr__(self, "output", _checked_names(self.output))
            if not self.same_sign and self.policy is None:
                raise ValueError(
                    f"output={self.output!r} is not used without same_sign=True or policy=: leave it out, or give one"
                )
        if self.policy is not None:
            _check_policy(self.policy, BySize)
            for name in ("density", "select", "interval", "small_elements", "same_sign"):
                _check_left_out(name, getattr(self, name), getattr(TopK, name))
        self._check_values()
        check_choice(self.feedback, "feedback", FEEDBACK)

    def _check_values(self) -> None:
        if self.values is None:  # for all_reduce it means the default
            raise ValueError("values=None does not exist: use 'auto', or leave it out")
        formats_named(self.values, "f32", argument="values")
        if not isinstance(self.combine, (OkTopk, BoundedTopk)):
            check_choice(self.combine, "combine", COMBINE)
        if self.combine == "bounded" or isinstance(self.combine, BoundedTopk):
            check_block_wire(self.values, "combine='bounded'", argument="values")

    @property
    def per_parameter(self) -> Policy:
        """How each parameter is sent."""
        if self.policy is not None:
            return self.policy
        return BySize(
            density=self.density,
            small_elements=checked_count(self.small_elements, "small_elements"),
            middle=self.select,
            interval=self.interval,
            same_sign=self.same_sign,
        )

    @classmethod
    def sparcml(
        cls, per_bucket: int = 8, *, bucket_elements: int = 512, values: str = "qsgd4", feedback: str = "steps"
    ) -> TopK:
        """SparCML's choices: the ``per_bucket`` largest of every ``bucket_elements`` consecutive entries, in 4-bit
        values.

        Residuals hold steps, so pass ``optimizer=`` too. Source: Renggli et al., SC 2019, Algorithm 1 and §8.3
        (8 or 16 of 512 for CIFAR-10, 2 for ATIS)."""
        select = BucketTopK(bucket_elements, per_bucket)
        return cls(per_bucket / bucket_elements, select, values=values, feedback=feedback)

    @classmethod
    def redsync(cls, density: float = 0.001, *, same_sign: bool = False) -> TopK:
        """RedSync's choices: tensors up to 128 KB dense, up to 4 MB by trimmed top-k, larger ones by threshold search.

        ``same_sign``: its quantisation, entries of one sign at a time as their mean. See ``BySize.redsync``. Source:
        Fang et al., RedSync (preprint), §2.1 and §3.3."""
        return cls(policy=BySize.redsync(density, same_sign=same_sign))

    @classmethod
    def oktopk(
        cls,
        density: float = 0.01,
        *,
        boundaries_every: int = 64,
        threshold_every: int = 32,
        balance_factor: float = 4.0,
        slack: float | None = None,
        feedback: str = "steps",
    ) -> TopK:
        """Ok-Topk's choices: a threshold of each rank's own entries, and one of the sum, by magnitude / v^(1/4) with v
        the mean square of a tensor's sums. Residuals hold steps, so pass ``optimizer=`` too, or
        ``feedback="gradients"``. Intervals and factor: see ``OkTopk``. ``slack``: sums go in messages of fixed sizes,
        with so much room (``BoundedTopk``). Raises ``ValueError`` for a ``balance_factor`` beside ``slack``. Source:
        Li, Hoefler, PPoPP 2022, Algorithms 1 and 2, which compare magnitudes."""
        combine: Combine = OkTopk(boundaries_every, threshold_every, balance_factor)
        if slack is not None:
            if balance_factor != 4.0:
                raise ValueError(f"balance_factor={balance_factor!r} is not used with slack={slack!r}: leave one out")
            combine = BoundedTopk(slack, boundaries_every)
        return cls(density, interval=threshold_every, combine=combine, feedback=feedback)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Sends each gradient matrix as the product of two narrow ones (PowerSGD). A residual keeps the rest on its rank,
    and adds it to the next gradient (error feedback).

    ``rank``: how many columns each of the two has, at least 1; 4 to 32 are usual. A matrix of n rows and m columns
    travels as rank * (n + m) numbers. If a parameter has more dimensions, the first one makes the rows.
    ``small_elements``: parameters of at most so many elements are sent whole. So are those with one dimension, and
    those of which more than half would travel.
    ``values``: the format of the two matrices in messages, and of parameters that are sent whole: ``"int8"`` or
    ``"f32"``. The rounding error stays in the residual.
    ``policy``: instead of ``rank`` and ``small_elements``, how each parameter is sent: a ``ByShape``, or a function
    from ParameterInfo to ParameterCompression. It may mix products, largest entries and dense parameters.
    The optimizer applies momentum.
    Raises ``TypeError`` and ``ValueError``.
    Source: Vogels, Karimireddy, Jaggi, NeurIPS 2019, Algorithms 1 and 2."""

    rank: int = 16
    small_elements: int = 2048
    values: str = "int8"
    policy: Policy | None = None

    def __post_init__(self) -> None:
        check_choice(self.values, "values", FACTOR_VALUES)
        plain = ByShape(self.rank, self.small_elements)
        object.__setattr__(self, "rank", plain.rank)
        object.__setattr__(self, "small_elements", plain.small_elements)
        if self.policy is not None:
            _check_policy(self.policy, ByShape)
            for name in ("rank", "small_elements"):
                _check_left_out(name, getattr(self, name), getattr(ByShape, name))

    @property
    def per_parameter(self) -> Policy:
        """How each parameter is sent."""
        return ByShape(self.rank, self.small_elements) if self.policy is None else self.policy

    def as_topk(self, parameters: Mapping[str, torch.nn.Parameter]) -> TopK:
        """How the largest entries of those ``parameters`` travel that the policy does not make matrices."""
        encodes = all(one.dtype == torch.float32 for one in parameters.values() if one.dtype in COMPRESSIBLE)
        return TopK(values=self.values if encodes and self.values != "f32" else "auto")


@dataclass(frozen=True)
class Quantised:
    """Sends all values of a float32 gradient, rounded to fewer bits. The residual on each rank keeps the rounding
    error.

    - ``values``: ``"bf16"``, ``"int8"``, ``"qsgd8"`` or ``"qsgd4"``; with several, each group uses the cheapest.
    - ``small_elements``, ``feedback`` and ``policy``: as for ``TopK``. Only a policy's choice of dense parameters
      counts.

    Raises ``TypeError`` and ``ValueError`` that name the argument."""

    values: str | Sequence[str]
    small_elements: int = 2048
    feedback: str = "gradients"
    policy: Policy | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _checked_formats(self.values))
        self.as_topk()  # which looks at the others

    def as_topk(self) -> TopK:
        """The ``TopK`` that says which parameters are rounded."""
        return TopK(small_elements=self.small_elements, feedback=self.feedback, policy=self.policy)


@dataclass(frozen=True)
class Cheapest:
    """Lets the Synchronizer's measured plan choose the cheapest format for each group of parameters: dense, the entries
    of ``topk``, or one of the formats ``values`` (as for ``Quantised``). Groups are sent dense until there is a plan.
    It needs ``plan="auto"`` or ``"optimal"``."""

    topk: TopK = TopK()
    values: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.topk, TopK):
            raise TypeError(f"topk is a {type(self.topk).__name__}: give a telegrad.TopK, as TopK(density=0.01)")
        object.__setattr__(self, "values", () if self.values == () else _checked_formats(self.values))


@dataclass(frozen=True, slots=True)
class Momentum:
    """Momentum correction for SGD: each rank applies the momentum to its own gradients, before entries are chosen. So
    an entry that was unsent for long does not get all its momentum at once. Use an SGD with ``momentum=0``, passed as
    ``optimizer=``.

    ``factor``: in (0, 1). ``nesterov``: as in SGD. ``masking``: entries that were sent have their momentum set to zero,
    so that no stale direction is repeated. Raises ``TypeError`` and ``ValueError``. Sources: RedSync, Algorithm 4; Deep
    Gradient Compression, §3."""

    factor: float
    _: KW_ONLY
    nesterov: bool = False
    masking: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.factor, bool) or not isinstance(self.factor, numbers.Real):
            raise TypeError(f"factor={self.factor!r} must be a number in (0, 1), as Momentum(0.9)")
        if not 0 < self.factor < 1:
            raise ValueError(
                f"factor={self.factor} must be in (0, 1), as Momentum(0.9); without any leave momentum= out"
            )
        for name, flag in (("nesterov", self.nesterov), ("masking", self.masking)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r} must be True or False")


@dataclass(frozen=True, slots=True)
class Warmup:
    """Sends more in the first ``steps`` of a training: all entries (``kind="dense"``, RedSync's choice), or with
    ``"falling"`` 25 % of them and in five stages down to 0.1 % or the density. Raises ``TypeError`` and ``ValueError``.
    """

    steps: int
    kind: str = "dense"

    def __post_init__(self) -> None:
        if isinstance(self.steps, float):
            part = self.steps if 0 < self.steps < 1 else 0.1
            raise TypeError(
                f"steps={self.steps!r} must be an int, the number of the optimizer's first steps: for a part of all "
                f"give Warmup(steps=int({part!r} * total_steps))"
            )
        object.__setattr__(self, "steps", checked_count(self.steps, "steps"))
        check_choice(self.kind, "kind", WARMUPS)

    def is_dense(self, step: int) -> bool:
        """Whether everything is sent in this step, counted from 0."""
        return self.kind == "dense" and step < self.steps

    def least_density(self, step: int) -> float:
        """The density below which this step sends no tensor; 0: each tensor's own."""
        if self.kind == "dense" or step >= self.steps:
            return 0.0
        return FALLING[step * len(FALLING) // self.steps]


Compress = TopK | LowRank | Quantised | Cheapest


AUTO = "auto"


def resolved_compress(compress: Any, momentum: object, warmup: object) -> Any:
    """What ``compress`` stands for. ``"auto"``: a ``LowRank``, which suits every optimizer; a ``TopK`` with options
    that only it has. See docs/results/accuracy.md and docs/results/adamw.md."""
    if not isinstance(compress, str) or compress != AUTO:
        return compress
    return TopK() if momentum is not None or getattr(warmup, "kind", None) == "falling" else LowRank()


def averages_are_whole(compress: object) -> bool:
    """Whether averages of what ``resolved_compress`` gave hold all entries of a step, and are clipped as without it."""
    return compress is None or (isinstance(compress, LowRank) and compress.policy is None)


def check_objects(compress: object, momentum: object, warmup: object, *, kinds: tuple[type, ...] = (TopK,)) -> None:
    """Raises ``TypeError``, with the remedy, for what is none of the objects, and ``ValueError`` for what plain
    averaging does not use."""
    if isinstance(compress, type):
        raise TypeError(f"compress is the class {compress.__name__}: call it, as {compress.__name__}()")
    if compress is not None and not isinstance(compress, kinds):
        if isinstance(compress, (Quantised, Cheapest)):
            raise TypeError(
                f"compress is a {type(compress).__name__}, which is for a Synchronizer that plans: give a telegrad.TopK"
            )
        names = " or ".join(f"telegrad.{kind.__name__}" for kind in kinds)
        raise TypeError(f"compress={compress!r} must be a {names}, as TopK(density=0.01), or None: plain averages")
    if momentum is not None and not isinstance(momentum, Momentum):
        raise TypeError(f"momentum={momentum!r} must be a telegrad.Momentum, as Momentum(0.9), or None")
    if isinstance(compress, LowRank):
        if momentum is not None:
            raise ValueError(
                f"momentum={momentum!r} is not used with a LowRank, whose averages hold all directions that matter: "
                "leave momentum to the optimizer"
            )
        if isinstance(warmup, Warmup) and warmup.kind != "dense":
            raise ValueError(f"warmup={warmup!r} raises a density, which a LowRank has not: use kind='dense'")
    if warmup is None:
        return
    if not isinstance(warmup, Warmup):
        raise TypeError(f"warmup={warmup!r} must be a telegrad.Warmup, as Warmup(steps=500), or None")
    if compress is None and warmup.steps:
        raise ValueError(f"warmup={warmup!r} is not used with compress=None, which sends all values: leave it out")


def plain_options(
    compress: Compress | None, momentum: Momentum | None, warmup: Warmup | None, **others: object
) -> dict[str, object]:
    """Options as a checkpoint may hold them, and as ranks compare them: numbers, texts and ``None`` by name."""
    given: dict[str, object] = {"compress": None if compress is None else type(compress).__name__}
    topk = compress.topk if isinstance(compress, Cheapest) else compress
    if topk is not None:
        given |= {one.name: getattr(topk, one.name) for one in fields(topk) if one.name != "output"}
    if isinstance(compress, Cheapest):
        given["Cheapest.values"] = compress.values
    given |= {"momentum": 0.0} if momentum is None else {"momentum": momentum.factor, **_flags(momentum)}
    given |= {"warmup_steps": 0} if warmup is None else {"warmup_steps": warmup.steps, "warmup": warmup.kind}
    return {name: _plain(value) for name, value in (given | others).items()}


def _flags(momentum: Momentum) -> dict[str, bool]:
    return {"nesterov": momentum.nesterov, "masking": momentum.masking}


def _plain(value: object) -> object:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else repr(value)


def compressor_of(
    parameters: Mapping[str, torch.nn.Parameter],
    topk: TopK | None,
    momentum: Momentum | None,
    optimizer: torch.optim.Optimizer | None,
    held: Mapping[str, torch.Tensor] | None = None,
) -> Compressor:
    """A compressor of those ``parameters`` that ``topk`` does not leave dense (``None``: of none), with velocities of
    all where there is a ``momentum``. Those of other dtypes than float32 and bfloat16 always are dense. ``held``: what
    this rank has of the parameters, if not all of them."""
    large = {} if topk is None else parameters
    topk, own = topk or TopK(), parameters if held is None else held
    chosen = compressions_by(topk.per_parameter, large, topk.output)
    chosen = {name: one for name, one in chosen.items() if name in own}
    for name, one in chosen.items():
        if one.rank is not None:
            raise ValueError(
                f"policy says rank={one.rank} of parameter {name!r}: matrices of low rank are a LowRank's, so give "
                "compress=LowRank(policy=…)"
            )
    compressor = Compressor(
        {name: own[name].numel() for name in chosen},
        density=topk.density,
        densities={name: one.density for name, one in chosen.items()},
        selections={name: one.selection for name, one in chosen.items() if one.selection is not None},
        feedback=topk.feedback,
    )
    if momentum is not None:
        compressor.momentum = _velocities_of(own, momentum, optimizer)
    if topk.feedback == "steps" and optimizer is None:
        raise ValueError(
            "feedback='steps' needs optimizer=: residuals hold gradients times its learning rates; give it, or use "
            "feedback='gradients'"
        )
    return compressor


def compressions_by(
    policy: Policy, parameters: Mapping[str, torch.nn.Parameter], output: Sequence[str] | None = None
) -> dict[str, ParameterCompression]:
    """What ``policy`` says of those ``parameters`` that it does not leave dense. Raises ``TypeError`` and
    ``ValueError`` for what does not fit them."""
    outputs = _outputs(parameters, output)
    names: tuple[str, ...] = ()
    text = ""
    if isinstance(policy, BySize):
        names, text = policy.dense, "dense names"
    elif isinstance(policy, ByShape):
        names, text = policy.tables, "tables names"
    if parameters and (unknown := sorted(set(names) - parameters.keys())):
        raise ValueError(f"{text} {unknown[0]!r}, which the model does not have: use named_parameters()' names")
    infos = [
        ParameterInfo(name, one.numel(), one.dim(), name in outputs, tuple(one.shape))
        for name, one in parameters.items()
        if one.dtype in COMPRESSIBLE and one.numel()
    ]
    said = compressions_of(policy, infos)
    for info in infos:
        if said[info.name].rank is not None and info.dimensions < 2:
            raise ValueError(
                f"policy says rank={said[info.name].rank} of parameter {info.name!r} of shape {info.shape}: only those "
                "with two dimensions or more are matrices"
            )
    return {name: one for name, one in said.items() if one.selection is not None or one.rank is not None}


def compressed_by(compressor: Compressor) -> dict[str, tuple[int, str, bool]]:
    """Of each compressed parameter what its messages depend on, which all ranks must have alike."""
    found = {}
    for one in compressor.residuals:
        policy = compressor.policy_of(one)
        kind = "LowRank" if one.name in compressor.matrices else "whole"
        kind = type(policy).__name__ if compressor.selects(one.name) else kind
        found[one.name] = one.k, kind, getattr(policy, "same_sign", False)
    return found


def checked_parameters(named: Iterable[tuple[str, torch.nn.Parameter]]) -> tuple[Named, Named]:
    """Those that require a gradient, and the others, by name. Raises ``ValueError`` where there is none, and
    ``TypeError`` for a dtype that cannot be averaged."""
    parameters: Named = {}
    frozen: Named = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            frozen[name] = parameter
            continue
        check_dtype(parameter.dtype, name, on_device=on_device(parameter))
        parameters[name] = parameter
    if not parameters:
        raise ValueError("the model has no parameter that requires a gradient: give the one that is trained")
    check_no_optimizer_in_backward(parameters, "the DDP hook")
    return parameters, frozen


def encoding_of(topk: TopK, parameters: Mapping[str, torch.nn.Parameter]) -> _core.ValueEncoding:
    """How messages hold the values of gradients: native if none is rounded.

    Raises ``TypeError`` for values that a gradient cannot take, and ``ValueError`` where none may be rounded."""
    values = topk.values
    encodings = set()
    for name, parameter in parameters.items():
        if parameter.dtype not in COMPRESSIBLE:
            continue  # it is sent densely, as it is
        dtype = "f32" if parameter.dtype == torch.float32 else "bf16"
        try:
            encodings.add(formats_named(values, dtype).values)
        except TypeError as error:
            raise TypeError(
                f"values={values!r} does not fit parameter {name!r} of {parameter.dtype}: only float32 gradients can "
                "be encoded; use 'auto'"
            ) from error
    found = next((one for one in encodings if one != _core.ValueEncoding.native), _core.ValueEncoding.native)
    if found != _core.ValueEncoding.native and (
        topk.combine in ("gtopk", "bounded") or isinstance(topk.combine, BoundedTopk)
    ):
        raise ValueError(f"values={values!r} rounds values, which combine={topk.combine!r} does not: use values='auto'")
    return found


def _velocities_of(
    parameters: Mapping[str, torch.Tensor], momentum: Momentum, optimizer: torch.optim.Optimizer | None
) -> Velocities:
    for name, parameter in parameters.items():
        if parameter.dtype not in COMPRESSIBLE:
            raise TypeError(
                f"momentum= has float32 velocities, and parameter {name!r} is {parameter.dtype}: leave momentum to "
                "the optimizer, or leave that parameter out of the model that is averaged"
            )
    check_without_momentum(optimizer)
    sizes = {name: parameter.numel() for name, parameter in parameters.items() if parameter.numel()}
    return Velocities(sizes, momentum.factor, **_flags(momentum))


def _outputs(parameters: Mapping[str, torch.nn.Parameter], output: Sequence[str] | None) -> set[str]:
    if output is None:
        weights = [name for name, parameter in parameters.items() if parameter.dim() > 1]
        return set(weights[-1:])
    unknown = sorted(set(output) - parameters.keys())
    if unknown and parameters:
        raise ValueError(f"output names {unknown[0]!r}, which the model does not have: use named_parameters()' names")
    return set(output)
