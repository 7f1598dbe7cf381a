"""Training without DistributedDataParallel: gradients in planned groups, and replicas of models that ``fully_shard``
has sharded. Needs torch."""

from telegrad.synchronizer.profile import StepProfile
from telegrad.synchronizer.replicas import ReplicaSynchronizer
from telegrad.synchronizer.step_report import StepReport
from telegrad.synchronizer.synchronizer import Synchronizer

__all__ = [
    "ReplicaSynchronizer",
    "StepProfile",
    "StepReport",
    "Synchronizer",
]
