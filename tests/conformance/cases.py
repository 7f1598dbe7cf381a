"""What every driver must do: cases as data, their inputs, and the numpy sum that they are compared with.

Only numpy and telegrad's public names, so that ranks start fast; bfloat16 is handled as its 16 bits.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from cases_moves import BLOCK_OPERATIONS, begin_blocks, block_cases, fault_of_blocks

from telegrad import Communicator, SparseVector, Work, _core
from telegrad.communicator.operands import address
from telegrad.communicator.reductions import (
    DENSE_ALGORITHMS,
    SPARSE_ALGORITHMS,
    algorithm_of,
    reduction_of,
    sparse_reduction_of,
)

Array = npt.NDArray[Any]

SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16)
MOST_OF_ALL = 8  # with more ranks than this on few cores only small vectors
PATTERNS = ("uniform", "unequal", "one_rank", "nobody", "one_slice", "identical", "disjoint", "crowded", "full")
_UNIT_ROUNDOFF = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11, "f64": 2.0**-53}
_UNIT_ROUNDOFF |= {"c64": 2.0**-22, "c128": 2.0**-51}  # of a product's parts: two products and a sum of them
_SMALLEST_F16 = 2.0**-24  # whoever divides may lose half of this
_COMPUTED_AS: dict[str, Any] = {
    "f32": np.float32,
    "bf16": np.float32,
    "f64": np.float64,
    "f16": np.float16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "i8": np.int8,
    "i16": np.int16,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "bool": np.bool_,
    "c64": np.complex64,
    "c128": np.complex128,
}


def _larger_magnitude(a: Array, b: Array) -> Array:
    left, right = np.abs(a), np.abs(b)
    if a.dtype.kind == "i":  # that of the least one fits an unsigned integer only
        left, right = left.view(f"u{a.itemsize}"), right.view(f"u{a.itemsize}")
    return np.where(left == right, np.maximum(a, b), np.where(left < right, b, a))


COMBINE = {
    "sum": np.add,
    "own": np.add,  # of the caller, see reduction_cases.py
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "max_abs": _larger_magnitude,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": lambda a, b: np.logical_and(a, b).astype(a.dtype),
    "lor": lambda a, b: np.logical_or(a, b).astype(a.dtype),
    "lxor": lambda a, b: np.logical_xor(a, b).astype(a.dtype),
}
_NEUTRAL = {"prod": 1.0, "min": np.inf, "max": -np.inf}  # of the others 0
_REDUCTIONS = ("sum", "avg", "prod", "min", "max", "max_abs")
LOGICAL = ("land", "lor", "lxor")
_WHOLE = ("sum", "prod", "min", "max", "band", "bor", "bxor", *LOGICAL)
_SPARSE_WHOLE = [
    (d, r) for d in ("i32", "i64", "u32", "u64") for r in (*_WHOLE[:4], "max_abs") if (d[0], r) != ("u", "max_abs")
]


@dataclass(frozen=True)
class Case:
    """One operation, the same on all ranks.

    ``values``: small integers are summed exactly, floats within their rounding; wide ones are any of an integer dtype.
    """

    operation: str
    count: int = 0
    dtype: str = "f32"
    reduction: str = "sum"
    algorithm: str = "auto"
    values: str = "integers"
    pattern: str = "uniform"  # of a sparse vector
    switch_factor: float = 1.0
    root: int = 0
    blocking: bool = False  # where a process has one rank only

    def __str__(self) -> str:
        words = [self.operation, self.count, self.dtype, self.reduction, self.algorithm, self.values]
        if self.operation in BLOCK_OPERATIONS:
            words += [self.pattern, f"root={self.root}"]
        if self.operation.startswith("sparse"):
            words += [self.pattern, f"switch={self.switch_factor:g}"]
        return "-".join(map(str, [*words, *(["blocking"] if self.blocking else [])]))


@dataclass(frozen=True)
class Group:
    """Cases that are in flight together. ``family`` is the test that they belong to."""

    family: str
    cases: tuple[Case, ...]
    staggered: bool = False  # ranks begin at different times, and wait in different orders


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def node_of(rank: int, size: int) -> int:
    """Where ranks live: for ``two_level``, and for the choice of an algorithm. Most nodes have two ranks, some one."""
    return rank % ((size + 1) // 2)


def groups(size: int) -> list[Group]:
    """All that ``size`` ranks are asked to do, in this order."""
    small = size > MOST_OF_ALL
    single = [*_dense_cases(size, small), *_sparse_cases(small), *_moving_cases(size, small)]
    every = [
        Group(family, (case if number % 2 else replace_blocking(case),)) for number, (family, case) in enumerate(single)
    ]
    from reduction_cases import reduction_groups
    from stream_cases import stream_groups

    return [*every, *reduction_groups(size), *stream_groups(size), *_groups_in_flight(size)]


def numbers_of(asked: list[Group], one_in: int) -> list[int]:
    """The places of the first group of each family, and of one in so many behind it: an odd number, since most options
    of cases take turns by twos."""
    seen: Counter[str] = Counter()
    chosen = []
    for number, group in enumerate(asked):
        if seen[group.family] % one_in == 0:
            chosen.append(number)
        seen[group.family] += 1
    return chosen


def replace_blocking(case: Case) -> Case:
    return Case(**{**case.__dict__, "blocking": True})


def _dense_cases(size: int, small: bool) -> list[tuple[str, Case]]:
    counts = (0, 1, 63, 1000) if small else (0, 1, 63, 1000, 4099, 150_001)
    kinds = [("f32", "integers"), ("bf16", "integers")] if small else _KINDS
    cases = [
        Case("dense", count, dtype, reduction, algorithm, values)
        for algorithm in ("ring", "recursive_doubling", "rabenseifner", "two_level", "auto")
        for count in counts
        for dtype, values in kinds
        for reduction in ("sum", "avg")
        if algorithm != "auto" or values == "integers"
    ]
    for dtype, values, reduction in OTHER_KINDS:
        cases.append(Case("dense", 63, dtype, reduction, "recursive_doubling", values))
        cases.append(Case("dense", 1000 if small else 4099, dtype, reduction, "ring", values))
        cases.append(Case("dense", 1000 if small else 4099, dtype, reduction, "two_level", values))
    if not small:  # several segments, of which the last is short
        cases += [Case("dense", 131_072 * size + 17, "f32", "sum", "ring", "floats")]
        cases += [Case("dense", 131_072 * size + 17, "f32", "sum", "two_level", "floats")]
    return [(case.algorithm, case) for case in cases]


_KINDS = [(dtype, values) for dtype in ("f32", "bf16") for values in ("integers", "floats")]
OTHER_KINDS = [
    *((dtype, "floats", reduction) for dtype in ("f64", "f16") for reduction in _REDUCTIONS),
    *((dtype, "floats", reduction) for dtype in ("f32", "bf16") for reduction in _REDUCTIONS[2:]),
    *((dtype, "wide", "max_abs") for dtype in ("i8", "i16", "i32", "i64")),
    *(
        (dtype, "wide", reduction)
        for dtype in ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "bool")
        for reduction in _WHOLE
    ),
    *((dtype, "floats", reduction) for dtype in ("c64", "c128") for reduction in ("sum", "avg", "prod")),
]


def _sparse_cases(small: bool) -> list[tuple[str, Case]]:
    cases = [
        Case(operation, 1000, dtype, "sum", pattern=pattern)
        for operation in ("sparse", "sparse_into")
        for pattern in PATTERNS
        for dtype in ("f32", "bf16")
    ]
    for operation in ("sparse", "sparse_into"):
        cases += [Case(operation, count, reduction="avg", values="floats") for count in (0, 1, 7, 63, 1000)]
        cases += [Case(operation, 1000, values="floats", switch_factor=factor) for factor in (0.0, 1e9)]
        cases += [
            Case(operation, 1000, dtype, reduction, values="floats", pattern=pattern)
            for dtype in ("f32", "f64", "bf16", "f16")
            for reduction in _REDUCTIONS
            for pattern in ("uniform", "crowded")
        ]
        cases += [
            Case(operation, 1000, dtype, reduction, algorithm, "wide", pattern)
            for dtype, reduction in _SPARSE_WHOLE
            for algorithm, pattern in (("auto", "uniform"), ("auto", "crowded"), ("recursive_doubling", "full"))
        ]
        cases += [
            Case(operation, 1000, dtype, reduction, algorithm, "wide", pattern, factor)
            for dtype, reduction in (("i32", "sum"), ("u64", "min"))
            for algorithm in ("split_allgather", "split_dense_allgather", "recursive_doubling", "ring")
            for pattern in ("uniform", "crowded")
            for factor in (0.0, 1.0, 1e9)
        ]
        if not small:
            cases += [Case(operation, 200_003, d, "sum", values="wide", pattern="crowded") for d in ("u32", "i64")]
            cases += [
                Case(operation, 200_003, dtype, "avg", values="floats", pattern=p)
                for p in ("uniform", "one_slice", "crowded")
                for dtype in ("f32", "bf16")
            ]
    by_levels = [
        Case(operation, count, dtype, reduction, "two_level", "wide" if dtype[0] in "iu" else "floats", pattern)
        for operation in ("sparse", "sparse_into")
        for count in ((0, 1, 1000) if small else (0, 1, 7, 1000, 200_003))
        for dtype, reduction in (
            *(("f32", "avg"), ("bf16", "sum"), ("f64", "min"), ("f16", "max_abs")),
            *(("i32", "sum"), ("u64", "max"), ("u32", "prod"), ("i64", "min")),
        )
        for pattern in ("uniform", "one_slice", "full")
    ]
    return [("sparse", case) for case in cases] + [("sparse_two_level", case) for case in by_levels]


def _moving_cases(size: int, small: bool) -> list[tuple[str, Case]]:
    counts = (0, 1, 63, 1000) if small else (0, 1, 63, 1000, 100_003, 1_000_001)
    cases = [("all_gather", Case("all_gather", count)) for count in counts]
    cases += [
        ("broadcast", Case("broadcast", count, root=r)) for count in counts for r in sorted({0, size // 2, size - 1})
    ]
    cases += [(name, Case(name, count, pattern=layout, root=r)) for name, count, layout, r in block_cases(size, small)]
    return cases + [("barrier", Case("barrier")) for _ in range(3)]


def _groups_in_flight(size: int) -> list[Group]:
    mixed = (
        Case("dense", 1000, algorithm="ring"),
        Case("sparse", 5000, values="floats"),
        Case("dense", 63, "bf16", algorithm="recursive_doubling"),
        Case("all_gather", 77),
        Case("sparse_into", 5000, "bf16", pattern="unequal"),
        Case("broadcast", 5000, root=size - 1),
        Case("barrier"),
        Case("dense", 1),
    )
    many = tuple(
        Case("dense", 10 + number, algorithm=("ring", "recursive_doubling")[number % 2]) for number in range(40)
    )
    return [Group("in_flight", cases, staggered=staggered) for cases in (mixed, many) for staggered in (False, True)]


def dense_input(case: Case, rank: int) -> Array:
    """Rank ``rank``'s vector: bf16 as float32, already rounded."""
    values = "factors" if case.reduction == "prod" and case.values == "floats" else case.values
    if values == "wide" and case.reduction in ("land", "lor", "lxor", "band", "bor"):
        values = "sparse"  # of many random elements the result would be alike everywhere
    return _drawn(rank, case.count, case.dtype, values).copy()


