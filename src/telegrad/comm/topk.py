"""all_reduce_topk: the largest entries of a sum of streams, in words that do not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from telegrad import _core
from telegrad.comm.arguments import checked_integer
from telegrad.comm.reduction import sparse_reduction_of
from telegrad.comm.stream_input import sparse_input
from telegrad.comm.stream_reductions import DTYPES, StreamReductions
from telegrad.comm.stream_wire import formats_of
from telegrad.comm.tensors import address
from telegrad.stream import SparseStream

_COUNT_MOST = 2**63 - 1
_DIMENSION_MOST = 2**32 - 1


class TopkReport(NamedTuple):
    """What one call of all_reduce_topk has done on this rank. An index is a word, a value is one, however encoded."""

    words_sent: int
    words_received: int
    control_words_sent: int
    """Counts, in words of 4 bytes: neither indices nor values."""
    control_words_received: int
    local_most: int
    """The largest number of entries that a rank has given; with ``as_published``, of this rank in most calls."""
    selected: int
    """How many entries the sum has."""
    cut: bool
    """Slices were cut in this call."""
    exact: bool
    """The threshold was found in this call: the sum has its ``k`` largest entries, and what ties with the least."""
    balanced: bool
    """Ranks' shares of the sum were made alike before they were gathered."""


class TopkSum(NamedTuple):
    """The result of all_reduce_topk: streams (SparseStream or COO, as what was given) and a report."""

    sum: Any
    """The entries of the sum that are kept; the same bits on every rank."""
    left: Any
    """Those entries of this rank that have no part in the sum: they belong back into its residual."""
    report: TopkReport


