"""Which block and how many warps suit the kernels that read a whole residual, on this GPU: what `PASS_BLOCK`,
`PASS_WARPS`, `GROUP` and `BLOCK` of telegrad.kernels.select.triton.launches should be.

    python benchmarks/gpu/blocks.py --json FILE

A row for each kernel and choice, in the file as it comes: the median of its times, and the time of a copy of as many
elements in the same turns.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rows
import torch
from limited import ROOT

from telegrad.kernels.select.triton import launches, passes
from telegrad.kernels.triton import launch, numbers_on

sys.path.insert(0, str(ROOT))

from lab.select import seconds_between_events

_ELEMENTS = 64 << 20
_SAMPLES = 15
_PASSES = ((256, 1), (512, 1), (512, 2), (1024, 1), (1024, 2), (1024, 4), (2048, 1), (2048, 2), (2048, 4), (2048, 8))
_COUNTS = ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
_TAKES = ((1024, 8), (1024, 4), (1024, 2), (512, 4), (512, 2), (256, 2), (256, 1), (128, 1))  # words, warps
_CHOICES: Mapping[str, Sequence[tuple[int, int]]] = {
    "fused_pass": _PASSES,
    "take_marked": _TAKES,
    "count_digits": _COUNTS,
}
_MOVED = {"fused_pass": 12.0, "take_marked": 0.125 + 20 * 0.01, "count_digits": 4.0}  # bytes for an element
_WIDTH, _SHIFT = launches.DIGITS[0]
_DENSITY = 0.01
_SIDE = launches.side_of(0)

Kernel = Callable[[], object]


class Passes:
    """Launches of the two kernels over one residual on ``device``, of which about 1 % of the entries leave."""

    def __init__(self, elements: int, device: str) -> None:
        self.size, self._device = elements, device
        generator = torch.Generator(device).manual_seed(0)
        self._before = torch.randn(elements, device=device, generator=generator)
        self._gradient = torch.randn(elements, device=device, generator=generator)
        self._residual = self._before.clone()
        sums = (self._before + self._gradient).abs().view(torch.int32)
        k = max(1, int(_DENSITY * elements))
        sampled = sums[torch.randint(elements, (1 << 16,), device=device, generator=generator)].sort().values
        self._bound = sampled[-max(1, sampled.numel() * k // elements)].to(torch.int64).reshape(1)
        self._reached = torch.zeros(1, dtype=torch.int64, device=device)
        self._length = numbers_on(self._residual, elements)

    def copy(self) -> None:
        self._residual.copy_(self._before)

    def fused(self, block: int, warps: int) -> Kernel:
        blocks = launches.blocks_of(self.size, block)
        self.marks = marks = torch.empty(blocks * block // 32, dtype=torch.uint32, device=self._device)
        flags: dict[str, Any] = {"HELD": False, "ADD": True, "SELECT": True, "MOMENTS": False, "KNOWN": False}
        given = (self._residual, self._gradient, self.size, self._bound, marks, *(self._reached,) * 6)
        return self._launching(passes.fused_pass, blocks, *given, **flags, BLOCK=block, warps=warps)

    def taken(self, group: int, warps: int) -> Kernel:
        self.fused(launches.PASS_BLOCK, launches.PASS_WARPS)()
        marks, words = self.marks, self.marks.numel()
        groups, k = -(-words // group), max(1, int(2 * _DENSITY * self.size))
        totals = torch.empty(groups, dtype=torch.int64, device=self._device)
        launch(passes.count_marks, groups, marks, words, totals, self._reached, GROUP=group)
        indices = torch.zeros(k, dtype=torch.uint32, device=self._device)
        values = torch.zeros(k, device=self._device)
        reached = self._reached.clone()  # each launch of a fused pass makes that 0
        found = (marks, words, totals, reached, reached, reached)
        how: dict[str, Any] = {"DECIDE": False, "FEWER": False, "CLEAR": True, "ENDS": False, "GROUP": group}
        given = (self._residual, *found, 0, k, indices, values, 0)
        return lambda: launch(passes.take_marked, groups, *given, **how, warps=warps)

    def counted(self, block: int, warps: int) -> Kernel:
        histogram = torch.zeros(launches.HISTOGRAM, dtype=torch.int64, device=self._device)
        found = torch.zeros(2, dtype=torch.int64, device=self._device)
        digit: dict[str, Any] = {"SHIFT": _SHIFT, "WIDTH": _WIDTH, "FIRST": True, "CUT": False}
        programs = min(launches.PROGRAMS, launches.blocks_of(self.size, block))
        given = (self._before, self._length, found, histogram, 1)
        options: dict[str, Any] = {**digit, "LOWEST": _SIDE.lowest, "BLOCK": block}
        return self._launching(passes.count_digits, programs, *given, **options, warps=warps)

    def _launching(self, kernel: Any, programs: int, *given: Any, **options: Any) -> Kernel:
        return lambda: launch(kernel, programs, *given, **options, FLIP=_SIDE.flip, MASK=_SIDE.mask)


def measure(
    elements: int,
    device: str,
    seconds_of: Callable[[Kernel], float],
    tell: Callable[[dict[str, Any]], None],
    *,
    samples: int = _SAMPLES,
    choices: Mapping[str, Sequence[tuple[int, int]]] = _CHOICES,
) -> None:
    """``tell`` gets a row for each choice."""
    made = Passes(elements, device)
    kernels = {"fused_pass": made.fused, "take_marked": made.taken, "count_digits": made.counted}
    works = [
        ({"kernel": name, "block": block, "warps": warps}, kernels[name](block, warps))
        for name, some in choices.items()
        for block, warps in some
    ]
    for about, work in works:
        times: dict[str, list[float]] = {"own": [], "copy": []}
        for number in range(samples + 1):
            for name, one in (("copy", made.copy), ("own", work)):
                made.copy()
                seconds = seconds_of(one)
                if number:  # the first launch compiles
                    times[name].append(seconds)
        own, copy = (statistics.median(times[name]) for name in ("own", "copy"))
        of_copy = _MOVED[about["kernel"]] / 8 * copy / own
        tell({**about, "elements": elements, "median_s": own, "copy_s": copy, "of_copy": of_copy})


def main(arguments: Sequence[str] | None = None) -> int:
    def measured(tell: rows.Tell) -> None:
        measure(_ELEMENTS, "cuda", seconds_between_events, tell)

    return rows.run(__doc__, "blocks", measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
