"""all_reduce_topk: the largest entries of a sum of vectors, by the algorithm that the state names, and the states."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from telegrad import _core
from telegrad import _core as core
from telegrad.communicator.operands import (
    address,
    check_async,
    check_block_wire,
    checked_integer,
    checked_number,
    formats_named,
)
from telegrad.communicator.reductions import StreamReductions, sparse_input, sparse_reduction_of
from telegrad.sparse_vector.formats import DTYPES

_COUNT_MOST = 2**63 - 1
_DIMENSION_MOST = 2**32 - 1


class TopkState:
    """The common part of all states. They are pickled and copied as ``state_dict()`` is: not while in use."""

    _core: core.OkTopkState | core.GTopkState | core.BoundedTopkState

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    @property
    def k(self) -> int:
        """The number of entries that the sum should keep. It does not change: make another state for another k."""
        return int(self._settings["k"])

    @property
    def in_use(self) -> bool:
        """Whether a call that uses this state is under way."""
        return self._core.in_use

    def state_dict(self) -> dict[str, Any]:
        """A copy: the settings, and the data that the last call leaves to the next. The same on all ranks.

        Raises ``ValueError`` while a call that uses this state is under way."""
        self._check_idle("save it")
        return {**self._settings, **self._past()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a ``state_dict()``, on all ranks; nothing is changed if it does not fit.

        Settings stay as they are here. If it was saved with others, what calls have left is dropped, and found anew.
        Raises ``ValueError`` for anything else, and while a call that uses this state is under way."""
        self._check_idle("load it")
        if not isinstance(state, Mapping):
            raise ValueError(f"state is a {type(state).__name__}: it must come from state_dict()")
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ValueError(f"state has no {missing[0]!r}: it must come from state_dict()")
        self._load_past(state, any(state[name] != value for name, value in self._settings.items()))

    def _past(self) -> dict[str, Any]:
        """What the last call has left."""
        return {}

    def _load_past(self, state: Mapping[str, Any], is_of_others: bool) -> None:
        """Checks it and takes it over; ``is_of_others``: it was left to other settings."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _restored, (type(self), self._settings, self.state_dict())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._described()})"

    def _described(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._settings.items())

    def _check_idle(self, wish: str) -> None:
        if self.in_use:
            raise ValueError(
                f"this {type(self).__name__} is in use by a call that is not over: wait for that before you {wish}, or "
                "give each call in flight a state of its own"
            )


def _restored(kind: Callable[..., TopkState], settings: dict[str, Any], past: dict[str, Any]) -> TopkState:
    state = kind(**settings)
    state.load_state_dict(past)
    return state


class _SlicesAndThreshold(TopkState):
    """Slices and a threshold, which are reused."""

    _core: core.OkTopkState | core.BoundedTopkState

    @property
    def calls(self) -> int:
        """How many calls have succeeded."""
        return self._core.get()[0]

    @property
    def threshold(self) -> float:
        """The magnitude from which the next call would keep entries of the sum; BoundedTopkState: the last one has."""
        return self._core.get()[1]

    def _past(self) -> dict[str, Any]:
        return dict(zip(("calls", "threshold", "slices", "spread", "squares"), self._core.get(), strict=False))

    def _load_past(self, state: Mapping[str, Any], is_of_others: bool) -> None:
        calls, threshold, slices, *more = (state[name] for name in self._past())
        if not _is_count(calls):
            raise ValueError(f"state['calls'] is {calls!r}: it must be an int of 0 or more")
        if not isinstance(threshold, float) or threshold < 0:  # NaN where k sums were NaN
            raise ValueError(f"state['threshold'] is {threshold!r}: it must be a float of 0 or more")
        if not _are_lengths(slices):
            raise ValueError("state['slices'] must be a list of ints of 0 or more: the lengths of slices")
        if more and not isinstance(more[0], bool):
            raise ValueError(f"state['spread'] is {more[0]!r}: it must be a bool")
        if more and not all(isinstance(one, float) and 0 <= one < math.inf for one in more[1]):
            raise ValueError("state['squares'] must be a list of finite floats of 0 or more")
        if is_of_others:
            calls, threshold, slices, more = 0, 0.0, [], [False, []][: len(more)]
        self._core.set(calls, threshold, list(slices), *more)

    def _described(self) -> str:
        return f"{super()._described()}, calls={self.calls}"


class OkTopkState(_SlicesAndThreshold):
    """Ok-Topk: traffic per rank stays bounded as ranks are added. Each call leaves slices and a threshold to the next.

    - ``k``: how many entries the sum keeps, at least 1.
    - ``boundaries_every`` (τ of the paper): calls between two finer checks of the slices.
    - ``threshold_every`` (τ′): calls between two exact thresholds; sooner if counts need it.
    - ``balance_factor``: long or very unlike shares are balanced if one rank has more than this times the mean.
    - ``as_published``: boundaries, thresholds and messages as in the paper, for comparison; traffic is not bounded.
    - ``tensors``: the first index and the size of each tensor in the vector, ascending. The sum then keeps the entries
      along which a step of Adam gains most, by magnitude / v^(1/4). The mean square v of their tensor's sums is that of
      before the last exact threshold. Entries of float16 are compared by magnitude.

    All ranks use states that were made alike and have seen the same calls. Raises ``TypeError`` or ``ValueError``.
    Source: Li, Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP 2022, Algorithm 1."""

    def __init__(
        self,
        k: int,
        *,
        boundaries_every: int = 64,
        threshold_every: int = 32,
        balance_factor: float = 4.0,
        as_published: bool = False,
        tensors: Sequence[Sequence[int]] = (),
    ) -> None:
        balance_factor = checked_number(balance_factor, "balance_factor")
        if not balance_factor >= 1:
            raise ValueError(f"balance_factor={balance_factor} must be 1 or more: no largest share is below the mean")
        if not isinstance(as_published, bool):
            raise TypeError(f"as_published={as_published!r} must be True or False")
        given = _checked_tensors(tensors)
        if given and as_published:
            raise ValueError(f"tensors={tensors!r} is not used with as_published=True: leave one of the two out")
        super().__init__(
            k=_checked_count(k, "k"),
            boundaries_every=_checked_count(boundaries_every, "boundaries_every"),
            threshold_every=_checked_count(threshold_every, "threshold_every"),
            balance_factor=balance_factor,
            as_published=as_published,
            tensors=given,
        )
        self._core = core.OkTopkState(**self._settings)


class GTopkState(TopkState):
    """gTopk: a tree of sums of at most k entries, ``2k`` words a level each way. No call leaves anything to the next.

    ``k``: the most entries that the sum keeps, and that a rank can give of its own, at least 1; the others are left.
    All ranks use the same. Raises ``TypeError`` or ``ValueError``. Source: Shi et al., "A distributed synchronous SGD
    algorithm with global top-k sparsification for low bandwidth networks", ICDCS 2019; unlike there nothing is lost."""

    def __init__(self, k: int) -> None:
        super().__init__(k=_checked_count(k, "k"))
        self._core = core.GTopkState(**self._settings)


