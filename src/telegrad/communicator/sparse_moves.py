"""The operation that moves sparse streams as they are: every rank gets all of them."""

from __future__ import annotations

from typing import Any

from telegrad import _core
from telegrad.communicator.sparse_input import StreamInput
from telegrad.communicator.sparse_reductions import DTYPES, StreamReductions
from telegrad.communicator.tensors import address
from telegrad.sparse_vector import SparseVector


class StreamMoves(StreamReductions):
    """Operations in which ranks get each other's streams."""

    def _gather_streams(
        self,
        given: StreamInput,
        wire: str | None,
        error: Any,
        seed: int,
        async_op: bool,
    ) -> Any:
        core, stream = self._usable(), given.stream
        how = self._sparse_reduction(stream, "sum", "auto", 1.0, wire, error, seed)  # nothing is summed
        indices, values = stream.entries(0.0)
        request = core.all_gather_sparse(
            address(indices), address(values), indices.size, stream.n, DTYPES[stream.dtype], how, not async_op
        )
        held = (indices, values, error)

        def finish(done: _core.Request) -> Any:
            found = done.sparse_results()
            return [given.like(SparseVector.trusted(*arrays, stream.n, of_torch=stream.of_torch)) for arrays in found]

        return self._stream_work(request, "all_gather", held, finish, async_op)
