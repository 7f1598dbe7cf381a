"""What to do, decided beforehand: closed forms of the collectives' costs, and the choice of an algorithm.

Pure functions: no network, no clock, no torch.
"""

from telegrad.cost.decision import (
    ALLREDUCE_ALGORITHMS,
    DecisionTable,
    TableEntry,
    allreduce_table,
    fastest_allreduce,
    measured_allreduce_table,
)
from telegrad.cost.network import Cost, Costs
from telegrad.cost.tuning import DEVICE_ALGORITHMS, DeviceTuning, Place, Tuning

__all__ = [
    "ALLREDUCE_ALGORITHMS",
    "DEVICE_ALGORITHMS",
    "Cost",
    "Costs",
    "DecisionTable",
    "DeviceTuning",
    "Place",
    "TableEntry",
    "Tuning",
    "allreduce_table",
    "fastest_allreduce",
    "measured_allreduce_table",
]
