"""Calibration of a running job: its costs, the formulas' table from them, what measurements make of that table, and
what is kept for later jobs.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import telegrad
from telegrad.communicator import Communicator
from telegrad.communicator.cuda.runtime import resolved_device
from telegrad.communicator.tuning_cache import file_of, store
from telegrad.cost import Costs, DeviceTuning, Place, Tuning, allreduce_table, measured_allreduce_table
from telegrad.cost.closed_forms import Levels
from telegrad.cost.decision import ALLREDUCE_ALGORITHMS, MPI, TWO_LEVEL
from telegrad.cost.network import CARD_BYTES
from telegrad.tuning.probes import (
    CostFit,
    Probe,
    calls_of_sample,
    fit_costs,
    open_pairs,
    probes,
    timed_sample,
    written_zeros,
)
from telegrad.tuning.sweep import MeasuredDeviceSums, Samples, Sweep, grid, measure_device_sums, measure_gloo

# There are three algorithms; where nothing disturbs they cross a few times, also where a network's protocol changes.
_MOST_STEPS = 8
# Algorithms cross below it on most networks: a sweep that ends before has not seen what long vectors take.
_LONG_BYTES = 256 << 10


class NoisyCalibration(RuntimeError):  # noqa: N818
    """What was found is not kept; the text says why, and what to do."""


def doubts_about(tuning: Tuning) -> tuple[str, ...]:
    """Why its table may be noise."""
    steps = len(tuning.allreduce.choices)
    if steps <= _MOST_STEPS:
        return ()
    return (f"the table has {steps} steps, more than {_MOST_STEPS}",)


def doubts_about_sizes(sizes: Iterable[int]) -> tuple[str, ...]:
    """The same, of the sizes in bytes at which algorithms were timed: time may have been up before long vectors."""
    longest = max(sizes)
    if longest >= _LONG_BYTES:
        return ()
    return (f"nothing longer than {longest:,} bytes was measured: give more --seconds (seconds=)",)


def doubts_about_load(machines: Sequence[tuple[float, int]]) -> tuple[str, ...]:
    """The same, of each rank's load and cores as they were before: the one that was the busiest."""
    rank, (load, cores) = max(enumerate(machines), key=lambda of: of[1][0] / of[1][1])
    if load <= cores:
        return ()
    return (f"the machine of rank {rank} was busy before (load {load:.1f} on {cores} cores)",)


def store_unless_noisy(tuning: Tuning, doubts: Sequence[str]) -> Path:
    """Keeps ``tuning`` for later jobs, and returns the file; one with ``doubts`` only where none is kept yet. Raises
    ``NoisyCalibration`` if one is, ``OSError`` if it cannot be written."""
    path = file_of(tuning.place)
    if doubts and path.exists():
        raise NoisyCalibration(
            f"{'; '.join(doubts)}; {path} stays as it is: calibrate again on a quiet machine, or delete that file first"
        )
    return store(tuning)


_ONE_WAY_BYTES = tuple(1 << power for power in (15, 17, 18, 20, 22))
# Short ones say what a message costs beyond its bytes; in longer ones the core would exchange several at once.
_EXCHANGE_BYTES = (256, 1 << 12, 1 << 15, CARD_BYTES)
_ROUNDS, _FEWEST_ROUNDS = 5, 3
_SAMPLE_S = 0.015
_LEVELS = {"within": "within nodes", "between": "between nodes", "alone": "of one rank of each node"}
_PROBES_SHARE = 0.3  # of the time
_DEVICE_SHARE = 0.4  # of the time, where devices are measured; then the rest is what the others share
_GLOO_SHARE = 0.3  # in the same way

DEFAULT_S = 7.0
"""How long a calibration may take, about."""