class OkTopkState:
    """What all_reduce_topk is to keep, and what each call leaves to the next: thresholds and slices are reused.

    ``k``: how many entries the sum keeps, at least 1. ``boundaries_every`` and ``threshold_every`` (the paper's τ and
    τ′): after so many calls slices are cut, and the threshold is found anew; sooner where counts say that it is needed.
    ``balance_factor``: where one rank has more than this times the mean of what is gathered, shares are made alike
    first. ``as_published``: boundaries, thresholds and messages as in the paper, for comparison: its volume is not
    bounded.

    All ranks use states that were made alike and have seen the same calls, one call at a time; one that differs is a
    ``MismatchedCall``. Raises ``TypeError`` or ``ValueError`` for bad arguments. Source: Li, Hoefler, "Near-optimal
    sparse allreduce for distributed deep learning", PPoPP 2022, Algorithm 1.
    """

    def __init__(
        self,
        k: int,
        *,
        boundaries_every: int = 64,
        threshold_every: int = 32,
        balance_factor: float = 4.0,
        as_published: bool = False,
    ) -> None:
        if isinstance(balance_factor, bool) or not isinstance(balance_factor, (int, float)):
            raise TypeError(f"balance_factor={balance_factor!r} must be a number")
        if not balance_factor >= 1:
            raise ValueError(f"balance_factor={balance_factor} must be 1 or more: no largest share is below the mean")
        if not isinstance(as_published, bool):
            raise TypeError(f"as_published={as_published!r} must be True or False")
        self._settings: dict[str, Any] = {
            "k": _checked_count(k, "k"),
            "boundaries_every": _checked_count(boundaries_every, "boundaries_every"),
            "threshold_every": _checked_count(threshold_every, "threshold_every"),
            "balance_factor": float(balance_factor),
            "as_published": as_published,
        }
        self._core = _core.TopkState(*self._settings.values())

    @property
    def k(self) -> int:
        """How many entries the sum is to keep. It does not change: make another state for another k."""
        return int(self._settings["k"])

    @property
    def calls(self) -> int:
        """How many calls have succeeded."""
        return self._core.get()[0]

    @property
    def threshold(self) -> float:
        """The magnitude from which the next call would keep entries of the sum."""
        return self._core.get()[1]

    def state_dict(self) -> dict[str, Any]:
        """A copy: the settings, ``calls``, ``threshold`` and ``slices`` (their lengths). The same on all ranks.

        Raises ``ValueError`` while a call that uses this state is under way.
        """
        self._check_idle("save it")
        calls, threshold, slices = self._core.get()
        return {**self._settings, "calls": calls, "threshold": threshold, "slices": slices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a ``state_dict()`` over, on all ranks; nothing is changed if it does not fit.

        Where it was saved with other settings, slices and threshold are found anew at the next call. Raises
        ``ValueError`` for what is no state, and while a call that uses this one is under way.
        """
        self._check_idle("load it")
        if not isinstance(state, Mapping):
            raise ValueError(f"state is a {type(state).__name__}: it must come from state_dict()")
        missing = [name for name in (*self._settings, "calls", "threshold", "slices") if name not in state]
        if missing:
            raise ValueError(f"state has no {missing[0]!r}: it must come from state_dict()")
        calls, threshold, slices = state["calls"], state["threshold"], state["slices"]
        if not _is_count(calls):
            raise ValueError(f"state['calls'] is {calls!r}: it must be an int of 0 or more")
        if not isinstance(threshold, float) or threshold < 0:  # NaN where k sums were NaN
            raise ValueError(f"state['threshold'] is {threshold!r}: it must be a float of 0 or more")
        if not _are_lengths(slices):
            raise ValueError("state['slices'] must be a list of ints of 0 or more: the lengths of slices")
        if any(state[name] != value for name, value in self._settings.items()):
            calls, threshold, slices = 0, 0.0, []
        self._core.set(calls, threshold, list(slices))

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"OkTopkState({settings}, calls={self.calls})"

    def _check_idle(self, wish: str) -> None:
        if self._core.in_use:
            raise ValueError(
                f"this OkTopkState is in use by a call that is not over: wait for that before you {wish}, or give "
                "each call in flight a state of its own"
            )


class TopkReductions(StreamReductions):
    """The operation that keeps a part of a sum."""

    def all_reduce_topk(
        self, x: Any, state: OkTopkState, op: Any = "sum", *, wire: str | None = None, async_op: bool = False
    ) -> Any:
        """The ``state.k`` largest entries of the sum of all ranks' streams, by magnitude; the same bits on every rank.

        ``x``: SparseStream or ``torch.sparse_coo`` tensor of float32, float64, float16 or bfloat16: what this rank has
        selected of its own, any number of entries, of ``n`` elements on all ranks. ``op``: ``"sum"`` or ``"avg"``.
        ``wire``: a format that loses nothing: ``"raw"``, ``"blocked"``, ``"packed"``, ``"indices"``, or by default
        ``"auto"``, which packs unless all ranks share a host's memory.

        Returns a TopkSum; with ``async_op=True`` a Work whose result is one. At the first call and every
        ``state.threshold_every``-th its sum is exactly the top k of the sum of streams, formed in the order of ranks;
        what ties with the least is kept too. In between the last threshold is reused, gently corrected, and found anew
        at once if that would keep more than a quarter too many or too few. With ``k'`` the largest number of entries
        that a rank gives or the sum has, no rank sends or receives more than ``6k' + 2P`` words, counts apart, and
        ``(2P + O(log P))`` messages.

        Raises ``TypeError`` or ``ValueError`` for arguments that do not fit, and for a state in use by a call that is
        not over, before anything is sent; ``MismatchedCall`` where the ranks' states differ: load one rank's
        ``state.state_dict()`` on all. After a ``TransportError`` the state is as before the call. Source: Ok-Topk
        (Li, Hoefler, PPoPP 2022, §3.1), with pooled boundaries and radix selection in place of the paper's.
        """
        given = sparse_input(x)
        if given is None:
            raise TypeError(
                f"x is a {type(x).__name__}: it must be a SparseStream or a COO tensor, the entries that this rank has "
                "selected"
            )
        if not isinstance(state, OkTopkState):
            raise TypeError(f"state={state!r} must be an OkTopkState: make one for all calls that follow each other")
        core, stream, reduction = self._usable(), given.stream, sparse_reduction_of(op)
        if reduction not in (_core.Reduction.sum, _core.Reduction.avg):
            raise ValueError(f"op={reduction.name!r} is not supported by all_reduce_topk: use 'sum' or 'avg'")
        formats = formats_of(wire, stream, shares_memory=core.shares_memory, tuning=self._tuning)
        if formats.values != _core.ValueEncoding.native:
            raise ValueError(f"wire={wire!r} rounds values, which all_reduce_topk does not: use 'packed'")
        state._check_idle("call again")
        indices, values = stream.raw_indices, stream.raw_values
        request = core.all_reduce_topk(
            address(indices),
            address(values),
            indices.size,
            stream.n,
            DTYPES[stream.dtype],
            reduction,
            formats.indices,
            formats.packs_values,
            state._core,
            not async_op,
        )

        def finish(done: _core.Request) -> TopkSum:
            total, left, report = done.topk_result()

            def stream_of(arrays: tuple[Any, Any]) -> Any:
                return given.like(SparseStream.trusted(*arrays, stream.n, of_torch=stream.of_torch))

            return TopkSum(stream_of(total), stream_of(left), TopkReport(*report))

        return self._stream_work(request, "all_reduce_topk", (indices, values), finish, async_op)


def _checked_count(value: Any, argument: str) -> int:
    count = checked_integer(value, argument)
    if not 1 <= count <= _COUNT_MOST:
        raise ValueError(f"{argument}={count} must be at least 1, and below 2**63")
    return count


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _COUNT_MOST


def _are_lengths(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    return all(map(_is_count, value)) and sum(value) <= _DIMENSION_MOST
