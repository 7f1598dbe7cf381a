"""What lies where in a DDP bucket, and its memory as arrays.

A bucket is one flat buffer with the gradients of some parameters. DDP may rebuild its buckets, so a layout is only as
old as the list of parameters that it was made from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from telegrad.compress import Compressor, Part

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    from torch.distributed import GradBucket as GradBucket

Bits = npt.NDArray[Any]
"""The memory of a buffer: float32, or uint16 that holds bfloat16."""


class Member(NamedTuple):
    """A parameter's gradient in the buffer, in elements."""

    name: str
    offset: int
    size: int


@dataclass(slots=True)
class BucketLayout:
    """The members of one bucket: those that are compressed, and the runs of small ones between them."""

    identity: tuple[int, ...]
    members: tuple[Member, ...]
    parts: tuple[Part, ...]
    small: tuple[slice, ...]
    wanted: int  # entries at exactly the density
    indices: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    outcome: torch.futures.Future[torch.Tensor] | None = None

    def scratch(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """Memory for the selected entries; the network may still read it while the last outcome is open."""
        if self.outcome is not None and not self.outcome.done():
            self.indices, self.values = np.empty_like(self.indices), np.empty_like(self.values)
        return self.indices, self.values


def identity_of(bucket: GradBucket) -> tuple[int, ...]:
    """Tells two buckets apart while their parameters live."""
    return tuple(map(id, bucket.parameters()))


def layout_of(bucket: GradBucket, names: Mapping[int, str], compressor: Compressor | None) -> BucketLayout:
    """``names``: parameters' names by id. Raises ``ValueError`` for a parameter that has none."""
    buffer = bucket.buffer()
    members = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        name = names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"bucket {bucket.index()} holds a parameter of shape {tuple(parameter.shape)} that DDPState does not "
                "know: give DDPState all of ddp.named_parameters(), after requires_grad is set for the last time"
            )
        offset = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size() if gradient.numel() else 0
        members.append(Member(name, offset, gradient.numel()))
    members.sort(key=lambda member: (member.offset, member.size))
    parts: list[Part] = []
    small: list[slice] = []
    for member in members:
        if compressor is not None and member.name in compressor.residuals:
            parts.append(compressor.part(member.name, member.offset))
        elif small and small[-1].stop == member.offset:
            small[-1] = slice(small[-1].start, member.offset + member.size)
        else:
            small.append(slice(member.offset, member.offset + member.size))
    capacity = compressor.capacity(parts) if compressor is not None else 0
    return BucketLayout(
        identity_of(bucket),
        tuple(members),
        tuple(parts),
        tuple(small),
        sum(part.entry.k for part in parts),
        np.empty(capacity, np.uint32),
        np.empty(capacity, np.float32),
    )


def bits_of(buffer: torch.Tensor, first_name: str) -> Bits:
    """A buffer's memory. Raises ``TypeError``, naming a parameter, for what telegrad cannot reduce."""
    if buffer.layout != torch.strided:
        raise TypeError(
            f"the gradient of {first_name!r} is {buffer.layout}: make it dense, e.g. "
            "torch.nn.Embedding(sparse=False); telegrad finds out by itself what is worth sending"
        )
    if buffer.device.type != "cpu":
        raise TypeError(f"the gradient of {first_name!r} is on {buffer.device}: this version trains on the CPU")
    check_dtype(buffer.dtype, first_name)
    if buffer.dtype == torch.float32:
        return buffer.numpy()
    return buffer.view(torch.int16).numpy().view(np.uint16)


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Raises ``TypeError``, naming the parameter, unless its gradient is float32 or bfloat16."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"the gradient of {name!r} has dtype {dtype}: telegrad reduces float32 and bfloat16; use model.float() or "
            "model.bfloat16() (autocast keeps float32 gradients)"
        )


def tensor_of(bits: Bits) -> torch.Tensor:
    """The memory as the tensor that it is."""
    if bits.dtype == np.float32:
        return torch.from_numpy(bits)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def rounded_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """float32 to the bits of the nearest bfloat16."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
