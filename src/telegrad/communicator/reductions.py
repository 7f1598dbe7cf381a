"""The operations that reduce: dense vectors in host memory and on a GPU, and sparse ones, to a new vector or a dense
one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from telegrad import _core
from telegrad.communicator.base import CommunicatorBase
from telegrad.communicator.cuda.entries import (
    DeviceEntries,
    EncodedSum,
    EntriesPart,
    GatheredPart,
    Staged,
    encoded_parts,
)
from telegrad.communicator.cuda.nccl import NcclSums, Verdict
from telegrad.communicator.cuda.runtime import Stream, resolved_device, runtime_of
from telegrad.communicator.cuda.transfers import DeviceWork, element_parts, flat, scattered_parts
from telegrad.communicator.operands import (
    UNMEASURED_S_PER_BYTE,
    CustomReduction,
    HostBuffer,
    address,
    check_async,
    check_dense_options,
    check_encodable,
    check_rounding_options,
    check_together,
    checked_counts,
    checked_factor,
    checked_rank,
    checked_seed,
    checked_slices,
    dtype_name,
    empty_like,
    encoding_of,
    error_into,
    error_of,
    formats_named,
    formats_of,
    formats_of_name,
    on_device,
    overlap,
    overlaps_stream,
    reducible,
    without_sums,
)
from telegrad.communicator.texts import all_gather_text
from telegrad.communicator.work import Work, once, with_fast_path
from telegrad.cost import Tuning
from telegrad.cost.closed_forms import layout_that_pays
from telegrad.cost.send_method import GroupCost
from telegrad.cost.tuning import DEVICE_ALGORITHMS, HOST_TRANSFER, NCCL
from telegrad.kernels.staging import kernels_of
from telegrad.sparse_vector import SparseVector
from telegrad.sparse_vector.formats import DTYPES, NAMES, Bits, is_coo

DENSE_ALGORITHMS = ("auto", "ring", "recursive_doubling", "rabenseifner", "two_level", "mpi")
DENSE_DEVICE_ALGORITHMS = (*(name for name in DENSE_ALGORITHMS if name != "mpi"), *DEVICE_ALGORITHMS)
"""Of dense device tensors: NCCL's, the engine's by name, or ``"host_transfer"``, of which the engine chooses one."""
SPARSE_ALGORITHMS = ("auto", "split_allgather", "split_dense_allgather", "recursive_doubling", "ring", "two_level")


class ReduceOp(StrEnum):
    """Reductions; their names serve as well: ``op="avg"``.

    The table in docs/reference/api/communicator.md says which dtype has which; any other pair raises ``TypeError``.
    ``AVG`` is the sum divided by the number of ranks. The average of finite float16 is finite, even if the sum is not
    (docs/explanation/algorithms.md). ``MIN`` and ``MAX`` are NaN where any rank's element is, and order -0 before +0.
    ``MAX_ABS`` is the element of the largest magnitude, with its sign: the positive one of two that differ in sign
    only, NaN where any is. Integers wrap round, as NumPy's do. ``BAND``, ``BOR`` and ``BXOR`` are bitwise. ``LAND``,
    ``LOR`` and ``LXOR`` take any element but 0 for true, and give 0 or 1. The ``SUM`` of booleans is or, their ``PROD``
    and. Sparse vectors have the first six. An index without an entry in a sparse vector is the neutral element: 0, 1
    for ``PROD``, infinity (of integers the largest value) for ``MIN``, -infinity (the least) for ``MAX``."""

    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    MAX_ABS = "max_abs"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"
    LXOR = "lxor"


_REDUCTIONS: dict[str, _core.Reduction] = {op.value: getattr(_core.Reduction, op.value) for op in ReduceOp}
_NEUTRAL = {_core.Reduction.prod: 1.0, _core.Reduction.min: math.inf, _core.Reduction.max: -math.inf}
_SPARSE_REDUCTIONS = tuple(op.value for op in ReduceOp)[:6]
_ALGORITHMS: dict[str, _core.Algorithm] = {
    **{name: getattr(_core.Algorithm, name) for name in {*DENSE_ALGORITHMS, *SPARSE_ALGORITHMS}},
    **dict.fromkeys(DEVICE_ALGORITHMS, _core.Algorithm.auto),
}


def reduction_of(op: object, dtype: _core.DType, allowed: tuple[str, ...] = tuple(_REDUCTIONS)) -> _core.Reduction:
    """The reduction of elements of ``dtype``, one of ``allowed``, that a ReduceOp, its name, or torch's ReduceOp stands
    for.

    Raises ``ValueError`` for any other, and ``TypeError`` for one that ``dtype`` does not have."""
    reduction = _REDUCTIONS[_name(op, allowed)]
    if not _core.has_reduction(dtype, reduction):
        its = ", ".join(repr(name) for name in allowed if _core.has_reduction(dtype, _REDUCTIONS[name]))
        remedy = "use 'sum' and divide, or convert x to float64" if reduction == _core.Reduction.avg else f"use {its}"
        raise TypeError(f"op={reduction.name!r} of {dtype_name(dtype)} does not exist: {remedy}")
    return reduction


def sparse_reduction_of(op: object) -> _core.Reduction:
    """The same for sparse vectors, of whatever dtype."""
    return _REDUCTIONS[_name(op, _SPARSE_REDUCTIONS)]


def neutral_element(reduction: _core.Reduction) -> float:
    """What an index that no rank has stands for in a sparse result."""
    return _NEUTRAL.get(reduction, 0.0)


def open_choices(reduction: _core.Reduction, algorithm: str, switch_factor: Any) -> tuple[_core.Algorithm, float]:
    """The algorithm of a sparse reduction, and its ``switch_factor``, of which the caller may have left both open
    (``"auto"``, ``None``).

    By the reduction alone, of which ranks have the same. Where its neutral element is not 0, an open choice is one that
    never makes a sum dense: there an entry that equals the neutral element and an index that no rank has would be
    alike, which are not the same to whoever takes a missing index for 0. Raises ``TypeError`` or ``ValueError``."""
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


class StreamInput(NamedTuple):
    """A caller's sparse vector as a stream, and the way back."""

    stream: SparseVector
    like: Callable[[SparseVector], Any]
    """Makes a stream of as many elements the type, and the shape, of what was given."""


