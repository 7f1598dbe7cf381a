"""Training with torch's DistributedDataParallel: the hook, what it compresses, and what it saves. Needs torch."""

from telegrad.compress import ByShape, BySize, ParameterCompression, ParameterInfo
from telegrad.ddp.checkpoint import GatheredState, RankState, load_resharded
from telegrad.ddp.hook import DDPState, ddp_hook
from telegrad.ddp.options import BoundedTopk, Cheapest, LowRank, Momentum, OkTopk, Quantised, TopK, Warmup
from telegrad.ddp.pass_use import gradients_used
from telegrad.ddp.rank_state import reshard
from telegrad.ddp.telemetry import JsonLines, StepRecord, Telemetry, TensorBoard

__all__ = [
    "BoundedTopk",
    "ByShape",
    "BySize",
    "Cheapest",
    "DDPState",
    "GatheredState",
    "JsonLines",
    "LowRank",
    "Momentum",
    "OkTopk",
    "ParameterCompression",
    "ParameterInfo",
    "Quantised",
    "RankState",
    "StepRecord",
    "Telemetry",
    "TensorBoard",
    "TopK",
    "Warmup",
    "ddp_hook",
    "gradients_used",
    "load_resharded",
    "reshard",
]