class BoundedTopkState(_SlicesAndThreshold):
    """Ok-Topk's steps in messages of fixed sizes: no rank tells another how much there is.

    - ``k``: how many entries the sum should keep, at least 1. ``boundaries_every``: calls between two cuts of the
      slices.
    - ``slack``, at least 1: a message has room for ``ceil(slack k / P)`` entries. More room costs words in every call;
      with less, more entries are left and returned.

    All ranks use states that were made alike and have seen the same calls. Raises ``TypeError`` or ``ValueError``.
    Source: ours, after Ok-Topk and the capacity factor of expert layers (Lepikhin et al., GShard, 2020, §3.2)."""

    def __init__(self, k: int, *, slack: float = 1.5, boundaries_every: int = 64) -> None:
        slack = checked_number(slack, "slack")
        if not 1 <= slack < math.inf:
            raise ValueError(
                f"slack={slack} must be a finite number of 1 or more: with less there is no room for k entries"
            )
        super().__init__(
            k=_checked_count(k, "k"), slack=slack, boundaries_every=_checked_count(boundaries_every, "boundaries_every")
        )
        self._core = core.BoundedTopkState(**self._settings)


def _checked_count(value: Any, argument: str) -> int:
    count = checked_integer(value, argument)
    if not 1 <= count <= _COUNT_MOST:
        raise ValueError(f"{argument}={count} must be at least 1, and below 2**63")
    return count


def _checked_tensors(tensors: Sequence[Sequence[int]]) -> list[list[int]]:
    found = [[checked_integer(first, "tensors"), _checked_count(size, "tensors")] for first, size in tensors]
    ends = [0, *(first + size for first, size in found)]
    if any(first < end for (first, _), end in zip(found, ends, strict=False)):
        raise ValueError(f"tensors={tensors!r} must ascend, from index 0 on, and have no index in common")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COUNT_MOST