def sparse_input(x: Any) -> StreamInput | None:
    """``x`` if it is a SparseVector or a ``torch.sparse_coo`` tensor, else ``None``.

    Raises ``TypeError`` or ``ValueError`` for a COO tensor that is no stream."""
    if isinstance(x, SparseVector):
        return StreamInput(x, lambda stream: stream)
    if not is_coo(x):
        return None
    shape, sparse_dim = tuple(x.shape), x.sparse_dim()
    return StreamInput(SparseVector.from_coo(x), lambda stream: stream.to_coo(shape, sparse_dim))


def dense_for(entries: DeviceEntries, out: Any, error: Any, length: int | None = None) -> Any:
    """``out``, if the sum of ``entries``, or a slice of ``length``, can go there, and what is lost to ``error``, if
    that is given. Raises ``TypeError`` or ``ValueError`` if not."""
    whole, length = length is None, entries.length if length is None else length
    if out is None:
        raise TypeError(
            f"the sum of DeviceEntries goes into a dense tensor: give out=, of {length} elements on "
            f"{entries.values.device}"
        )
    buffer = reducible(out, "out", device=True)
    check_together(entries.values, out)
    if out.dtype != entries.values.dtype:
        raise TypeError(f"out has dtype {out.dtype} but the values have {entries.values.dtype}: give both the same")
    if buffer.elements != length:
        wanted = "the entries' length" if whole else "this rank's slice"
        raise ValueError(f"out has {buffer.elements} elements but {wanted} is {length}")
    parts = _memory_of(entries)
    if any(overlap(part, buffer) for part in parts):
        raise ValueError("out shares memory with the entries: give it memory of its own")
    if error is not None:
        _check_error(entries, error, [*parts, buffer])
    return out


def _lost_to(error: Any, wire: Any, entries: DeviceEntries) -> Any:
    """``error``, if ``wire`` loses anything of these values."""
    loses = (
        error is not None and formats_named(without_sums(wire)[0], entries.dtype).values != _core.ValueEncoding.native
    )
    return error if loses else None


def _memory_of(entries: DeviceEntries) -> list[HostBuffer]:
    parts = (entries.indices, entries.values, entries.count)
    return [HostBuffer(part.data_ptr(), part.numel(), part.nbytes, DTYPES[entries.dtype]) for part in parts]


def _check_error(entries: DeviceEntries, error: Any, others: list[HostBuffer]) -> None:
    into, place = reducible(error, "error", device=True), entries.values.device
    if not on_device(error) or error.device != place:
        raise TypeError(f"error is not on {place}, where the entries are: give a float32 tensor there")
    if into.dtype != _core.DType.f32:
        raise TypeError(f"error has dtype {error.dtype}: give a float32 one of {entries.length} elements")
    if into.elements != entries.length:
        raise ValueError(f"error has {into.elements} elements but the entries' length is {entries.length}")
    if any(overlap(into, other) for other in others):
        raise ValueError("error shares memory with out or the entries: give it memory of its own")


