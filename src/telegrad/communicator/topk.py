"""all_reduce_topk: the largest entries of a sum of streams, by the algorithm that the state names."""

from __future__ import annotations

from typing import Any, NamedTuple

from telegrad import _core
from telegrad.communicator.arguments import check_async
from telegrad.communicator.reduction import sparse_reduction_of
from telegrad.communicator.sparse_input import sparse_input
from telegrad.communicator.sparse_reductions import DTYPES, StreamReductions
from telegrad.communicator.sparse_wire import check_block_wire, formats_named
from telegrad.communicator.tensors import address
from telegrad.communicator.topk_state import BoundedTopkState, OkTopkState, TopkState
from telegrad.sparse_vector import SparseVector


class TopkReport(NamedTuple):
    """What one call of all_reduce_topk has done on this rank. An index is a word, a value is one, however encoded."""

    words_sent: int
    words_received: int
    control_words_sent: int
    """Counts, in words of 4 bytes: neither indices nor values."""
    control_words_received: int
    local_most: int
    """The largest number of entries that a rank has given, where ranks tell each other (Ok-Topk, but in most calls with
    ``as_published``); else of this rank."""
    selected: int
    """How many entries the sum has."""
    overflow: int
    """How many of this rank's own entries did not fit into its messages, and are left. gTopk: all but its k largest."""
    cut: bool
    """Slices were cut in this call."""
    exact: bool
    """The threshold was found in this call: the sum has its ``k`` largest entries, and what ties with the least.
    Ok-Topk's alone."""
    balanced: bool
    """Ranks' shares of the sum were made alike before they were gathered."""


class TopkSum(NamedTuple):
    """The result of all_reduce_topk: streams (SparseVector or COO, as what was given) and a report."""

    sum: Any
    """The entries of the sum that are kept; the same bits on every rank."""
    left: Any
    """What has no part in the sum: entries of this rank, and of gTopk also partial sums that it has dropped. It belongs
    back into the residual."""
    report: TopkReport


class TopkReductions(StreamReductions):
    """The operation that keeps a part of a sum."""

    def all_reduce_topk(
        self,
        x: Any,
        state: TopkState,
        op: Any = "sum",
        *,
        wire: str | None = None,
        error: Any = None,
        seed: int = 0,
        async_op: bool = False,
    ) -> Any:
        """About the ``state.k`` largest entries of the sum of all ranks' streams; the same bits on every rank.

        ``x``: SparseVector or ``torch.sparse_coo`` tensor of float32, float64, float16 or bfloat16: what this rank has
        selected of its own, any number of entries, of ``n`` elements on all ranks. ``state`` chooses the algorithm:

        - ``OkTopkState``: at the first call and every ``threshold_every``-th exactly the top k of the sum of streams,
          formed in the order of ranks; what ties with the least is kept too. In between the last threshold is reused,
          gently corrected, and found anew at once if that would keep more than a quarter too many or too few. With
          ``k'`` the largest number of entries that a rank gives or the sum has, no rank sends or receives more than
          ``6k' + 2P`` words, counts apart, in ``(2P + O(log P))`` messages.
        - ``GTopkState``: what a tree of sums keeps that are cut to k where two meet; at most k. No rank sends or
          receives more than ``2k`` words at each of ``ceil(log2 P)`` levels, in as many messages.
        - ``BoundedTopkState``: about k, near those that are the largest. A rank sends each other one at most ``C =
          ceil(slack k / P)`` of its entries, the largest of that one's slice; and of a slice at most C sums are kept.
          Every call has ``4 C (P - 1)`` words each way, however many there are, in messages whose number and sizes
          depend on the settings, ``n``, the dtype and the number of the call alone. Where ranks' entries lie in
          different places, most of a rank's may not fit: see ``overflow``.

        ``op``: ``"sum"`` or ``"avg"``. ``wire``, ``error`` and ``seed`` as for a sparse ``all_reduce``; by default
        nothing is rounded. A BoundedTopkState has raw entries always, and only an OkTopkState has formats that round:
        entries are rounded on their way to the rank that sums them, and those that the sum keeps once more, so that
        thresholds are of sums of rounded entries. ``error`` is given only what the kept entries lose.

        Returns a TopkSum; with ``async_op=True`` a Work whose result is one. The sum (``P`` times the mean), all ranks'
        ``left`` and what was added to ``error`` together are what was given, but for the rounding of additions.

        Raises ``TypeError`` or ``ValueError`` for arguments that do not fit, and for a state in use by a call that is
        not over, before anything is sent; ``MismatchedCall`` where the ranks' states differ in kind, settings or past:
        load one rank's ``state.state_dict()`` on all. After a ``TransportError`` the state is as before the call.
        Sources: Ok-Topk (Li, Hoefler, PPoPP 2022, §3.1), with pooled boundaries and radix selection in place of the
        paper's; gTopk (Shi et al., ICDCS 2019), which here hands back what it drops.
        """
        check_async(async_op)
        given = sparse_input(x)
        if given is None:
            raise TypeError(
                f"x is a {type(x).__name__}: it must be a SparseVector or a COO tensor, the entries that this rank has "
                "selected"
            )
        if not isinstance(state, TopkState):
            raise TypeError(
                f"state={state!r} must be an OkTopkState, a GTopkState or a BoundedTopkState: make one for all calls "
                "that follow each other"
            )
        core, stream, reduction = self._usable(), given.stream, sparse_reduction_of(op)
        if reduction not in (_core.Reduction.sum, _core.Reduction.avg):
            raise ValueError(f"op={reduction.name!r} is not supported by all_reduce_topk: use 'sum' or 'avg'")
        rounds = formats_named(wire, stream.dtype).values != _core.ValueEncoding.native
        if rounds and not isinstance(state, OkTopkState):
            raise ValueError(f"wire={wire!r} rounds values, which a {type(state).__name__} does not: use 'packed'")
        if isinstance(state, BoundedTopkState):
            check_block_wire(wire, "a BoundedTopkState")
            wire = "raw"
        state._check_idle("call again")
        how = self._sparse_reduction(stream, op, "auto", 1.0, wire, error, seed)
        indices, values = stream.entries(0.0)
        request = core.all_reduce_topk(
            address(indices),
            address(values),
            indices.size,
            stream.n,
            DTYPES[stream.dtype],
            how,
            state._core,
            not async_op,
        )

        def finish(done: _core.Request) -> TopkSum:
            total, left, report = done.topk_result()

            def stream_of(arrays: tuple[Any, Any]) -> Any:
                return given.like(SparseVector.trusted(*arrays, stream.n, of_torch=stream.of_torch))

            return TopkSum(stream_of(total), stream_of(left), TopkReport(*report))

        return self._stream_work(request, "all_reduce_topk", (indices, values, error), finish, async_op)
