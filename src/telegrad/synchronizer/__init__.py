"""Training without DistributedDataParallel: gradients in planned groups, and replicas of models that ``fully_shard``
has sharded. Needs torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telegrad.synchronizer.elastic import Elastic
    from telegrad.synchronizer.group_planning import AutoPlan
    from telegrad.synchronizer.profile import StepProfile
    from telegrad.synchronizer.replicas import ReplicaSynchronizer
    from telegrad.synchronizer.step_report import StepReport
    from telegrad.synchronizer.synchronizer import Synchronizer

__all__ = ["AutoPlan", "Elastic", "ReplicaSynchronizer", "StepProfile", "StepReport", "Synchronizer"]

# Imported when used: `telegrad simulate` and `advise` need plans and traces of this package, which need no torch.
_SOURCES = ("group_planning", "elastic", "replicas", "profile", "step_report", "synchronizer")
_MODULES = dict(zip(__all__, _SOURCES, strict=True))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