class StreamReductions(CommunicatorBase):
    """Operations that combine the entries of ranks."""

    _tuning: Tuning | None = None
    _encoded_calls = 0  # so far: no two of them round alike

    def all_reduce_into(
        self,
        stream: Any,
        out: Any,
        op: Any = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        switch_factor: float | None = None,
        wire: str | None = None,
        error: Any = None,
        seed: int = 0,
        slices: str = "equal",
    ) -> Work | None:
        """Writes the dense reduction of all ranks' sparse vectors (SparseVector or ``torch.sparse_coo``) into ``out``.

        This is faster than making a sparse result dense. ``out``: ``stream.n`` elements of the values' dtype, any
        shape, without shared memory. It gets the neutral element of ``op`` where no rank has an entry: 0 for ``"sum"``,
        ``"avg"`` and ``"max_abs"``, 1 for ``"prod"``, infinity for ``"min"``, -infinity for ``"max"``. The other
        arguments are those of all_reduce(), so some ranks may call this and others that. For ``"prod"``, ``"min"`` and
        ``"max"`` of many entries ``switch_factor=1`` may be faster. Raises ``TypeError`` or ``ValueError`` for
        arguments that do not fit, before anything is sent."""
        check_async(async_op)
        given = sparse_input(stream)
        if given is None:
            raise TypeError(
                f"stream is a {type(stream).__name__}: it must be a SparseVector or a COO tensor; give dense tensors "
                "to all_reduce()"
            )
        stream = given.stream
        core, buffer = self._usable(), reducible(out, "out")
        dtype = DTYPES[stream.dtype]
        if buffer.dtype != dtype:
            raise TypeError(f"out has dtype {out.dtype} but the sparse vector holds {stream.dtype}: give both the same")
        if buffer.elements != stream.n:
            raise ValueError(
                f"out has {buffer.elements} elements but the sparse vector has n={stream.n}: give them the same length"
            )
        if overlaps_stream(buffer, stream):
            raise ValueError("out shares memory with the stream: give it memory of its own")
        entries, held = _memory_in(stream, neutral_element(sparse_reduction_of(op)))
        how = self._sparse_reduction(stream, op, algorithm, switch_factor, wire, error, seed, out=buffer, slices=slices)
        request = core.all_reduce_sparse_into(*entries, how, buffer.pointer, not async_op)
        return self._begun(request, "all_reduce_into", (held, out, error), out, async_op)

    def _begin_average_into(
        self, indices: npt.NDArray[np.uint32], values: Bits, out: Bits, wire: str, error: Bits | None
    ) -> Work:
        """As ``all_reduce_into(…, "avg", async_op=True)``, of arrays that telegrad itself has made, of which nothing is
        checked: entries of a vector as long as ``out``, float32, or uint16 that holds bfloat16. ``error`` is for a
        ``wire`` that rounds."""
        core = self._live
        if core is None:
            core = self._usable()
        dtype, tuning, look = NAMES[values.dtype], self._tuning, _core.buffer_of
        layout = "blocked"
        if tuning is not None or not core.shares_memory:
            beta_s_per_byte = UNMEASURED_S_PER_BYTE if tuning is None else tuning.costs.beta_s_per_byte
            layout = layout_that_pays(beta_s_per_byte, values.size / out.size if out.size else 0.0, dtype)
        index_format, encoding, packs_values = formats_of_name(wire, dtype, layout)
        at, of, into = look(indices, False), look(values, False), look(out, True)
        lost = None if error is None else look(error, True)
        assert at is not None
        assert of is not None
        assert into is not None
        call = 0 if encoding == _core.ValueEncoding.native else self._next_encoded_call()
        rounding = (index_format, encoding, 0, call, 0 if lost is None else lost.pointer, out.size)
        how = _core.SparseReduction(_core.Reduction.avg, _core.Algorithm.auto, 1.0, *rounding, False, packs_values)
        request = core.all_reduce_sparse_into(
            at.pointer, of.pointer, values.size, 0, out.size, DTYPES[dtype], how, into.pointer, False
        )
        if self._kept:
            self._let_go()
        held = (indices, values, out, error)
        return Work(request, "all_reduce_into", core.rank, lambda _: out, held, None if self._over else self)

    def _sparse_reduction(
        self,
        stream: SparseVector | DeviceEntries,
        op: Any,
        algorithm: str,
        switch_factor: float | None,
        wire: Any,
        error: Any,
        seed: Any,
        *,
        out: HostBuffer | None = None,
        slices: str = "equal",
    ) -> _core.SparseReduction:
        core, reduction = self._usable(), reduction_of(op, DTYPES[stream.dtype], _SPARSE_REDUCTIONS)
        wire, rounds_shares = without_sums(wire)
        formats = formats_of(wire, stream, shares_memory=core.shares_memory, tuning=self._tuning)
        encoding = formats.values
        balanced = _balanced(slices, algorithm)
        chosen, factor = open_choices(reduction, algorithm, switch_factor)
        number = checked_seed(seed)
        check_rounding_options(wire, number, error)
        lost = 0 if isinstance(stream, DeviceEntries) else error_into(error, stream, out)
        if encoding != _core.ValueEncoding.native:
            if reduction not in (_core.Reduction.sum, _core.Reduction.avg):
                raise ValueError(
                    f"op={reduction.name!r} is not supported with wire={wire!r}, which rounds: use 'packed'"
                )
            if algorithm == "recursive_doubling":
                raise ValueError(
                    f"algorithm='recursive_doubling' is not supported with wire={wire!r}, which rounds: use another"
                )
            if algorithm == "ring" and not rounds_shares:
                raise ValueError("algorithm='ring' rounds sums of some ranks: with wire='sums-…' use another")
        call = 0 if encoding == _core.ValueEncoding.native else self._next_encoded_call()
        rounding = (formats.indices, encoding, number, call, lost, stream.n)
        return _core.SparseReduction(
            reduction, chosen, factor, *rounding, balanced, formats.packs_values, rounds_shares
        )

    def _next_encoded_call(self) -> int:
        with self._lock:
            call, self._encoded_calls = self._encoded_calls, (self._encoded_calls + 1) % 2**32
        return call

    def _reduce_stream(
        self, given: StreamInput, op: Any, how: _core.SparseReduction, async_op: bool, error: Any
    ) -> Any:
        absent, stream = neutral_element(sparse_reduction_of(op)), given.stream
        entries, held = _memory_in(stream, absent)
        request = self._usable().all_reduce_sparse(*entries, how, not async_op)

        def finish(done: _core.Request) -> Any:
            return given.like(stream.result(*done.sparse_result(), absent))

        return self._stream_work(request, "all_reduce", (held, error), finish, async_op)

    def _run_entries(
        self,
        call: str,
        entries: DeviceEntries,
        how: _core.SparseReduction,
        out: Any,
        error: Any,
        async_op: bool,
        *more: Any,
        absent: float = 0.0,
    ) -> Any:
        """``call``: the core's, with what it takes ``more`` of. ``out``: a dense tensor, or DeviceEntries by rank."""
        kernels_of(entries.values)  # what they need may be missing: that must be known before anything begins
        begun, dtype, n = getattr(self._usable(), f"{call}_staged"), DTYPES[entries.dtype], entries.length

        def begin(staged: Staged, gate: _core.Gate) -> _core.Request:
            return begun(staged, n, dtype, how, *more, gate)  # type: ignore[no-any-return]

        lost = None if error is None else flat(error)
        found = out if isinstance(out, list) else []
        form = entries.count.new_empty(1 + max(len(found), 1), dtype=sys.modules["torch"].int64)
        part = (
            GatheredPart(entries, found, form, begin, lost)
            if found
            else EntriesPart(entries, flat(out), form, absent, begin, lost)
        )
        own = [tensor for one in (entries, *found) for tensor in (one.indices, one.values, one.count)]
        tensors = (*own, form, *([] if found else [out]), *([] if error is None else [error]))
        operation = "all_gather" if call == "average_gathered" else call
        return self._run_on_device(operation, [part], tensors, out, async_op) or out

    def _gather_entries(self, entries: DeviceEntries, wire: Any, error: Any, seed: Any, async_op: bool) -> Any:
        formats_named(wire, entries.dtype)  # refuses one of sums: nothing is summed
        how = self._sparse_reduction(entries, "sum", "auto", 1.0, wire, error, seed)
        if error is not None:
            _check_error(entries, error, _memory_of(entries))
        torch, new = sys.modules["torch"], entries.count.new_empty
        found = [
            DeviceEntries(new(x.numel(), dtype=torch.uint32), torch.empty_like(x), new(1, dtype=torch.int64), entries.n)
            for x in [entries.values] * self.world_size
        ]
        return self._run_entries("all_gather", entries, how, found, _lost_to(error, wire, entries), async_op)

    def _begin_entries_average(self, entries: DeviceEntries, out: Any, wire: str, error: Any, state: Any) -> Any:
        """Puts into ``out`` the average of all ranks' entries: as ``all_reduce_topk`` by ``state``, or (``None``) of
        all that this rank gathers, added in the order of ranks. To ``error`` (float32) is added what the wire loses of
        this rank's entries, and those finite ones that are not kept. Returns a DeviceWork."""
        how = self._sparse_reduction(entries, "avg", "auto", 1.0, wire, None, 0)
        call, more = ("average_gathered", ()) if state is None else ("all_reduce_topk", (state._core,))
        return self._run_entries(call, entries, how, out, error, True, *more)

    def _stream_work(
        self, request: _core.Request, operation: str, held: Any, finish: Callable[[_core.Request], Any], async_op: bool
    ) -> Any:
        if async_op:
            return self._work(request, operation, held, once(finish))
        self._block(request, held)
        return finish(request)


