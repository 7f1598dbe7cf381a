"""What operations are given: single arguments, tensors, blocks and wires. All of it is checked before a pointer leaves
Python."""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np

from telegrad import _core
from telegrad.communicator.cuda.runtime import has_runtime
from telegrad.cost import Tuning
from telegrad.cost.closed_forms import layout_that_pays
from telegrad.cost.tuning import HOST_TRANSFER
from telegrad.sparse_vector import SparseVector, is_torch_tensor
from telegrad.sparse_vector.formats import DTYPES, check_not_masked, is_scipy

SLICES = ("equal", "balanced")
"""How the index range of a sparse sum is divided among the ranks that each sum one part of it."""


def checked_rank(value: Any, argument: str, ranks: int) -> int:
    """``value`` as an int, if it is a rank of ``ranks``, else ``TypeError`` or ``ValueError``."""
    rank = checked_integer(value, argument)
    if not 0 <= rank < ranks:
        raise ValueError(f"{argument}={value!r} is no rank: use an int in [0, {ranks})")
    return rank


def checked_integer(value: Any, argument: str, wanted: str = "an int") -> int:
    """``value`` as an int, numpy's and torch's included; ``TypeError``, which says what is ``wanted``, for others."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{argument}={value!r} must be {wanted}")


def checked_number(value: Any, argument: str, wanted: str = "a number") -> float:
    """``value`` as a float, numpy's numbers included; ``TypeError``, which says what is ``wanted``, for what is no
    number, as bools and text are, and ``ValueError`` for what no float can hold."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{argument}={value!r} must be {wanted}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{argument} is more than a float can hold: it must be {wanted}") from error


def checked_flag(value: Any, argument: str, meaning: str = "") -> bool:
    """``value`` as a bool; ``TypeError`` for others: a text such as ``"no"`` would stand for True."""
    if value is True or value is False or isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{argument}={value!r} must be True or False{meaning}")


def check_async(async_op: Any) -> None:
    """Raises ``TypeError`` for what is neither True nor False."""
    checked_flag(async_op, "async_op", ": True returns a Work, False waits")


def checked_factor(value: Any) -> float:
    """A ``switch_factor`` as a float. Raises ``TypeError`` or ``ValueError``."""
    factor = checked_number(value, "switch_factor")
    if not factor >= 0:
        raise ValueError(
            f"switch_factor={value} must be 0 or more: 1.0 switches to dense where both take the same bytes"
        )
    return factor


def checked_slices(slices: Any) -> str:
    """Raises ``ValueError`` with the names that there are."""
    if not isinstance(slices, str) or slices not in SLICES:
        raise ValueError(f"slices={slices!r} does not exist: use one of {', '.join(SLICES)}")
    return slices


HostBuffer = _core.HostBuffer
"""Contiguous host memory. Whoever uses its ``pointer`` must keep the tensor alive."""


_DTYPES = {
    "float32": _core.DType.f32,
    "float64": _core.DType.f64,
    "float16": _core.DType.f16,
    "bfloat16": _core.DType.bf16,
    "uint8": _core.DType.u8,
    "int8": _core.DType.i8,
    "int16": _core.DType.i16,
    "int32": _core.DType.i32,
    "int64": _core.DType.i64,
    "uint16": _core.DType.u16,
    "uint32": _core.DType.u32,
    "uint64": _core.DType.u64,
    "bool": _core.DType.bool,
    "complex64": _core.DType.c64,
    "complex128": _core.DType.c128,
}


