"""What a rank sends of its gradients, and what it keeps for later. It must not know of networks, nor of torch."""

from telegrad.compress.compressor import Compressor, Part
from telegrad.compress.residual import Residual, ResidualStore
from telegrad.compress.selection import ExactTopK, ReusedThreshold, Selection

__all__ = ["Compressor", "ExactTopK", "Part", "Residual", "ResidualStore", "ReusedThreshold", "Selection"]
