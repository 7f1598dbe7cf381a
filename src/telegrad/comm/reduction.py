"""What a reduction computes, and by which algorithm."""

from __future__ import annotations

from enum import StrEnum

from telegrad import _core

DENSE_ALGORITHMS = ("auto", "ring", "recursive_doubling", "rabenseifner")
SPARSE_ALGORITHMS = ("auto", "split_allgather")


class ReduceOp(StrEnum):
    """Reductions; their names serve as well: ``op="avg"``. ``AVG`` is the sum divided by the number of ranks."""

    SUM = "sum"
    AVG = "avg"


_REDUCTIONS = {"sum": _core.Reduction.sum, "avg": _core.Reduction.avg}
_ALGORITHMS: dict[str, _core.Algorithm] = {
    name: getattr(_core.Algorithm, name) for name in {*DENSE_ALGORITHMS, *SPARSE_ALGORITHMS}
}


def reduction_of(op: object) -> _core.Reduction:
    """``op``: a ReduceOp, its name, or torch's ReduceOp.SUM or AVG. Raises ``ValueError`` for any other."""
    known = _REDUCTIONS.get(op) if isinstance(op, str) else _REDUCTIONS.get(_name_in_torch(op))
    if known is None:
        raise ValueError(f"op={op!r} is not supported: use 'sum' or 'avg'")
    return known


def algorithm_of(name: str, allowed: tuple[str, ...]) -> _core.Algorithm:
    """Raises ``ValueError`` with the names that this operation has."""
    if name not in allowed:
        raise ValueError(f"algorithm={name!r} does not exist for this operation: use one of {', '.join(allowed)}")
    return _ALGORITHMS[name]


def _name_in_torch(op: object) -> str:
    return str(op).rpartition(".")[2].lower() if "RedOpType" in str(op) else ""
