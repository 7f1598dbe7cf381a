"""Sparse streams, and what they are made from. It must not know of communicators."""

from telegrad.sparse_vector.formats import is_torch_tensor
from telegrad.sparse_vector.vector import MAX_LENGTH, SparseVector

__all__ = ["MAX_LENGTH", "SparseVector", "is_torch_tensor"]
