"""How messages hold the entries of sparse streams: what ``wire=`` names, and what it stands for on a network.

The formats of indices, and packed values, lose nothing and need no agreement: every message says which it has. The
encodings of values are part of what ranks compare.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from telegrad import _core
from telegrad.communicator.encoded import WIRES
from telegrad.communicator.tensors import HostBuffer, address, overlap, reducible
from telegrad.cost import Tuning
from telegrad.cost.closed_forms import layout_that_pays
from telegrad.sparse_vector import SparseVector

ENCODINGS = (*WIRES, "mean")
"""How a message may hold float32 values in fewer bytes; as their mean only where all are of one sign."""

_AUTO = "auto"
_LAYOUTS = {  # of indices, and whether values are packed
    "raw": (_core.IndexFormat.raw32, False),
    "blocked": (_core.IndexFormat.none, False),  # 16 bits an index in blocks of 65,536, or raw where that is shorter
    "packed": (_core.IndexFormat.packed, True),
    "indices": (_core.IndexFormat.packed, False),  # packed, and they alone
}
_NATIVE = ("f32", "f64", "f16", "bf16")
_UNMEASURED_S_PER_BYTE = 8.5e-9
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
    beta_s_per_byte = 0.0 if shares_memory else _UNMEASURED_S_PER_BYTE
    if tuning is not None:
        beta_s_per_byte = tuning.costs.beta_s_per_byte
    density = stream.nnz / stream.n if stream.n else 0.0
    return formats_named(wire, stream.dtype, layout=layout_that_pays(beta_s_per_byte, density, stream.dtype))


def formats_named(wire: object, dtype: str, *, layout: str = "blocked") -> Formats:
    """What ``wire`` stands for where values are of ``dtype`` (as ``SparseVector.dtype`` says it) and entries, unless it
    names their layout, have this one. Raises as ``formats_of`` does."""
    named, values = _parts_of(wire)
    if values is None or values == dtype:
        encoding = _core.ValueEncoding.native
    elif dtype != "f32" or values not in ENCODINGS:
        raise TypeError(
            f"wire={wire!r} does not fit a stream of {dtype}: only float32 values can be encoded, and others go as "
            "they are; name the layout alone"
        )
    else:
        encoding = getattr(_core.ValueEncoding, values)
    indices, packs_values = _LAYOUTS[named or layout]
    return Formats(indices, encoding, packs_values)


def name_of_formats(formats: Formats, dtype: str) -> str:
    """The other way: a ``wire`` that names both parts, as ``packed-bf16``."""
    name = next(name for name, known in _LAYOUTS.items() if known == (formats.indices, formats.packs_values))
    return f"{name}-{dtype if formats.values == _core.ValueEncoding.native else formats.values.name}"


def check_block_wire(wire: object, owner: str) -> None:
    """Raises ``ValueError``, saying whose messages they are, unless ``wire`` leaves indices and values as they are: for
    blocks of fixed sizes."""
    if _parts_of(wire)[0] not in (None, "raw"):
        raise ValueError(
            f"wire={wire!r} makes messages whose sizes depend on the entries, but those of {owner} are fixed: use "
            "'auto' or 'raw'"
        )


def _parts_of(wire: object) -> tuple[str | None, str | None]:
    """The names of the layout and of the values' encoding; ``None``: not named."""
    if wire is None:
        return None, None
    if isinstance(wire, str):
        if wire == _AUTO:
            return None, None
        first, dash, second = wire.partition("-")
        if first in _LAYOUTS and (not dash or second in ENCODINGS or second in _NATIVE):
            return first, second or None
        if wire in ENCODINGS or wire in _NATIVE:
            return None, wire
    raise ValueError(
        f"wire={wire!r} does not exist for sparse streams: use auto, raw, blocked, packed, indices, one of "
        f"{', '.join(ENCODINGS)} or two as in packed-bf16"
    )


def check_rounding_options(wire: object, seed: int, error: Any) -> None:
    """Raises ``ValueError`` for a ``seed`` that is not 0 or an ``error`` where ``wire`` names no rounding. One that
    leaves this dtype as it is, as ``"bf16"`` does a bfloat16 stream, may have them: of a model's streams some are
    float32."""
    if _parts_of(wire)[1] in ENCODINGS:
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
            f"error has {into.elements} elements but the stream has n={stream.n}: give them the same length"
        )
    if overlaps_stream(into, stream):
        raise ValueError("error shares memory with the stream: give it memory of its own")
    if out is not None and overlap(into, out):
        raise ValueError("error shares memory with out: give it memory of its own")
    return into.pointer