def _memory_in(stream: SparseVector, absent: float) -> tuple[tuple[int, int, int, int, int, _core.DType], Any]:
    """Its entries as the core takes them, and what must stay where it is until they are read."""
    indices, values = stream.memory(absent)
    marks = stream.marks
    at, marked = (0 if one is None else address(one) for one in (indices, marks))
    entries = (at, address(values), values.size, marked, stream.n, DTYPES[stream.dtype])
    return entries, (indices, values, marks)


def _balanced(slices: object, algorithm: str) -> bool:
    is_balanced = checked_slices(slices) == "balanced"
    if is_balanced and algorithm in ("recursive_doubling", "two_level"):
        why = "which has none" if algorithm == "recursive_doubling" else "whose slices are its nodes'"
        raise ValueError(f"slices='balanced' is not for algorithm={algorithm!r}, {why}: use another")
    return is_balanced


_SUMS = (_core.Reduction.sum, _core.Reduction.avg)
_BY_NCCL = ("float32", "float64", "float16", "bfloat16", "int32", "int64")


class DeviceSums(CommunicatorBase):
    """Dense sums of device tensors: the algorithms that a device has, and their costs."""

    _tuning: Tuning | None
    _nccl: NcclSums | None = None

    def device_algorithms(self, device: Any) -> tuple[str, ...]:
        """The algorithms, of ``"nccl"`` and ``"host_transfer"``, that dense sums on ``device`` can use, the same on all
        ranks.

        ``device``: a ``torch.device`` of this rank's, or its name. All ranks call this; the host waits for them at the
        first call for a device. Raises ``ValueError`` on all ranks if their ``device_algorithm`` differs or is
        impossible. Raises ``ValueError`` or ``TypeError`` for a ``device`` that does not exist."""
        device = resolved_device(device)  # what can be wrong with it is found before other ranks wait for this one
        if self._nccl is None or self._verdict_on(device).refusal:
            return (HOST_TRANSFER,)
        return DEVICE_ALGORITHMS

    def sum_cost(self, device: Any) -> GroupCost | None:
        """Seconds by bytes of a dense sum on ``device``, as a calibration has measured it there; ``None`` without one.

        The same on all ranks, which all call this; the host waits for them. Errors are those of ``device_algorithms``.
        """
        device = resolved_device(device)
        by_nccl = NCCL in self.device_algorithms(device)
        kinds = {*all_gather_text(self, runtime_of(device.type).identity(device)[0])}  # type: ignore[arg-type]
        measured = None if self._tuning is None else self._tuning.on_device
        if measured is None or kinds != {measured.device}:
            return None
        if not by_nccl:
            return measured.host_transfer
        assert self._nccl is not None
        return measured.nccl if self._nccl.always or measured.nccl is None else measured

    def _goes_by_nccl(self, x: Any, reduction: _core.Reduction, algorithm: str) -> bool:
        """The same on all ranks, which call this for the same sum; the first time for a device the host waits for all.
        Raises ``ValueError`` where ``algorithm`` demands what cannot be."""
        if algorithm not in ("auto", NCCL):
            return False
        refusal = ""
        if reduction not in _SUMS:
            refusal = "sums and averages: use 'auto' for other reductions"
        elif str(x.dtype).removeprefix("torch.") not in _BY_NCCL:
            refusal = f"is for {', '.join(_BY_NCCL)}: use 'auto' for {x.dtype}"
        elif self._nccl is None:
            refusal = (
                "is not there: make the communicator with from_torch() of a group whose CUDA tensors go by NCCL, and "
                "device_algorithm='auto'; or use 'auto'"
            )
        elif x.numel():
            verdict = self._verdict_on(x.device)
            if not verdict.refusal:
                return algorithm == NCCL or self._nccl.chosen(x.nbytes, verdict, self._tuning) == NCCL
            refusal = f"cannot be: {verdict.refusal}"
        if refusal and algorithm == NCCL:
            raise ValueError(f"algorithm='nccl' {refusal}")
        return False

    def _verdict_on(self, device: Any) -> Verdict:
        assert self._nccl is not None
        gather = partial(all_gather_text, self)  # type: ignore[arg-type]
        return self._nccl.verdict_on(device, runtime_of(device.type), gather)

    def _sum_by_nccl(
        self, x: Any, target: Any, dtype: _core.DType, reduction: _core.Reduction, async_op: bool
    ) -> DeviceWork | None:
        """As ``all_reduce``. An average is the sum, divided: what NCCL calls one multiplies before it adds. The engine
        hears of the call, so that it can say who has called something else, or has left."""
        sums, core = self._nccl, self._usable()
        assert sums is not None
        averages = reduction == _core.Reduction.avg
        transfers = self._transfers_of("all_reduce", (x, target))
        runtime = runtime_of(x.device.type)
        own, into = flat(x), flat(target)

        def begin(stream: Stream) -> Any:
            if target is not x:
                runtime.launch(stream, _copy, into, own)
            return sums.group.begin_sum(into)

        def finish(stream: Stream) -> None:
            if averages:
                runtime.launch(stream, _average_of(self.world_size), into)

        if averages:
            sums.load_kernels(into, runtime)
        return transfers.run_in_group(
            "all_reduce",
            x.device,
            lambda: core.announce_all_reduce(into.numel(), dtype, reduction),
            begin,
            finish,
            (x, target),
            self.abort,
            result=target,
            async_op=async_op,
        )


