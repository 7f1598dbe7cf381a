"""Sparse streams, and what they are made from. It must not know of communicators."""

from telegrad.stream.stream import MAX_LENGTH, SparseStream
from telegrad.stream.values import is_torch_tensor

__all__ = ["MAX_LENGTH", "SparseStream", "is_torch_tensor"]
