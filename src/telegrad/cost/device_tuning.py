"""What dense sums of tensors on a device take by each way that they can go, and which is the faster one. Plain data.

It must not know how it is measured.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Self

from telegrad.cost.decision import LONGEST_BYTES, Choice
from telegrad.cost.linear_cost import LinearCost

NCCL, HOST_TRANSFER = "nccl", "host_transfer"
DEVICE_ALGORITHMS = (NCCL, HOST_TRANSFER)
"""By NCCL, from device to device; or through host memory, by this library's own operations. Where they take equally
long, the first is chosen: it leaves the host's memory and cores alone."""


@dataclass(frozen=True)
class DeviceTuning:
    """``device``: which kind of device the ranks had, all the same. ``nccl`` and ``host_transfer``: seconds by bytes of
    a dense sum; ``nccl`` is ``None`` where there was none. ``residual``: how far these lines are from what they were
    fitted to, as the median of |fitted / measured − 1|. Raises ``ValueError`` for costs and residuals that are not
    finite, or below 0.
    """

    device: str
    nccl: LinearCost | None
    host_transfer: LinearCost
    residual: float

    def __post_init__(self) -> None:
        for name, cost in self._costs().items():
            if not all(0 <= value < math.inf for value in asdict(cost).values()):
                raise ValueError(f"{name}={cost} must be of finite numbers, 0 or more")
        if not 0 <= self.residual < math.inf:
            raise ValueError(f"residual={self.residual} must be a finite number, 0 or more")

    def algorithm(self, size: int) -> str:
        """The faster one for ``size`` bytes. Raises ``ValueError`` below 0."""
        if size < 0:
            raise ValueError(f"size={size} must be 0 bytes or more")
        costs = self._costs()
        return min(costs, key=lambda name: costs[name](size))

    def __call__(self, size: int) -> float:
        """Seconds of a sum of so many bytes, by the faster one: a group cost, as planners take them."""
        return min(cost(size) for cost in self._costs().values())

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The same as a table: ascending from 0 bytes, two at most."""
        first = self.algorithm(0)
        if self.algorithm(LONGEST_BYTES) == first:
            return (Choice(0, first),)
        least, most = 0, LONGEST_BYTES  # first is the faster one at least, not at most
        while most - least > 1:
            middle = (least + most) // 2
            if self.algorithm(middle) == first:
                least = middle
            else:
                most = middle
        return (Choice(0, first), Choice(most, self.algorithm(most)))

    def to_data(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_data(cls, found: Any) -> Self:
        """The reverse of ``to_data``. Raises ``KeyError``, ``TypeError`` and ``ValueError`` for what is none."""
        return cls(
            str(found["device"]),
            None if found["nccl"] is None else _cost_from(found["nccl"]),
            _cost_from(found["host_transfer"]),
            float(found["residual"]),
        )

    def __str__(self) -> str:
        lines = [f"allreduce on {self.device}"]
        lines += [f"  from {choice.from_bytes:>13,} bytes  {choice.algorithm}" for choice in self.choices]
        return "\n".join(lines)

    def _costs(self) -> dict[str, LinearCost]:
        own = {HOST_TRANSFER: self.host_transfer}
        return own if self.nccl is None else {NCCL: self.nccl, **own}


def _cost_from(found: Any) -> LinearCost:
    return LinearCost(float(found["startup_s"]), float(found["s_per_byte"]))
