"""What all tests share: no tuning that this user has calibrated chooses their algorithms, examples that Hypothesis
draws have no time limit of their own, interrupts are heard, GPU kernels run in Triton's interpreter where there is no
GPU, and ranks that could have been forked from a process with their imports are (forked_ranks.py)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Read when numpy and torch are imported: several tests run at a time, and idle threads of each process would spin
# beside them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from cpu_cost import CpuCost
from forked_ranks import RankServers
from telegrad.launch import ranks

if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

# A shell without job control begins what ends in & with SIGINT ignored, and every process inherits that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("telegrad", deadline=None)
settings.load_profile("telegrad")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TELEGRAD_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


_LONGEST = (
    "conformance/test_failures.py",
    "python/ddp/test_device_compression.py",
    "lab/faults/test_fault_trials.py",
    "python/kubernetes/test_kubernetes.py",
    "conformance/test_collectives.py",
    "python/ddp/test_ddp.py",
    "python/docs/test_two_machines.py",
    "python/tools/cli/test_linear.py",
    "python/communicator/test_restarts.py",
    "python/kernels/test_select_queued.py",
    "lab/accuracy/test_real_job.py",
    "python/synchronizer/test_compressed_synchronizer.py",
    "python/synchronizer/test_replicas.py",
    "python/diloco/test_membership.py",
    "python/diloco/test_replica_ranks.py",
    "python/communicator/test_from_mpi.py",
    "python/ddp/test_device_scaler.py",
    "python/docs/test_pages.py",
    "python/tools/bench/test_bench_command.py",
    "python/synchronizer/test_lost_ranks.py",
    "python/synchronizer/test_device_low_rank.py",
    "python/synchronizer/test_device_discards.py",
    "python/ddp/test_device_states.py",
    "python/ddp/test_device_launches.py",
    "python/communicator/test_networks_of_hosts.py",
)
"""Files that take most (``make test-cost``): begun first, so that none of them is left alone at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(_LONGEST)}
    assert all(path.is_file() for path in places), "a file of _LONGEST is gone"
    items.sort(key=lambda item: places.get(item.path, len(places)))


_servers, _begun_s = pytest.StashKey[RankServers](), pytest.StashKey[float]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_begun_s] = time.time()
    servers = session.config.stash[_servers] = RankServers()
    ranks.start_process = servers.start


def pytest_configure(config: pytest.Config) -> None:
    if "TELEGRAD_TEST_COST" in os.environ:
        config.pluginmanager.register(CpuCost())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and thousands of collected tests stay: garbage collections would look at all of them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if servers := session.config.stash.get(_servers, None):
        servers.close()
    if not hasattr(session.config, "workerinput"):  # the last one, where several processes run tests
        _remove_shared_memory(session.config.stash[_begun_s])


def _remove_shared_memory(since_s: float) -> None:
    """What MPI ranks that tests have killed leave behind, of megabytes each; what a process still has stays."""
    left = set()
    for path in Path("/dev/shm").glob("mpich_shm_*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= since_s:
                left.add(path)
    living = (int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal())
    ranks.remove_mpich_segments(left - ranks.mpich_segments_of(living))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """How the ranks of this test start, also in the fixtures of its module that it is the first to ask for."""
    mark = item.get_closest_marker("ranks")
    servers = item.config.stash[_servers]
    servers.kind = mark.args[0] if mark else "numpy"
    servers.follow(os.environ)
    return (yield)