def _are_lengths(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(map(_is_count, value)) and sum(value) <= _DIMENSION_MOST


class TopkReport(NamedTuple):
    """The traffic and the result of one call of all_reduce_topk on this rank. An index is a word, a value is one."""

    words_sent: int
    words_received: int
    control_words_sent: int
    """Counts, in words of 4 bytes: neither indices nor values."""
    control_words_received: int
    bytes_sent: int
    """Everything that was sent: entries as the wire has them, headers and counts."""
    bytes_received: int
    local_most: int
    """The most entries that a rank has given, where ranks tell each other (Ok-Topk); else of this rank."""
    selected: int
    """How many entries the sum has."""
    overflow: int
    """How many of this rank's own entries did not fit into its messages. gTopk: all but its k largest."""
    cut: bool
    """Slices were cut in this call."""
    exact: bool
    """Ok-Topk found its threshold in this call: the sum has its ``k`` largest entries, and ties, at most 2k."""
    balanced: bool
    """Ranks' shares of the sum were made alike before they were gathered."""


class TopkSum(NamedTuple):
    """The result of all_reduce_topk: sparse vectors (SparseVector or COO, like the input) and a report."""

    sum: Any
    """The entries of the sum that are kept; the same bits on every rank."""
    left: Any
    """What has no part in the sum: entries of this rank, and of gTopk also partial sums that it has dropped. It belongs
    back into the residual."""
    report: TopkReport


class TopkReductions(StreamReductions):
    """The top-k allreduce."""

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
        """About the ``state.k`` largest entries of the sum of all ranks' sparse vectors; the same bits on every rank.

        ``x``: a SparseVector or ``torch.sparse_coo`` tensor of float32, float64, float16 or bfloat16, of ``n`` elements
        on all ranks: this rank's selected entries, any number of them. ``state`` chooses the algorithm:

        - ``OkTopkState``: the exact top k of the sum, formed in the order of ranks, at the first call and every
          ``threshold_every``-th. Ties with the least stay up to 2k in all, the lowest indices first. In between the
          last threshold is reused and corrected. If it is more than ``k/4`` entries off, it is moved, or, failing that,
          found anew. No rank sends or receives more than ``6k' + 2E`` words, and some bytes of counts for each
          rank, in ``(2P + O(log P))`` messages. ``k'`` is the largest number of entries that a rank gives or the sum
          has, and ``E = max(P, 6 sqrt(k'))``.
        - ``GTopkState``: at most k, by a tree of sums that are cut to k where two meet. No rank sends or receives more
          than ``2k`` words at each of ``ceil(log2 P)`` levels, in as many messages.
        - ``BoundedTopkState``: about k, near the largest. A rank sends each other one at most ``C = ceil(slack k / P)``
          of its entries, the largest of that one's slice; of a slice at most C sums are kept. Every call has ``4 C (P -
          1)`` words each way. Number and sizes of messages depend on the settings, ``n``, the dtype and the number of
          the call alone. If ranks' entries lie in different places, most of a rank's may not fit: see ``overflow``.

        ``op``: ``"sum"`` or ``"avg"``. ``wire``, ``error`` and ``seed`` as for a sparse ``all_reduce``; nothing is
        rounded by default. Only an OkTopkState has formats that round; a BoundedTopkState always has raw entries.
        Entries are rounded on their way to the rank that sums them, and kept sums once more. So thresholds are of sums
        of rounded entries. ``error`` gets the rounding error of kept entries only.

        Returns a TopkSum; with ``async_op=True`` a Work whose result is one. The sum (``P`` times the mean), all ranks'
        ``left`` and the part added to ``error`` add up to the inputs, up to the rounding of additions.

        Raises ``TypeError`` or ``ValueError``, before anything is sent, for arguments that do not fit, and for a state
        in use by another call. Raises ``MismatchedCall`` if the ranks' states differ in kind, settings or past: load
        one rank's ``state.state_dict()`` on all. After a ``TransportError`` the state is as before the call.
        Sources: those of the states."""
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
        if stream.dtype.startswith(("i", "u")):
            raise TypeError(f"x holds {stream.dtype}: the largest entries are of floats; convert the values to float64")
        if reduction not in (_core.Reduction.sum, _core.Reduction.avg):
            raise ValueError(f"op={reduction.name!r} is not supported by all_reduce_topk: use 'sum' or 'avg'")
        rounds = formats_named(wire, stream.dtype).values != _core.ValueEncoding.native
        if rounds and not isinstance(state, OkTopkState):
            raise ValueError(f"wire={wire!r} rounds values, which a {type(state).__name__} does not: use 'packed'")
        if isinstance(state, BoundedTopkState):
            check_block_wire(wire, "a BoundedTopkState")
            wire = "raw"
        tensors = state._settings.get("tensors")
        if tensors and sum(tensors[-1]) > stream.n:
            raise ValueError(f"tensors of the state end at {sum(tensors[-1])}, but the sparse vector has n={stream.n}")
        state._check_idle("call again")
        how = self._sparse_reduction(stream, op, "auto", 1.0, wire, error, seed)
        indices, values = stream.entries(0.0)
        entries = (address(indices), address(values), indices.size, stream.n, DTYPES[stream.dtype])
        request = core.all_reduce_topk(*entries, how, state._core, not async_op)

        def finish(done: _core.Request) -> TopkSum:
            total, left, report = done.topk_result()
            kept, rest = (given.like(stream.result(*one)) for one in (total, left))
            return TopkSum(kept, rest, TopkReport(*report))

        return self._stream_work(request, "all_reduce_topk", (indices, values, error), finish, async_op)