Progress = Callable[[float, str], None]
"""Is told which part of the whole is done, from 0 to 1, and what is next."""


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: the ``tuning``, and the ``fit`` behind its costs (with two levels: of those between
    nodes).

    ``probe_medians`` and ``samples`` are the measured times in seconds. ``doubts``: reasons why the result may be
    noise. ``device_sums``: the times measured on devices, or ``None``."""

    tuning: Tuning
    fit: CostFit
    probe_medians: dict[Probe, float]
    samples: Samples
    doubts: tuple[str, ...] = ()
    device_sums: MeasuredDeviceSums | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One for each size and algorithm: median, samples, whether it is the choice, and how much slower that is than
        the best."""
        found = []
        for size, of in sorted(self.samples.items()):
            medians = {name: statistics.median(times) for name, times in of.items()}
            chosen = self.tuning.allreduce.algorithm(size)
            for name, median_s in medians.items():
                found.append(
                    {
                        "bytes": size,
                        "algorithm": name,
                        "median_s": median_s,
                        "samples": len(of[name]),
                        "chosen": name == chosen,
                        "ratio_to_best": median_s / min(medians.values()),
                    }
                )
        return found


def calibrate(
    communicator: Communicator, *, seconds: float = DEFAULT_S, keep: bool = True, device: Any = None
) -> Tuning:
    """Measures this communicator's network and algorithms in about ``seconds``; every rank calls it.

    Returns the tuning, the same on all ranks. ``communicator`` uses it from now on. With ``keep`` rank 0 keeps it in
    the user's cache directory, for later jobs on the same hosts with as many ranks. If it looks like noise and an
    earlier one is kept, it is not kept, and rank 0 warns (docs/reference/tuning.md). ``device``, on all ranks or none:
    a ``torch.device`` or ``"cuda"``, on which dense sums are timed too, by NCCL if possible and through host memory.
    Without it the known costs of devices stay.

    Raises ``TypeError`` for another object than a Communicator, and ``TransportError`` if a peer fails. Raises
    ``ValueError`` for a communicator that is closed, of a forked parent, of one rank or of ranks of one process, and
    for ``seconds`` not above 0. It does so on all ranks if ``seconds`` or kinds of devices differ. Raises
    ``OSError`` on rank 0 if the cache cannot be written."""
    measured = measure(communicator, seconds=seconds, like=None if device is None else _tensor_on(device))
    found = measured.tuning
    communicator.use(found)
    if keep and communicator.rank == 0:
        try:
            path = store_unless_noisy(found, measured.doubts)
        except NoisyCalibration as noisy:
            warnings.warn(f"not kept for later jobs: {noisy}", stacklevel=2)
        else:
            if measured.doubts:
                warnings.warn(f"{path} may be noise: {'; '.join(measured.doubts)}", stacklevel=2)
    return found


def measure(
    communicator: Communicator,
    *,
    seconds: float = DEFAULT_S,
    on_progress: Progress = lambda _part, _what: None,
    like: Any = None,
    with_gloo: bool = False,
) -> Calibration:
    """Measures as ``calibrate``, but changes and keeps nothing. ``like``: a float32 tensor on the device to measure
    too. ``with_gloo``, the same on all ranks: dense sums by torch's Gloo too, as ``measure_gloo`` says."""
    place = _checked_place(communicator, seconds)
    doubts = _agree(communicator, seconds, on_device=like is not None)
    device_sums = gloo = None
    first_share = _DEVICE_SHARE if like is not None else _GLOO_SHARE if with_gloo else 0.0

    def say_first(part: float, what: str) -> None:
        on_progress(first_share * part, what)

    def say(part: float, what: str) -> None:
        on_progress(first_share + (1 - first_share) * part, what)

    if like is not None:
        device_sums = measure_device_sums(communicator, like, first_share * seconds, say_first)
    elif with_gloo:
        gloo = measure_gloo(communicator, first_share * seconds, say_first)
    seconds *= 1 - first_share

    medians_of: dict[str, dict[Probe, float]] = {}
    levels = tuple(_LEVELS) if place.nodes else ("flat",)
    share = _PROBES_SHARE / len(levels)
    for number, level in enumerate(levels):

        def on_probe(part: float, what: str, number: int = number, level: str = level) -> None:
            say(share * (number + part), f"{what} {_LEVELS.get(level, '')}".rstrip())

        medians_of[level] = _measure_probes(communicator, level, share * seconds, on_probe)
    medians = medians_of["between" if place.nodes else "flat"]
    fit = fit_costs(medians, communicator.world_size)
    costs = fit.plain_costs()
    within: Costs | None = None
    alone: Costs | None = None
    on_levels: Levels | None = None
    if place.nodes:
        within = fit_costs(medians_of["within"], communicator.world_size).plain_costs()
        alone = fit_costs(medians_of["alone"], communicator.world_size).plain_costs()
        on_levels = Levels(place.nodes, within, alone)
    core = communicator._usable()
    predicted = allreduce_table(communicator.world_size, costs, levels=on_levels, shares_memory=core.shares_memory)
    sweep = Sweep(
        communicator,
        lambda part, what: say(_PROBES_SHARE + (1 - _PROBES_SHARE) * part, what),
        [*ALLREDUCE_ALGORITHMS, *([TWO_LEVEL] if on_levels else []), *([MPI] if core.has_network_sums else [])],
    )
    sweep.run(grid(choice.from_bytes for choice in predicted.choices[1:]), (1 - _PROBES_SHARE) * seconds)
    tuning = Tuning(
        place=place,
        costs=costs,
        allreduce=measured_allreduce_table(communicator.world_size, sweep.samples, predicted),
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        telegrad_version=telegrad.__version__,
        residual=fit.residual(medians),
        within=within,
        alone=alone,
        gloo=gloo,
        on_device=_known_of_devices(communicator) if device_sums is None else device_sums.tuning,
    )
    say(1.0, "done")
    agreed = _of_rank_0(communicator, tuning)
    doubts = (*doubts, *doubts_about_sizes(sweep.samples), *doubts_about(agreed))
    return Calibration(agreed, fit, medians, sweep.samples, doubts, device_sums)


