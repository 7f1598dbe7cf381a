"""The operations that reduce: dense vectors, in place or not, sparse ones to a new stream or into a dense vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from telegrad import _core
from telegrad.communicator.arguments import check_async, checked_factor, checked_rank
from telegrad.communicator.blocks import checked_counts
from telegrad.communicator.cuda.entries import DeviceEntries
from telegrad.communicator.cuda.transfers import element_parts, scattered_parts
from telegrad.communicator.dense_options import check_dense_options
from telegrad.communicator.device_sums import DeviceSums
from telegrad.communicator.encoded import check_encodable, checked_seed, encoding_of, error_of
from telegrad.communicator.reduction import (
    DENSE_ALGORITHMS,
    DENSE_DEVICE_ALGORITHMS,
    algorithm_of,
    neutral_element,
    reduction_of,
    sparse_reduction_of,
)
from telegrad.communicator.short_way import with_short_way
from telegrad.communicator.sparse_input import StreamInput, dense_for, sparse_input
from telegrad.communicator.sparse_reductions import StreamReductions
from telegrad.communicator.sparse_wire import formats_named
from telegrad.communicator.tensors import HostBuffer, check_together, empty_like, on_device, overlap, reducible
from telegrad.communicator.work import Work


class Reductions(StreamReductions, DeviceSums):
    """Operations in which ranks' elements are combined."""

    @with_short_way
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

        A dense ``x`` (float32, float64, float16, int32, int64 or torch's bfloat16, any shape, the same on all ranks)
        is overwritten with the result, and ``None`` returned; with ``out`` (as ``x``; no part of its memory, or all)
        the result goes there, and ``x`` stays as it is. For a SparseVector or a ``torch.sparse_coo`` tensor the result
        is a new one, returned; ranks may hold any number of entries. With ``async_op=True`` a Work is returned;
        ``work.result()`` gives the tensor or stream. ``op``: ``"sum"``, ``"avg"`` (of floats), ``"prod"``, ``"min"``,
        ``"max"`` or ``"max_abs"``; see ReduceOp. An index that a stream does not have is neutral in it: the minimum of
        streams is that of their entries; see ``SparseVector.absent``. 16-bit floats are added and multiplied in float32
        and rounded after each step; an average of them is divided before the last one, and of finite float16 it is
        finite. ``algorithm``: ``"auto"``, dense ``"ring"``, ``"recursive_doubling"`` or ``"rabenseifner"``, sparse
        ``"split_allgather"``, ``"split_dense_allgather"``, ``"recursive_doubling"`` or ``"ring"``, or of both
        ``"two_level"``: inside of each node (see ``nodes``), between them, inside; where all ranks are on one, or each
        is alone, it is ``"auto"``. Of a dense CUDA tensor also ``"nccl"`` (sums and averages, where
        ``device_algorithm`` has it) and ``"host_transfer"``, as all the others are there; ``"auto"`` is one of the two
        (docs/gpu.md).
        ``switch_factor``: a sparse sum is held densely once it has more than this times the number of entries at which
        both take the same bytes; ``None`` stands for 1. But with ``None`` a result of ``"prod"``, ``"min"`` or
        ``"max"`` stays sparse, unless ``algorithm`` makes it dense (``"split_dense_allgather"``, ``"two_level"``): held
        densely it is 1, infinity or -infinity where no rank has an entry, which cannot be told from an entry of that
        value, so that a COO result has all elements as entries. With 1 these reductions may be faster. ``slices`` of
        the index range, which ranks sum: ``"equal"``, or ``"balanced"`` with about as many entries of all ranks
        together, for entries that cluster: a short message more, from which all ranks cut alike (not
        ``"recursive_doubling"``, not ``"two_level"``).

        ``wire`` of a dense float32 ``x``: how messages hold its values, to be summed or averaged in float32: as
        ``"bf16"``, ``"f16"``, ``"int8"`` (a scale for 256 values each), or by QSGD as ``"qsgd8"``, ``"qsgd4"``,
        ``"qsgd2"`` (8, 4 or 2 bits, a scale for 1,024 values each), which rounds at random such that the mean is right;
        the choices depend on ``seed``, the rank, and how many such calls this communicator has had. What shares a scale
        with a NaN or an infinity becomes NaN. ``error``, as ``x`` and with memory of its own, receives what rounding
        lost on this rank: over all ranks, errors and the sum (the average times ``world_size``) add up to the sum of
        all ``x``, but for float32's own rounding. So adding it to the next ``x`` is error feedback, which QSGD does not
        need, and ``"qsgd2"``, whose errors are larger than most values, does not bear. After a failure ``error`` is of
        no use.

        ``wire`` of a sparse ``x``: ``"raw"`` or ``"blocked"`` (16 bits) indices, ``"packed"`` indices and values
        (indices near their entropy, the exponents of float32 and bfloat16 in few bits, without loss) or packed
        ``"indices"`` alone; one of the names above for how its values are rounded (``"f32"``: not at all), or both, as
        in ``"packed-bf16"``; what rounding lost is then *added* to ``error``, of ``n`` float32, so that it may be the
        residual. ``"mean"``: every message whose values are all of one sign holds their mean alone (RedSync, same-sign
        quantization), and one with a NaN or an infinity a NaN for all; others, and those that have become dense, hold
        them as they are. ``None`` and
        ``"auto"`` lose nothing, and pack where the network is slow enough for that. Ranks that give COO tensors give
        the same shape: only the number of elements is compared.

        The sum of DeviceEntries, a sparse vector on a GPU, goes into ``out``, a dense tensor there, of which all is
        written; their arguments are those of a sparse ``x``, and ``error`` is a tensor there. docs/gpu.md.

        Raises ``ValueError`` or ``TypeError`` for arguments that do not fit, before anything is sent; also for what
        would do nothing here: for a dense ``x`` what is for sparse streams alone (``switch_factor``, ``slices``), and
        ``seed`` and ``error`` without a ``wire`` that names a rounding. (Where it names one that this dtype does not
        need, as ``"bf16"`` of a bfloat16 stream, they do nothing, and may be given.)
        """
        check_async(async_op)
        if isinstance(x, DeviceEntries):
            into = dense_for(x, out, error)
            how = self._sparse_reduction(x, op, algorithm, switch_factor, wire, error, seed, slices=slices)
            loses = error is not None and formats_named(wire, x.dtype).values != _core.ValueEncoding.native
            return self._reduce_entries(x, op, how, into, error if loses else None, async_op)
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
        reduction = reduction_of(op, buffer.dtype)
        if on_device(x):
            target = x if out is None else out
            chosen = algorithm_of(algorithm, DENSE_DEVICE_ALGORITHMS)
            if self._goes_by_nccl(x, reduction, algorithm):
                return self._sum_by_nccl(x, target, buffer.dtype, reduction, async_op)
            parts = element_parts(
                x,
                target,
                lambda given, taken, length, gate: core.all_reduce(
                    given, taken, length, buffer.dtype, reduction, chosen, False, gate
                ),
            )
            work = self._run_on_device("all_reduce", parts, (x, target), target if async_op else None, async_op)
            is_plain = out is None and algorithm == "auto" and self._nccl is None
            if is_plain and len(parts) == 1 and buffer.nbytes:
                transfers = self._transfers[x.device.type]
                self._device_short_way = transfers.short_way(core, x, async_op=async_op) or self._device_short_way
            return work
        chosen = algorithm_of(algorithm, DENSE_ALGORITHMS)
        request = core.all_reduce(
            buffer.pointer, into.pointer, buffer.elements, buffer.dtype, reduction, chosen, not async_op
        )
        if async_op:
            result = x if out is None else out
            return self._work(request, "all_reduce", (x, out), lambda _: result)
        self._block(request, (x, out))
        return None

    def _reduce_encoded(
        self, x: Any, op: Any, out: Any, algorithm: str, async_op: bool, wire: str, error: Any, seed: int
    ) -> Work | None:
        encoding = encoding_of(wire)
        core, buffer = self._usable(), reducible(x, "x", writable=out is None, device=True)
        into = buffer if out is None else _result_of(buffer, x, out)
        reduction = reduction_of(op, buffer.dtype)
        check_encodable(buffer, x, reduction, algorithm)
        lost, number = error_of(error, x, (buffer, into)), checked_seed(seed)
        if on_device(x):

            def begin(given: int, taken: int, length: int, gate: _core.Gate) -> _core.Request:
                behind = taken + length * x.element_size() if lost else 0
                call = self._next_encoded_call()  # another one for each chunk, whose elements are counted from 0
                return core.all_reduce_quantised(
                    given, taken, behind, length, reduction, encoding, number, call, False, gate
                )

            target = x if out is None else out
            parts = element_parts(x, target, begin, error)
            tensors = (x, target) if error is None else (x, target, error)
            result = target if async_op else None
            work: Work | None = self._run_on_device("all_reduce", parts, tensors, result, async_op)
            return work
        call = self._next_encoded_call()
        request = core.all_reduce_quantised(
            buffer.pointer, into.pointer, lost, buffer.elements, reduction, encoding, number, call, not async_op
        )
        held = (x, out, error)
        if async_op:
            result = x if out is None else out
            return self._work(request, "all_reduce", held, lambda _: result)
        self._block(request, held)
        return None

    def reduce(self, x: Any, root: int, op: Any = "sum", *, out: Any = None, async_op: bool = False) -> Work | None:
        """Reduces ``x`` over all ranks to rank ``root``.

        ``x`` (as all_reduce's dense ones, the same shape on all ranks) is overwritten with the result on ``root``;
        or ``out`` is (as ``x``; no part of its memory, or all), if it is given there. The other ranks' ``x`` stays as
        it is, and their ``out`` is not looked at. ``op`` as there. With ``async_op=True`` a Work is
        returned, whose result is the tensor on ``root`` and ``None`` elsewhere. Raises ``ValueError`` or ``TypeError``
        for arguments that do not fit, before anything is sent.
        """
        check_async(async_op)
        root = checked_rank(root, "root", self.world_size)
        at_root = root == self.rank
        result = x if out is None else out
        core, buffer = self._usable(), reducible(x, "x", writable=at_root and out is None)
        into = _result_of(buffer, x, out) if at_root and out is not None else buffer
        request = core.reduce(
            buffer.pointer,
            into.pointer,
            buffer.elements,
            buffer.dtype,
            reduction_of(op, buffer.dtype),
            root,
            not async_op,
        )
        if async_op:
            return self._work(request, "reduce", (x, out), lambda _: result if at_root else None)
        self._block(request, (x, out))
        return None

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

        ``x`` (as all_reduce's dense ones, the same shape on all ranks) stays as it is. Without ``counts`` its first
        dimension is divided by the number of ranks: the block has shape ``(x.shape[0] // world_size, *x.shape[1:])``.
        With ``counts`` (elements of each rank's block, the same on all ranks, 0 or more) ``x`` is one-dimensional and
        has as many elements as they together. The block is returned: ``out`` if that is given (of the block's length
        and ``x``'s dtype, with memory of its own), or a new tensor. ``op`` as there. With
        ``async_op=True`` a Work is returned, whose result is the block. Raises ``ValueError`` or ``TypeError`` for
        arguments that do not fit, before anything is sent.

        For a SparseVector or a ``torch.sparse_coo`` tensor of ``n`` elements the result is a new one of as many, with
        the entries of this rank's slice, at indices of the whole vector. Slices are consecutive, of
        ``n // world_size`` elements, the first ``n % world_size`` of one more, or of ``counts``, whose sum is ``n``.
        Ranks may hold any number of entries. Where a slice of a sum went dense on its way, a zero is no entry;
        those of ``"prod"``, ``"min"`` and ``"max"`` stay sparse, and a ``switch_factor`` is refused, unless infinite.
        ``switch_factor``, ``wire``, ``error`` and ``seed`` as for a sparse all_reduce. Source: SparCML §5.3.2.
        """
        check_async(async_op)
        if (sparse := sparse_input(x)) is not None:
            return self._reduce_scatter_sparse(sparse, op, out, counts, async_op, switch_factor, wire, error, seed)
        if wire is not None or error is not None:
            raise TypeError("wire and error are for sparse streams: leave them out for a dense x")
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
        reduction = reduction_of(op, buffer.dtype)
        if on_device(x):
            parts = scattered_parts(
                x,
                block,
                lengths,
                lambda given, taken, counted, gate: core.reduce_scatter(
                    given, taken, counted, buffer.dtype, reduction, False, gate
                ),
            )
            return self._run_on_device("reduce_scatter", parts, (x, block), block, async_op)
        request = core.reduce_scatter(buffer.pointer, into.pointer, lengths, buffer.dtype, reduction, not async_op)
        if async_op:
            return self._work(request, "reduce_scatter", (x, block), lambda _: block)
        self._block(request, (x, block))
        return block

    def _reduce_scatter_sparse(
        self,
        given: StreamInput,
        op: Any,
        out: Any,
        counts: Sequence[int] | None,
        async_op: bool,
        switch_factor: float | None,
        wire: str | None,
        error: Any,
        seed: int,
    ) -> Any:
        if out is not None:
            raise TypeError("out is for a dense x: a slice of a sparse sum is a new stream")
        stream = given.stream
        lengths = None if counts is None else checked_counts(counts, "counts", self.world_size)
        if lengths is not None and sum(lengths) != stream.n:
            raise ValueError(f"counts add up to {sum(lengths)} but x has {stream.n} elements: give each to one rank")
        _check_scattered(op, switch_factor)
        how = self._sparse_reduction(stream, op, "auto", switch_factor, wire, error, seed)
        return self._scatter_stream(given, op, how, lengths, async_op, error)


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
