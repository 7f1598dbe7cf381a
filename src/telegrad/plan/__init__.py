"""What to do, decided beforehand: closed forms of the collectives' costs, and the choice of an algorithm.

Pure functions: no network, no clock, no torch.
"""

from telegrad.plan.decision import ALLREDUCE_ALGORITHMS, Choice, DecisionTable, allreduce_table, fastest_allreduce
from telegrad.plan.network import Cost, Costs

__all__ = [
    "ALLREDUCE_ALGORITHMS",
    "Choice",
    "Cost",
    "Costs",
    "DecisionTable",
    "allreduce_table",
    "fastest_allreduce",
]