def reducible(x: Any, argument: str, *, writable: bool = True, device: bool = False) -> HostBuffer:
    """The memory of a tensor whose dtype has reductions; ``device``: it may be a device's.

    Raises ``TypeError`` or ``ValueError`` with the remedy."""
    if type(x) is np.ndarray:
        found = _core.buffer_of(x, writable)
        if found is not None:
            return found
    if is_torch_tensor(x):
        name = str(x.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise TypeError(f"{argument} has dtype {x.dtype}: {_REDUCED}; use .to(torch.float32)")
        pointer = _pointer_of(x, argument, device)
        return HostBuffer(pointer, x.numel(), x.numel() * x.element_size(), _DTYPES[name])
    _check_numpy(x, argument, writable=writable)
    if x.dtype.name not in _DTYPES or not x.dtype.isnative:
        raise TypeError(f"{argument} has dtype {x.dtype}: {_REDUCED}; {_numpy_remedy(x.dtype)}")
    return HostBuffer(address(x), x.size, x.nbytes, _DTYPES[x.dtype.name])


@dataclass(frozen=True)
class CustomReduction:
    """An associative operation of your own, as ``op`` of dense ``all_reduce``, ``reduce`` and ``reduce_scatter``.

    The result is x0 ∘ x1 ∘ … by rank, evaluated from left to right: the same bits on all ranks, also if the operation
    does not commute. It takes host tensors, NumPy's or torch's, of ``dtype``, with ``algorithm="auto"``.

    ``function``: compiled code, ``void f(T *into, const T *other, int64_t count)``, that sets ``into[i] = into[i] ∘
    other[i]``. A Numba ``cfunc`` of ``void(CPointer(T), CPointer(T), int64)``, a ``ctypes`` function, or an address,
    whose code must stay. telegrad's thread calls it, so it must not use Python.

    ``dtype``: a NumPy or torch dtype, or its name. ``neutral``: an e of which e ∘ e is e. ``name``: the same on all
    ranks, or they call different things.

    Raises ``TypeError`` or ``ValueError`` for an address that is no code of this process, and for a ``neutral`` that is
    not."""

    function: Any = field(repr=False)
    dtype: Any
    neutral: Any
    name: str
    address: int = field(init=False, repr=False)
    core_dtype: _core.DType = field(init=False, repr=False)

    def __post_init__(self) -> None:
        text = str(self.dtype).removeprefix("torch.")
        dtype = text if text in _DTYPES else np.dtype(self.dtype).name
        if dtype not in _DTYPES:
            raise TypeError(f"dtype={self.dtype!r} has no reductions: {_REDUCED}")
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name={self.name!r} must be a text, the same on all ranks")
        object.__setattr__(self, "core_dtype", _DTYPES[dtype])
        object.__setattr__(self, "address", _address_of_code(self.function))
        is_bf16 = self.core_dtype == _core.DType.bf16
        neutral = np.full(2, self.neutral, np.float32 if is_bf16 else dtype)
        if is_bf16:
            neutral = (neutral.view(np.uint32) >> 16).astype(np.uint16)
        into = neutral.copy()
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(self.address)
        call(into.ctypes.data, neutral.ctypes.data, 2)
        if into.tobytes() != neutral.tobytes():
            raise ValueError(f"neutral={self.neutral!r} of {self.name!r} is not: combined with itself it is {into[0]}")

    def check(self, buffer: HostBuffer, x: Any, algorithm: str = "auto") -> None:
        """Raises ``TypeError`` or ``ValueError`` unless it fits ``x``, whose memory is ``buffer``."""
        if on_device(x):
            raise TypeError(f"op={self.name!r} runs on the host: give x.cpu()")
        if buffer.dtype != self.core_dtype:
            raise TypeError(f"op={self.name!r} is for {dtype_name(self.core_dtype)}: x has {dtype_name(buffer.dtype)}")
        if algorithm != "auto":
            raise ValueError(f"algorithm={algorithm!r} is not for op={self.name!r}, whose order is fixed: leave it out")

    @property
    def digest(self) -> int:
        return zlib.crc32(self.name.encode()) or 1


def _address_of_code(function: Any) -> int:
    address = getattr(function, "address", function)
    if hasattr(function, "argtypes"):  # of ctypes
        address = ctypes.cast(function, ctypes.c_void_p).value
    number = checked_integer(address, "function", "a Numba cfunc, a ctypes function or the address of one")
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, rights = line.split(maxsplit=2)[:2]
            begin, end = (int(one, 16) for one in place.split("-"))
            if begin <= number < end and "x" in rights:
                return number
    raise ValueError(f"function={number:#x} is no address of code in this process: give a compiled function's")


_REDUCED = "floats of 16 to 64 bits, integers, bool, complex64 and complex128 can be reduced"


def dtype_name(dtype: _core.DType) -> str:
    """As users write it: ``float32``."""
    return next(name for name, known in _DTYPES.items() if known == dtype)


def _numpy_remedy(dtype: np.dtype[Any]) -> str:
    if dtype.name in _DTYPES:  # in another byte order
        return f"use .astype(numpy.{dtype.name})"
    wider = {"c": "complex128", "f": "float64", "m": "int64", "M": "int64"}.get(dtype.kind)
    return "give numbers" if wider is None else f"use .astype(numpy.{wider})"


def movable(x: Any, argument: str, *, writable: bool = True, device: bool = False) -> HostBuffer:
    """The memory of a tensor of any plain element type; ``device``: it may be a device's. Its dtype is what peers
    compare; where messages have no name for it, bytes: of two such dtypes nobody sees that they differ.

    Raises ``TypeError`` or ``ValueError`` with the remedy."""
    if type(x) is np.ndarray:
        found = _core.buffer_of(x, writable)
        if found is not None:
            return found
    if is_torch_tensor(x):
        pointer = _pointer_of(x, argument, device)
        dtype = _DTYPES.get(str(x.dtype).removeprefix("torch."), _core.DType.u8)
        return HostBuffer(pointer, x.numel(), x.numel() * x.element_size(), dtype)
    _check_numpy(x, argument, writable=writable)
    if x.dtype.hasobject:
        raise TypeError(f"{argument} has dtype {x.dtype}, which holds Python objects: use a numeric dtype")
    if not x.dtype.isnative:
        raise TypeError(
            f"{argument} has dtype {x.dtype}, in another byte order than this machine's: use "
            ".astype(x.dtype.newbyteorder('='))"
        )
    return HostBuffer(address(x), x.size, x.nbytes, _DTYPES.get(x.dtype.name, _core.DType.u8))


def overlap(one: HostBuffer, other: HostBuffer) -> bool:
    """Whether the two share memory."""
    return one.pointer < other.pointer + other.nbytes and other.pointer < one.pointer + one.nbytes


def empty_like(x: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised tensor of ``x``'s library and dtype."""
    if on_device(x):
        return x.new_empty(shape)
    if is_torch_tensor(x):
        return sys.modules["torch"].empty(shape, dtype=x.dtype)
    return np.empty(shape, x.dtype)


def address(x: np.ndarray[Any, Any]) -> int:
    """Where an array's memory begins."""
    return int(x.__array_interface__["data"][0])


def on_device(x: Any) -> bool:
    """Whether it is a torch tensor whose memory is not the host's."""
    return is_torch_tensor(x) and x.device.type != "cpu"


def check_together(x: Any, other: Any, name: str = "out") -> None:
    """Raises ``TypeError`` where only one of two tensors is on a device, or each on another."""
    places = [tensor.device if on_device(tensor) else "the host" for tensor in (x, other)]
    if places[0] != places[1]:
        raise TypeError(f"x is on {places[0]} but {name} on {places[1]}: give both in one place")


def _pointer_of(x: Any, argument: str, device: bool) -> int:
    torch = sys.modules["torch"]
    if x.layout != torch.strided:
        raise TypeError(f"{argument} has layout {x.layout}: give a dense tensor; COO tensors are for {_TAKE_STREAMS}")
    if x.device.type != "cpu" and not (device and has_runtime(x.device.type)):
        raise TypeError(
            f"{argument} is on {x.device}, and this call works in host memory: move it with .cpu() (all_reduce(), "
            "broadcast(), reduce_scatter(), all_gather(), send(), recv() and sendrecv() of dense tensors take CUDA's)"
        )
    if x.is_conj() or x.is_neg():  # torch keeps the unchanged values and a mark, and memory holds no mark
        view, remedy = ("conjugate", "resolve_conj") if x.is_conj() else ("negative", "resolve_neg")
        raise ValueError(f"{argument} is a lazy {view} view, whose memory holds other values: use .{remedy}()")
    if not x.is_contiguous():
        raise ValueError(
            f"{argument} is not contiguous (shape {tuple(x.shape)}, stride {x.stride()}): use .contiguous()"
        )
    pointer: int = x.data_ptr()
    if pointer == 0 and x.numel() and x.device.type != "meta":  # which a runtime that moves nothing takes
        raise ValueError(
            f"{argument} has no memory (a {type(x).__name__} of {x.numel()} elements): its storage was freed, as FSDP "
            "does with gathered parameters, or torch only pretends it. Give one that holds values"
        )
    return pointer


_TAKE_STREAMS = "all_reduce(), all_reduce_into(), all_reduce_topk(), reduce_scatter() and all_gather()"


def _sparse_remedy(x: object) -> str:
    """What to do with a sparse vector where a dense one is wanted; empty for anything else."""
    if isinstance(x, SparseVector):
        return f"; a sparse vector is for {_TAKE_STREAMS}, or use .to_dense()"
    if is_scipy(x):
        return f"; SparseVector.from_csr() makes a stream of a CSR row, for {_TAKE_STREAMS}, or use .toarray()"
    return ""


def _check_numpy(x: Any, argument: str, *, writable: bool) -> None:
    if x is None and argument == "x":
        raise TypeError(
            "x is None: a parameter has no gradient before backward(), and none at all if the loss does not use it"
        )
    if x is None:
        raise TypeError(f"{argument} is None: give a torch tensor or a numpy array, which is written")
    if not isinstance(x, np.ndarray):
        raise TypeError(
            f"{argument} is a {type(x).__name__}: it must be a torch tensor or a numpy array{_sparse_remedy(x)}"
        )
    check_not_masked(x, argument)
    if not x.flags.c_contiguous:
        raise ValueError(
            f"{argument} is not contiguous (shape {x.shape}, strides {x.strides}): use numpy.ascontiguousarray()"
        )
    if writable and not x.flags.writeable:
        raise ValueError(f"{argument} is read-only, and the result is written into it: pass a copy (.copy())")


_MOST_ELEMENTS = 1 << 48  # of a block: what processors can address


class Result(NamedTuple):
    """A tensor that is written, and its memory."""

    tensor: Any
    buffer: HostBuffer


def checked_counts(counts: Any, argument: str, ranks: int) -> list[int]:
    """``counts`` as a list of ``ranks`` ints, 0 or more, else ``TypeError`` or ``ValueError``."""
    is_list = isinstance(counts, (Sequence, np.ndarray)) and not isinstance(counts, (str, bytes))
    listed = list(counts) if is_list else None
    if listed is None or any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) for one in listed):
        raise TypeError(
            f"{argument}={counts!r} must be a sequence of ints: the number of elements of each rank's block"
        )
    if len(listed) != ranks:
        raise ValueError(f"{argument} has {len(listed)} entries: give one for each of the {ranks} ranks")
    for rank, count in enumerate(listed):
        if count < 0:
            raise ValueError(f"{argument}[{rank}]={count} must not be negative: a rank without elements has 0")
        if count > _MOST_ELEMENTS:
            raise ValueError(f"{argument}[{rank}]={count} is more than memory can hold")
    return [int(count) for count in listed]


