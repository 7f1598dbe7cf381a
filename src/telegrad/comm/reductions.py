"""The operations that reduce: dense vectors in place, sparse ones to a new stream or into a dense vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad import _core
from telegrad.comm.coo import is_coo, stream_of_coo
from telegrad.comm.member import Member
from telegrad.comm.reduction import DENSE_ALGORITHMS, SPARSE_ALGORITHMS, algorithm_of, reduction_of, sparse_reduction_of
from telegrad.comm.tensors import address, reducible
from telegrad.comm.work import Work
from telegrad.stream import SparseStream

_DTYPES = {"f32": _core.DType.f32, "bf16": _core.DType.bf16}


class Reductions(Member):
    """Operations in which ranks' elements are combined."""

    def all_reduce(
        self,
        x: Any,
        op: Any = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        switch_factor: float = 1.0,
    ) -> Any:
        """Reduces ``x`` over all ranks; every rank gets the same bits.

        A dense ``x`` (float32, float64, float16, int32, int64 or torch's bfloat16, any shape, the same on all ranks)
        is overwritten with the result, and ``None`` returned. For a SparseStream or a ``torch.sparse_coo`` tensor the
        result is a new one, returned; ranks may hold any number of entries. With ``async_op=True`` a Work is returned;
        ``work.result()`` gives the tensor or stream. ``op``: ``"sum"``, ``"avg"`` (of floats), and for dense ``x``
        ``"prod"``, ``"min"`` or ``"max"``; see ReduceOp. 16-bit floats are added and multiplied in float32 and rounded
        after each step, also before an average is divided. ``algorithm``: ``"auto"``, dense ``"ring"`` or
        ``"recursive_doubling"``, sparse ``"split_allgather"``. ``switch_factor``: a sparse sum is held densely once
        it has more than this times the number of entries at which both take the same bytes.
        """
        if isinstance(x, SparseStream):
            return self._reduce_stream(x, op, algorithm, switch_factor, async_op, lambda total: total)
        if is_coo(x):
            stream, back = stream_of_coo(x)
            return self._reduce_stream(stream, op, algorithm, switch_factor, async_op, back)
        core, buffer = self._usable(), reducible(x, "x")
        reduction, chosen = reduction_of(op, buffer.dtype), algorithm_of(algorithm, DENSE_ALGORITHMS)
        request = core.all_reduce(
            buffer.pointer, buffer.pointer, buffer.elements, buffer.dtype, reduction, chosen, not async_op
        )
        if async_op:
            return self._work(request, "all_reduce", x, lambda _: x)
        self._block(request, x)
        return None

    def all_reduce_into(
        self,
        stream: SparseStream,
        out: Any,
        op: Any = "sum",
        *,
        algorithm: str = "auto",
        async_op: bool = False,
        switch_factor: float = 1.0,
    ) -> Work | None:
        """Writes the dense reduction of all ranks' streams into ``out``.

        ``out``: ``stream.n`` elements of the values' dtype, any shape. ``op``: ``"sum"`` or ``"avg"``. Faster than
        making a sparse result dense; ``out`` must not share memory with the stream.
        """
        if not isinstance(stream, SparseStream):
            raise TypeError(
                f"stream is a {type(stream).__name__}: it must be a SparseStream; dense tensors go to all_reduce()"
            )
        core, buffer = self._usable(), reducible(out, "out")
        dtype = _DTYPES[stream.dtype]
        if buffer.dtype != dtype:
            raise TypeError(f"out has dtype {out.dtype} but the stream holds {stream.dtype}: give both the same")
        if buffer.elements != stream.n:
            raise ValueError(
                f"out has {buffer.elements} elements but the stream has n={stream.n}: give them the same length"
            )
        indices, values = stream.raw_indices, stream.raw_values
        for part in (indices, values):
            if address(part) < buffer.pointer + buffer.nbytes and buffer.pointer < address(part) + part.nbytes:
                raise ValueError("out shares memory with the stream: give it memory of its own")
        request = core.all_reduce_sparse_into(
            address(indices),
            address(values),
            indices.size,
            stream.n,
            dtype,
            sparse_reduction_of(op),
            algorithm_of(algorithm, SPARSE_ALGORITHMS),
            _checked_factor(switch_factor),
            buffer.pointer,
            not async_op,
        )
        held = (indices, values, out)
        if async_op:
            return self._work(request, "all_reduce_into", held, lambda _: out)
        self._block(request, held)
        return None

    def _reduce_stream(
        self,
        stream: SparseStream,
        op: Any,
        algorithm: str,
        switch_factor: float,
        async_op: bool,
        convert: Callable[[SparseStream], Any],
    ) -> Any:
        core = self._usable()
        indices, values = stream.raw_indices, stream.raw_values
        request = core.all_reduce_sparse(
            address(indices),
            address(values),
            indices.size,
            stream.n,
            _DTYPES[stream.dtype],
            sparse_reduction_of(op),
            algorithm_of(algorithm, SPARSE_ALGORITHMS),
            _checked_factor(switch_factor),
            not async_op,
        )

        def finish(done: _core.Request) -> Any:
            sum_indices, sum_values = done.sparse_result()
            return convert(SparseStream.trusted(sum_indices, sum_values, stream.n, of_torch=stream.of_torch))

        if async_op:
            return self._work(request, "all_reduce", (indices, values), finish)
        self._block(request, (indices, values))
        return finish(request)


def _checked_factor(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"switch_factor={value!r} must be a number")
    if not value >= 0:
        raise ValueError(
            f"switch_factor={value} must not be negative: 1.0 switches to dense where both take the same bytes"
        )
    return float(value)
