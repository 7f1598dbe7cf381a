"""Selections by name, and policies: how each tensor of a model is sent, by its name, size and place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from telegrad.compress.arguments import checked_count, checked_whole
from telegrad.compress.baselines import BucketTopK, GaussianThreshold, RandomK
from telegrad.compress.residual import check_density
from telegrad.compress.selection import (
    ExactTopK,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    TrimmedTopK,
)

SELECTIONS: Mapping[str, type[Selection]] = {
    "reused": ReusedThreshold,
    "topk": ExactTopK,
    "trimmed": TrimmedTopK,
    "search": ThresholdSearch,
    "sampled": SampledThreshold,
    "buckets": BucketTopK,
    "gaussian": GaussianThreshold,
    "random": RandomK,
}
"""What ``select=`` can be. What each promises is in its docstring and in docs/reference/selection.md."""


def selection_named(
    name: str, interval: int | None = None, *, same_sign: bool = False, argument: str = "selection"
) -> Selection:
    """The policy of that name. ``interval``: for those that reuse a threshold, others have none; ``None``: their own.

    ``argument``: what the caller's one is called. ``same_sign``: entries of one sign at a time. Raises ``ValueError``
    and ``TypeError`` for what does not exist."""
    if name not in SELECTIONS:
        raise ValueError(f"{argument}={name!r} does not exist: use one of {', '.join(SELECTIONS)}")
    policy = SELECTIONS[name]
    options: dict[str, object] = {}
    if interval is not None:  # checked in any case
        interval = checked_whole(interval, "interval", 1, None, "calls from one exact threshold to the next")
        if _has(policy, "interval"):
            options["interval"] = interval
    if same_sign:
        if not _has(policy, "same_sign"):
            able = ", ".join(other for other in SELECTIONS if _has(SELECTIONS[other], "same_sign"))
            raise ValueError(f"same_sign=True does not fit {argument}={name!r}: use one of {able}, or leave it out")
        options["same_sign"] = True
    return policy(**options)


def reuses(selection: object) -> bool:
    """Whether it is the name of one that takes an ``interval``."""
    return isinstance(selection, str) and _has(SELECTIONS[selection], "interval")


def _has(policy: type[Selection], option: str) -> bool:
    return option in {field.name for field in dataclasses.fields(policy)}  # type: ignore[arg-type]


# How each tensor of a model is sent: a policy looks at its name, size and place and says.


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """The facts of a parameter that a policy can use."""

    name: str
    elements: int
    dimensions: int
    is_output: bool  # of the layer whose outputs are the model's
    shape: tuple[int, ...] = ()


def is_selection(given: object) -> bool:
    """Whether it is an object that selects, not a class of such."""
    return not isinstance(given, type) and hasattr(given, "capacity")


@dataclass(frozen=True, slots=True)
class ParameterCompression:
    """How a parameter is sent. ``selection=None``: dense, or for a ``LowRank`` by ``rank``: as a product of two
    matrices with so many columns each. ``density``: the share of entries that is sent, in (0, 1]."""

    selection: Selection | None = None
    density: float = 1.0
    rank: int | None = None

    def __post_init__(self) -> None:
        check_density(self.density)
        selection = self.selection
        if self.rank is not None:
            object.__setattr__(self, "rank", checked_whole(self.rank, "rank", 1, None, "the columns of two matrices"))
            if selection is not None or self.density != 1:
                raise ValueError(f"rank={self.rank} sends the whole matrix: leave selection and density out")
        if selection is not None and not is_selection(selection):
            raise TypeError(f"selection={selection!r} must be an object, as selection_named('topk') makes, or None")

    @property
    def same_sign(self) -> bool:
        """Whether all entries of a call have one sign: then they go as their mean."""
        return getattr(self.selection, "same_sign", False)


Policy = Callable[[ParameterInfo], ParameterCompression]
"""Called once for each parameter, the same on all ranks."""


@dataclass(frozen=True)
class BySize:
    """A policy by size: small tensors dense, middle and large ones by a selection each. Source: RedSync, §2.1 and §3.3.

    - ``small_elements``: tensors of at most so many elements are sent dense. ``large_elements``: tensors of more are
      large; ``None``: no tensor is. ``middle`` and ``large``: selections or their names.
    - ``density``: of all that are not small. ``interval``: of selections given by name that reuse a threshold.
    - ``same_sign``: selections given by name take entries of one sign at a time, but not of the output layer.
    - ``dense``: names of parameters that are sent dense whatever their size."""

    density: float = 0.01
    small_elements: int = 2048
    middle: str | Selection = "reused"
    large_elements: int | None = None
    large: str | Selection = "reused"
    interval: int | None = None
    same_sign: bool = False
    dense: tuple[str, ...] = ()

    @classmethod
    def redsync(cls, density: float = 0.001, *, same_sign: bool = False) -> BySize:
        """The paper's choice: dense up to 128 KB (of float32), trimmed top-k up to 4 MB, threshold search above.

        The search is repeated every five calls, but in every one with ``same_sign``, which cannot reuse thresholds. The
        paper tells middle from large layers by their kind; 4 MB is ours."""
        large = "search" if same_sign else "sampled"
        return cls(density, 1 << 15, "trimmed", 1 << 20, large, same_sign=same_sign)

    def __post_init__(self) -> None:
        check_density(self.density)
        if isinstance(self.dense, str):
            raise TypeError(f"dense={self.dense!r} must be a tuple of names: dense=({self.dense!r},)")
        checked_count(self.small_elements, "small_elements")
        if self.large_elements is not None:
            checked_count(self.large_elements, "large_elements")
        given = {"middle": self.middle, "large": self.large}
        check_selections(given, ("large_elements", self.large_elements), self.interval, same_sign=self.same_sign)

    def __call__(self, tensor: ParameterInfo) -> ParameterCompression:
        """The compression of ``tensor``."""
        if tensor.elements <= self.small_elements or tensor.name in self.dense:
            return ParameterCompression(None)
        is_large = self.large_elements is not None and tensor.elements > self.large_elements
        given = self.large if is_large else self.middle
        if not isinstance(given, str):
            return ParameterCompression(given, self.density)
        selection = selection_named(given, self.interval, same_sign=self.same_sign and not tensor.is_output)
        return ParameterCompression(selection, self.density)


@dataclass(frozen=True)
class ByShape:
    """The policy of a ``LowRank``: matrices as products of two narrow ones, the rest dense, but for tables.

    - ``rank``: columns of each of the two matrices, at least 1.
    - ``small_elements``: parameters of at most so many elements are sent dense. So are those with one dimension, and
      those of which more than half would travel.
    - ``tables``: names of parameters of which the largest entries are sent instead. It suits embeddings: a step changes
      few of their rows, so their gradients have a high rank. ``density``: the share of these entries; ``select``: a
      selection or its name."""

    rank: int = 16
    small_elements: int = 2048
    tables: tuple[str, ...] = ()
    density: float = 0.01
    select: str | Selection = "reused"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", checked_whole(self.rank, "rank", 1, None, "the columns of two matrices"))
        object.__setattr__(self, "small_elements", checked_count(self.small_elements, "small_elements"))
        if isinstance(self.tables, str):
            raise TypeError(f"tables={self.tables!r} must be a tuple of names: tables=({self.tables!r},)")
        check_density(self.density)
        check_selections({"select": self.select, "large": "reused"}, ("large_elements", None), None, same_sign=False)
        for name in ("density", "select"):
            if not self.tables and getattr(self, name) != getattr(ByShape, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not used without tables=: name them, or leave it out"
                )

    def __call__(self, tensor: ParameterInfo) -> ParameterCompression:
        """The compression of ``tensor``."""
        if tensor.elements <= self.small_elements:
            return ParameterCompression()
        if tensor.name in self.tables:
            select = selection_named(self.select) if isinstance(self.select, str) else self.select
            return ParameterCompression(select, self.density)
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 0
        columns = tensor.elements // rows if rows else 0
        if not rows or 2 * min(self.rank, rows, columns) * (rows + columns) > tensor.elements:
            return ParameterCompression()
        return ParameterCompression(rank=self.rank)


def check_selections(
    given: Mapping[str, str | Selection], large: tuple[str, int | None], interval: int | None, *, same_sign: bool
) -> None:
    """``given``: selections or their names, by the argument: of middle tensors, and of those that are larger than
    ``large`` says, an argument too. ``interval`` and ``same_sign``: of those given by name.

    Raises ``TypeError`` and ``ValueError`` for what is no selection, does not fit, or would not be used."""
    if not isinstance(same_sign, bool):
        raise TypeError(f"same_sign={same_sign!r} must be True or False")
    (middle, of_middle), (larger, of_large) = given.items()
    argument, elements = large
    for name, one in given.items():
        if isinstance(one, str):
            used = name == middle or elements is not None
            selection_named(one, interval, same_sign=same_sign and used, argument=name)
        elif not is_selection(one):
            raise TypeError(f"{name}={one!r} must be a selection or its name; a policy chooses dense parameters")
        elif same_sign and not getattr(one, "same_sign", False):
            raise ValueError(
                f"same_sign=True is for selections that are given by name, and {name} is {one!r}: give "
                f"{type(one).__name__}(same_sign=True) where it has that argument"
            )
    if elements is None and of_large != BySize.large:
        raise ValueError(f"{larger}={of_large!r} is not used without {argument}=: give both, or leave it out")
    if interval is not None and not (reuses(of_middle) or (elements is not None and reuses(of_large))):
        raise ValueError(
            f"interval={interval} is not used with {middle}={of_middle!r}: use one of "
            f"{', '.join(filter(reuses, SELECTIONS))} by its name, or leave it out"
        )


def compressions_of(policy: Policy, tensors: Iterable[ParameterInfo]) -> Mapping[str, ParameterCompression]:
    """What ``policy`` says of each. Raises ``TypeError`` where it says something else than a ParameterCompression."""
    said = {}
    for tensor in tensors:
        compression = policy(tensor)
        if not isinstance(compression, ParameterCompression):
            raise TypeError(
                f"policy says {compression!r} of parameter {tensor.name!r}: it must return a "
                "telegrad.ddp.ParameterCompression"
            )
        said[tensor.name] = compression
    return said