def check_length(x: Any, argument: str, elements: int, reason: str) -> None:
    """Raises ``ValueError`` unless ``x`` is one-dimensional with ``elements`` elements."""
    if len(x.shape) != 1 or x.shape[0] != elements:
        raise ValueError(f"{argument} has shape {tuple(x.shape)} but {reason}: give it shape ({elements},)")


def result_of(out: Any, like: Any, shape: tuple[int, ...], *, device: bool = False) -> Result:
    """``out`` if it has ``shape`` and the library and dtype of ``like``; a new tensor where it is None.
    ``device``: it may be a device's.

    Raises ``TypeError`` or ``ValueError`` with the remedy."""
    if out is None:
        out = empty_like(like, shape)
    buffer = movable(out, "out", device=device)
    if is_torch_tensor(out) != is_torch_tensor(like) or out.dtype != like.dtype:
        kind = "torch" if is_torch_tensor(like) else "numpy"
        raise TypeError(f"out is a {type(out).__name__} of {out.dtype}: give a {kind} one of {like.dtype}, as x is")
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}: the result has shape {shape}")
    return Result(out, buffer)


def check_apart(x: HostBuffer, out: HostBuffer, own: tuple[int, int] | None, remedy: str) -> None:
    """Raises ``ValueError`` where ``x`` and ``out`` share memory.

    ``own``: where in the longer of the two the shorter one may lie nevertheless: first byte and length."""
    if not overlap(x, out) or not x.nbytes or not out.nbytes:
        return
    whole, part = (out, x) if out.nbytes >= x.nbytes else (x, out)
    if own is not None and (part.pointer - whole.pointer, part.nbytes) == own:
        return
    raise ValueError(f"x shares memory with out: {remedy}")


