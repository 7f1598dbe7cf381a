"""Work that the host has a stream do in each pass, with the same tensors each time: put there by one call, as what a
device has captured once it replays (a CUDA graph). Launching kernels one by one costs the host as much as long kernels
cost the device.

It must not know what the work is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from telegrad.communicator.cuda.runtime import Captured, DeviceRuntime, Stream, runtime_of
from telegrad.communicator.cuda.transfers import DeviceWork

T = TypeVar("T")

SWITCH = "TELEGRAD_CUDA_GRAPHS"
"""The variable of the environment that, if it is 0, has all work launched anew in each pass."""


@dataclass(slots=True)
class _Known(Generic[T]):
    """``owner`` and ``about``: what the work was of. ``made``, ``captured``: once it has been captured. ``reader``: the
    operation that reads what it made last."""

    owner: object
    about: Hashable
    made: T | None = None
    captured: Captured | None = None
    reader: DeviceWork | None = None


class CapturedWork(Generic[T]):
    """By name. Each is done as it comes at first, and captured the second time, if nothing has changed by then."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known[T]] = {}
        self._is_on = os.environ.get(SWITCH) != "0"

    def run(
        self,
        name: Hashable,
        owner: object,
        about: Hashable,
        like: torch.Tensor,
        make: Callable[[], T],
        work: Callable[[T], None],
        *,
        replays: bool = True,
    ) -> T:
        """Has the current stream do ``work(made)``, and returns ``made``: tensors from ``make()``, which is not part of
        it, or those that it wrote last time.

        ``owner`` (this very object) and ``about``: all that it depends on but the contents of tensors, among it where
        these lie; what it allocates itself it must hold no longer than it runs. It may have no effect on the host that
        has to be had each time, unless it is done as it comes (``replays=False``), and allocates no pinned memory.
        Raises what ``work`` does, and what the operation that read the tensors last has failed with."""
        runtime = runtime_of(like.device.type)
        stream = runtime.current_stream(like.device)
        known = self._known.get(name)
        is_known = known is not None and known.owner is owner and known.about == (stream, about)
        if known is None or not is_known or not replays or not self._is_on:
            if not is_known:  # what it knew of other tensors holds no longer
                self._known.pop(name, None)
            made = make()
            work(made)
            if not is_known:
                self._known[name] = _Known(owner, (stream, about))
            return made
        if known.captured is None or known.made is None:
            known.made = make()
            known.captured = self._capture(runtime, stream, work, known.made)
            if known.captured is None:
                work(known.made)
                return known.made
        if known.reader is not None:  # mostly over: but nobody has waited for it where a pass was broken off
            known.reader.wait()
            known.reader = None
        runtime.replay(known.captured)
        return known.made

    def read_by(self, name: Hashable, reader: DeviceWork) -> None:
        """``reader`` reads what the work of this name has made last, in a stream of its own."""
        if name in self._known:
            self._known[name].reader = reader

    def forget(self) -> None:
        """All is done as it comes the next time."""
        self._known.clear()

    def _capture(self, runtime: DeviceRuntime, stream: Stream, work: Callable[[T], None], made: T) -> Captured | None:
        """``None``: it cannot be, and nothing will be from here on."""
        others = (one.captured for one in self._known.values() if one.captured is not None)
        beside = next((one for one in others if one.stream is stream), None)
        try:
            return runtime.capture(stream, lambda: work(made), beside)
        except RuntimeError as error:
            self._is_on = False
            logging.getLogger("telegrad").warning(
                "what is done in each pass cannot be captured in a CUDA graph (%s): kernels are launched one by one, "
                "which takes the host longer; %s=0 does so from the start",
                str(error).partition("\n")[0],
                SWITCH,
            )
            return None