def _copy(into: Any, own: Any) -> None:
    into.copy_(own)


def _average_of(ranks: int) -> Any:
    def divide(sums: Any) -> None:
        sums.mul_(1.0 / ranks)  # as the engine does it, so that the averages of equal sums have equal bits

    return divide


class Reductions(StreamReductions, DeviceSums):
    """Operations that combine the elements of ranks."""

    @with_fast_path
    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: bool = False,
        switch_factor: float | None = None,
        wire: str | None = None,
        error: Any = None,
        seed: int = 0,
        slices: str = "equal",
    ) -> Any:
        """Reduces ``x`` over all ranks; every rank gets the same bits.

        - Dense ``x``: floats, integers, booleans or complex numbers, any shape, the same on all ranks.
          The result overwrites ``x``, and ``None`` is returned. With ``out`` (like ``x``; none of its memory, or all)
          it is written there.
        - Sparse ``x``: a SparseVector or a ``torch.sparse_coo`` tensor, with any number of entries. The result is a new
          one. COO tensors have the same shape on all ranks: only the number of elements is compared.
        - DeviceEntries, a sparse vector on a GPU: the sum overwrites ``out``, a dense tensor there. The other arguments
          are those of a sparse ``x``, with ``error`` on the GPU (docs/explanation/gpu.md).

        With ``async_op=True`` a Work is returned; ``work.result()`` gives the tensor or sparse vector.

        ``op``: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"``, ``"max"``, ``"max_abs"``, and of dense ``x`` the bitwise
        and logical ones: see ReduceOp. An absent index is neutral: the minimum of sparse vectors is that of their
        entries; see ``SparseVector.absent``. A CustomReduction is an operation of your own on dense ``x``.
        16-bit floats are added and multiplied in float32 and rounded after each step. Their average is divided before
        the last rounding.

        ``algorithm``: ``"auto"``; dense ``"ring"``, ``"recursive_doubling"``, ``"rabenseifner"``; sparse
        ``"split_allgather"``, ``"split_dense_allgather"``, ``"recursive_doubling"``, ``"ring"``. For both
        ``"two_level"``: inside each node (see ``nodes``), between nodes, inside again; with one node, or one rank a
        node, it is ``"auto"``. Dense ``"mpi"``, with the mpi driver: MPI's own collective (docs/how-to/mpi.md). Dense
        CUDA tensors also have ``"nccl"`` (sums and averages, if ``device_algorithm`` allows it) and
        ``"host_transfer"``; ``"auto"`` is one of the two.

        ``switch_factor``: a sparse sum becomes dense once it has more than this times the number of entries at which
        both take the same bytes. ``None`` is 1, except that results of ``"prod"``, ``"min"`` and ``"max"`` then stay
        sparse, unless ``algorithm`` makes them dense. A dense result of these cannot tell a missing entry from one that
        is 1 or infinite, so a COO result has all elements as entries. With 1 they may be faster.

        ``slices``: the parts of the index range that ranks sum. ``"equal"``, or ``"balanced"``: about as many entries
        in each, for entries that cluster. It costs a short message (not with ``"recursive_doubling"`` or
        ``"two_level"``).

        ``wire`` of a dense float32 ``x`` (sum or average): the format of values in messages. ``"bf16"``, ``"f16"``,
        ``"int8"`` (a scale for 256 values), or QSGD's ``"qsgd8"``, ``"qsgd4"``, ``"qsgd2"`` (8, 4 or 2 bits, a scale
        for 1,024 values). Also ``"e3m0"`` (4 bits, powers of two) and ``"codebook2"`` (2 bits, four levels found for
        512 values). QSGD rounds at random with the right mean, by ``seed``, rank and number of such calls; with
        ``error`` to the nearest, and ``seed`` has no effect. A NaN or an infinity makes all values of its scale NaN.
        ``error``, like ``x`` and with memory of its own, receives this rank's rounding error. All ranks' errors and the
        sum (the average times ``world_size``) add up to the sum of all ``x``, up to float32's rounding. Adding
        ``error`` to the next ``x`` is error feedback. After a failure ``error`` is undefined.

        ``wire`` of a sparse ``x``: ``"raw"`` or ``"blocked"`` (16 bits) indices; ``"packed"`` indices and values,
        lossless; packed ``"indices"`` alone. Or a rounding of values as above (``"f32"``: none), or both, as in
        ``"packed-bf16"``. The rounding error is then *added* to ``error``, ``n`` float32, so that it may be the
        residual. ``"mean"``: a message whose values have one sign holds their mean alone (RedSync), or NaN with a NaN
        or an infinity; other messages hold values as they are. ``"sums-qsgd8"``, and so each that rounds: sums are
        rounded, ranks' own entries are exact, as in SparCML §6 (there with ``"split_dense_allgather"``). ``None`` and
        ``"auto"`` lose nothing, and pack if the network is slow enough.

        Raises ``ValueError`` or ``TypeError`` before anything is sent, for arguments that do not fit. Arguments without
        effect raise too: ``switch_factor`` and ``slices`` of a dense ``x``, ``seed`` and ``error`` without a rounding
        ``wire``."""
        check_async(async_op)
        if isinstance(x, DeviceEntries):
            into = dense_for(x, out, error)
            how = self._sparse_reduction(x, op, algorithm, switch_factor, wire, error, seed, slices=slices)
            absent = neutral_element(sparse_reduction_of(op))
            return self._run_entries("all_reduce", x, how, into, _lost_to(error, wire, x), async_op, absent=absent)
        sparse = sparse_input(x)
        if sparse is not None:
            if out is not None:
                raise TypeError("out is for a dense x: a sparse sum is a new one, or dense with all_reduce_into()")
            how = self._sparse_reduction(sparse.stream, op, algorithm, switch_factor, wire, error, seed, slices=slices)
            return self._reduce_stream(sparse, op, how, async_op, error)
        check_dense_options(seed=seed, rounds=wire is not None, switch_factor=switch_factor, slices=slices)
        if wire is not None:
            return self._reduce_encoded(x, op, out, algorithm, async_op, wire, error, seed)
        if error is not None:
            raise ValueError("error takes what wire= loses: name a wire, or leave error out")
        core, buffer = self._usable(), reducible(x, "x", writable=out is None, device=True)
        into = buffer if out is None else _result_of(buffer, x, out)
        target = x if out is None else out
        if isinstance(op, CustomReduction):
            op.check(buffer, x, algorithm)
            return self._reduce_custom("all_reduce", op, buffer, into, (x, out), target, async_op)
        reduction, is_of_device = reduction_of(op, buffer.dtype), on_device(x)
        chosen = algorithm_of(algorithm, DENSE_DEVICE_ALGORITHMS if is_of_device else DENSE_ALGORITHMS)

        def begin(given: int, taken: int, length: int, gate: _core.Gate | None) -> _core.Request:
            blocks = not (async_op or gate)
            return core.all_reduce(given, taken, length, buffer.dtype, reduction, chosen, blocks, gate)

        if not is_of_device:
            request = begin(buffer.pointer, into.pointer, buffer.elements, None)
            return self._begun(request, "all_reduce", (x, out), target, async_op)
        if self._goes_by_nccl(x, reduction, algorithm):
            return self._sum_by_nccl(x, target, buffer.dtype, reduction, async_op)
        parts = element_parts(x, target, begin)
        work = self._run_on_device("all_reduce", parts, (x, target), target, async_op)
        is_plain = out is None and algorithm == "auto" and self._nccl is None
        if is_plain and len(parts) == 1 and buffer.nbytes:
            transfers = self._transfers[x.device.type]
            self._device_fast_path = transfers.fast_path(core, x, async_op=async_op) or self._device_fast_path
        return work

    def _average_in_turn(self, x: Any, gate: _core.Gate, words: Any) -> Work:
        """As ``all_reduce(x, "avg", async_op=True)`` of a host's tensor, but begins once ``gate`` is open, whose
        ``words`` are kept until then."""
        core, buffer = self._usable(), reducible(x, "x", writable=True)
        reduction, chosen = reduction_of("avg", buffer.dtype), algorithm_of("auto", DENSE_ALGORITHMS)
        address = buffer.pointer
        request = core.all_reduce(address, address, buffer.elements, buffer.dtype, reduction, chosen, False, gate)
        return self._work(request, "all_reduce", (x, words), lambda _: x)

    def _reduce_encoded(
        self, x: Any, op: Any, out: Any, algorithm: str, async_op: bool, wire: str, error: Any, seed: int
    ) -> Work | None:
        encoding = encoding_of(wire)
        core, buffer = self._usable(), reducible(x, "x", writable=out is None, device=True)
        into = buffer if out is None else _result_of(buffer, x, out)
        reduction = reduction_of(op, buffer.dtype)
        check_encodable(buffer, x, reduction, algorithm)
        lost, number = error_of(error, x, (buffer, into)), checked_seed(seed)
        target = x if out is None else out

        if on_device(x):
            drawn = EncodedSum(core, reduction, encoding, number, self._next_encoded_call)
            parts, packed = encoded_parts(x, target, error, drawn)
            used = tuple(one for one in (x, target, error, packed) if one is not None)
            return self._run_on_device("all_reduce", parts, used, target, async_op)
        at = (buffer.pointer, into.pointer, lost, buffer.elements)
        call = self._next_encoded_call()
        request = core.all_reduce_quantised(*at, reduction, encoding, number, call, not async_op)
        return self._begun(request, "all_reduce", (x, target, error), target, async_op)

    def reduce(self, x: Any, root: int, op: Any = "sum", *, out: Any = None, async_op: bool = False) -> Work | None:
        """Reduces ``x`` over all ranks to rank ``root``.

        ``x``: as all_reduce's dense ones, the same shape on all ranks. On ``root`` the result overwrites ``x``, or
        ``out`` (like ``x``; none of its memory, or all) if given. The other ranks' ``x`` stays as it is, and their
        ``out`` is ignored. ``op`` as there. With ``async_op=True`` a Work is returned, whose result is the tensor on
        ``root`` and ``None`` elsewhere. Raises ``ValueError`` or ``TypeError`` for arguments that do not fit, before
        anything is sent."""
        check_async(async_op)
        root = checked_rank(root, "root", self.world_size)
        at_root = root == self.rank
        result = (x if out is None else out) if at_root else None
        core, buffer = self._usable(), reducible(x, "x", writable=at_root and out is None, device=True)
        into = _result_of(buffer, x, out) if at_root and out is not None else buffer
        if isinstance(op, CustomReduction):
            op.check(buffer, x)
            return self._reduce_custom("reduce", op, buffer, into, (x, result), result, async_op, root=root)
        reduction = reduction_of(op, buffer.dtype)

        def begin(given: int, taken: int, count: int, gate: _core.Gate | None) -> _core.Request:
            to = taken if at_root else given
            return core.reduce(given, to, count, buffer.dtype, reduction, root, not (async_op or gate), gate)

        at = (buffer.pointer, into.pointer, buffer.elements)
        return self._run("reduce", begin, at, lambda: element_parts(x, result, begin), (x, result), result, async_op)

    def reduce_scatter(
        self,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        switch_factor: float | None = None,
        wire: str | None = None,
        error: Any = None,
        seed: int = 0,
    ) -> Any:
        """Reduces ``x`` over all ranks, and gives each rank its block of the result.

        ``x``: as all_reduce's dense ones, the same shape on all ranks; it stays as it is. Its first dimension is
        divided by the number of ranks: the block has shape ``(x.shape[0] // world_size, *x.shape[1:])``. ``counts``
        (the elements of each rank's block, the same on all ranks) is for a one-dimensional ``x`` of as many elements
        together. The block is returned: ``out`` if given (with memory of its own), or a new tensor. ``op`` as there.
        With ``async_op=True`` a Work is returned, whose result is the block. Raises ``ValueError`` or ``TypeError`` for
        arguments that do not fit, before anything is sent.

        For a SparseVector or a ``torch.sparse_coo`` tensor of ``n`` elements the result is a new one of length ``n``,
        with the entries of this rank's slice. Slices are consecutive, of ``n // world_size`` elements, the first ``n %
        world_size`` of one more, or of ``counts``, whose sum is ``n``. If a slice of a sum became dense on its way,
        zeros are no entries. ``"prod"``, ``"min"`` and ``"max"`` stay sparse, and refuse a finite ``switch_factor``.
        With DeviceEntries the slice overwrites ``out``, a dense tensor of its length.
        ``switch_factor``, ``wire``, ``error`` and ``seed`` as for a sparse all_reduce. Source: SparCML §5.3.2."""
        check_async(async_op)
        if (sparse := x if isinstance(x, DeviceEntries) else sparse_input(x)) is not None:
            return self._reduce_scatter_sparse(sparse, op, out, counts, async_op, (switch_factor, wire, error, seed))
        if wire is not None or error is not None:
            raise TypeError("wire and error are for sparse vectors: leave them out for a dense x")
        check_dense_options(seed=seed, switch_factor=switch_factor)
        core, buffer = self._usable(), reducible(x, "x", writable=False, device=True)
        lengths, shape = _blocks_of(x, counts, self.world_size, self.rank)
        block = empty_like(x, shape) if out is None else out
        into = reducible(block, "out", device=True)
        check_together(x, block)
        if into.dtype != buffer.dtype:
            raise TypeError(f"out has dtype {block.dtype} but x has {x.dtype}: give both the same")
        if into.elements != lengths[self.rank]:
            raise ValueError(
                f"out has {into.elements} elements but rank {self.rank}'s block has {lengths[self.rank]}: give it "
                "that length"
            )
        if overlap(into, buffer):
            raise ValueError("out shares memory with x: give it memory of its own")
        if isinstance(op, CustomReduction):
            op.check(buffer, x)
            held = (x, block)
            custom = self._reduce_custom("reduce_scatter", op, buffer, into, held, block, async_op, counts=lengths)
            return custom or block
        reduction = reduction_of(op, buffer.dtype)

        def begin(given: int, taken: int, counted: list[int], gate: _core.Gate | None) -> _core.Request:
            return core.reduce_scatter(given, taken, counted, buffer.dtype, reduction, not (async_op or gate), gate)

        at = (buffer.pointer, into.pointer, lengths)
        parts = partial(scattered_parts, x, block, lengths, begin)
        return self._run("reduce_scatter", begin, at, parts, (x, block), block, async_op) or block

    def _reduce_custom(
        self,
        name: str,
        op: CustomReduction,
        buffer: HostBuffer,
        into: HostBuffer,
        held: tuple[Any, ...],
        result: Any,
        async_op: bool,
        *,
        root: int | None = None,
        counts: list[int] | None = None,
    ) -> Work | None:
        what = (buffer.pointer, into.pointer, buffer.elements, buffer.dtype, op.address, op.digest)
        request = self._usable().reduce_custom(*what, root, counts, not async_op)
        return self._begun(request, name, (*held, op), result, async_op)

    def _reduce_scatter_sparse(
        self,
        given: StreamInput | DeviceEntries,
        op: Any,
        out: Any,
        counts: Sequence[int] | None,
        async_op: bool,
        options: tuple[Any, ...],
    ) -> Any:
        switch_factor, wire, error, _ = options
        n = given.n if isinstance(given, DeviceEntries) else given.stream.n
        if out is not None and not isinstance(given, DeviceEntries):
            raise TypeError("out is for a dense x: a slice of a sparse sum is a new sparse vector")
        lengths = None if counts is None else checked_counts(counts, "counts", self.world_size)
        if lengths is not None and sum(lengths) != n:
            raise ValueError(f"counts add up to {sum(lengths)} but x has {n} elements: give each to one rank")
        _check_scattered(op, switch_factor)
        absent = neutral_element(sparse_reduction_of(op))
        if isinstance(given, DeviceEntries):
            share, more = divmod(given.n, self.world_size)
            dense_for(given, out, error, share + (self.rank < more) if lengths is None else lengths[self.rank])
            how = self._sparse_reduction(given, op, "auto", *options)
            lost = _lost_to(error, wire, given)
            return self._run_entries("reduce_scatter", given, how, out, lost, async_op, lengths, absent=absent)
        stream, like = given.stream, given.like
        how = self._sparse_reduction(stream, op, "auto", *options)
        indices, values = stream.entries(absent)
        entries = (address(indices), address(values), indices.size, stream.n)
        request = self._usable().reduce_scatter_sparse(*entries, lengths, DTYPES[stream.dtype], how, not async_op)

        def finish(done: _core.Request) -> Any:
            return like(stream.result(*done.sparse_result(), absent))

        return self._stream_work(request, "reduce_scatter", (indices, values, error), finish, async_op)