WIRES = ("bf16", "f16", "int8", "qsgd8", "qsgd4", "qsgd2", "e3m0", "codebook2")
"""How a message may hold float32 values in fewer bytes."""

_ENCODINGS: dict[str, _core.ValueEncoding] = {name: getattr(_core.ValueEncoding, name) for name in WIRES}
_REDUCTIONS = {"sum": _core.Reduction.sum, "avg": _core.Reduction.avg}
_SEEDS = 2**64


def encoding_of(wire: object) -> _core.ValueEncoding:
    """Raises ``ValueError`` with the names that there are."""
    if not isinstance(wire, str) or wire not in _ENCODINGS:
        raise ValueError(f"wire={wire!r} does not exist for dense vectors: use one of {', '.join(WIRES)}")
    return _ENCODINGS[wire]


def check_encodable(buffer: HostBuffer, x: Any, reduction: _core.Reduction, algorithm: str) -> None:
    """What encoded values cannot do: other dtypes, reductions but sums and averages, other algorithms."""
    if buffer.dtype != _core.DType.f32:
        raise TypeError(f"x has dtype {x.dtype}: wire= is for float32; leave it out, or convert x")
    if reduction not in _REDUCTIONS.values():
        raise ValueError(f"op={reduction.name!r} is not supported with wire=: use 'sum' or 'avg', or leave wire out")
    if algorithm != "auto" and not (algorithm == HOST_TRANSFER and on_device(x)):
        raise ValueError(f"algorithm={algorithm!r} is not supported with wire=: use 'auto', or leave wire out")


