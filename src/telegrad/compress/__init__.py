"""What a rank sends of its gradients, and what it keeps for later. It must not know of networks, nor of torch."""

from telegrad.compress.baselines import BucketTopK, GaussianThreshold, RandomK
from telegrad.compress.compressor import Compressor, Part
from telegrad.compress.ranked import ExactTopK, ThresholdSearch, TrimmedTopK
from telegrad.compress.residual import Residual, ResidualStore
from telegrad.compress.reused import ReusedThreshold, SampledThreshold
from telegrad.compress.selection import Selection
from telegrad.compress.selections import SELECTIONS, selection_named

__all__ = [
    "SELECTIONS",
    "BucketTopK",
    "Compressor",
    "ExactTopK",
    "GaussianThreshold",
    "Part",
    "RandomK",
    "Residual",
    "ResidualStore",
    "ReusedThreshold",
    "SampledThreshold",
    "Selection",
    "ThresholdSearch",
    "TrimmedTopK",
    "selection_named",
]
