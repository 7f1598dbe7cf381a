"""What error feedback does around a selection on a GPU: velocities before it; after it the entries of several residuals
become one list, and what leaves is rounded; and a step can be undone.

Whether a gradient takes part, how many entries it gives, and whether a step is undone is known to the GPU alone: these
are numbers of one element, which kernels read, so that nobody waits. ``naive`` is the oracle of ``triton``; on CPUs
compressors do this themselves. Gradients and what leaves are float32 or bfloat16 (numpy has none: uint16 there), all
else is float32.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from telegrad.ops.placement import is_on_gpu

Array = Any
"""A numpy array, for the oracle; or a contiguous torch tensor on a GPU, of one dimension."""


class Kernels(Protocol):
    """None of them waits. ``fault`` (int32, one element) becomes 1 where something that is not finite is found."""

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

    def collect(
        self,
        indices: Array,
        values: Array,
        count: Array,
        broken: Array,
        end: Array,
        residual: Array,
        velocity: Array | None,
        to_indices: Array,
        to_values: Array,
        fault: Array,
        offset: int,
        most: float = math.inf,
    ) -> None:
        """Copies the first ``count`` entries to where they end before ``end``; as ``to_values`` holds them.

        Entries have left ``residual``, which begins at index ``offset``: what rounding loses goes back to it, and
        ``velocity`` becomes 0 there. Of a finite float32 beyond ``most`` that much goes, and the rest goes back, too.
        If ``broken`` is not 0, ``count`` is 0, and one NaN is written, at ``offset``.
        These three have one element, int64. Indices are uint32.
        """

    def clear_faults(self, residual: Array, fault: Array) -> None:
        """If ``fault`` is not 0, what is not finite becomes 0."""

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
