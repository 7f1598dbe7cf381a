"""Collectives in virtual time: the real protocol and the real algorithms over a network that is a formula.

A message of b bytes takes α + b·β, and each rank has one port out and one in; work on b bytes takes b·γ. The same seed
gives the same history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.communicator import Communicator
from telegrad.communicator.nodes import checked_nodes


class World:
    """``size`` simulated ranks. ``communicators[r]`` is rank r's, used like any other, all from one thread: begin an
    operation on all ranks with ``async_op=True``, then wait; virtual time passes while you wait.

    ``alpha_s``: latency of a message; ``beta_s_per_byte``: time of a byte in a port; ``gamma_s_per_byte``: time of a
    byte in the processor; ``jitter``: a message's latency is α·(1 + jitter·u), u drawn from [0, 1) by ``seed``;
    ``nodes``: what ranks know of where they live, as in ``Communicator.local``: messages cost the same. Raises
    ``ValueError`` for a size below 1, a negative cost, or nodes of another number of ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        alpha_s: float = 1e-6,
        beta_s_per_byte: float = 1e-10,
        gamma_s_per_byte: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
        nodes: Sequence[int] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size={size} must be at least 1: the number of ranks")
        numbers = checked_nodes(nodes, size)
        costs = {
            "alpha_s": alpha_s,
            "beta_s_per_byte": beta_s_per_byte,
            "gamma_s_per_byte": gamma_s_per_byte,
            "jitter": jitter,
        }
        for name, cost in costs.items():
            if not cost >= 0:
                raise ValueError(f"{name}={cost} must not be negative: virtual time only goes forward")
        self._core = _core.Simulation.make(size, **costs, seed=seed)
        self.communicators = [Communicator(self._core.communicator(rank)) for rank in range(size)]
        for communicator in self.communicators:
            communicator._use_nodes(numbers)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the beginning."""
        return self._core.now_s()

    def finish_s(self, rank: int) -> float:
        """When ``rank``'s last operation was over, in virtual seconds; 0 if it had none."""
        return self._core.finish_s(rank)

    def close(self) -> None:
        """Closes all communicators."""
        for communicator in self.communicators:
            communicator.close()


@dataclass(frozen=True)
class Outcome:
    """Of a simulated collective; lists are by rank. ``outputs`` are the results themselves."""

    outputs: list[npt.NDArray[np.float32]]
    finish_s: list[float]
    bytes_sent: list[int]
    messages_sent: list[int]


def all_reduce(
    inputs: Sequence[npt.NDArray[np.float32]],
    *,
    op: str = "sum",
    algorithm: str = "auto",
    alpha_s: float = 1e-6,
    beta_s_per_byte: float = 1e-10,
    gamma_s_per_byte: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """The sum (or ``op="avg"``) of one float32 array per rank, and what it took. Costs as in ``World``.

    The inputs stay as they are. Raises ``ValueError`` for inputs of different shapes and for bad costs or names.
    """
    shapes = {x.shape for x in inputs}
    if len(shapes) != 1:
        raise ValueError(f"inputs have shapes {sorted(shapes)}: give one array per rank, all of one shape")
    world = World(
        len(inputs),
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        gamma_s_per_byte=gamma_s_per_byte,
        jitter=jitter,
        seed=seed,
    )
    try:
        outputs = [np.array(x, order="C") for x in inputs]
        ranks = list(zip(world.communicators, outputs, strict=True))
        for work in [comm.all_reduce(x, op, algorithm=algorithm, async_op=True) for comm, x in ranks]:
            work.wait()
        stats = [communicator.stats() for communicator in world.communicators]
        return Outcome(
            outputs,
            [world.finish_s(rank) for rank in range(len(inputs))],
            [one["bytes_sent"] for one in stats],
            [one["messages_sent"] for one in stats],
        )
    finally:
        world.close()


__all__ = ["Outcome", "World", "all_reduce"]
