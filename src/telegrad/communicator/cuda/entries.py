"""DeviceEntries: a sparse vector on a device, and the operation that sums such vectors; and dense sums whose values the
device encodes and decodes.

How many entries there are stays on the device: kernels put them into pinned memory with their number, and write the sum
by what the engine says of it there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from telegrad import _core
from telegrad.communicator.cuda.runtime import DeviceRuntime, Stream, has_runtime
from telegrad.communicator.cuda.staging import Lease
from telegrad.communicator.cuda.transfers import StagedOperation, cuts, flat
from telegrad.kernels.staging import kernels_of
from telegrad.sparse_vector import MAX_LENGTH, is_torch_tensor
from telegrad.sparse_vector.formats import NAMES

_DTYPES = {"bfloat16" if short == "bf16" else dtype.name: short for dtype, short in NAMES.items()}
_INDEX_BYTES, _LOST_BYTES, _WORD_BYTES = 4, 4, 8
_ALIGNED = 4  # indices: 16 bytes, which is what Triton tells addresses apart by
_FAILED = -1
_MOST_VIEWS = 8  # that a lease keeps: numbers of entries may be others in each pass
_COUNTS = ("int32", "int64")


@dataclass(frozen=True, eq=False)
class DeviceEntries:
    """A sparse vector of ``length`` elements, less than 2**32, in tensors of one device.

    ``indices`` are uint32 or int64, ``values`` floats of 16 to 64 bits or integers of 32 or 64. Both are
    one-dimensional, contiguous, and as long as the most entries that there may be. ``count`` (int32 or int64, one
    element) says how many there are. Their indices are strictly increasing and below ``length``, which is checked once
    they are on the host; what lies behind them does not count. An operation reads them when its stream comes to it:
    with ``async_op=True`` leave them alone until the current stream has passed its ``wait()``. Raises ``TypeError`` or
    ``ValueError`` for tensors that do not fit."""

    indices: Any
    values: Any
    count: Any
    length: int

    def __post_init__(self) -> None:
        for name, dtypes in (("indices", ("uint32", "int64")), ("values", tuple(_DTYPES)), ("count", _COUNTS)):
            _check_tensor(getattr(self, name), name, dtypes)
        places = {str(tensor.device) for tensor in (self.indices, self.values, self.count)}
        if len(places) > 1:
            raise ValueError(f"indices, values and count are on {', '.join(sorted(places))}: give them on one device")
        if self.indices.shape != self.values.shape:
            raise ValueError(
                f"there are {self.indices.numel()} indices but {self.values.numel()} values: give one for each"
            )
        if self.count.numel() != 1:
            raise ValueError(f"count has {self.count.numel()} elements: give one, the number of entries")
        if isinstance(self.length, bool) or not isinstance(self.length, int):
            raise TypeError(f"length={self.length!r} must be an int: the elements of the dense vector")
        if not 0 <= self.length <= MAX_LENGTH:
            raise ValueError(f"length={self.length} is not in [0, 2**32): split the vector")

    @property
    def n(self) -> int:
        """As of a SparseVector: the length of the dense vector."""
        return self.length

    @property
    def nnz(self) -> int:
        """As far as the host knows: the most entries that there may be."""
        return int(self.indices.numel())

    @property
    def dtype(self) -> str:
        """That of the values, as a SparseVector names it: ``"f32"``."""
        return _DTYPES[str(self.values.dtype).removeprefix("torch.")]


def _check_tensor(x: Any, name: str, dtypes: tuple[str, ...]) -> None:
    if not is_torch_tensor(x):
        raise TypeError(f"{name} is a {type(x).__name__}: it must be a torch tensor on a device")
    if not has_runtime(x.device.type):
        raise TypeError(f"{name} is on {x.device}: entries on the host are a SparseVector; others must be on cuda")
    if str(x.dtype).removeprefix("torch.") not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}: use {', '.join(dtypes[:-1])} or {dtypes[-1]}")
    if name != "count" and x.dim() != 1:
        raise ValueError(f"{name} has {x.dim()} dimensions: it must have one; use .reshape(-1)")
    if not x.is_contiguous():
        raise ValueError(f"{name} is not contiguous: use .contiguous()")


Staged = tuple[int, ...]
"""Addresses in pinned memory, and lengths, in the order of the core's StagedAddresses."""


