"""One suite for every driver: all cases of cases.py, results compared with numpy's and their bits across ranks.

``ucx``: processes of our own launcher, started once for each number of ranks; ``mpi``: of mpiexec. ``local``: ranks of
this process. ``sim``: the same in virtual time.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import program
import pytest
from cases import SIZES, groups, node_of, numbers_of
from cases_moves import BLOCK_OPERATIONS, DIFFERS_BY_RANK
from joined import MPI_MISSING

from telegrad import Communicator, _core
from telegrad.launch import SINGLE_THREADED, Ranks

MPI_SIZES = (2, 3, 4, 8)  # what differs between drivers shows in few numbers of ranks
SIM_SIZES = (1, 2, 3, 8)  # tests/core/collectives sums in virtual time among many more
# Processes are many for few cores: of numbers that are no powers of two UCX has 3, the other drivers these too; and
# ranks of MPI poll.
_SLOW = {("ucx", 5), ("ucx", 7), ("ucx", 13), ("ucx", 16), ("mpi", 4), ("mpi", 8)}
# Of each family some groups: the driver's part in all of them shows among 2 and 3 processes, the algorithms' among
# 1 to 5 and 8 ranks of one process, and among many more in tests/core/collectives.
ONE_IN = {("ucx", 4): 5, ("ucx", 8): 5, ("mpi", 3): 5, ("local", 7): 3, ("local", 13): 3, ("local", 16): 3}
JOBS = [
    pytest.param(driver, size, marks=[pytest.mark.slow] if (driver, size) in _SLOW else [])
    for driver, sizes in (("local", SIZES), ("ucx", SIZES), ("sim", SIM_SIZES), ("mpi", MPI_SIZES))
    for size in sizes
]
FAMILIES = [
    "ring",
    "recursive_doubling",
    "rabenseifner",
    "two_level",
    "auto",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_v",
]
FAMILIES += [
    "all_reduce_out",
    "encoded",
    "sparse",
    "sparse_two_level",
    "sparse_all_gather",
    "sparse_reduce_scatter",
    "sparse_reduce_scatter_v",
    "sparse_topk",
    "sparse_topk_stale",
    "sparse_gtopk",
    "sparse_bounded_topk",
    "sparse_bounded_topk_stale",
    "all_gather",
    "broadcast",
    "barrier",
    "in_flight",
    *BLOCK_OPERATIONS,
]
_ENVIRONMENT = {
    **SINGLE_THREADED,
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
}
_TIMEOUT_S = 100.0


def _local(size: int) -> list[program.Outcome]:
    nodes = [sum(divmod(rank, 3)) % max(1, size // 2) for rank in range(size)]  # some of many ranks, some of few
    communicators = Communicator.local(size, timeout_s=60.0, nodes=nodes)
    try:
        return list(program.run(communicators, one_in=ONE_IN.get(("local", size), 1)))
    finally:
        for communicator in communicators:
            communicator.close()


def _ucx(size: int) -> list[program.Outcome]:
    outcomes: list[program.Outcome] = []
    with Ranks(
        "program:main",
        size,
        arguments=[str(ONE_IN.get(("ucx", size), 1))],
        timeout_s=_TIMEOUT_S,
        environment=_ENVIRONMENT,
        environment_of=lambda rank: {"TELEGRAD_NODE": f"node{node_of(rank, size)}"},
        on_line=lambda _, line: outcomes.append(json.loads(line)),
    ) as ranks:
        ranks.wait()
    return outcomes


def _sim(size: int) -> list[program.Outcome]:
    from telegrad.tools import sim

    return list(program.run(sim.World(size, seed=size, nodes=[2 * rank // size for rank in range(size)]).communicators))


def _mpi(size: int) -> list[program.Outcome]:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    script = Path(__file__).with_name("mpi_program.py")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [mpiexec, "-n", str(size), sys.executable, script, folder, str(ONE_IN.get(("mpi", size), 1))],
            env={**os.environ, **_ENVIRONMENT},
            timeout=_TIMEOUT_S,
            check=True,
        )
        texts = [file.read_text() for file in Path(folder).iterdir()]
    return [json.loads(line) for text in texts for line in text.splitlines()]


@functools.cache
def _outcomes_or_error(driver: str, size: int) -> list[program.Outcome] | Exception:
    try:
        return {"local": _local, "ucx": _ucx, "sim": _sim, "mpi": _mpi}[driver](size)
    except Exception as error:
        return error


def outcomes_of(driver: str, size: int) -> list[program.Outcome]:
    """Runs the whole list once; the tests look at their part."""
    found = _outcomes_or_error(driver, size)
    if isinstance(found, Exception):
        raise found
    return found


@pytest.mark.timeout(_TIMEOUT_S + 20)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("driver", "size"), JOBS)
def test_collectives(driver: str, size: int, family: str) -> None:
    if driver == "ucx" and not hasattr(_core.Communicator, "ucx"):
        pytest.skip("built without UCX")
    if driver == "mpi" and MPI_MISSING:
        pytest.skip(MPI_MISSING)
    asked = groups(size)
    found = [outcome for outcome in outcomes_of(driver, size) if asked[outcome["group"]].family == family]
    by_case: dict[tuple[int, int], list[program.Outcome]] = defaultdict(list)
    for outcome in found:
        by_case[outcome["group"], outcome["case"]].append(outcome)
    numbers = [g for g in numbers_of(asked, ONE_IN.get((driver, size), 1)) if asked[g].family == family]
    assert numbers
    assert set(by_case) == {(g, c) for g in numbers for c in range(len(asked[g].cases))}
    faults = []
    for (group, index), results in by_case.items():
        case = asked[group].cases[index]
        assert sorted(result["rank"] for result in results) == list(range(size)), case
        faults += [f"{case} on rank {result['rank']}: {result['fault']}" for result in results if result["fault"]]
        if case.operation not in DIFFERS_BY_RANK and len({result["digest"] for result in results}) != 1:
            faults.append(f"{case}: ranks hold different bits")
        came, left = (f(r[k] for r in results) for f, k in ((max, "began_s"), (min, "ended_s")))
        if driver in ("ucx", "mpi") and case.operation == "barrier" and came > left:
            faults.append(f"{case}: a rank left before another came")
    assert not faults, "\n".join(faults[:20])


def test_ranks_of_one_process_close_one_after_another_without_waiting() -> None:
    communicators = Communicator.local(4)
    works = [communicator.barrier(async_op=True) for communicator in communicators]
    for work in works:
        assert work is not None
        work.wait()
    begin = time.monotonic()
    for communicator in communicators:
        communicator.close()
    assert time.monotonic() - begin < 2.0
