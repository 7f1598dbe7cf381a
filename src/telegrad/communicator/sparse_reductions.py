"""The operations that reduce sparse streams: to a new stream, or into a dense vector."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from telegrad import _core
from telegrad.communicator.arguments import check_async, checked_slices
from telegrad.communicator.cuda.entries import DeviceEntries, EntriesPart, Staged
from telegrad.communicator.cuda.transfers import flat
from telegrad.communicator.encoded import checked_seed
from telegrad.communicator.member import Member
from telegrad.communicator.reduction import neutral_element, open_choices, sparse_reduction_of
from telegrad.communicator.sparse_input import StreamInput, sparse_input
from telegrad.communicator.sparse_wire import check_rounding_options, error_into, formats_of, overlaps_stream
from telegrad.communicator.tensors import HostBuffer, address, reducible
from telegrad.communicator.work import Work, once
from telegrad.cost import Tuning
from telegrad.kernels.staging import kernels_of
from telegrad.sparse_vector import SparseVector

DTYPES = {name: getattr(_core.DType, name) for name in ("f32", "f64", "bf16", "f16")}


class StreamReductions(Member):
    """Operations in which ranks' entries are combined."""

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
        """Writes the dense reduction of all ranks' streams (SparseVector or ``torch.sparse_coo``) into ``out``.

        ``out``: ``stream.n`` elements of the values' dtype, any shape. ``op`` as for all_reduce: where no rank has an
        entry, ``out`` becomes the neutral element (0 for ``"sum"``, ``"avg"`` and ``"max_abs"``, 1 for ``"prod"``,
        infinity for ``"min"``, -infinity for ``"max"``). Faster than making a sparse result dense; ``out`` must not
        share memory with the stream. The other arguments are as for all_reduce(), so that some ranks may call this and
        others that; for ``"prod"``, ``"min"`` and ``"max"`` of many entries ``switch_factor=1`` may go faster. Raises
        ``TypeError`` or ``ValueError`` for arguments that do not fit, before anything is sent.
        """
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
            raise TypeError(f"out has dtype {out.dtype} but the stream holds {stream.dtype}: give both the same")
        if buffer.elements != stream.n:
            raise ValueError(
                f"out has {buffer.elements} elements but the stream has n={stream.n}: give them the same length"
            )
        if overlaps_stream(buffer, stream):
            raise ValueError("out shares memory with the stream: give it memory of its own")
        indices, values = stream.memory(neutral_element(sparse_reduction_of(op)))
        marks = stream.marks
        how = self._sparse_reduction(stream, op, algorithm, switch_factor, wire, error, seed, out=buffer, slices=slices)
        request = core.all_reduce_sparse_into(
            0 if indices is None else address(indices),
            address(values),
            values.size,
            0 if marks is None else address(marks),
            stream.n,
            dtype,
            how,
            buffer.pointer,
            not async_op,
        )
        held = (indices, values, marks, out, error)
        if async_op:
            return self._work(request, "all_reduce_into", held, lambda _: out)
        self._block(request, held)
        return None

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
        core, reduction = self._usable(), sparse_reduction_of(op)
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
        return _core.SparseReduction(
            reduction,
            chosen,
            factor,
            formats.indices,
            encoding,
            number,
            0 if encoding == _core.ValueEncoding.native else self._next_encoded_call(),
            lost,
            stream.n,
            balanced,
            formats.packs_values,
        )

    def _next_encoded_call(self) -> int:
        with self._lock:
            call, self._encoded_calls = self._encoded_calls, (self._encoded_calls + 1) % 2**32
        return call

    def _reduce_stream(
        self, given: StreamInput, op: Any, how: _core.SparseReduction, async_op: bool, error: Any
    ) -> Any:
        core, absent, stream = self._usable(), neutral_element(sparse_reduction_of(op)), given.stream
        indices, values = stream.memory(absent)
        marks = stream.marks
        request = core.all_reduce_sparse(
            0 if indices is None else address(indices),
            address(values),
            values.size,
            0 if marks is None else address(marks),
            stream.n,
            DTYPES[stream.dtype],
            how,
            not async_op,
        )
        held = (indices, values, marks, error)

        def finish(done: _core.Request) -> Any:
            sum_indices, sum_values = done.sparse_result()
            total = SparseVector.trusted(sum_indices, sum_values, stream.n, of_torch=stream.of_torch, absent=absent)
            return given.like(total)

        return self._stream_work(request, "all_reduce", held, finish, async_op)

    def _reduce_entries(
        self, entries: DeviceEntries, op: Any, how: _core.SparseReduction, out: Any, error: Any, async_op: bool
    ) -> Any:
        core, absent = self._usable(), neutral_element(sparse_reduction_of(op))
        kernels_of(out)  # what they need may be missing: that must be known before anything begins
        dtype, n = DTYPES[entries.dtype], entries.length

        def begin(staged: Staged, gate: _core.Gate) -> _core.Request:
            mine, total = staged[:4], staged[4:]
            return core.all_reduce_staged(*mine, n, dtype, how, *total, gate)

        form = entries.count.new_empty(2, dtype=sys.modules["torch"].int64)
        part = EntriesPart(entries, flat(out), form, absent, begin, None if error is None else flat(error))
        tensors = (entries.indices, entries.values, entries.count, out, form, *(() if error is None else (error,)))
        return self._run_on_device("all_reduce", [part], tensors, out, async_op)

    def _scatter_stream(
        self,
        given: StreamInput,
        op: Any,
        how: _core.SparseReduction,
        counts: list[int] | None,
        async_op: bool,
        error: Any,
    ) -> Any:
        core, absent, stream = self._usable(), neutral_element(sparse_reduction_of(op)), given.stream
        indices, values = stream.entries(absent)
        request = core.reduce_scatter_sparse(
            address(indices), address(values), indices.size, stream.n, counts, DTYPES[stream.dtype], how, not async_op
        )
        held = (indices, values, error)

        def finish(done: _core.Request) -> Any:
            found, sums = done.sparse_result()
            return given.like(SparseVector.trusted(found, sums, stream.n, of_torch=stream.of_torch, absent=absent))

        return self._stream_work(request, "reduce_scatter", held, finish, async_op)

    def _stream_work(
        self,
        request: _core.Request,
        operation: str,
        held: Any,
        finish: Callable[[_core.Request], Any],
        async_op: bool,
    ) -> Any:
        if async_op:
            return self._work(request, operation, held, once(finish))
        self._block(request, held)
        return finish(request)


def _balanced(slices: object, algorithm: str) -> bool:
    is_balanced = checked_slices(slices) == "balanced"
    if is_balanced and algorithm in ("recursive_doubling", "two_level"):
        why = "which has none" if algorithm == "recursive_doubling" else "whose slices are its nodes'"
        raise ValueError(f"slices='balanced' is not for algorithm={algorithm!r}, {why}: use another")
    return is_balanced
