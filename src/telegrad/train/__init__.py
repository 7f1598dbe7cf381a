"""Training with torch: the hook for DistributedDataParallel, and what belongs to it. Needs torch."""

from telegrad.compress import BySize, Tensor, Treatment
from telegrad.train.checkpoint import GatheredState, RankState, load_resharded
from telegrad.train.ddp import DDPState, ddp_hook
from telegrad.train.pass_use import gradients_used
from telegrad.train.profile import StepProfile
from telegrad.train.replicas import ReplicaSynchronizer
from telegrad.train.resharding import reshard
from telegrad.train.step_report import StepReport
from telegrad.train.synchronizer import Synchronizer
from telegrad.train.telemetry import JsonLines, StepRecord, Telemetry, TensorBoard

__all__ = [
    "BySize",
    "DDPState",
    "GatheredState",
    "JsonLines",
    "RankState",
    "ReplicaSynchronizer",
    "StepProfile",
    "StepRecord",
    "StepReport",
    "Synchronizer",
    "Telemetry",
    "Tensor",
    "TensorBoard",
    "Treatment",
    "ddp_hook",
    "gradients_used",
    "load_resharded",
    "reshard",
]
