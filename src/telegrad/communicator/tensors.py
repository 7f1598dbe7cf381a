"""From a caller's tensor to an address: everything is checked here, before a pointer leaves Python."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from telegrad import _core
from telegrad.communicator.cuda.runtime import has_runtime
from telegrad.sparse_vector import SparseVector, is_torch_tensor
from telegrad.sparse_vector.formats import check_not_masked, is_scipy

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


_REDUCIBLE = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
_REDUCIBLE_DTYPES = frozenset(_DTYPES[name] for name in _REDUCIBLE)


def reducible(x: Any, argument: str, *, writable: bool = True, device: bool = False) -> HostBuffer:
    """The memory of a float32, float64, float16, bfloat16, int32 or int64 tensor; ``device``: it may be a device's.

    Raises ``TypeError`` or ``ValueError`` with the remedy.
    """
    if type(x) is np.ndarray:
        found = _core.buffer_of(x, writable)
        if found is not None and found.dtype in _REDUCIBLE_DTYPES:
            return found
    if is_torch_tensor(x):
        name = str(x.dtype).removeprefix("torch.")
        if name not in _REDUCIBLE:
            raise TypeError(f"{argument} has dtype {x.dtype}: {_REDUCED}; {_torch_remedy(name, argument)}")
        pointer = _pointer_of(x, argument, device)
        return HostBuffer(pointer, x.numel(), x.numel() * x.element_size(), _DTYPES[name])
    _check_numpy(x, argument, writable=writable)
    if x.dtype.name not in _REDUCIBLE or not x.dtype.isnative:
        raise TypeError(f"{argument} has dtype {x.dtype}: {_REDUCED}; {_numpy_remedy(x.dtype, argument)}")
    return HostBuffer(address(x), x.size, x.nbytes, _DTYPES[x.dtype.name])


_REDUCED = "float32, float64, float16, bfloat16, int32 and int64 can be reduced"
_PARTS = "sum or average real and imaginary parts, as"


def _torch_remedy(name: str, argument: str) -> str:
    if name.startswith("complex"):
        return f"{_PARTS} torch.view_as_real({argument})"
    return f"use .to(torch.{'int64' if name.startswith(('int', 'uint', 'bool')) else 'float32'})"


def _numpy_remedy(dtype: np.dtype[Any], argument: str) -> str:
    if dtype.name in _REDUCIBLE:  # in another byte order
        return f"use .astype(numpy.{dtype.name})"
    if dtype.kind == "c":
        part = "float32" if dtype.itemsize == 8 else "float64"
        native = dtype.isnative and dtype.itemsize <= 16
        whole = argument if native else f"{argument}.astype(numpy.complex{'64' if dtype.itemsize == 8 else '128'})"
        return f"{_PARTS} {whole}.view(numpy.{part})"
    if dtype.kind not in "biufmM":
        return "give numbers"
    return f"use .astype(numpy.{'float64' if dtype.kind == 'f' else 'int64'})"


def _moved_as(name: str) -> _core.DType:
    """What peers compare a tensor's dtype by; where messages have no name for it, bytes: of two such dtypes nobody
    sees that they differ."""
    return _DTYPES.get(name, _core.DType.u8)


def movable(x: Any, argument: str, *, writable: bool = True, device: bool = False) -> HostBuffer:
    """The memory of a tensor of any plain element type; ``device``: it may be a device's.

    Raises ``TypeError`` or ``ValueError`` with the remedy.
    """
    if type(x) is np.ndarray:
        found = _core.buffer_of(x, writable)
        if found is not None:
            return found
    if is_torch_tensor(x):
        pointer = _pointer_of(x, argument, device)
        nbytes = x.numel() * x.element_size()
        return HostBuffer(pointer, x.numel(), nbytes, _moved_as(str(x.dtype).removeprefix("torch.")))
    _check_numpy(x, argument, writable=writable)
    if x.dtype.hasobject:
        raise TypeError(f"{argument} has dtype {x.dtype}, which holds Python objects: use a numeric dtype")
    if not x.dtype.isnative:
        raise TypeError(
            f"{argument} has dtype {x.dtype}, in another byte order than this machine's: use "
            ".astype(x.dtype.newbyteorder('='))"
        )
    return HostBuffer(address(x), x.size, x.nbytes, _moved_as(x.dtype.name))


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
            "does with parameters that it has gathered, or torch only pretends it; give one that holds values"
        )
    return pointer


_TAKE_STREAMS = "all_reduce(), all_reduce_into(), all_reduce_topk(), reduce_scatter() and all_gather()"


def _sparse_remedy(x: object) -> str:
    """What to do with a sparse vector where a dense one is wanted; empty for anything else."""
    if isinstance(x, SparseVector):
        return f"; a stream is for {_TAKE_STREAMS}, or use .to_dense()"
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
