"""What a rank sends of its gradients, and what it keeps for later. It must not know of networks, nor of torch."""

from telegrad.compress.baselines import BucketTopK, GaussianThreshold, RandomK
from telegrad.compress.compressor import Compressor, Observation, PlacedResidual
from telegrad.compress.momentum import Velocities
from telegrad.compress.policies import (
    SELECTIONS,
    ByShape,
    BySize,
    ParameterCompression,
    ParameterInfo,
    Policy,
    selection_named,
)
from telegrad.compress.residual import Residual, ResidualStore
from telegrad.compress.selection import (
    ExactTopK,
    ReusedThreshold,
    SampledThreshold,
    Selection,
    ThresholdSearch,
    TrimmedTopK,
)

__all__ = [
    "SELECTIONS",
    "BucketTopK",
    "ByShape",
    "BySize",
    "Compressor",
    "ExactTopK",
    "GaussianThreshold",
    "Observation",
    "ParameterCompression",
    "ParameterInfo",
    "PlacedResidual",
    "Policy",
    "RandomK",
    "Residual",
    "ResidualStore",
    "ReusedThreshold",
    "SampledThreshold",
    "Selection",
    "ThresholdSearch",
    "TrimmedTopK",
    "Velocities",
    "selection_named",
]
