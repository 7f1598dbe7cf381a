"""What error feedback does around a selection on a GPU: velocities before it; after it the entries of several residuals
become one list, and what leaves is rounded; and a step can be undone.

Whether a gradient takes part, how many entries it gives, and whether a step is undone is known to the GPU alone: these
are numbers of one element, which kernels read, so that nobody waits. On CPUs compressors do this themselves. Gradients
and what leaves are float32 or bfloat16 (numpy has none: uint16 there), all else is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from telegrad.kernels.placement import is_on_gpu

Array = Any
"""A numpy array, for the oracle; or a contiguous torch tensor on a GPU, of one dimension."""


class Collected(NamedTuple):
    """One of the residuals that entries have left. Those from ``start`` to ``stop`` are its own, of which there may be
    fewer; their indices begin at ``offset``. ``velocity``: of all parts or of none. ``place``: of its gradient, among
    those that were looked at."""

    residual: Array
    velocity: Array | None
    start: int
    stop: int
    offset: int
    place: int


class Moved(NamedTuple):
    """One of the velocities that gradients move. ``offset``: where its gradient begins among all; ``place``: as of
    ``Collected``."""

    velocity: Array
    offset: int
    place: int


class Remade(NamedTuple):
    """One of the arrays whose unit (float64, one element) changes. ``threshold``: as ``unit``, if there is one."""

    values: Array
    unit: Array
    threshold: Array | None


class Kept(NamedTuple):
    """One of the arrays that may have to be again what they were."""

    values: Array
    before: Array


class FeedbackKernels(Protocol):
    """None of them waits. Each is one launch, however many parts it has; a table is what it knows of them: int64, made
    in host memory, to be copied to the device, and good as long as arrays stay where they are. ``faults`` (int32, one
    for each gradient) become 1 where something that is not finite is found."""

    def velocity_table(self, parts: Sequence[Moved]) -> Array:
        """For ``accumulate_velocities``."""

    def accumulate_velocities(
        self,
        parts: Sequence[Moved],
        table: Array,
        gradient: Array,
        out: Array,
        momentum: float,
        active: Array,
        faults: Array,
        nesterov: bool,
    ) -> None:
        """velocity = momentum · velocity + gradient, which is also written to ``out``; with ``nesterov``
        momentum · (velocity + gradient), and gradient + that to ``out``.

        ``gradient`` and ``out``: of all parts, and maybe more; the latter float32 or as the former, which it may be.
        Where a velocity overflows it becomes 0. ``active``: int64, by place; where it is 0, nothing is done.
        """

    def table(self, parts: Sequence[Collected]) -> Array:
        """For ``collect`` and ``clear_faults``."""

    def collect(
        self,
        parts: Sequence[Collected],
        table: Array,
        indices: Array,
        values: Array,
        counts: Array,
        broken: Array,
        ends: Array,
        to_indices: Array,
        to_values: Array,
        faults: Array,
        most: float = math.inf,
    ) -> None:
        """Of each part copies the first ``counts`` of its entries to where they end before ``ends``; as ``to_values``
        holds them.

        Entries have left ``residual``: what rounding loses goes back to it, and ``velocity`` becomes 0 there. Of a
        finite float32 beyond ``most`` that much goes, and the rest goes back, too. Where ``broken`` is not 0 the count
        is 0, and one NaN is written, at ``offset``. ``counts`` and ``ends`` are int64, by part; ``broken``, int64, and
        ``faults`` are by ``place``. Indices are uint32; ``to_indices`` and ``to_values`` are all parts'.
        """

    def clear_faults(self, parts: Sequence[Collected], table: Array, faults: Array) -> None:
        """Of each part whose fault is not 0 what is not finite becomes 0."""

    def kept_table(self, parts: Sequence[Kept]) -> Array:
        """For ``restore``."""

    def restore(self, parts: Sequence[Kept], table: Array, wanted: Array) -> None:
        """If ``wanted`` (int32, one element) is above 0, all ``values`` become what they were ``before``."""

    def unit_table(self, parts: Sequence[Remade]) -> Array:
        """For ``change_units`` and ``rescale``."""

    def change_units(self, parts: Sequence[Remade], table: Array, wanted: Array, ratios: Array) -> None:
        """Each ``unit`` becomes ``wanted`` (float64, one element), and of ``ratios`` (float64, by part) its own what an
        array in it must be multiplied by to say the same, at most 1e300; its ``threshold`` is multiplied, and becomes 0
        where float32 cannot hold it. Where ``wanted`` is not above 0 and finite, ratios are 1, and nothing changes."""

    def rescale(self, parts: Sequence[Remade], table: Array, ratios: Array) -> None:
        """Each ``values`` times its ratio, unless that is 1. What float32 cannot hold becomes its largest number."""


def kernels_of(x: Array) -> FeedbackKernels:
    """The functions for tensors such as ``x``. Raises as ``placement.is_on_gpu``; ``TypeError`` for a numpy array."""
    if not is_on_gpu(x, "x"):
        raise TypeError("x is a numpy array, whose error feedback is a Compressor's: give a tensor on a GPU")
    from telegrad.kernels.feedback import triton

    return triton
