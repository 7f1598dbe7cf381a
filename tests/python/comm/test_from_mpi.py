"""Communicator.from_mpi: under mpiexec, with both drivers, and what it refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad.comm import mpi
from telegrad.errors import RendezvousError

_MISSING = [name for name in ("mpi4py", "telegrad._mpi") if importlib.util.find_spec(name) is None]
needs_mpi = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}")


def mpiexec(size: int, *arguments: str) -> str:
    """What ``size`` ranks of mpi_programs.py print."""
    launcher = Path(sys.executable).with_name("mpiexec")
    program = Path(__file__).with_name("mpi_programs.py")
    ended = subprocess.run(
        [launcher, "-n", str(size), sys.executable, program, *arguments], capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs_mpi
@pytest.mark.parametrize("first", ["mpi4py.MPI", "telegrad"])
def test_sums_and_groups_over_both_drivers_in_both_orders_of_import(first: str) -> None:
    assert mpiexec(4, "sums", first) == "right"


@needs_mpi
@pytest.mark.parametrize(("size", "program"), [(2, "refusals"), (1, "thread_level"), (2, "finalise"), (1, "forked")])
def test_what_it_refuses(size: int, program: str) -> None:
    assert mpiexec(size, program) == "right"


@needs_mpi
def test_parts_that_are_made_at_the_same_time_have_messages_of_their_own() -> None:
    assert mpiexec(2, "threads") == "right"


def test_memory_of_an_exchange_that_is_given_up_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def begin(mine: Any, every: Any) -> SimpleNamespace:
        given.extend([mine, every])
        return SimpleNamespace(Test=lambda: False)

    monkeypatch.setattr(mpi, "_left_to_mpi", left := [])
    comm = SimpleNamespace(rank=0, size=2, Iallgather=begin)
    with pytest.raises(RendezvousError, match=r"came within 0.01 s.*comm.Dup"):
        mpi.MpiExchange(comm, None, 0.01)(b"address")
    assert [one is other for one, other in zip(left[0][1], given, strict=True)] == [True, True]


@needs_mpi
def test_an_idle_rank_leaves_its_core_alone() -> None:
    assert float(mpiexec(2, "idle")) < 0.2


def test_without_mpi4py_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(TypeError, match=r"give one, such as MPI.COMM_WORLD"):
        mpi.find_mpi_peers(object(), driver="ucx", join_timeout_s=1.0)


def _library(**changes: Any) -> SimpleNamespace:
    """mpi4py's module or ours, as far as they are compared."""
    version = changes.pop("version", "MPICH Version:\t4.0\nand more")
    known: dict[str, Any] = {
        "Get_library_version": lambda: version,
        "library_version": lambda: version,
        "_sizeof": lambda comm: 4,
        "handle_bytes": 4,
        "is_initialized": lambda: True,
        "COMM_WORLD": None,
    }
    return SimpleNamespace(**{**known, **changes})


def test_a_telegrad_built_without_mpi_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "telegrad._mpi", None)
    with pytest.raises(ImportError, match=r"built without MPI.*TELEGRAD_MPI=on.*driver='ucx'"):
        mpi.load_driver(_library())


@pytest.mark.parametrize(
    ("native", "said"),
    [
        ({"version": "Open MPI v5.0"}, r"mpi4py runs on MPICH Version: 4.0.*built for another \(Open MPI v5.0\)"),
        ({"handle_bytes": 8}, "built for another"),
        ({"is_initialized": lambda: False}, "another copy of it"),
    ],
    ids=["version", "handles", "copy"],
)
def test_another_mpi_than_mpi4pys_is_refused(native: dict[str, Any], said: str) -> None:
    with pytest.raises(ImportError, match=said):
        mpi.check_same_mpi(_library(), _library(**native))
    mpi.check_same_mpi(_library(), _library())


def test_a_driver_that_does_not_load_says_which_mpi_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("libmpi.so.12: cannot open shared object file")

    monkeypatch.setattr(mpi.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"MPICH Version: 4.0.*does not load beside it \(libmpi.so.12"):
        mpi.load_driver(_library())
