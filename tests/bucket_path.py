"""Counts the Python path of one compressed bucket through telegrad: files, calls, and changes from one file to another.

``python tests/bucket_path.py`` prints the counts of the fourth pass, ``--calls`` also each call.
``tests/python/ddp/test_bucket_path.py`` holds them against limits that may only shrink.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

import telegrad
from telegrad.ddp import DDPState, ddp_hook

PACKAGE = Path(telegrad.__file__).parent
ELEMENTS = 1 << 20  # a bucket of 4 MiB
PASSES = 4


class Bucket:
    """As DDP's ``GradBucket``: the gradients of some parameters in one buffer, the only bucket of a backward pass."""

    def __init__(self, parameters: list[torch.nn.Parameter], buffer: torch.Tensor) -> None:
        self._parameters, self._buffer = parameters, buffer

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return [*torch.split(self._buffer, [one.numel() for one in self._parameters])]


class Call(NamedTuple):
    """A call of one of telegrad's Python functions. ``depth``: of the calls around it."""

    file: str
    function: str
    line: int
    depth: int


class BucketPath(NamedTuple):
    """``changes``: how often a call is in another file than the one before it."""

    files: int
    calls: int
    changes: int


def calls_of(function: Callable[[], Any]) -> list[Call]:
    """All calls into telegrad's Python files that ``function`` makes on this thread, in their order."""
    found: list[Call] = []
    depth = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        if not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "call":
            file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            found.append(Call(file, frame.f_code.co_name, frame.f_lineno, depth))
            depth += 1
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def counted(calls: list[Call]) -> BucketPath:
    """What a reader of the path meets."""
    files = [call.file for call in calls]
    return BucketPath(len({*files}), len(files), sum(one != other for one, other in pairwise(files)))


def bucket_calls(parameters: int = 1, elements: int = ELEMENTS, passes: int = PASSES, **options: Any) -> list[Call]:
    """Those of the last of ``passes`` passes of one rank's hook, with ``options`` of DDPState."""
    options = {"compress": telegrad.TopK(), **options}
    model = [torch.nn.Parameter(torch.zeros(elements // parameters)) for _ in range(parameters)]
    numbers = np.random.default_rng(0)
    (comm,) = telegrad.Communicator.local(1)
    with comm:
        state = DDPState(comm, torch.nn.ParameterList(model), **options)
        buffer = torch.empty(elements)
        bucket: Any = Bucket(model, buffer)
        for _ in range(passes):
            buffer.copy_(torch.from_numpy(numbers.standard_normal(elements, dtype=np.float32)))
            outcomes: list[torch.futures.Future[torch.Tensor]] = []
            calls = calls_of(lambda taken=outcomes: taken.append(ddp_hook(state, bucket)))  # type: ignore[misc]
            outcomes[0].wait()
            for one in model:
                one.grad = buffer[: one.numel()]
        return calls


def main() -> None:
    """The command."""
    for parameters in (1, 4):
        calls = bucket_calls(parameters)
        print(f"{parameters} parameter(s):", *(f"{name}: {value}" for name, value in counted(calls)._asdict().items()))
        if "--calls" in sys.argv:
            for call in calls:
                print(f"  {'. ' * call.depth}{call.file}:{call.line} {call.function}")


if __name__ == "__main__":
    main()