def _known_of_devices(communicator: Communicator) -> DeviceTuning | None:
    return None if communicator.tuning is None else communicator.tuning.on_device


def _tensor_on(device: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.float32, device=resolved_device(device))


def _checked_place(communicator: Communicator, seconds: float) -> Place:
    """Where ``communicator`` is; all that one rank can say is wrong is said here, before a connection is opened: in a
    forked child that would wait for ever for a lock of the network's."""
    if not isinstance(communicator, Communicator):
        raise TypeError(
            f"communicator is a {type(communicator).__name__}: give the Communicator that from_torch() or "
            "from_exchange() returned"
        )
    communicator._usable()
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"seconds={seconds!r} must be a number: about how long to measure")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0: about how long to measure")
    place = communicator.place
    if place is None:
        raise ValueError(
            f"{communicator!r} cannot be calibrated: make it with from_torch() or from_exchange(), one rank per process"
        )
    if communicator.world_size < 2:
        raise ValueError("one rank alone has no network to calibrate: start 2 or more")
    return place


def _agree(communicator: Communicator, seconds: float, *, on_device: bool) -> tuple[str, ...]:
    """Whose machine was busy already before, the same on all ranks. ``ValueError`` on all if ``seconds`` differ, or
    some measure devices: ranks that count on another time measure other things, and wait for each other."""
    own = [seconds, os.getloadavg()[0], len(os.sched_getaffinity(0)), on_device]
    told = communicator.all_gather(np.array(own, np.float64))
    if len(set(told[:, 3])) > 1:
        have, lack = (int(np.flatnonzero(told[:, 3] == given)[0]) for given in (1, 0))
        raise ValueError(f"device= was given on rank {have} and not on rank {lack}: give it on all ranks or on none")
    others = np.flatnonzero(told[:, 0] != told[0, 0])
    if others.size:
        raise ValueError(
            f"seconds differs between ranks (rank 0: {told[0, 0]:g}, rank {others[0]}: {told[others[0], 0]:g}): "
            "give all the same"
        )
    return doubts_about_load([(load, int(cores)) for _, load, cores, _ in told])