def _result_of(buffer: HostBuffer, x: Any, out: Any) -> HostBuffer:
    """The memory of an ``out`` that is to take what is reduced of ``x``."""
    into = reducible(out, "out", device=on_device(x))
    check_together(x, out)
    if into.dtype != buffer.dtype:
        raise TypeError(f"out has dtype {out.dtype} but x has {x.dtype}: give both the same")
    if tuple(out.shape) != tuple(x.shape):
        raise ValueError(f"out has shape {tuple(out.shape)} but x has {tuple(x.shape)}: give both the same")
    if overlap(into, buffer) and into.pointer != buffer.pointer:
        raise ValueError("out shares a part of its memory with x: give it memory of its own, or x itself")
    return into


def _check_scattered(op: Any, switch_factor: float | None) -> None:
    """A slice that has gone dense has lost the entries that equal the neutral element: those of a sum are nothing, but
    not those of a product."""
    reduction = sparse_reduction_of(op)
    neutral = neutral_element(reduction)
    if switch_factor is not None and checked_factor(switch_factor) != math.inf and neutral != 0:
        raise ValueError(
            f"switch_factor={switch_factor} is not for slices of op={reduction.name!r}: in one that goes dense an "
            f"entry of {neutral} would be lost; leave it out"
        )


def _blocks_of(x: Any, counts: Sequence[int] | None, size: int, rank: int) -> tuple[list[int], tuple[int, ...]]:
    """Of all ranks' blocks the elements, and of ``rank``'s the shape."""
    shape = tuple(x.shape)
    if counts is None:
        if not shape or shape[0] % size:
            raise ValueError(
                f"x has shape {shape}: its first dimension must be a multiple of the {size} ranks; or give counts"
            )
        rows = shape[0] // size
        return [rows * math.prod(shape[1:])] * size, (rows, *shape[1:])
    lengths = checked_counts(counts, "counts", size)
    if len(shape) != 1 or shape[0] != sum(lengths):
        raise ValueError(
            f"x has shape {shape}: with counts it must have one dimension of {sum(lengths)} elements, their sum"
        )
    return lengths, (lengths[rank],)