@functools.lru_cache(maxsize=512)  # many cases, and all ranks' oracles, ask for the same
def _drawn(rank: int, count: int, dtype_name: str, values: str) -> Array:
    random = np.random.default_rng([rank, count])
    dtype = _COMPUTED_AS[dtype_name]
    if dtype is np.bool_:
        return random.random(count) < (0.9 if rank % 2 else 0.2)
    if values == "sparse":
        wide = _drawn(rank, count, dtype_name, "wide")
        return np.where(random.random(count) < 0.5, wide, random.choice([0, -1], count).astype(dtype))
    if values == "wide":
        return random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, count, dtype, endpoint=True)
    if values == "integers":
        x = random.integers(-8, 8, count, endpoint=True).astype(np.float64)
    elif values == "factors":
        x = random.uniform(0.5, 1.5, count)  # their product stays in f16's range
    else:
        x = random.standard_normal(count) * 10.0 ** random.integers(-3, 3, count)
    if np.issubdtype(dtype, np.complexfloating):
        if values == "integers":
            return (x + 1j * random.integers(-8, 8, count, endpoint=True)).astype(dtype)
        return (x * np.exp(1j * random.uniform(-3, 3, count))).astype(dtype)
    x = x.astype(dtype)
    return from_bf16(to_bf16(x)) if dtype_name == "bf16" else x


