"""DeviceEntries: a sparse vector on a device, and the operation that sums such vectors.

How many entries there are stays on the device: kernels put them into pinned memory with their number, and write the sum
by what the engine says of it there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from telegrad import _core
from telegrad.comm.device.parts import flat
from telegrad.comm.device.runtime import DeviceRuntime, Stream, has_runtime
from telegrad.comm.device.staging import NOTE_BYTES, Lease
from telegrad.ops.staging import kernels_of
from telegrad.stream import MAX_LENGTH, is_torch_tensor

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_INDEX_BYTES = 4
_ALIGNED = 4  # indices: 16 bytes, which is what Triton tells addresses apart by
_FAILED = -1
_COUNTS = ("int32", "int64")


@dataclass(frozen=True, eq=False)
class DeviceEntries:
    """A sparse vector of ``length`` elements, less than 2**32, in tensors of one device.

    ``indices`` (uint32 or int64) and ``values`` (float32, float16 or bfloat16) are one-dimensional, contiguous, and
    equally long: as long as the most entries that there may be. ``count`` (int32 or int64, one element) says how many
    there are. Their indices are strictly increasing and below ``length``, which is checked once they are on the host;
    what lies behind them does not count. A sum reads them when its stream comes to it: with ``async_op=True`` leave
    them alone until the current stream has passed its ``wait()``. Raises ``TypeError`` or ``ValueError`` for tensors
    that do not fit.
    """

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
        """As of a SparseStream: the length of the dense vector."""
        return self.length

    @property
    def nnz(self) -> int:
        """As far as the host knows: the most entries that there may be."""
        return int(self.indices.numel())

    @property
    def dtype(self) -> str:
        """That of the values, as a SparseStream names it: ``"f32"``, ``"f16"`` or ``"bf16"``."""
        return _DTYPES[str(self.values.dtype).removeprefix("torch.")]


def _check_tensor(x: Any, name: str, dtypes: tuple[str, ...]) -> None:
    if not is_torch_tensor(x):
        raise TypeError(f"{name} is a {type(x).__name__}: it must be a torch tensor on a device")
    if not has_runtime(x.device.type):
        raise TypeError(f"{name} is on {x.device}: entries on the host are a SparseStream; others must be on cuda")
    if str(x.dtype).removeprefix("torch.") not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}: use {' or '.join(dtypes)}")
    if name != "count" and x.dim() != 1:
        raise ValueError(f"{name} has {x.dim()} dimensions: it must have one; use .reshape(-1)")
    if not x.is_contiguous():
        raise ValueError(f"{name} is not contiguous: use .contiguous()")


class Staged(NamedTuple):
    """Addresses in pinned memory, as the core's ``all_reduce_staged`` takes them."""

    counted: int
    indices: int
    values: int
    room: int
    form: int
    sum_indices: int
    sum_values: int
    sum_room: int
    dense: int


class EntriesPart:
    """The sum of all ranks' entries, into a dense tensor. It is one operation of the engine, however long.

    Pinned: for the input what the tensors hold, indices as 32 bits; for the sum a dense vector, in whose memory its
    entries lie where they take less. The count and the sum's form, int64 both, lie beside the words: buffers are powers
    of two, and would often be twice as long for one more number.
    """

    has_input = True

    def __init__(
        self,
        entries: DeviceEntries,
        out: Any,
        form: Any,
        absent: float,
        begin: Callable[[Staged, _core.Gate], _core.Request],
    ) -> None:
        """``form``: an int64 on the device."""
        self._entries, self._out, self._form, self._absent, self._begin = entries, out, form, absent, begin
        item = int(entries.values.element_size())
        self._room = entries.nnz
        self._sum_room = entries.length * item // (_INDEX_BYTES + item) // _ALIGNED * _ALIGNED
        self._item = item

    @property
    def input_bytes(self) -> int:
        return max(1, _aligned(self._room) * _INDEX_BYTES + self._room * self._item)

    @property
    def output_bytes(self) -> int:
        return max(1, self._entries.length * self._item)

    def prepare(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        key = (*self._compiled_for(), runtime)
        if key in _prepared:
            return
        self.stage(runtime, stream, lease)
        self._queue_sum(runtime, stream, lease, fails=True)  # no entries are read; ``out`` becomes NaN
        _prepared.add(key)

    def spoilt(self, lease: Lease) -> tuple[int, int]:
        return int(lease.words.told.data_ptr()), NOTE_BYTES

    def stage(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        entries = self._entries
        indices, values = self._sections(lease.input, self._room)
        count = lease.words.given.view(self._form.dtype)
        given = (entries.indices, flat(entries.values), flat(entries.count))
        runtime.launch(stream, kernels_of(entries.values).stage, *given, count, indices, values)

    def begin(self, lease: Lease, gate: _core.Gate) -> _core.Request:
        counted, form = int(lease.words.given.data_ptr()), int(lease.words.told.data_ptr())
        first, to = lease.input_address, lease.output_address
        staged = Staged(
            *(counted, first, first + _aligned(self._room) * _INDEX_BYTES, self._room),
            *(form, to, to + self._sum_room * _INDEX_BYTES, self._sum_room, to),
        )
        return self._begin(staged, gate)

    def fetch(self, runtime: DeviceRuntime, stream: Stream, lease: Lease) -> None:
        # Kernels ask for the word in each block: it must be near.
        runtime.copy_to_device(stream, self._form, 0, int(lease.words.told.data_ptr()), NOTE_BYTES)
        self._queue_sum(runtime, stream, lease, fails=False)

    def _queue_sum(self, runtime: DeviceRuntime, stream: Stream, lease: Lease, *, fails: bool) -> None:
        """The kernels that write ``out`` by ``form``, or, if it ``fails``, by one that says so."""
        dense = lease.output[: self._entries.length * self._item].view(self._out.dtype)
        indices, values = self._sections(lease.output, self._sum_room)
        kernels, absent = kernels_of(self._out), self._absent

        def write_sum(out: Any, form: Any, dense: Any, indices: Any, values: Any) -> None:
            if fails:
                form.fill_(_FAILED)
            kernels.write_sum(out, form, dense, indices, values, absent)

        runtime.launch(stream, write_sum, self._out, self._form, dense, indices, values)

    def _sections(self, buffer: Any, room: int) -> tuple[Any, Any]:
        """So many indices, and the values behind them."""
        first = _aligned(room) * _INDEX_BYTES
        indices = buffer[: room * _INDEX_BYTES].view(sys.modules["torch"].uint32)
        return indices, buffer[first : first + room * self._item].view(self._out.dtype)

    def _compiled_for(self) -> tuple[Any, ...]:
        """What Triton compiles kernels anew for."""
        entries = self._entries
        given = (entries.indices, entries.values, entries.count, self._out)
        aligned = [x.data_ptr() % 16 == 0 for x in given]
        wide = [size >= 1 << 31 for size in (self._room, entries.length, self._sum_room)]
        empty = (entries.length == 0, self._sum_room == 0)
        return (
            self._out.device,
            entries.values.dtype,
            entries.indices.dtype,
            entries.count.dtype,
            *aligned,
            *wide,
            *empty,
        )


_prepared: set[tuple[Any, ...]] = set()


def _aligned(room: int) -> int:
    """So many indices that what follows them is as aligned as they are: for other addresses kernels are others."""
    return -(-room // _ALIGNED) * _ALIGNED
