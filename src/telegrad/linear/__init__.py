"""Linear models on sparse data: rows from LIBSVM files, training among ranks that sum sparse gradients."""

from telegrad.linear.data import read_libsvm
from telegrad.linear.rows import Rows

__all__ = ["Rows", "read_libsvm"]
