"""What lies where in a bucket, and its memory as arrays.

A bucket is one flat buffer with the gradients of some parameters: DDP's, or that of a group of a Synchronizer. DDP may
rebuild its buckets, so a layout is only as old as the list of parameters that it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from telegrad.communicator.topk import TopkState
from telegrad.compress import Compressor, PlacedResidual

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    from torch.distributed import GradBucket as GradBucket

Bits = npt.NDArray[Any]
"""The memory of a buffer: float32, uint16 that holds bfloat16, float16 or float64; of complex numbers their parts."""

COMPRESSIBLE = (torch.float32, torch.bfloat16)
"""Gradients of which the largest entries alone can be sent, and which the kernels of a GPU take."""

_DENSE = (torch.float16, torch.float64, torch.complex64, torch.complex128)
"""Those that the host averages besides, always densely."""


class ParameterSpan(NamedTuple):
    """A parameter's gradient in the buffer, in elements."""

    name: str
    offset: int
    size: int


@dataclass(slots=True)
class BucketLayout:
    """The members of one bucket: those that are compressed, and the runs of what is dense between them."""

    identity: tuple[int, ...]
    elements: int
    members: tuple[ParameterSpan, ...]
    parts: tuple[PlacedResidual, ...]
    matrices: tuple[PlacedResidual, ...]  # of these, those that are sent as matrices of low rank
    whole: tuple[PlacedResidual, ...]  # those that are sent whole, in fewer bits, by name; they are dense members too
    selected: tuple[PlacedResidual, ...]  # and those of which entries are selected:
    signed: tuple[PlacedResidual, ...]  # of any sign
    one_signed: tuple[PlacedResidual, ...]  # or all of one sign
    dense: tuple[ParameterSpan, ...]  # members of which all values are sent
    dense_runs: tuple[slice, ...]  # where those of them lie that go as they are
    dense_elements: int  # of these members
    member_elements: int  # of all members
    wanted: int  # entries at exactly the density
    indices: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    errors: npt.NDArray[np.float32] | None = None
    topk: TopkState | None = None  # of the sums that keep a part
    outcome: torch.futures.Future[torch.Tensor] | None = None

    def scratch(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Memory for the selected entries; the network may still read it while the last outcome is open."""
        if self._in_use():
            self.indices, self.values = np.empty_like(self.indices), np.empty_like(self.values)
        return self.indices, self.values

    def error_scratch(self) -> npt.NDArray[np.float32]:
        """Zeros, to which the network adds what rounding loses while the outcome is open."""
        if self.errors is None or self._in_use():
            self.errors = np.zeros(self.elements, np.float32)
        else:
            self.errors.fill(0)  # now, not when they are used: those of a dropped step are not
        return self.errors

    def _in_use(self) -> bool:
        return self.outcome is not None and not self.outcome.done()


def identity_of(bucket: GradBucket) -> tuple[int, ...]:
    """Tells two buckets apart while their parameters live."""
    return tuple(map(id, bucket.parameters()))


def name_in(bucket: GradBucket, parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    """``names``: parameters' names by id. Raises ``ValueError`` for a parameter that has none."""
    name = names.get(id(parameter))
    if name is None:
        raise ValueError(
            f"bucket {bucket.index()} holds a parameter of shape {tuple(parameter.shape)} that DDPState does not "
            "know: give DDPState the model that DDP has wrapped, after requires_grad is set for the last time"
        )
    return name


def parts_of(tensor: torch.Tensor) -> int:
    """Floats of an element."""
    return 2 if tensor.is_complex() else 1


def members_of(bucket: GradBucket, names: Mapping[int, str]) -> list[ParameterSpan]:
    """The place of each parameter's gradient in the buffer. A buffer holds complex numbers as pairs of floats, while
    ``gradients()`` counts and places them in complex numbers. Raises as ``name_in``."""
    buffer, members = bucket.buffer(), []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        offset = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size() if gradient.numel() else 0
        parts = parts_of(parameter)
        members.append(ParameterSpan(name_in(bucket, parameter, names), offset * parts, gradient.numel() * parts))
    return members


def layout_of(
    bucket: GradBucket, names: Mapping[int, str], compressor: Compressor, *, is_first: bool = False
) -> BucketLayout:
    """``names``: parameters' names by id. ``is_first``: current for this pass only, as DDP lays buckets out once more
    after its first one, maybe with the same parameters. Raises ``ValueError`` for a parameter that has no name."""
    buffer, members = bucket.buffer(), members_of(bucket, names)
    identity = () if is_first else identity_of(bucket)
    layout = layout_of_members(members, buffer.numel(), compressor, identity=identity)
    if buffer.dtype not in COMPRESSIBLE and (layout.parts or compressor.momentum is not None):
        name = layout.parts[0].entry.name if layout.parts else layout.members[0].name
        raise TypeError(
            f"the gradient of {name!r} has dtype {buffer.dtype}, and what waits for it is of float32 or bfloat16 "
            "gradients: use model.float() or model.bfloat16(), or make the DDPState after the model was converted"
        )
    return layout


def layout_of_members(
    members: Iterable[ParameterSpan],
    elements: int,
    compressor: Compressor,
    *,
    identity: tuple[int, ...] = (),
    tail: int = 0,
) -> BucketLayout:
    """Of a buffer of so many ``elements``, the last ``tail`` of which belong to no member and travel with the dense
    ones."""
    members = sorted(members, key=lambda member: (member.offset, member.size))
    dense = tuple(one for one in members if one.name not in compressor.residuals or one.name in compressor.whole)
    plain = (one for one in dense if one.name not in compressor.whole)
    parts = tuple(compressor.part(one.name, one.offset) for one in members if one.name in compressor.residuals)
    whole = [part for part in parts if part.entry.name in compressor.whole]
    matrices = tuple(part for part in parts if part.entry.name in compressor.matrices)
    selected = tuple(part for part in parts if compressor.selects(part.entry.name))
    capacity = compressor.capacity(selected)
    return BucketLayout(
        identity=identity,
        elements=elements,
        members=tuple(members),
        parts=parts,
        matrices=matrices,
        whole=tuple(sorted(whole, key=lambda part: part.entry.name)),
        selected=selected,
        signed=tuple(part for part in selected if not compressor.one_signed(part)),
        one_signed=tuple(part for part in selected if compressor.one_signed(part)),
        dense=dense,
        dense_elements=sum(member.size for member in dense),
        member_elements=sum(member.size for member in members),
        dense_runs=tuple(_runs_of((*plain, ParameterSpan("", elements - tail, tail)))),
        wanted=_wanted((*matrices, *selected)),
        indices=np.empty(capacity, np.uint32),
        values=np.empty(capacity, np.float32),
    )


def is_current(layout: BucketLayout, bucket: GradBucket) -> bool:
    """False where DDP has rebuilt the bucket since, or a density has changed."""
    return layout.identity == identity_of(bucket) and has_current_density(layout)


def has_current_density(layout: BucketLayout) -> bool:
    """False where its memory for entries is of another density."""
    return layout.wanted == _wanted((*layout.matrices, *layout.selected))


def _wanted(parts: tuple[PlacedResidual, ...]) -> int:
    return sum(part.entry.k for part in parts)


def _runs_of(members: tuple[ParameterSpan, ...]) -> Iterator[slice]:
    """Neighbours become one."""
    run = slice(0, 0)
    for member in members:
        if member.offset != run.stop and run.stop > run.start:
            yield run
        start = run.start if member.offset == run.stop else member.offset
        run = slice(start, member.offset + member.size)
    if run.stop > run.start:
        yield run


def bits_of(buffer: torch.Tensor, first_name: str) -> Bits:
    """The memory of a buffer on the host. Raises ``TypeError``, naming a parameter, for what telegrad cannot reduce."""
    check_reducible(buffer, first_name)
    if buffer.dtype == torch.bfloat16:
        return buffer.view(torch.int16).numpy().view(np.uint16)
    return (torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer).numpy()


def check_reducible(buffer: torch.Tensor, first_name: str, *, on_device: bool = False) -> None:
    """Raises ``TypeError``, naming a parameter, for gradients that are sparse or of a dtype that cannot be reduced."""
    if buffer.layout != torch.strided:
        raise TypeError(
            f"the gradient of {first_name!r} is {buffer.layout}: make it dense, e.g. "
            "torch.nn.Embedding(sparse=False); telegrad finds out by itself what is worth sending"
        )
    check_dtype(buffer.dtype, first_name, on_device=on_device)


def check_dtype(dtype: torch.dtype, name: str, *, on_device: bool = False) -> None:
    """Raises ``TypeError``, naming the parameter, for a gradient that telegrad does not average there: on the host
    those of 16 to 64 bits, real or complex, on a device float32 and bfloat16."""
    if dtype in COMPRESSIBLE or (dtype in _DENSE and not on_device):
        return
    if dtype.is_complex:
        remedy = "keep real and imaginary parts in a real parameter, and use torch.view_as_complex() in forward()"
    elif dtype == torch.float64:
        remedy = "use model.float()"
    else:
        remedy = "keep parameters in float32 and use torch.autocast, or use model.bfloat16()"
    where, taken = (
        ("on a GPU ", "float32 and bfloat16") if on_device else ("", "floats and complex numbers of usual sizes")
    )
    raise TypeError(f"the gradient of {name!r} has dtype {dtype}: {where}telegrad reduces {taken}; {remedy}")


def tensor_of(bits: Bits) -> torch.Tensor:
    """The memory as the tensor that it is, of complex numbers their parts."""
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits)


def fill(bits: Bits, value: float) -> None:
    """Every element becomes ``value``, which bfloat16 must hold exactly; of complex ones both parts."""
    tensor_of(bits).fill_(value)


def rounded_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 to the bits of the nearest bfloat16."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
