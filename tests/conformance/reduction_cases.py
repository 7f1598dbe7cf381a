"""Cases of reductions of which a rank gets all, a block or nothing. Their values are integers, so that sums are exact.

What a rank got is put into the place of the right sum, so that every rank's outcome is the whole vector.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import COMBINE, LOGICAL, MOST_OF_ALL, OTHER_KINDS, Case, Group, dense_input

from telegrad import Communicator, CustomReduction, Work

Vector = npt.NDArray[Any]
WIRES = ("bf16", "f16", "int8", "qsgd8", "qsgd4", "qsgd2", "e3m0", "codebook2")
OPERATIONS = ("reduce", "reduce_scatter", "reduce_scatter_v", "all_reduce_out")
_OWN_SUM = "void own(float *to, const float *from, long n) { for (long i = 0; i < n; ++i) to[i] += from[i]; }"


@functools.cache
def own_sum() -> CustomReduction:
    """Compiled once, by whichever rank comes first."""
    path = Path(__file__).parents[2] / "build" / "own_sum.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        mine = path.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", mine], input=_OWN_SUM.encode(), check=True)
        mine.replace(path)
    return CustomReduction(ctypes.CDLL(str(path)).own, np.float32, 0.0, "own sum")


def reduction_groups(size: int) -> list[Group]:
    """One case each, and all kinds in flight together. The counts are on both sides of where ways change."""
    counts = (0, 1, 63, 1000) if size > MOST_OF_ALL else (0, 1, 63, 4099, 20_011, 150_001)
    roots = sorted({0, size // 2, size - 1})
    cases = [Case("reduce", count, root=root, blocking=root == 0) for count in counts for root in roots]
    cases += [
        Case(operation, count, blocking=blocking)
        for operation in OPERATIONS[1:]
        for count in counts
        for blocking in (True, False)
    ]
    cases += [
        Case(operation, count, root=size // 2, reduction="own", blocking=bool(count % 2))
        for operation in OPERATIONS
        for count in counts
    ]
    if size <= 4:  # blocks long enough for a ring of several segments
        cases += [Case("reduce_scatter", 300_000 * size), Case("reduce_scatter_v", 250_000 * size)]
    cases += [
        Case("encoded", count, reduction=op, algorithm=wire, values="floats", blocking=op == "avg")
        for count in (0, 1, 5000, *([] if size > MOST_OF_ALL else [60_001]))
        for wire in WIRES
        for op in ("sum", "avg")
    ]
    typed = []
    mixed = tuple(Case(operation, 1000 + number, root=size - 1) for number, operation in enumerate(OPERATIONS * 3))
    kinds = [
        (dtype, "integers" if (values, reduction) == ("floats", "sum") else values, reduction)
        for dtype, values, reduction in OTHER_KINDS
        if dtype != "bf16" and (values == "wide" or reduction not in ("avg", "prod"))  # numpy has none; exact ones
    ]
    for dtype, of_dtype in itertools.groupby(sorted(kinds), lambda kind: kind[0]):
        at_once = [(values, reduction) for _, values, reduction in of_dtype]
        for operation, count in itertools.product(OPERATIONS, (63, 1000)):
            several = [Case(operation, count, dtype, op, values=v, root=size // 2) for v, op in at_once]
            typed.append(Group(operation, tuple(several), staggered=count == 63))
    return [
        *(Group(case.operation, (case,)) for case in cases),
        *typed,
        *(Group("in_flight", mixed, staggered=staggered) for staggered in (False, True)),
    ]


def begin_reduction(
    case: Case, communicator: Communicator, *, blocking: bool
) -> tuple[Work | None, Callable[[], Vector]]:
    """The work, if it does not block, and what gives the outcome once it is done."""
    rank, size = communicator.rank, communicator.world_size
    x = _vector(case, rank, size)
    kept = x.copy()
    total = _whole(case, size) if case.operation != "encoded" else x
    out = np.full(x.shape, np.nan if x.dtype.kind in "fc" else 77, x.dtype)
    counts = _counts(case, size)
    begins = np.cumsum([0, *counts])
    op = own_sum() if case.reduction == "own" else case.reduction
    match case.operation:
        case "reduce" if case.count % 2:
            got = communicator.reduce(x, case.root, op, async_op=not blocking)
        case "reduce":
            into = out if rank == case.root else None
            got = communicator.reduce(x, case.root, op, out=into, async_op=not blocking)
        case "reduce_scatter":
            got = communicator.reduce_scatter(x.reshape(-1, 3), op, async_op=not blocking)
        case "reduce_scatter_v":
            out = out[: counts[rank]]
            got = communicator.reduce_scatter(x, op, counts=counts, out=out, async_op=not blocking)
        case "encoded":
            error = np.full(x.shape, np.nan, np.float32)
            got = communicator.all_reduce(
                x, case.reduction, out=out, wire=case.algorithm, error=error, async_op=not blocking
            )
        case _:
            got = communicator.all_reduce(x, op, out=out, async_op=not blocking)

    def outcome() -> Vector:
        in_place = case.operation == "reduce" and case.count % 2 and rank == case.root
        if not in_place and not np.array_equal(x, kept):
            raise AssertionError(f"{case}: the input has changed")
        result = total.copy()
        if case.operation == "reduce" and rank == case.root:
            result[:] = x if in_place else out
        elif case.operation.startswith("reduce_scatter"):
            block = got if blocking else got.result()
            result[begins[rank] : begins[rank + 1]] = np.ravel(block)
        elif case.operation == "encoded":
            if not np.isfinite(error).all():
                raise AssertionError(f"{case}: not all errors have been written")
            result[:] = out
        elif case.operation == "all_reduce_out":
            result[:] = out
        return result[: case.count]

    return got if isinstance(got, Work) else None, outcome


def fault_of_encoded(case: Case, got: npt.NDArray[np.float32], right: npt.NDArray[np.float64], size: int) -> str:
    """Each share, but the owner's own, is rounded once, and the sum once more."""
    largest = max((float(np.abs(dense_input(case, rank)).max(initial=0.0)) for rank in range(size)), default=0.0)
    of_one = {"bf16": 2.0**-8, "f16": 2.0**-11, "int8": 1 / 254, "qsgd8": 1 / 127, "qsgd4": 1 / 7, "qsgd2": 1.0}
    of_one |= {"e3m0": 1 / 4, "codebook2": 2.0}
    lost = of_one[case.algorithm] * 1.001
    shares = lost * largest * (size - 1)
    bound = shares + lost * (largest * size + shares) + 1e-6 * largest * size
    wrong = ~(np.abs(got - right) <= bound / (size if case.reduction == "avg" else 1))
    return f"{int(wrong.sum())} of {case.count} values are further off than rounding takes them" if wrong.any() else ""


def _counts(case: Case, size: int) -> list[int]:
    """Of each rank's block: alike, or of lengths that differ, some of them 0."""
    if case.operation == "reduce_scatter":
        return [3 * -(-case.count // (3 * size))] * size
    shares = [rank * 7 % 4 for rank in range(size)]
    if not sum(shares):
        return [case.count] * size
    counts = [case.count * share // sum(shares) for share in shares]
    counts[-1] += case.count - sum(counts)
    return counts


def _vector(case: Case, rank: int, size: int) -> Vector:
    """Rank ``rank``'s input; that of a reduce_scatter goes on up to a length that can be divided."""
    x = dense_input(case, rank)
    length = sum(_counts(case, size)) if case.operation == "reduce_scatter" else case.count
    return np.concatenate([x, np.zeros(length - case.count, x.dtype)])


@functools.lru_cache(maxsize=16)  # for the ranks of one process
def _whole(case: Case, size: int) -> Vector:
    vectors = [_vector(case, rank, size) for rank in range(size)]
    total = functools.reduce(COMBINE[case.reduction], vectors)
    return (total != 0 if case.reduction in LOGICAL else total).astype(vectors[0].dtype)
