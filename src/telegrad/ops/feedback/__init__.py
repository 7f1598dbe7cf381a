"""What error feedback does around a selection on a GPU: velocities before it; after it the entries of several residuals
become one list, and what leaves is rounded; and a step can be undone.

Whether a gradient takes part, how many entries it gives, and whether a step is undone is known to the GPU alone: these
are numbers of one element, which kernels read, so that nobody waits. ``naive`` is the oracle of ``triton``; on CPUs
compressors do this themselves. Gradients and what leaves are float32 or bfloat16 (numpy has none: uint16 there), all
else is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from telegrad.ops.placement import is_on_gpu

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


class Kernels(Protocol):
    """None of them waits. ``fault`` (int32, one element; ``faults``: one for each gradient) becomes 1 where something
    that is not finite is found."""

    def accumulate_velocity(
        self,
        velocity: Array,
        gradient: Array,
        out: Array,
        momentum: float,
        active: Array,
        fault: Array,
        nesterov: bool,
    ) -> None:
        """velocity = momentum · velocity + gradient, which is also written to ``out``; with ``nesterov``
        momentum · (velocity + gradient), and gradient + that to ``out``.

        ``out``: float32 or as ``gradient``, which it may be. Where the velocity overflows it becomes 0. ``active``:
        int64, one element; if it is 0, nothing is done.
        """

    def table(self, parts: Sequence[Collected]) -> Array:
        """What the kernels of the next two know of ``parts``: int64, in host memory, to be copied to the device. It
        holds as long as the arrays stay where they are."""

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
        ``faults`` are by ``place``. Indices are uint32; ``to_indices`` and ``to_values`` are all parts'. In one launch.
        """

    def clear_faults(self, parts: Sequence[Collected], table: Array, faults: Array) -> None:
        """Of each part whose fault is not 0 what is not finite becomes 0. In one launch."""

    def restore(self, x: Array, before: Array, wanted: Array) -> None:
        """If ``wanted`` (int32, one element) is above 0, ``x`` becomes ``before``."""

    def change_unit(self, unit: Array, wanted: Array, ratio: Array, threshold: Array | None) -> None:
        """``unit`` becomes ``wanted``, and ``ratio`` what an array in it must be multiplied by to say the same, at most
        1e300; ``threshold`` is multiplied, and becomes 0 where float32 cannot hold it.

        All have one element, float64. Where ``wanted`` is not above 0 and finite ``ratio`` is 1, and nothing changes.
        """

    def rescale(self, x: Array, ratio: Array) -> None:
        """``x`` times ``ratio`` (float64, one element), unless that is 1. What float32 cannot hold becomes its largest
        number."""


def kernels_of(x: Array) -> Kernels:
    """The functions for tensors such as ``x``. Raises as ``placement.is_on_gpu``; ``TypeError`` for a numpy array."""
    if not is_on_gpu(x, "x"):
        raise TypeError("x is a numpy array, whose error feedback is a Compressor's: give a tensor on a GPU")
    from telegrad.ops.feedback import triton

    return triton
