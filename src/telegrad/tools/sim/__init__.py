"""Collectives in virtual time: the real protocol and the real algorithms over a network that is a formula.

A message of b bytes takes α + b·β, and each rank has one port out and one in; work on b bytes takes b·γ. The same seed
gives the same history.
"""

from __future__ import annotations

from collections.abc import Sequence

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


__all__ = ["World"]