def sparse_indices(case: Case, rank: int, size: int) -> npt.NDArray[np.uint32]:
    """Where rank ``rank`` of ``size`` has entries."""
    return _drawn_indices(case.pattern, case.count, rank, size)


@functools.lru_cache(maxsize=512)
def _drawn_indices(pattern: str, n: int, rank: int, size: int) -> npt.NDArray[np.uint32]:
    random = np.random.default_rng([rank, n, 1])
    everywhere = np.arange(n, dtype=np.uint32)

    def some(share: float, among: npt.NDArray[np.uint32] = everywhere) -> npt.NDArray[np.uint32]:
        return np.sort(random.choice(among, int(share * among.size), replace=False))

    match pattern:
        case "unequal":
            return some(0.2 * rank / size)
        case "one_rank":
            return some(0.1) if rank == size // 2 else everywhere[:0]
        case "nobody":
            return everywhere[:0]
        case "one_slice":  # all in the part that one rank owns
            return some(0.5, everywhere[: n // size])
        case "identical":
            return everywhere[::17].copy()
        case "disjoint":
            return everywhere[rank::size][::8].copy()
        case "crowded":
            return some(0.9)
        case "full":
            return everywhere
    return some(0.03 if n > 100 else 0.5)


def bits_of(x: Array, dtype: str) -> Array:
    return to_bf16(x) if dtype == "bf16" else x


class Started:
    """An operation that one rank has begun. ``outcome()`` waits; it gives the bits of the result."""

    def __init__(self, case: Case, communicator: Communicator, *, alone: bool = True) -> None:
        """``alone``: the process has no other rank, so that a call may block."""
        self._work: Work | None = None
        self._read: Any = None
        blocking = case.blocking and alone
        rank, size = communicator.rank, communicator.world_size
        if case.operation in BLOCK_OPERATIONS:
            begun = begin_blocks(case.operation, case.count, case.pattern, case.root, communicator, blocking)
            self._work = None if blocking else begun
            self._read = lambda: begun if blocking else begun.result()
            return
        match case.operation:
            case "dense":
                bits = np.ascontiguousarray(bits_of(dense_input(case, rank), case.dtype))
                self._work = _dense(communicator, bits, case, blocking)
                self._read = lambda: bits
            case "sparse":
                stream = input_stream(case, rank, size)
                options = {"algorithm": case.algorithm, "switch_factor": case.switch_factor, "async_op": not blocking}
                started = communicator.all_reduce(stream, case.reduction, **options)
                self._work = None if blocking else started
                self._read = lambda: dense_bits(started if blocking else started.result())
            case "sparse_into":
                stream = input_stream(case, rank, size)
                unwritten = 77 if case.values == "wide" else np.nan
                out = np.full(case.count, unwritten, _COMPUTED_AS[case.dtype]) if case.dtype != "bf16" else None
                if out is not None:
                    options = {"algorithm": case.algorithm, "switch_factor": case.switch_factor}
                    self._work = communicator.all_reduce_into(
                        stream, out, case.reduction, async_op=not blocking, **options
                    )
                    self._read = lambda: out
                else:
                    narrow = np.full(case.count, 0x7FC0, np.uint16)
                    self._work = _into_bf16(communicator, stream, narrow, case)
                    self._read = lambda: narrow
            case "all_gather":
                mine = _bytes(case, rank)
                gathered = communicator.all_gather(mine, async_op=not blocking)
                self._work = None if blocking else gathered
                self._read = lambda: gathered if blocking else gathered.result()
            case "broadcast":
                data = _bytes(case, rank)
                self._work = communicator.broadcast(data, case.root, async_op=not blocking)
                self._read = lambda: data
            case "barrier":
                self._work = communicator.barrier(async_op=not blocking)
                self._read = lambda: np.empty(0, np.uint8)
            case streaming if streaming.startswith("sparse_"):
                from stream_cases import begin_streams

                self._work, self._read = begin_streams(case, communicator, blocking=blocking)
            case _:
                from reduction_cases import begin_reduction

                self._work, self._read = begin_reduction(case, communicator, blocking=blocking)

    def outcome(self) -> Array:
        if self._work is not None:
            self._work.wait()
        found = self._read()
        return np.empty(0, np.uint8) if found is None else np.asarray(found)  # None: a rank that gets nothing


def _dense(communicator: Communicator, bits: Array, case: Case, blocking: bool) -> Work | None:
    if case.dtype != "bf16":
        work = communicator.all_reduce(bits, case.reduction, algorithm=case.algorithm, async_op=not blocking)
        return work if isinstance(work, Work) else None
    core = communicator._core
    at = address(bits)
    algorithm = algorithm_of(case.algorithm, DENSE_ALGORITHMS)
    reduction = reduction_of(case.reduction, _core.DType.bf16)
    request = core.all_reduce(at, at, bits.size, _core.DType.bf16, reduction, algorithm)
    return Work(request, "all_reduce", communicator.rank, lambda _: None)


def _into_bf16(communicator: Communicator, stream: SparseVector, out: Array, case: Case) -> Work:
    request = communicator._core.all_reduce_sparse_into(
        address(stream.raw_indices),
        address(stream.raw_values),
        stream.nnz,
        0 if stream.marks is None else address(stream.marks),
        stream.n,
        _core.DType.bf16,
        _core.SparseReduction(
            sparse_reduction_of(case.reduction), algorithm_of(case.algorithm, SPARSE_ALGORITHMS), case.switch_factor
        ),
        address(out),
    )
    return Work(request, "all_reduce_into", communicator.rank, lambda _: stream)  # which keeps it alive


def input_stream(case: Case, rank: int, size: int) -> SparseVector:
    indices = sparse_indices(case, rank, size)
    bits = bits_of(dense_input(case, rank)[indices], case.dtype)
    return SparseVector.trusted(indices, np.ascontiguousarray(bits), case.count)


def dense_bits(stream: SparseVector) -> Array:
    dense = stream.to_dense()
    if not stream.is_dense and not np.all(np.diff(stream.raw_indices.astype(np.int64)) > 0):
        raise AssertionError("indices of the sum are not strictly increasing")
    return np.asarray(dense)


def _bytes(case: Case, rank: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng([rank, case.count, 2]).integers(0, 256, case.count, dtype=np.uint8)


def _neutral(case: Case) -> float:
    if case.values != "wide" or case.reduction not in ("min", "max"):
        return _NEUTRAL.get(case.reduction, 0.0)
    limits = np.iinfo(_COMPUTED_AS[case.dtype])
    return limits.max if case.reduction == "min" else limits.min


@dataclass
class Oracle:
    """The right results for one size, each computed once."""

    size: int
    _results: dict[tuple[object, ...], tuple[Array, Array]] = field(default_factory=dict)

    def fault(self, case: Case, bits: Array, rank: int) -> str:
        """What is wrong with the result of ``rank``; empty if it is right."""
        if case.operation in BLOCK_OPERATIONS:
            return fault_of_blocks(case.operation, case.count, case.pattern, case.root, bits, rank, self.size)
        if case.operation == "barrier":
            return ""
        if case.operation == "all_gather":
            right = np.stack([_bytes(case, rank) for rank in range(self.size)])
            return "" if np.array_equal(bits, right) else "all_gather gave other bytes than the ranks sent"
        if case.operation == "broadcast":
            right = _bytes(case, case.root)
            return "" if np.array_equal(bits, right) else "broadcast gave other bytes than the root's"
        if case.operation == "sparse_all_gather":
            right = np.stack([self._input(case, rank) for rank in range(self.size)])
            return "" if np.array_equal(bits, right) else "all_gather gave other streams than the ranks have"
        right, magnitude = self._result(case)
        if bits.shape != right.shape:
            return f"shape {bits.shape} instead of {right.shape}"
        if case.operation == "encoded":
            from reduction_cases import fault_of_encoded

            return fault_of_encoded(case, bits, right, self.size)
        got = from_bf16(bits) if case.dtype == "bf16" and bits.dtype == np.uint16 else bits
        if self._is_exact(case):
            wrong = ~(got == right)
        else:
            roundings = self.size + 2 + (self.size if case.dtype in ("f64", "c128") else 0)  # of the right result too
            bound = magnitude * roundings * _UNIT_ROUNDOFF[case.dtype] + (case.dtype == "f16") * _SMALLEST_F16
            wrong = ~(np.abs(got.astype(right.dtype) - right) <= bound)  # NaN counts as wrong
        if not wrong.any():
            return ""
        at = int(wrong.argmax())
        return f"{int(wrong.sum())} of {case.count} values are wrong: [{at}] is {got[at]} instead of {right[at]}"

    def _is_exact(self, case: Case) -> bool:
        if case.values == "wide" or case.reduction in ("min", "max", "max_abs"):
            return True
        return case.values == "integers" and (case.reduction in ("sum", "own") or self.size.bit_count() == 1)

    def _result(self, case: Case) -> tuple[Array, Array]:
        """The right result, and what its roundings are in proportion to."""
        key = (case.operation.startswith("sparse"), case.count, case.dtype, case.values, case.pattern, case.reduction)
        if key not in self._results:
            inputs = [self._input(case, rank) for rank in range(self.size)]
            right, magnitude = inputs[0].copy(), np.abs(inputs[0])
            for x in inputs[1:]:
                right = COMBINE[case.reduction](right, x)
                magnitude = COMBINE[case.reduction](magnitude, np.abs(x))
            if case.reduction in LOGICAL:
                right = (right != 0).astype(right.dtype)  # also of one rank
            if case.reduction == "avg":
                right, magnitude = right / self.size, magnitude / self.size
            self._results[key] = right, magnitude
        return self._results[key]

    def _input(self, case: Case, rank: int) -> Array:
        x = dense_input(case, rank)
        x = x if case.values == "wide" else x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
        if not case.operation.startswith("sparse"):
            return x
        whole = np.full(case.count, _neutral(case), x.dtype)
        held = sparse_indices(case, rank, self.size)
        whole[held] = x[held]
        return whole