def error_of(error: Any, x: Any, others: tuple[HostBuffer, ...]) -> int:
    """The address of an ``error`` that is to take what rounding loses of ``x``; 0 if it is ``None``.

    ``others``: memory that it must not share."""
    if error is None:
        return 0
    into = reducible(error, "error", device=on_device(x))
    check_together(x, error, "error")
    if into.dtype != _core.DType.f32:
        raise TypeError(f"error has dtype {error.dtype} but x has {x.dtype}: give both the same")
    if tuple(error.shape) != tuple(x.shape):
        raise ValueError(f"error has shape {tuple(error.shape)} but x has {tuple(x.shape)}: give both the same")
    if any(overlap(into, other) for other in others):
        raise ValueError("error shares memory with x or out: give it memory of its own")
    return into.pointer


def checked_seed(seed: object) -> int:
    """``seed`` as an unsigned number of 64 bits."""
    number = checked_integer(seed, "seed")
    if not 0 <= number < _SEEDS:
        raise ValueError(f"seed={number} is out of range: use 0 to 2**64 - 1")
    return number


_NOT_FOR_DENSE = "is for sparse vectors: leave it out for a dense x"


def check_dense_options(
    *, seed: Any, rounds: bool | None = None, switch_factor: Any = None, slices: Any = "equal"
) -> None:
    """Raises ``TypeError`` or ``ValueError`` for one that is wrong, or is not its default. ``rounds``: whether a
    ``wire`` is named, which a ``seed`` is for; ``None``: the operation has none for dense tensors."""
    if switch_factor is None and type(slices) is str and type(seed) is int and slices == "equal" and seed == 0:
        return  # as nearly all calls, for less than a look at each
    factor = 1.0 if switch_factor is None else checked_factor(switch_factor)
    if factor != 1.0:
        raise ValueError(f"switch_factor={factor} {_NOT_FOR_DENSE}")
    if checked_slices(slices) != "equal":
        raise ValueError(f"slices={slices!r} {_NOT_FOR_DENSE}")
    number = checked_seed(seed)
    if number and rounds is None:
        raise ValueError(f"seed={number} {_NOT_FOR_DENSE}")
    if number and not rounds:
        raise ValueError(f"seed={number} is for wire=, which may round at random: name a wire, or leave seed out")


