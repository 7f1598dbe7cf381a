"""The scale of the loss on a device: what 1 in a gradient is worth there, which the host does not wait for."""

from __future__ import annotations

from collections import deque

import torch

from telegrad.communicator.cuda.runtime import LateRead
from telegrad.ddp.gradient_scales import check_scale


class LossScale:
    """Asked in each backward pass, of whose scale it speaks from ``begin`` on."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._scales: dict[tuple[torch.device, float], torch.Tensor] = {}
        self._looks: deque[LateRead] = deque()

    def begin(self) -> None:
        """Of another pass."""
        self._scales = {}

    def unit(self, like: torch.Tensor, rate: float = 1.0) -> torch.Tensor:
        """``rate`` / scale on the device of ``like``, float64, of one element; not to be written. A scale that is no
        number above 0 gives none above 0 that is finite."""
        found = self._scales.get((like.device, rate))
        if found is None:
            with torch.no_grad():
                found = self._inverse(like) if rate == 1.0 else self.unit(like) * rate
            self._scales[like.device, rate] = found
        return found

    def check(self, *, wait: bool = False) -> None:
        """Raises ``ValueError`` for a scale of which the host knows by now that it is none; ``wait``: for all."""
        while self._looks and (wait or self._looks[0].is_known):
            check_scale(float(self._looks.popleft().values()[0]))

    def forget(self) -> None:
        """What is not yet known is of no account."""
        self._looks.clear()

    def _inverse(self, like: torch.Tensor) -> torch.Tensor:
        # 1, scaled as a loss is: the scaler's only public way to its scale for which nobody waits.
        scale = self._scaler.scale(like.new_ones(1, dtype=torch.float32))
        assert isinstance(scale, torch.Tensor)
        self._looks.append(LateRead(scale))
        return scale.double().reciprocal()
