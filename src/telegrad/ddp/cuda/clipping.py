"""Local gradient clipping on a device, of all gradients of a pass together, without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def clip_together(parameters: Iterable[torch.nn.Parameter], most: float) -> None:
    """As ``clip_own``, in the current stream."""
    clip_tensors([one.grad for one in parameters if one.grad is not None], most)


def clip_tensors(gradients: Iterable[torch.Tensor], most: float, unit: torch.Tensor | None = None) -> None:
    """Scales them down to a norm of ``most``, all together, in the current stream; not where theirs is not finite.
    ``unit``: what 1 in a gradient is worth to ``most``, float64, one element; ``None``: 1."""
    given = [*gradients]
    with torch.no_grad():
        norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in given])
        norm = torch.linalg.vector_norm(norms)
        if unit is not None:
            norm = norm * unit.view(())
        factor = torch.where(norm.isfinite() & (norm > most), most / norm, torch.ones_like(norm))
        for one in given:
            one.mul_(factor)