def _measure_probes(
    communicator: Communicator, level: str, budget_s: float, on_progress: Progress
) -> dict[Probe, float]:
    """All take their first sample, then all their second, each time in another order."""
    todo = probes(_ONE_WAY_BYTES, _EXCHANGE_BYTES)
    vector = written_zeros(max(probe.bytes for probe in todo) // 4)
    with open_pairs(communicator, timeout_s=60.0, level=level) as pairs:
        calls = [pairs.call_of(probe, communicator, vector) for probe in todo]
        firsts = [timed_sample(communicator, call, 1) for call in calls]  # which warm up, too
        counts = [calls_of_sample(first.per_call_s, _SAMPLE_S) for first in firsts]
        times: list[list[float]] = [[] for _ in todo]
        spent_s = sum(first.spent_s for first in firsts)
        for number in range(_ROUNDS):
            if number >= _FEWEST_ROUNDS and spent_s > budget_s:
                break
            for at, index in enumerate(np.random.default_rng(number).permutation(len(todo))):
                what = f"{todo[index].kind} of {todo[index].bytes} bytes"
                on_progress((number + at / len(todo)) / _ROUNDS, what)
                taken = timed_sample(communicator, calls[index], counts[index])
                times[index].append(taken.per_call_s)
                spent_s += taken.spent_s
    return {probe: statistics.median(of) for probe, of in zip(todo, times, strict=True)}


def _of_rank_0(communicator: Communicator, tuning: Tuning) -> Tuning:
    """Clocks and environments differ between ranks."""
    text = np.frombuffer(tuning.to_json().encode(), np.uint8)
    length = np.array([text.size], np.int64)
    communicator.broadcast(length, 0)
    sent = np.zeros(int(length[0]), np.uint8)
    if communicator.rank == 0:
        sent[:] = text
    communicator.broadcast(sent, 0)
    return Tuning.from_json(sent.tobytes().decode())


def to_data(found: Calibration) -> dict[str, Any]:
    """As files and processes hand it on."""
    return {
        "tuning": json.loads(found.tuning.to_json()),
        "probes": [
            {"kind": probe.kind, "bytes": probe.bytes, "median_s": median_s}
            for probe, median_s in found.probe_medians.items()
        ],
        "message_s": found.fit.message_s,
        "round_s": found.fit.round_s,
        "rows": found.rows(),
        "doubts": list(found.doubts),
        "device_rows": [] if found.device_sums is None else found.device_sums.rows(),
    }


# The ranks' side of `telegrad calibrate`.

_TIMEOUT_S = 120.0


def rank_main(seconds: str) -> None:
    """One rank, which measures for about so long.

    Rank 0 prints ``{"part", "what"}`` as it goes on, at last ``{"found"}`` (``to_data()``) and either ``{"kept"}``, the
    file in which later jobs find it, or ``{"not_kept"}``, why they will not.
    """
    from telegrad.launch import join

    with join(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S) as communicator:
        tell(communicator, float(seconds))


def rank_main_on_cuda(seconds: str, store: str) -> None:
    """The same, with the GPU whose number is the rank's, as far as there are so many. ``store``: a file that does not
    exist yet, by which ranks with a GPU each come to have NCCL."""
    import torch

    from telegrad.launch import join, rank_and_size

    rank, size = rank_and_size()
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    like = torch.empty(0, dtype=torch.float32, device="cuda")
    if gpus < size:
        with join(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S) as communicator:
            tell(communicator, float(seconds), like)
        return
    import torch.distributed as dist

    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout, device_id=like.device
    )
    with Communicator.from_torch(timeout_s=_TIMEOUT_S, join_timeout_s=_TIMEOUT_S) as communicator:
        tell(communicator, float(seconds), like)
    dist.destroy_process_group()


def tell(communicator: Communicator, seconds: float, like: Any = None) -> None:
    """What rank 0 prints. ``like``: a tensor on this rank's device, if devices are to be measured."""
    first = communicator.rank == 0

    def say(**what: object) -> None:
        if first:
            print(json.dumps(what), flush=True)

    found = measure(communicator, seconds=seconds, on_progress=lambda part, what: say(part=part, what=what), like=like)
    say(found=to_data(found))
    if first:
        say(**kept_in(found))


def kept_in(found: Calibration) -> dict[str, str]:
    """Keeps it for later jobs: ``{"kept"}``, the file, or ``{"not_kept"}``, why not."""
    try:
        return {"kept": str(store_unless_noisy(found.tuning, found.doubts))}
    except (OSError, RuntimeError) as error:
        return {"not_kept": str(error)}
