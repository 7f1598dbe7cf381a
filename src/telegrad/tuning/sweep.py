"""The time of every allreduce algorithm by size, where it can matter: what the choice is made from.

All ranks take the same decisions, since all hold the same times.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import runtime_of
from telegrad.communicator.texts import all_gather_text
from telegrad.cost import ALLREDUCE_ALGORITHMS, DEVICE_ALGORITHMS, DeviceTuning
from telegrad.cost.decision import TABLE_ALGORITHMS
from telegrad.cost.send_method import LinearCost
from telegrad.cost.tuning import HOST_TRANSFER, NCCL
from telegrad.tuning.probes import Call, calls_of_sample, line_of, timed_sample, written_zeros

Samples = dict[int, dict[str, list[float]]]
"""Seconds per call by size in bytes and algorithm."""

_LEAST_BYTES, _MOST_BYTES = 4, 64 << 20
_SAMPLE_S = 0.004
# One call after another: among more ranks than cores the first ones after a barrier take up to twice as long as those
# that follow, and not equally much with all algorithms.
_FEWEST_CALLS, _MOST_CALLS = 4, 100
_FIRST_ROUNDS, _SECOND_ROUNDS = 4, 6
_FEWEST_ROUNDS = 2  # where time is short: long calls scatter less
_MOST_LOOKS = 6  # of so many second rounds, each at what is still close after those before
_FIRST_SHARE = 0.6  # of the time, for the first look at all sizes
_HOPELESS = 1.5  # times the best: nothing that a better look could change
_CLOSE = 1.3  # times the best: worth a better look
_CLOSE_S = 4e-6
_LONG_CALL_S = 0.01  # a call so long is a sample, and is not made warm by another one


def grid(crossings: Iterable[int]) -> list[int]:
    """Sizes in bytes, ascending: powers of two from 1 KiB, few below, and beside each crossing that formulas say."""
    sizes = {_LEAST_BYTES, 64, 256, *(1 << power for power in range(10, _MOST_BYTES.bit_length()))}
    for crossing in crossings:
        for size in (round(crossing * factor / 4) * 4 for factor in (0.85, 1.2)):
            if _LEAST_BYTES <= size <= _MOST_BYTES and not any(abs(other - size) < size / 8 for other in sizes):
                sizes.add(size)
    return sorted(sizes)


class Sweep:
    """``samples`` holds what was measured so far; ``on_progress`` is told a fraction of the whole and what is next."""

    def __init__(
        self,
        communicator: Communicator,
        on_progress: Callable[[float, str], None],
        algorithms: Sequence[str] = ALLREDUCE_ALGORITHMS,
    ) -> None:
        self._communicator = communicator
        self._algorithms = algorithms
        self._on_progress = on_progress
        self._spent_s = 0.0
        self._round = 0
        self._vector = written_zeros(_MOST_BYTES // 4)
        self.samples: Samples = {}

    def _minima(self) -> dict[int, dict[str, float]]:
        """What is skipped must not hang on a moment in which the machine did something else."""
        return {size: {name: min(times) for name, times in of.items()} for size, of in sorted(self.samples.items())}

    def run(self, sizes: Sequence[int], budget_s: float) -> None:
        """First every size, as long as time is left of ``budget_s``, then again where algorithms are close, and between
        neighbours of which one favours another algorithm. The first size is measured in any case."""
        first_s = _FIRST_SHARE * budget_s
        for number, size in enumerate(sizes):
            names = contenders(size, self._minima(), self._algorithms)
            round_s = self._guess_s(size, names)
            rounds = _FIRST_ROUNDS if self._spent_s + _FIRST_ROUNDS * round_s <= first_s else _FEWEST_ROUNDS
            if self._spent_s + rounds * round_s > first_s:
                break
            self._on_progress(0.7 * number / len(sizes), f"all_reduce of {size} bytes")
            for _ in range(rounds):
                self._measure(size, names)
        left_s = budget_s - min(self._spent_s, first_s)
        self._spent_s = 0.0
        for look in range(_MOST_LOOKS):
            again = close_calls(self.samples)
            for number in range(_SECOND_ROUNDS):
                order = np.random.default_rng((look, number)).permutation(len(again))  # alike on all ranks
                for size, names in (again[index] for index in order):
                    if self._spent_s + self._guess_s(size, names) > left_s:
                        continue
                    self._on_progress(0.7 + 0.3 * self._spent_s / left_s, f"again {size} bytes")
                    self._measure(size, names)

    def _call_of(self, size: int, name: str) -> Call:
        x = self._vector[: size // 4]
        return lambda: self._communicator.all_reduce(x, algorithm=name)

    def _guess_s(self, size: int, names: Iterable[str]) -> float:
        """Of a round: from the longest vector measured so far, if none of this size was. From its shortest calls: a
        disturbed one, as many times longer as this vector is, would end the sweep."""
        if not self.samples:
            return 0.0
        known = size if size in self.samples else max((s for s in self.samples if s < size), default=min(self.samples))
        least = {name: min(times) for name, times in self.samples[known].items()}
        longest_s = max(least.values())
        guessed = (least.get(name, longest_s) * max(1.0, size / known) for name in names)
        return sum(call_s * (_calls_of(call_s) + (call_s <= _LONG_CALL_S)) for call_s in guessed)

    def _measure(self, size: int, names: Sequence[str]) -> None:
        """A sample of each algorithm, each time in another order."""
        self._round += 1
        for index in np.random.default_rng(self._round).permutation(len(names)):
            name = names[index]
            call = self._call_of(size, name)
            known = self.samples.setdefault(size, {}).setdefault(name, [])
            if known:
                call_s, warm = min(known), known[-1] < _LONG_CALL_S
            else:
                first = timed_sample(self._communicator, call, 1)
                self._spent_s += first.spent_s
                call_s, warm = first.per_call_s, True
            # From the shortest call so far: after a disturbed one a sample would be a single call for good.
            count = _calls_of(call_s)
            taken = timed_sample(self._communicator, call, count, warm=warm or count > 1)
            known.append(taken.per_call_s)
            self._spent_s += taken.spent_s


def _calls_of(call_s: float) -> int:
    """How many calls a sample has."""
    if call_s > _LONG_CALL_S:
        return 1
    return int(np.clip(_SAMPLE_S / max(call_s, 1e-7), _FEWEST_CALLS, _MOST_CALLS))


def contenders(
    size: int, times_s: dict[int, dict[str, float]], algorithms: Sequence[str] = ALLREDUCE_ALGORITHMS
) -> list[str]:
    """The algorithms that could be good at ``size`` after what shorter vectors took: a longer one takes no less time,
    and the best at most as many times longer as it has more bytes."""
    found = []
    for name in algorithms:
        known = [shorter for shorter in times_s if shorter <= size and name in times_s[shorter]]
        if known:
            last = max(known)
            ratio = times_s[last][name] / min(times_s[last].values())
            if ratio * last / size > _HOPELESS:
                continue
        found.append(name)
    return found


def close_calls(samples: Samples) -> list[tuple[int, list[str]]]:
    """Sizes, with algorithms, of which more should be known: measured ones at which several are close, and new ones
    half way between neighbours at which not the same is best. Close is also who was as fast as the best only once:
    where ranks share cores, most of few samples may be disturbed ones."""
    found = []
    medians = {size: {name: statistics.median(times) for name, times in of.items()} for size, of in samples.items()}
    for size, times_s in sorted(medians.items()):
        best_s = min(times_s.values())
        close_s = max(best_s * _CLOSE, best_s + _CLOSE_S)
        close = [name for name, time_s in times_s.items() if time_s <= close_s or min(samples[size][name]) <= best_s]
        if len(close) > 1:
            found.append((size, close))
    for below, above in itertools.pairwise(sorted(medians)):
        bests = [min(medians[size], key=medians[size].__getitem__) for size in (below, above)]
        between = round(math.sqrt(below * above) / 4) * 4
        if bests[0] != bests[1] and above >= 1.5 * below and between not in medians:
            found.append((between, sorted({*medians[below], *medians[above]}, key=TABLE_ALGORITHMS.index)))
    return found


# The time of dense allreduces of device tensors by each way, for a few lengths, until streams have the sums.

_SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
_FEWEST_SIZES = 2  # a line needs as many
_ROUNDS = 5
_DEVICE_SAMPLE_S = 0.01


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
            counts[name] = calls_of_sample(first.per_call_s, _DEVICE_SAMPLE_S)
            spent_s += first.spent_s
        of_size: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(_ROUNDS):
            for index in np.random.default_rng(turn).permutation(len(names)):  # alike on all ranks
                taken = timed_sample(communicator, calls[names[index]], counts[names[index]])
                of_size[names[index]].append(taken.per_call_s)
                spent_s += taken.spent_s
        samples[size] = of_size
    return MeasuredDeviceSums(fitted(kind, samples), samples)


SHORTEST_GLOO_BYTES = 1 << 16
_GLOO_SIZES = (SHORTEST_GLOO_BYTES, 1 << 20, 1 << 22, 1 << 24)
_GLOO_JOIN_S = 30.0


def measure_gloo(
    communicator: Communicator, seconds: float, on_progress: Callable[[float, str], None]
) -> LinearCost | None:
    """Of dense sums among all ranks by torch's Gloo, in about ``seconds``; all ranks call this in a job whose launcher
    has set MASTER_ADDR. ``None``, on all ranks, where one of them has no Gloo, or has a process group already."""
    group = _open_gloo(communicator)
    if group is None:
        return None
    import torch

    points: list[tuple[int, float]] = []
    spent_s = 0.0
    for number, size in enumerate(_GLOO_SIZES):
        if number >= _FEWEST_SIZES and spent_s + (_ROUNDS + 1) * points[-1][1] * size / points[-1][0] > seconds:
            break
        on_progress(number / len(_GLOO_SIZES), f"sums of {size} bytes by Gloo")
        call = functools.partial(group.all_reduce, torch.zeros(size // 4))
        taken = [timed_sample(communicator, call, 1, warm=not turn) for turn in range(_ROUNDS)]
        points.append((size, statistics.median(one.per_call_s for one in taken)))
        spent_s += sum(one.spent_s for one in taken)
    group.destroy_process_group()
    return _linear(points)


def _open_gloo(communicator: Communicator) -> Any:
    """``torch.distributed``, with Gloo among the ranks of ``communicator``."""
    dist: Any = None
    store: Any = None
    address = os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(ImportError):
        import torch.distributed as dist
    usable = bool(address) and dist is not None and dist.is_available() and not dist.is_initialized()
    usable, port, timeout = usable and dist.is_gloo_available(), 0, timedelta(seconds=_GLOO_JOIN_S)
    if usable and communicator.rank == 0:
        with contextlib.suppress(RuntimeError):
            store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        usable, port = store is not None, 0 if store is None else store.port
    told = communicator.all_gather(np.array([usable, port], np.int64))
    if not told[:, 0].all():
        return None
    with contextlib.suppress(RuntimeError):  # such as: a host's own name has no address
        store = store or dist.TCPStore(address, int(told[0, 1]), timeout=timeout)
        rank, size = communicator.rank, communicator.world_size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    everywhere = bool(communicator.all_gather(np.array([dist.is_initialized()], np.int64)).all())
    if not everywhere and dist.is_initialized():
        dist.destroy_process_group()
    return dist if everywhere else None


def _linear(points: Sequence[tuple[int, float]]) -> LinearCost:
    line = line_of(points)
    return LinearCost(max(0.0, line.intercept_s), max(0.0, line.slope_s_per_byte))


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
            lines[name] = _linear(measured)
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