class EntriesPart:
    """The sum of all ranks' entries, or a slice of it, into a dense tensor; and to another is added what rounding loses
    of them. It is one operation of the engine, however long.

    Pinned: for the input what the tensors hold, indices as 32 bits; for the sum, and for what is lost, a dense vector
    each, in whose memory entries lie where they take less. The count and the forms of the other two, int64 all, lie
    beside the words: buffers are powers of two, and would often be twice as long for one more number."""

    has_input = True

    def __init__(
        self,
        entries: DeviceEntries,
        out: Any,
        form: Any,
        absent: float,
        begin: Callable[[Staged, _core.Gate], _core.Request],
        error: Any = None,
    ) -> None:
        """``form``: two int64 on the device. ``error``: float32; ``None``: nobody wants what is lost."""
        self._entries, self._out, self._form, self._absent, self._begin = entries, out, form, absent, begin
        self._error, self._outs = error, [out]
        self._item = int(entries.values.element_size())
        self._room = entries.nnz
        self._words, self._first = 1, 0  # of the sum: how many say what it is, and where it begins
        self._sum_room = _entries_in(out.numel(), self._item)
        self._dense_bytes: int = out.numel() * self._item
        self._lost_room = _entries_in(entries.length, _LOST_BYTES)

    @property
    def _lost_first(self) -> int:
        return -(-self._dense_bytes // 16) * 16

    @property
    def input_bytes(self) -> int:
        return max(1, _aligned(self._room) * _INDEX_BYTES + self._room * self._item)

    @property
    def output_bytes(self) -> int:
        if self._error is not None:
            return max(1, self._lost_first + self._entries.length * _LOST_BYTES)
        return max(1, self._dense_bytes)

    def prepare(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        key = (*self._compiled_for(), runtime)
        if key in _prepared:
            return
        self.stage(runtime, stream, lease)
        self._queue_sum(runtime, stream, lease, fails=True)  # no entries are read; ``out`` becomes NaN
        _prepared.add(key)

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        return self._form_at(lease), self._form_bytes

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        entries = self._entries
        given = (entries.indices, flat(entries.values), flat(entries.count))
        runtime.launch(stream, kernels_of(entries.values).stage, *given, *self._input_views(lease))

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        counted, form = int(lease.words.given.data_ptr()), self._form_at(lease)
        first, to = lease.input_address, lease.output_address + self._first
        lost = lease.output_address + self._lost_first
        lost_form = form + self._words * _WORD_BYTES
        errors = (lost_form, lost, lost + self._lost_room * _INDEX_BYTES, self._lost_room, lost)
        staged = (
            *(counted, first, first + _aligned(self._room) * _INDEX_BYTES, self._room),
            *(form, to, to + _aligned(self._sum_room) * _INDEX_BYTES, self._sum_room, to),
            *(errors if self._error is not None else (0, 0, 0, 0, 0)),
        )
        return self._begin(staged, gate)

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        # Kernels ask for the word in each block: it must be near.
        runtime.copy_to_device(stream, self._form, 0, self._form_at(lease), self._form_bytes)
        self._queue_sum(runtime, stream, lease, fails=False)

    @property
    def _form_bytes(self) -> int:
        return _WORD_BYTES * (self._words + (self._error is not None))

    def _form_at(self, lease: Lease) -> int:
        return int(lease.words.told.data_ptr())

    def _queue_sum(self, runtime: DeviceRuntime, stream: Stream, lease: Lease, *, fails: bool) -> None:
        """The kernels that write ``out`` by ``form``, or, if it ``fails``, by one that says so."""
        kernels, words, outs, write = kernels_of(self._out), self._words, len(self._outs), self._write

        def write_sum(form: Any, dense: Any, indices: Any, values: Any, *others: Any) -> None:
            if fails:
                form.fill_(_FAILED)
            write(kernels, others[:outs], form, dense, indices, values)
            if len(others) > outs:
                kernels.add_sum(others[outs], form[words:], *others[outs + 1 :])

        tensors = [self._form, *self._sum_views(lease), *self._outs]
        if self._error is not None:
            tensors += [self._error, *self._lost_views(lease)]
        runtime.launch(stream, write_sum, *tensors)

    def _write(self, kernels: Any, outs: Sequence[Any], form: Any, dense: Any, indices: Any, values: Any) -> None:
        kernels.write_sum(outs[0], form[:1], dense, indices, values, self._absent)

    # What each of these makes of a lease depends on its key alone: the views of one operation may be those of another.
    def _input_views(self, lease: Lease) -> tuple[Any, ...]:
        room, dtype = self._room, self._out.dtype

        def make() -> tuple[Any, ...]:
            return lease.words.given.view(self._form.dtype), *_sections(lease.input, room, dtype)

        return _viewed(lease, ("input", room, dtype), make)

    def _sum_views(self, lease: Lease) -> tuple[Any, ...]:
        return _output_views(lease, 0, self._dense_bytes, self._first, self._sum_room, self._out.dtype)

    def _lost_views(self, lease: Lease) -> tuple[Any, ...]:
        first, nbytes = self._lost_first, self._entries.length * _LOST_BYTES
        return _output_views(lease, first, nbytes, first, self._lost_room, self._error.dtype)

    def _compiled_for(self) -> tuple[Any, ...]:
        """What Triton compiles kernels anew for."""
        entries = self._entries
        given = (entries.indices, entries.values, entries.count, self._out)
        aligned = [x.data_ptr() % 16 == 0 for x in given]
        wide = [size >= 1 << 31 for size in (self._room, entries.length, self._sum_room)]
        empty = (self._dense_bytes == 0, self._sum_room == 0, self._lost_room == 0)
        return (
            self._out.device,
            entries.values.dtype,
            entries.indices.dtype,
            entries.count.dtype,
            (self._absent, self._words, self._sum_room % _ALIGNED),
            *aligned,
            *wide,
            *empty,
            None if self._error is None else self._error.data_ptr() % 16 == 0,
        )


class GatheredPart(EntriesPart):
    """All ranks' entries, each rank's into one of ``found``, which have as much room as this rank's. Their numbers lie
    in front of them: words beside the operation's are too few. ``form``: an int64 more than there are ranks."""

    def __init__(
        self,
        entries: DeviceEntries,
        found: Sequence[DeviceEntries],
        form: Any,
        begin: Callable[[Staged, _core.Gate], _core.Request],
        error: Any = None,
    ) -> None:
        super().__init__(entries, entries.values, form, 0.0, begin, error)
        self._outs = [tensor for one in found for tensor in (one.count, one.indices, one.values)]
        self._words, self._sum_room = len(found), len(found) * self._room
        self._first = -(-(self._words + 1) * _WORD_BYTES // 16) * 16
        self._dense_bytes = self._first + _aligned(self._sum_room) * _INDEX_BYTES + self._sum_room * self._item

    def _form_at(self, lease: Lease) -> int:
        return lease.output_address

    def _write(self, kernels: Any, outs: Sequence[Any], form: Any, dense: Any, indices: Any, values: Any) -> None:
        for rank in range(self._words):
            own = slice(rank * self._room, (rank + 1) * self._room)
            kernels.stage(indices[own], values[own], form[rank : rank + 1], *outs[3 * rank : 3 * rank + 3])


class EncodedSum(NamedTuple):
    """How vectors are summed in messages of encoded values. ``call``: draws the number of the next such call."""

    core: _core.Communicator
    reduction: _core.Reduction
    encoding: _core.ValueEncoding
    seed: int
    call: Callable[[], int]


class EncodedPart:
    """A chunk of a dense sum. Kernels encode ``x`` into half of ``packed``, from where it goes to the host, and decode
    what comes back in the other half. Of more than two ranks this one's slice goes as float32, as its owner adds it
    unrounded, and its error comes back. Two ranks get each other's values, and both add them on the device."""

    has_input = True

    def __init__(self, x: Any, out: Any, error: Any, packed: Any, how: EncodedSum, layout: Sequence[int]) -> None:
        self._x, self._out, self._error, self._how = x, out, error, how
        self._nbytes, self._first, self._end, *self._hole = layout
        self._sent, self._come = (packed[at : at + self._nbytes] for at in (0, packed.numel() // 2))
        self._owned = self._end - self._first
        self._number, self._encoded = 0, None  # of the call; an event
        self._adds = how.core.size == 2
        self.input_bytes = self._bytes_with(self._owned)
        self.output_bytes = self._bytes_with(0 if error is None else self._owned)

    def _bytes_with(self, owned: int) -> int:
        return _padded(self._nbytes) + 4 * owned if owned else self._nbytes

    def prepare(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        vectors = (self._x, self._out, self._error)
        aligned = [None if one is None else one.data_ptr() % 16 for one in vectors]
        how = self._how
        key = (runtime, self._x.device, how.encoding, how.reduction, self._adds, *aligned)
        if key in _prepared or not self._nbytes:
            return
        x, out, error = (None if at is None else self._x.new_empty(8)[at // 4 :] for at in aligned)
        sent = self._sent.new_empty(64)
        for one in (x, out, sent, *([] if error is None else [error])):
            runtime.keep(one, stream)
        self._encode(runtime, stream, x, sent, error)
        self._decode(runtime, stream, sent, sent, out, error)
        _prepared.add(key)

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        return lease.output_address, self.output_bytes

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        self._number = self._how.call()
        if not self._nbytes:
            return
        self._encode(runtime, stream, self._x, self._sent, self._error)
        if self._error is not None:
            self._encoded = runtime.record(stream)
        begin, end = self._hole
        for first, last in ((0, begin), (end, self._nbytes)):
            if first < last:
                runtime.copy_to_host(stream, lease.input_address + first, self._sent, first, last - first)
        if self._owned:
            to = lease.input_address + _padded(self._nbytes)
            runtime.copy_to_host(stream, to, self._x, 4 * self._first, 4 * self._owned)

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        how, behind = self._how, _padded(self._nbytes)
        own, lost = (lease.input_address + behind, lease.output_address + behind) if self._owned else (0, 0)
        at = (lease.input_address, own, lease.output_address, 0 if self._error is None else lost)
        drawn = (how.reduction, how.encoding, how.seed, self._number)
        return how.core.all_reduce_encoded(*at, self._x.numel(), *drawn, gate)

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        if not self._nbytes:
            return
        runtime.copy_to_device(stream, self._come, 0, lease.output_address, self._nbytes)
        if self._error is not None:  # of what failed before the other stream came to it, the last word is NaN
            runtime.wait_event(stream, self._encoded)
        self._decode(runtime, stream, self._come, self._sent, self._out, self._error)
        if self._owned and self._error is not None:
            source = lease.output_address + _padded(self._nbytes)
            runtime.copy_to_device(stream, self._error, 4 * self._first, source, 4 * self._owned)

    def _encode(self, runtime: DeviceRuntime, stream: Stream, x: Any, sent: Any, error: Any) -> None:
        wire, drawn = self._how.encoding.name, (self._how.seed, self._how.core.rank, self._number)

        def encode(x: Any, sent: Any, *errors: Any) -> None:
            kernels_of(x).encode(x, sent, errors[0] if errors else None, wire, *drawn)

        runtime.launch(stream, encode, x, sent, *([] if error is None else [error]))

    def _decode(self, runtime: DeviceRuntime, stream: Stream, come: Any, sent: Any, out: Any, error: Any) -> None:
        wire, adds = self._how.encoding.name, self._adds
        factor = 0.5 if adds and self._how.reduction == _core.Reduction.avg else 1.0

        def decode(come: Any, sent: Any, out: Any, *errors: Any) -> None:
            kernels_of(out).decode(come, sent if adds else None, out, errors[0] if errors else None, wire, factor)

        runtime.launch(stream, decode, come, sent, out, *([] if error is None else [error]))


def encoded_parts(x: Any, out: Any, error: Any, how: EncodedSum) -> tuple[list[StagedOperation], Any]:
    """Chunks of a sum of float32 ``x``, and the tensor of all that is encoded of it there. ``error``: ``None``, or what
    gets this rank's rounding error."""
    kernels_of(x)  # what they need may be missing: that must be known before anything begins
    chunks = cuts(x.numel(), 4)
    layouts = [how.core.encoded_layout(length, how.encoding) for _, length in chunks]
    lengths = [2 * _padded(layout[0]) for layout in layouts]
    packed = x.new_empty(sum(lengths), dtype=sys.modules["torch"].uint8)
    parts: list[StagedOperation] = []
    for (first, length), layout, its, end in zip(chunks, layouts, lengths, accumulate(lengths), strict=True):
        x_, out_, error_ = (None if one is None else flat(one)[first : first + length] for one in (x, out, error))
        parts.append(EncodedPart(x_, out_, error_, packed[end - its : end], how, layout))
    return parts, packed


def _padded(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


_prepared: set[tuple[Any, ...]] = set()


def _viewed(lease: Lease, key: Hashable, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    found = lease.views.get(key)
    if found is None:
        if len(lease.views) >= _MOST_VIEWS:
            lease.views.clear()
        found = lease.views[key] = make()
    return found


def _output_views(lease: Lease, first: int, nbytes: int, listed: int, room: int, dtype: Any) -> tuple[Any, ...]:
    """The dense vector of so many bytes from ``first`` on, and the entries from ``listed`` on."""

    def make() -> tuple[Any, ...]:
        return lease.output[first : first + nbytes].view(dtype), *_sections(lease.output[listed:], room, dtype)

    return _viewed(lease, ("output", first, nbytes, listed, room, dtype), make)


def _sections(buffer: Any, room: int, dtype: Any) -> tuple[Any, Any]:
    """So many indices, and the values behind them."""
    torch = sys.modules["torch"]
    flat_bytes = buffer.view(torch.uint8)
    first = _aligned(room) * _INDEX_BYTES
    indices = flat_bytes[: room * _INDEX_BYTES].view(torch.uint32)
    return indices, flat_bytes[first : first + room * dtype.itemsize].view(dtype)


def _entries_in(elements: int, item: int) -> int:
    """How many entries, each an index and a value, there is room for in a dense vector."""
    return elements * item // (_INDEX_BYTES + item) // _ALIGNED * _ALIGNED


def _aligned(room: int) -> int:
    """So many indices that what follows them is as aligned as they are: for other addresses kernels are others."""
    return -(-room // _ALIGNED) * _ALIGNED
