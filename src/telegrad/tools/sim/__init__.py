"""Collectives in virtual time: the real protocol and the real algorithms over a network that is a formula.

A message of b bytes takes α + b·β, and each rank has one port out and one in; work on b bytes takes b·γ. The same seed
gives the same history.
"""

from telegrad.tools.sim.world import Outcome, World, all_reduce

__all__ = ["Outcome", "World", "all_reduce"]
