"""Tables of numbers that kernels read on a device, such as where arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from telegrad.communicator.cuda.runtime import runtime_of


class DeviceTables:
    """By name; each stays on its device as long as nothing in it changes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, torch.Tensor]] = {}

    def of(
        self, name: Hashable, contents: object, make: Callable[[], torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """The table of that name on the device of ``like``, int64. ``contents``: what it is of; where that, or the
        device, is another than last time, what ``make`` gives, in host memory, is copied there in the current
        stream."""
        contents = (like.device, contents)
        known = self._known.get(name)
        if known is not None and known[0] == contents:
            return known[1]
        runtime, rows = runtime_of(like.device.type), make()
        pinned = runtime.pinned(rows.nbytes).view(torch.int64)
        pinned.copy_(rows)
        made: torch.Tensor = like.new_empty(rows.numel(), dtype=torch.int64)
        runtime.copy(runtime.current_stream(like.device), made, pinned)
        self._known[name] = contents, made
        return made