ENCODINGS = (*WIRES, "mean")
"""How a message may hold float32 values in fewer bytes; as their mean only where all are of one sign."""

_AUTO = "auto"
_LAYOUTS = {  # of indices, and whether values are packed
    "raw": (_core.IndexFormat.raw32, False),
    "blocked": (_core.IndexFormat.none, False),  # 16 bits an index in blocks of 65,536, or raw where that is shorter
    "packed": (_core.IndexFormat.packed, True),
    "indices": (_core.IndexFormat.packed, False),  # packed, and they alone
}
UNMEASURED_S_PER_BYTE = 8.5e-9
"""Of a network that nobody has calibrated: 1 Gbit/s. Packing loses less on a fast one than it gains on a slow one."""


class Formats(NamedTuple):
    """What a message may hold, as the core takes it."""

    indices: _core.IndexFormat
    values: _core.ValueEncoding
    packs_values: bool


class Shape(Protocol):
    """What is known of entries before they are."""

    @property
    def n(self) -> int: ...

    @property
    def nnz(self) -> int:
        """How many they are, about."""

    @property
    def dtype(self) -> str: ...


def formats_of(wire: object, stream: Shape, *, shares_memory: bool, tuning: Tuning | None) -> Formats:
    """What ``wire`` stands for. Raises ``ValueError`` for a name that does not exist, ``TypeError`` for one that the
    stream's values do not have."""
    beta_s_per_byte = 0.0 if shares_memory else UNMEASURED_S_PER_BYTE
    if tuning is not None:
        beta_s_per_byte = tuning.costs.beta_s_per_byte
    density = stream.nnz / stream.n if stream.n else 0.0
    return formats_named(wire, stream.dtype, layout=layout_that_pays(beta_s_per_byte, density, stream.dtype))


def formats_named(wire: object, dtype: str, *, layout: str = "blocked", argument: str = "wire") -> Formats:
    """What ``wire`` stands for where values are of ``dtype`` (as ``SparseVector.dtype`` says it) and entries, unless it
    names their layout, have this one. ``argument``: what the caller's is called. Raises as ``formats_of`` does."""
    if wire is None or isinstance(wire, str):
        return formats_of_name(wire, dtype, layout, argument)
    raise _unknown(wire, argument)


@functools.cache
def formats_of_name(wire: str | None, dtype: str, layout: str, argument: str = "wire") -> Formats:
    """As ``formats_named``."""
    named, values = _parts_of(wire, argument)
    if values is None or values == dtype:
        encoding = _core.ValueEncoding.native
    elif dtype != "f32" or values not in ENCODINGS:
        raise TypeError(
            f"{argument}={wire!r} does not fit a sparse vector of {dtype}: only float32 values can be encoded. "
            "Name the layout alone"
        )
    else:
        encoding = getattr(_core.ValueEncoding, values)
    indices, packs_values = _LAYOUTS[named or layout]
    return Formats(indices, encoding, packs_values)


