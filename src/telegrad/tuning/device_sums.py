"""What dense sums of device tensors take by each way that they can go: a few lengths, until streams have the sums.

All ranks take the same decisions, since all hold the same times.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.communicator.texts import all_gather_text
from telegrad.cost import DEVICE_ALGORITHMS, DeviceTuning
from telegrad.cost.device_tuning import HOST_TRANSFER, NCCL
from telegrad.cost.linear_cost import LinearCost
from telegrad.tuning.fit import line_of
from telegrad.tuning.pairs import Call, calls_of_sample, timed_sample

Samples = dict[int, dict[str, list[float]]]
"""Seconds per call by size in bytes and algorithm."""

_SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
_FEWEST_SIZES = 2  # a line needs as many
_ROUNDS = 5
_SAMPLE_S = 0.01


@dataclass(frozen=True)
class MeasuredDeviceSums:
    """``tuning``, and the ``samples`` that it comes from."""

    tuning: DeviceTuning
    samples: Samples

    def rows(self) -> list[dict[str, Any]]:
        """One for each size and algorithm: median, samples, what the fitted line says, and whether it is the choice."""
        costs = {NCCL: self.tuning.nccl, HOST_TRANSFER: self.tuning.host_transfer}
        found = []
        for size, of in sorted(self.samples.items()):
            for name, times in of.items():
                cost = costs[name]
                assert cost is not None
                found.append(
                    {
                        "bytes": size,
                        "algorithm": name,
                        "median_s": statistics.median(times),
                        "samples": len(times),
                        "fitted_s": cost(size),
                        "chosen": name == self.tuning.algorithm(size),
                    }
                )
        return found


def measure_device_sums(
    communicator: Communicator, like: Any, seconds: float, on_progress: Callable[[float, str], None]
) -> MeasuredDeviceSums:
    """Of sums on the device of the float32 tensor ``like``, in about ``seconds``, the same on all ranks, which all call
    this. NCCL is looked at where the communicator has it, and each rank a device of its own. Raises ``ValueError`` on
    all of them where their devices are of several kinds."""
    runtime, device = runtime_of(like.device.type), like.device
    kind = _one_kind(all_gather_text(communicator, json.dumps(runtime.identity(device)[0])))
    names = communicator.device_algorithms(device)

    def call_of(x: Any, name: str) -> Call:
        def call() -> None:
            communicator.all_reduce(x, algorithm=name)
            runtime.wait_on_host(runtime.record(runtime.current_stream(device)))

        return call

    samples: Samples = {}
    spent_s = 0.0
    for number, size in enumerate(_SIZES):
        # What a longer one takes is at most as many times longer.
        growth = size / _SIZES[number - 1]
        guess_s = sum(growth * min(of) for of in samples[_SIZES[number - 1]].values()) if number else 0.0
        if number >= _FEWEST_SIZES and spent_s + (_ROUNDS + 1) * guess_s > seconds:
            break
        on_progress(number / len(_SIZES), f"sums of {size} bytes on {kind}")
        x = like.new_zeros(size // 4)  # a sum of zeros stays one
        calls = {name: call_of(x, name) for name in names}
        counts = {}
        for name, call in calls.items():
            first = timed_sample(communicator, call, 1)  # which warms up, too
            counts[name] = calls_of_sample(first.per_call_s, _SAMPLE_S)
            spent_s += first.spent_s
        of_size: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(_ROUNDS):
            for index in np.random.default_rng(turn).permutation(len(names)):  # alike on all ranks
                taken = timed_sample(communicator, calls[names[index]], counts[names[index]])
                of_size[names[index]].append(taken.per_call_s)
                spent_s += taken.spent_s
        samples[size] = of_size
    return MeasuredDeviceSums(fitted(kind, samples), samples)


def fitted(kind: str, samples: Samples) -> DeviceTuning:
    """Straight lines through the medians, which do the shortest sum the same justice as the longest. Raises
    ``ValueError`` for less than two sizes."""
    points = {
        name: [(size, statistics.median(of[name])) for size, of in sorted(samples.items()) if name in of]
        for name in DEVICE_ALGORITHMS
    }
    lines: dict[str, LinearCost] = {}
    for name, measured in points.items():
        if measured:
            line = line_of(measured)
            lines[name] = LinearCost(max(0.0, line.intercept_s), max(0.0, line.slope_s_per_byte))
    residual = statistics.median(
        abs(lines[name](size) / seconds - 1) for name, measured in points.items() for size, seconds in measured
    )
    return DeviceTuning(kind, lines.get(NCCL), lines[HOST_TRANSFER], residual)


def _one_kind(told: Iterable[str]) -> str:
    kinds = sorted({json.loads(one) for one in told})
    if len(kinds) > 1:
        raise ValueError(
            f"ranks have devices of several kinds ({', '.join(kinds)}), and one cost would not hold for all of them: "
            "calibrate without device="
        )
    kind: str = kinds[0]
    return kind
