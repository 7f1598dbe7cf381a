"""What kernels do with memory in Triton's interpreter, judged as if they ran on a GPU.

The interpreter runs one program after the other, each operation as a whole, in the host's memory: so it forgives what
no GPU does. A watched launch fails, with the lines of the kernel, where

- an address lies in no tensor (a GPU ends the process, or reads what is another's), unless the kernel was given some,
- two programs touch the same memory, one of them by a plain store, or one by an atomic operation and the other by a
  plain load: which comes first is not said, unless the one has released (``sem="acq_rel"``, behind a
  ``tl.debug_barrier()`` that all of its threads reach) before the other acquired,
- a program stores in one lane what it loads or stores in another without a barrier between: they may be two threads,
  and Triton makes none for memory of a tensor.

And lanes that the mask of a load leaves out hold garbage where no ``other`` is given, as on a GPU; the interpreter has
0. What threads of one *operation* do to each other, and what a compiler makes of a kernel, are not seen.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from bisect import bisect_right
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.runtime import interpreter

# Of float32, float64 and bfloat16 something large, finite and odd; as an index it is far outside.
GARBAGE = bytes([0x5B, 0xA7, 0x5B, 0x7A] * 2)


BETWEEN = {__file__}
"""Files of functions that stand between a kernel and what it calls."""


class Kind(IntEnum):
    LOAD = 0
    STORE = 1
    ATOMIC = 2


class Access(NamedTuple):
    addresses: np.ndarray  # int64, of the lanes that the mask lets in
    lanes: np.ndarray
    size: int  # bytes of an element
    kind: Kind
    program: int
    barriers: int  # that its program has passed
    where: str

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} at {self.where}"


class Launch:
    """What the programs of one launch of the kernel ``name`` have touched so far."""

    def __init__(self, name: str, tensors: list[torch.Tensor]) -> None:
        self._name = name
        self._accesses: list[Access] = []
        self._program, self._barriers = 0, 0
        self._barrier_at = 0  # the first access of this program behind its last barrier
        # By program: the first access that its last release does not cover, and the first behind an acquisition.
        self._released: dict[int, int] = {}
        self._acquired: dict[int, int] = {}
        spans = sorted({(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors})
        self._starts = [start for start, _ in spans]
        self._ends = [start + size for start, size in spans]
        # How long others are whose addresses lie in these is not known, and to ask for all tensors that there are
        # (``gc.get_objects()``) disturbs other threads, whose half-made tuples that finds, too.
        self._has_addresses = any(_holds_addresses(one) for one in tensors if one.dtype == torch.int64)

    def begin_program(self, number: int) -> None:
        self._program, self._barriers, self._barrier_at = number, 0, len(self._accesses)

    def pass_barrier(self) -> None:
        self._barriers += 1
        self._barrier_at = len(self._accesses)

    def add(self, pointers: Any, mask: Any, kind: Kind, *, ordered: bool = False) -> None:
        """``ordered``: an atomic operation that releases and acquires."""
        addresses = pointers.data.ravel().view(np.int64)
        lanes = _lanes(addresses.size)
        if mask is not None and not mask.data.all():
            let_in = np.broadcast_to(mask.data, pointers.data.shape).ravel().astype(bool)
            addresses, lanes = addresses[let_in], lanes[let_in]
        if not addresses.size:
            return
        element = pointers.get_element_ty()
        size = 8 if element.is_ptr() else max(1, element.primitive_bitwidth // 8)
        where = _line_of_kernel()
        self._check_inside(addresses, size, where)
        self._accesses.append(Access(addresses, lanes, size, kind, self._program, self._barriers, where))
        if ordered:
            self._released[self._program] = self._barrier_at
            self._acquired.setdefault(self._program, len(self._accesses))
            self.pass_barrier()  # all threads get its result

    def conflicts(self) -> list[str]:
        """One line for every pair of lines of the kernel that meet in the same memory unordered."""
        numbers = self._may_meet()
        if not numbers:
            return []
        accesses = [self._accesses[number] for number in numbers]
        grain = min(access.size for access in accesses)
        words = [max(1, access.size // grain) for access in accesses]
        place = np.concatenate(
            [
                (access.addresses[:, None] // grain + np.arange(n)).ravel()
                for access, n in zip(accesses, words, strict=True)
            ]
        )
        lane = np.concatenate([access.lanes.repeat(n) for access, n in zip(accesses, words, strict=True)])
        number = np.array(numbers).repeat(
            [access.addresses.size * n for access, n in zip(accesses, words, strict=True)]
        )
        order = np.argsort(place, kind="stable")
        place, lane, number = place[order], lane[order], number[order]
        kind = np.array([access.kind for access in self._accesses])[number]
        program = np.array([access.program for access in self._accesses])[number]
        begins = np.flatnonzero(np.r_[True, place[1:] != place[:-1]])
        ends = np.r_[begins[1:], len(place)]

        def differ(values: np.ndarray) -> np.ndarray:
            different: np.ndarray = np.maximum.reduceat(values, begins) != np.minimum.reduceat(values, begins)
            return different

        def any_is(which: Kind) -> np.ndarray:
            there: np.ndarray = np.maximum.reduceat(kind == which, begins)
            return there

        stored, programs = any_is(Kind.STORE), differ(program)
        unsure = programs & (stored | (any_is(Kind.ATOMIC) & any_is(Kind.LOAD))) | (stored & differ(lane))
        found: dict[str, None] = {}
        for group in np.flatnonzero(unsure):
            piece = slice(begins[group], ends[group])
            self._compare(list(zip(number[piece].tolist(), lane[piece].tolist(), strict=True)), found)
        return [f"{self._name}: {text}" for text in found]

    def _may_meet(self) -> list[int]:
        """The numbers of all accesses but loads that lie beside all that is written: most of a launch's."""
        first = [int(access.addresses.min()) for access in self._accesses]
        last = [int(access.addresses.max()) + access.size for access in self._accesses]
        written = [number for number, access in enumerate(self._accesses) if access.kind != Kind.LOAD]
        spans = {(first[number], last[number]) for number in written}
        return [
            number
            for number, access in enumerate(self._accesses)
            if access.kind != Kind.LOAD or any(begin < last[number] and first[number] < end for begin, end in spans)
        ]

    def _compare(self, touched: list[tuple[int, int]], found: dict[str, None]) -> None:
        for place, (number, lane) in enumerate(touched):
            later = self._accesses[number]
            for before, its_lane in touched[max(0, place - 64) : place]:  # enough to find one pair of those that meet
                earlier = self._accesses[before]
                if Kind.STORE not in (earlier.kind, later.kind) and earlier.kind == later.kind:
                    continue
                if earlier.program == later.program:
                    if (
                        earlier.barriers == later.barriers
                        and lane != its_lane
                        and Kind.STORE in (earlier.kind, later.kind)
                    ):
                        found[f"threads of a program meet, {earlier} and {later}: a barrier is missing"] = None
                elif not (
                    before < self._released.get(earlier.program, 0)
                    and number >= self._acquired.get(later.program, sys.maxsize)
                ):
                    found[f"programs meet, {earlier} and {later}: nothing says which is first"] = None

    def _check_inside(self, addresses: np.ndarray, size: int, where: str) -> None:
        if self._has_addresses or not self._outside(int(addresses.min()), int(addresses.max()) + size):
            return
        if outside := [one for one in addresses.tolist() if self._outside(one, one + size)]:
            raise AssertionError(f"{self._name}: {len(outside)} addresses at {where} lie in no tensor")

    def _outside(self, first: int, end: int) -> bool:
        place = bisect_right(self._starts, first)
        return place == 0 or end > self._ends[place - 1]


