"""Local gradient clipping on a device, of all gradients of a pass together, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def clip_together(buffers: Sequence[torch.Tensor], most: float) -> None:
    """Scales them down to a norm of ``most``, in the current stream; not where theirs is not finite."""
    with torch.no_grad():
        norms = torch.stack([torch.linalg.vector_norm(one, dtype=torch.float64) for one in buffers])
        norm = torch.linalg.vector_norm(norms)
        factor = torch.where(norm.isfinite() & (norm > most), most / norm, torch.ones_like(norm))
        for one in buffers:
            one.copy_(one * factor)
