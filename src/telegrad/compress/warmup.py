"""The first steps of a training, in which more is sent than later."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("dense", "falling")
FALLING = (0.25, 0.0625, 0.0156, 0.004, 0.001)
"""Densities of equally long stages. Source: Deep Gradient Compression, as RedSync's appendix C quotes it."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """``steps`` at first that are dense (RedSync's choice), or in which the density falls in stages."""

    steps: int = 0
    kind: str = "dense"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"warmup={self.kind!r} does not exist: use one of {', '.join(KINDS)}")

    def is_dense(self, step: int) -> bool:
        """Whether everything is sent in this step, counted from 0."""
        return self.kind == "dense" and step < self.steps

    def least_density(self, step: int) -> float:
        """The density below which this step sends no tensor; 0: each tensor's own."""
        if self.kind == "dense" or step >= self.steps:
            return 0.0
        return FALLING[step * len(FALLING) // self.steps]