@functools.cache
def _lanes(count: int) -> np.ndarray:
    lanes = np.arange(count)
    lanes.flags.writeable = False
    return lanes


def _holds_addresses(table: torch.Tensor) -> bool:
    """Asked of its memory: operations on tensors are counted by those who watch launches."""
    storage = table.untyped_storage()
    if not storage.nbytes():
        return False
    words = storage.nbytes() // 8
    values = np.frombuffer((ctypes.c_int64 * words).from_address(storage.data_ptr()), np.int64)
    return bool(((values >= 1 << 32) & (values < 1 << 47)).any())


def _line_of_kernel() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if "/triton/language/" not in name and "/triton/runtime/" not in name and name not in BETWEEN:
            return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def watch() -> None:
    """From now on, in this process."""
    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    run, place_program = executor.__call__, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store
    change, swap, barrier = builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_barrier
    both_ways = interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE
    launch = Launch("", [])

    def watched_run(self: Any, *arguments: Any, **named: Any) -> None:
        nonlocal launch
        launch = Launch(
            self.fn.__name__, [one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor)]
        )
        run(self, *arguments, **named)
        if conflicts := launch.conflicts():
            raise AssertionError("\n".join(conflicts))

    def watched_place(x: int, y: int, z: int) -> None:
        place_program(x, y, z)
        _, rows, layers = builder.grid_dim
        launch.begin_program((x * rows + y) * layers + z)

    def watched_load(pointers: Any, mask: Any, other: Any, *how: Any) -> Any:
        launch.add(pointers, mask, Kind.LOAD)
        if other is None:
            element = pointers.get_element_ty()
            dtype = np.dtype(interpreter._get_np_dtype(element))
            garbage = np.frombuffer(GARBAGE[: dtype.itemsize], np.uint8 if dtype.kind == "b" else dtype).astype(dtype)
            other = interpreter.TensorHandle(np.full_like(pointers.data, garbage[0], dtype=dtype), element)
        return load(pointers, mask, other, *how)

    def watched_store(pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
        launch.add(pointers, mask, Kind.STORE)
        return store(pointers, value, mask, *how)

    def watched_change(operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        launch.add(pointers, mask, Kind.ATOMIC, ordered=sem == both_ways)
        return change(operation, pointers, value, mask, sem, scope)

    def watched_swap(pointers: Any, expected: Any, value: Any, sem: Any, scope: Any) -> Any:
        launch.add(pointers, None, Kind.ATOMIC, ordered=sem == both_ways)
        return swap(pointers, expected, value, sem, scope)

    def watched_barrier() -> None:
        launch.pass_barrier()
        barrier()

    executor.__call__, builder.set_grid_idx = watched_run, watched_place
    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_barrier = (
        watched_change,
        watched_swap,
        watched_barrier,
    )
