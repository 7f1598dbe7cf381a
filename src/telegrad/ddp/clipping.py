"""Local gradient clipping: each rank clips its own gradient by its global norm, before residuals take it up.

The norm is known when the backward pass has computed its last gradient, so buckets are held until then: compression and
communication no longer overlap the backward pass. Source: RedSync §5.6, after Deep Gradient Compression: the threshold
is multiplied by P^(-1/2), since the norm of a sum of P independent gradients is about P^(1/2) times that of one.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from telegrad.ddp.bucket import Bits, BucketLayout, rounded_to_bf16
from telegrad.kernels.nonfinite.naive import as_float32

Start = Callable[[BucketLayout, Bits], torch.futures.Future[torch.Tensor]]


class HeldBuckets:
    """The buckets of one backward pass. ``most``: the norm above which this rank's gradient is scaled down."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._held: list[tuple[BucketLayout, Bits, torch.futures.Future[None]]] = []
        self._outcomes: list[torch.futures.Future[torch.Tensor]] = []
        self._error: Exception | None = None

    def hold(self, layout: BucketLayout, bits: Bits) -> torch.futures.Future[torch.Tensor]:
        """A future of the bucket's average, which is not yet started."""
        started: torch.futures.Future[None] = torch.futures.Future()
        place = len(self._held)
        self._held.append((layout, bits, started))

        def conclude(_: torch.futures.Future[None]) -> torch.Tensor:
            if self._error is not None:
                raise self._error
            return self._outcomes[place].value()

        return started.then(conclude)

    def release(self, start: Start, gradient_unit: float) -> float:
        """Clips all buckets and starts them, in their order; returns the factor.

        ``gradient_unit``: what 1 in a gradient is worth to ``most``. A norm that is not finite clips nothing: NaN and
        infinity are the policy's.
        """
        norm = self._norm() * gradient_unit
        factor = self._most / norm if self._most < norm < math.inf else 1.0
        for layout, bits, started in self._held:
            if factor < 1:
                _scale(bits, factor)
            outcome = start(layout, bits)
            self._outcomes.append(outcome)
            outcome.then(lambda _, started=started: started.set_result(None))  # type: ignore[misc]
        return factor

    def _norm(self) -> float:
        """The same bits whatever buckets the parameters are in: DDP rebuilds its own, and a restored state must clip
        as the one that was saved. So each parameter counts for itself, and ``fsum`` does not mind the order."""
        squares = []
        for layout, bits, _ in self._held:
            flat = as_float32(bits)
            squares += [_squares(flat[one.offset : one.offset + one.size]) for one in layout.members]
        return math.sqrt(math.fsum(squares))

    def fail(self, error: Exception) -> None:
        """Ends the futures of buckets that were never started."""
        self._error = error
        for _, _, started in self._held[len(self._outcomes) :]:
            started.set_result(None)
        self._held = self._held[: len(self._outcomes)]


def checked_norm(clip_norm: float | None) -> float | None:
    """``clip_norm`` as a float above 0, or ``None``; else ``TypeError`` or ``ValueError``."""
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, numbers.Real):
        raise TypeError(f"clip_norm={clip_norm!r} must be a number above 0, or None")
    if not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm} must be above 0 and finite; None clips nothing")
    return float(clip_norm)


def clip_own(parameters: Iterable[torch.nn.Parameter], most: float) -> None:
    """Scales the gradients of these parameters down to a norm of ``most``, all together; not where theirs is not
    finite."""
    held = [one for one in parameters if one.grad is not None]
    norm = torch.nn.utils.get_total_norm([one.grad for one in held if one.grad is not None])
    if math.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(held, most, norm)


def _squares(x: npt.NDArray[Any]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        quick = float(np.dot(x, x)) if x.dtype != np.float16 else math.inf
        return quick if math.isfinite(quick) else float(np.square(x.astype(np.float64)).sum())


def _scale(bits: Bits, factor: float) -> None:
    scaled = as_float32(bits)
    if scaled is bits:
        scaled *= scaled.dtype.type(factor)
    else:
        bits[:] = rounded_to_bf16(scaled * np.float32(factor))