def name_of_formats(formats: Formats, dtype: str) -> str:
    """The other way: a ``wire`` that names both parts, as ``packed-bf16``."""
    name = next(name for name, known in _LAYOUTS.items() if known == (formats.indices, formats.packs_values))
    return f"{name}-{dtype if formats.values == _core.ValueEncoding.native else formats.values.name}"


def without_sums(wire: object) -> tuple[object, bool]:
    """``wire`` without its ``sums-``, and whether ranks' shares are rounded too: without that they are. Raises
    ``ValueError`` where nothing is rounded."""
    if not isinstance(wire, str) or not wire.startswith("sums-"):
        return wire, True
    rest = wire.removeprefix("sums-")
    if _parts_of(rest, "wire")[1] not in ENCODINGS:
        raise ValueError(f"wire={wire!r} rounds nothing: name an encoding, as in sums-qsgd8")
    return rest, False


def check_block_wire(wire: object, owner: str, *, argument: str = "wire") -> None:
    """Raises ``ValueError``, saying whose messages they are, unless ``wire`` leaves indices and values as they are: for
    blocks of fixed sizes."""
    if _parts_of(wire, argument)[0] not in (None, "raw"):
        raise ValueError(
            f"{argument}={wire!r} makes messages whose sizes depend on the entries, but those of {owner} are fixed: "
            "use 'auto' or 'raw'"
        )


def _parts_of(wire: object, argument: str) -> tuple[str | None, str | None]:
    """The names of the layout and of the values' encoding; ``None``: not named."""
    if wire is None:
        return None, None
    if isinstance(wire, str):
        if wire == _AUTO:
            return None, None
        first, dash, second = wire.partition("-")
        if first in _LAYOUTS and (not dash or second in ENCODINGS or second in DTYPES):
            return first, second or None
        if wire in ENCODINGS or wire in DTYPES:
            return None, wire
    raise _unknown(wire, argument)


def _unknown(wire: object, argument: str) -> ValueError:
    return ValueError(
        f"{argument}={wire!r} does not exist for sparse vectors: use auto, raw, blocked, packed, indices, one of "
        f"{', '.join(ENCODINGS)} or two as in packed-bf16"
    )


def check_rounding_options(wire: object, seed: int, error: Any) -> None:
    """Raises ``ValueError`` for a ``seed`` that is not 0 or an ``error`` where ``wire`` names no rounding. One that
    leaves this dtype as it is, as ``"bf16"`` does a bfloat16 stream, may have them: of a model's streams some are
    float32."""
    if _parts_of(wire, "wire")[1] in ENCODINGS:
        return
    if seed:
        raise ValueError(f"seed={seed} is for a wire= that may round at random: name one, or leave seed out")
    if error is not None:
        raise ValueError(
            f"error takes what wire= loses, and wire={wire!r} loses nothing: name one that rounds, or leave error out"
        )


def overlaps_stream(buffer: HostBuffer, stream: SparseVector) -> bool:
    """Whether ``buffer`` shares memory with the stream's indices or values."""
    return any(
        address(part) < buffer.pointer + buffer.nbytes and buffer.pointer < address(part) + part.nbytes
        for part in stream.memory(stream.absent)
        if part is not None
    )


def error_into(error: Any, stream: SparseVector, out: HostBuffer | None) -> int:
    """The address of an ``error`` to which what rounding loses is added; 0 if it is ``None``. ``out``: memory that it
    must not share, besides the stream's."""
    if error is None:
        return 0
    into = reducible(error, "error")
    if into.dtype != _core.DType.f32:
        raise TypeError(f"error has dtype {error.dtype}: give a float32 one of n={stream.n} elements")
    if into.elements != stream.n:
        raise ValueError(
            f"error has {into.elements} elements but the sparse vector has n={stream.n}: give them the same length"
        )
    if overlaps_stream(into, stream):
        raise ValueError("error shares memory with the stream: give it memory of its own")
    if out is not None and overlap(into, out):
        raise ValueError("error shares memory with out: give it memory of its own")
    return into.pointer
