"""What the host reads of a device once for a whole pass: each copy, with pinned memory and an event, costs the host as
much as a launch, however short it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from telegrad.communicator.cuda.runtime import LateRead, Stream, runtime_of

T = TypeVar("T")


class _Read(NamedTuple, Generic[T]):
    """``sizes``: of those in ``abouts``."""

    abouts: list[T]
    sizes: list[int]
    read: LateRead


class GatheredReads(Generic[T]):
    """Small tensors of one dtype, each with what the host knows about it."""

    def __init__(self) -> None:
        self._open: dict[tuple[torch.device, Stream], tuple[list[T], list[torch.Tensor]]] = {}
        self._reads: deque[_Read[T]] = deque()

    def add(self, about: T, tensor: torch.Tensor) -> None:
        """``tensor``: flat, as the current stream has it by ``close``."""
        stream = runtime_of(tensor.device.type).current_stream(tensor.device)
        abouts, tensors = self._open.setdefault((tensor.device, stream), ([], []))
        abouts.append(about)
        tensors.append(tensor)

    def close(self) -> None:
        """Reads all that was added, when its streams come to here."""
        taken, self._open = self._open, {}
        for (device, stream), (abouts, tensors) in taken.items():
            sizes = [tensor.numel() for tensor in tensors]
            with runtime_of(device.type).on(stream):
                together = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
                self._reads.append(_Read(abouts, sizes, LateRead(together)))

    def known(self, *, wait: bool) -> Iterator[tuple[T, Any]]:
        """What the host can know by now, each once, as host tensors; ``wait``: all that was closed."""
        while self._reads and (wait or self._reads[0].read.is_known):
            one = self._reads.popleft()
            yield from zip(one.abouts, one.read.values().split(one.sizes), strict=True)

    def forget(self) -> None:
        """What is not yet known is of no account."""
        self._open.clear()
        self._reads.clear()
