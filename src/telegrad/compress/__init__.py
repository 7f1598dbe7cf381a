"""What a rank sends of its gradients, and what it keeps for later. It must not know of networks, nor of torch."""

from telegrad.compress.baselines import BucketTopK, GaussianThreshold, RandomK
from telegrad.compress.compressor import Compressor, Observation, Part
from telegrad.compress.momentum import Momentum
from telegrad.compress.residual import Residual, ResidualStore
from telegrad.compress.selection import (
    ExactTopK,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    TrimmedTopK,
)
from telegrad.compress.selections import SELECTIONS, selection_named
from telegrad.compress.treatment import BySize, Policy, Tensor, Treatment
from telegrad.compress.warmup import WarmUp

__all__ = [
    "SELECTIONS",
    "BucketTopK",
    "BySize",
    "Compressor",
    "ExactTopK",
    "GaussianThreshold",
    "Momentum",
    "Observation",
    "Part",
    "Policy",
    "RandomK",
    "Residual",
    "ResidualStore",
    "ReusedThreshold",
    "SampledThreshold",
    "Selection",
    "Tensor",
    "ThresholdSearch",
    "Treatment",
    "TrimmedTopK",
    "WarmUp",
    "selection_named",
]
