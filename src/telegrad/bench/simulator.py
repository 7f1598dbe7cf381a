"""How fast the simulator is, and how much memory it takes: each case in a process of its own.

The cases are those that tell whether thousands of ranks can be simulated: every collective at 4,096 ranks with sizes
only, and real payloads where they fit. Needs neither network nor torch.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from telegrad import _core
from telegrad.launch.parent import die_with

Row = dict[str, object]


@dataclass(frozen=True)
class Case:
    """One operation of ``ranks`` ranks. ``bytes``: one rank's vector; sparse: four per index of the dimension. ``nnz``:
    entries of each rank. ``payloads``: real values, whose result is compared with the expected sum.
    """

    operation: str
    algorithm: str
    ranks: int
    bytes: int
    nnz: int = 0
    payloads: bool = False


_MIB = 1 << 20

CASES: tuple[Case, ...] = (
    Case("allreduce", "ring", 1024, 64 << 10, payloads=True),
    Case("allreduce", "ring", 2048, 8 << 10),
    Case("allreduce", "recursive_doubling", 2048, 8 << 10),
    Case("sparse_allreduce", "split_allgather", 2048, 4 * _MIB, nnz=8, payloads=True),
    Case("sparse_allreduce", "split_allgather", 2048, 256 * _MIB, nnz=671_088),
    Case("allreduce", "ring", 4096, 64 * _MIB),
    Case("allreduce", "recursive_doubling", 4096, 64 * _MIB),
    Case("sparse_allreduce", "split_allgather", 4096, 256 * _MIB, nnz=671_088),
    Case("allgather", "", 4096, _MIB),
    Case("broadcast", "", 4096, 64 * _MIB),
    Case("barrier", "", 4096, 0),
    Case("allreduce", "ring", 4096, 64 << 10, payloads=True),
    Case("allreduce", "recursive_doubling", 4096, 64 << 10, payloads=True),
    Case("sparse_allreduce", "split_allgather", 4096, 4 * _MIB, nnz=4, payloads=True),
    Case("allgather", "", 4096, 4, payloads=True),
    Case("broadcast", "", 4096, 64 << 10, payloads=True),
)


def run_cases(cases: Sequence[Case] = CASES, *, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """A row per case, in their order. Raises ``RuntimeError`` if a result is wrong or a simulation does not end."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for case in cases:
        with concurrent.futures.ProcessPoolExecutor(1, context, die_with, (os.getpid(),)) as process:
            rows.append(process.submit(run_case, case).result())
        on_row(rows[-1])
    return rows


def run_case(case: Case) -> Row:
    """The case itself and what it took: ``wall_s``, ``events_per_s``, ``peak_bytes`` (of this process)."""
    before_s = time.perf_counter()
    found = _core.measure(case.operation, case.algorithm, case.ranks, case.bytes, nnz=case.nnz, payloads=case.payloads)
    wall_s = time.perf_counter() - before_s
    return {
        **asdict(case),
        "time_s": found["finish_s"],
        "events": found["events"],
        "messages": int(found["messages_sent"].sum()),
        "wall_s": wall_s,
        "events_per_s": found["events"] / wall_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
