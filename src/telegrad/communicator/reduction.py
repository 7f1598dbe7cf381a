"""What a reduction computes, and by which algorithm."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

from telegrad import _core
from telegrad.communicator.arguments import checked_factor
from telegrad.cost import DEVICE_ALGORITHMS

DENSE_ALGORITHMS = ("auto", "ring", "recursive_doubling", "rabenseifner", "two_level")
DENSE_DEVICE_ALGORITHMS = (*DENSE_ALGORITHMS, *DEVICE_ALGORITHMS)
"""Of dense device tensors: NCCL's, the engine's by name, or ``"host_transfer"``, of which the engine chooses one."""
SPARSE_ALGORITHMS = ("auto", "split_allgather", "split_dense_allgather", "recursive_doubling", "ring", "two_level")


class ReduceOp(StrEnum):
    """Reductions; their names serve as well: ``op="avg"``.

    ``AVG`` is the sum divided by the number of ranks, and of floats only; of finite float16 it is finite, also where
    the sum is not (docs/algorithms.md). ``MIN`` and ``MAX`` are NaN where any rank's element is, and take -0 for less
    than +0. ``MAX_ABS`` is the element of the largest magnitude, with its sign; the positive one of two that differ in
    sign only; NaN where any is. Integers wrap round. What a sparse stream does not have is the neutral element: 0, 1
    for ``PROD``, infinity for ``MIN``, -infinity for ``MAX``.
    """

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    MAX_ABS = "max_abs"


_REDUCTIONS: dict[str, _core.Reduction] = {op.value: getattr(_core.Reduction, op.value) for op in ReduceOp}
_NEUTRAL = {_core.Reduction.prod: 1.0, _core.Reduction.min: math.inf, _core.Reduction.max: -math.inf}
_INTEGERS = (_core.DType.i32, _core.DType.i64)
_ALGORITHMS: dict[str, _core.Algorithm] = {
    **{name: getattr(_core.Algorithm, name) for name in {*DENSE_ALGORITHMS, *SPARSE_ALGORITHMS}},
    **dict.fromkeys(DEVICE_ALGORITHMS, _core.Algorithm.auto),
}


def reduction_of(op: object, dtype: _core.DType) -> _core.Reduction:
    """The reduction of dense elements of ``dtype`` that a ReduceOp, its name, or torch's ReduceOp stands for.

    Raises ``ValueError`` for any other, and for averages of integers.
    """
    name = _name(op, tuple(_REDUCTIONS))
    if name == "avg" and dtype in _INTEGERS:
        raise ValueError("op='avg' needs a floating dtype: use 'sum' and divide, or convert the tensor to float64")
    return _REDUCTIONS[name]


def sparse_reduction_of(op: object) -> _core.Reduction:
    """The same for sparse streams, whose values are floats."""
    return _REDUCTIONS[_name(op, tuple(_REDUCTIONS))]


def neutral_element(reduction: _core.Reduction) -> float:
    """What an index that no rank has stands for in a sparse result."""
    return _NEUTRAL.get(reduction, 0.0)


def open_choices(reduction: _core.Reduction, algorithm: str, switch_factor: Any) -> tuple[_core.Algorithm, float]:
    """The algorithm of a sparse reduction, and its ``switch_factor``, of which the caller may have left both open
    (``"auto"``, ``None``).

    By the reduction alone, of which ranks have the same. Where its neutral element is not 0, an open choice is one that
    never makes a sum dense: there an entry that equals the neutral element and an index that no rank has would be
    alike, which are not the same to whoever takes a missing index for 0. Raises ``TypeError`` or ``ValueError``.
    """
    chosen = algorithm_of(algorithm, SPARSE_ALGORITHMS)
    if switch_factor is not None:
        return chosen, checked_factor(switch_factor)
    if neutral_element(reduction) == 0:
        return chosen, 1.0
    # "auto" sums densely where that takes less time, whatever the factor.
    return _core.Algorithm.split_allgather if chosen == _core.Algorithm.auto else chosen, math.inf


def algorithm_of(name: str, allowed: tuple[str, ...]) -> _core.Algorithm:
    """Raises ``ValueError`` with the names that this operation has."""
    if not isinstance(name, str) or name not in allowed:
        raise ValueError(f"algorithm={name!r} does not exist for this operation: use one of {', '.join(allowed)}")
    return _ALGORITHMS[name]


def _name(op: object, allowed: tuple[str, ...]) -> str:
    name = str(op) if isinstance(op, str) else _name_in_torch(op)
    if name not in allowed:
        *others, last = map(repr, allowed)
        raise ValueError(f"op={op!r} is not supported: use {', '.join(others)} or {last}")
    return name


def _name_in_torch(op: object) -> str:
    name = str(op).rpartition(".")[2].lower() if "RedOpType" in str(op) else ""
    return "prod" if name == "product" else name
