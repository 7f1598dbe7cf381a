"""The wheel as a user gets it: what is in it, what it needs, and whose UCX it runs on."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import telegrad._core

REPOSITORY = Path(__file__).parents[2]
BUNDLED = {"libtelegrad_ucp.so.0", "libtelegrad_ucs.so.0", "libtelegrad_uct.so.0", "libtelegrad_ucm.so.0"}
# Two ranks of one process exchange their addresses and sum over UCX.
SUM_OVER_UCX = """
import threading, numpy, telegrad
meet, blobs, sums = threading.Barrier(2), [b"", b""], [None, None]
def rank(r):
    def exchange(blob):
        blobs[r] = blob
        meet.wait()
        everything = list(blobs)
        meet.wait()
        return everything
    with telegrad.Communicator.from_exchange(r, 2, exchange) as comm:
        x = numpy.full(100_000, 1.0 + r, dtype=numpy.float32)
        comm.all_reduce(x)
        sums[r] = x
threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
assert all((s == 3.0).all() for s in sums), sums
"""


def run(*command: str | Path, **environment: str) -> str:
    """Standard output; a failure shows what the command wrote."""
    # No bytecode and no paths of the developer's: only what is installed counts.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd="/",
        env=inherited | environment,
        timeout=600,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fails(*command: str | Path) -> str:
    """The message of a command that must fail, its line breaks (CMake wraps) made spaces."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode != 0, done.stdout
    return " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in the folder of the editable build, so that only what differs is compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run(*pip, f"--config-settings=build-dir={REPOSITORY}/build/py", "-w", folder, REPOSITORY, **tools)
    (made,) = folder.glob("telegrad-*.whl")
    return made


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment that holds numpy and the wheel."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-c", constraints, wheel)
    return python


def test_every_pinned_package_runs_on_the_oldest_python_that_is_promised() -> None:
    """Those that are installed. The Python here is newer, so that pip would not complain."""
    asked = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
    oldest = f"{asked.removeprefix('>=')}.0"
    pinned = re.findall(r"^([\w.-]+)==", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    installed = {one.name.lower().replace("_", "-"): one for one in importlib.metadata.distributions()}
    found = [installed[name] for name in (one.lower().replace("_", "-") for one in pinned) if name in installed]
    assert len(found) > 0.9 * len(pinned)
    too_new = [
        f"{one.name} {one.version} needs Python {needed}"
        for one in found
        if not SpecifierSet(needed := one.metadata.get("Requires-Python") or "").contains(oldest)
    ]
    assert too_new == []


def package_of(python: Path) -> Path:
    return Path(run(python, "-c", "import telegrad; print(telegrad.__path__[0])").strip())


@pytest.mark.timeout(600)
def test_experiments_are_not_in_the_wheel(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"telegrad", "telegrad_autoload"}


@pytest.mark.timeout(600)
def test_a_user_needs_numpy_only(user: Path) -> None:
    listed = run(user, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check")
    assert {line.split("==")[0] for line in listed.split()} - {"pip", "setuptools"} == {"numpy", "telegrad"}
    run(user, "-c", SUM_OVER_UCX)


@pytest.mark.timeout(600)
def test_the_wheel_says_what_torch_calls(user: Path) -> None:
    program = """
from importlib.metadata import entry_points
(entry,) = entry_points(group="torch.backends")
print(entry.load().__module__)
"""
    assert run(user, "-c", program).strip() == "telegrad_autoload"


@pytest.mark.timeout(600)
def test_the_extension_finds_only_the_bundled_ucx(user: Path) -> None:
    package = package_of(user)
    (extension,) = package.glob("_core.*.so")
    resolved = re.findall(r"(\S*uc[pstm]\.so\S*) => (.*?)(?: \(|$)", run("ldd", extension), re.MULTILINE)
    assert {name: Path(path).parent for name, path in resolved} == dict.fromkeys(BUNDLED, package / "_ucx" / "lib")
    assert (package / "_ucx" / "LICENSE").is_file()
    assert (package / "py.typed").is_file()


@pytest.mark.timeout(600)
def test_the_mpi_driver_takes_the_mpi_that_is_loaded_already(user: Path) -> None:
    extensions = list(package_of(user).glob("_mpi.*.so"))
    if not extensions:
        pytest.skip("built without MPI")
    dynamic = run("readelf", "-d", extensions[0])
    assert re.search(r"NEEDED.*libmpi", dynamic)
    assert not re.search(r"RPATH|RUNPATH", dynamic)


@pytest.mark.timeout(600)
def test_the_bundled_ucx_has_symbols_of_its_own(user: Path) -> None:
    libraries = package_of(user) / "_ucx" / "lib"
    for library in [*libraries.glob("*.so.*"), *libraries.glob("ucx/*.so.*")]:
        symbols = run("nm", "-D", "--defined-only", "--format=posix", library).splitlines()
        foreign = [symbol for symbol in symbols if not symbol.startswith("telegrad_")]
        assert not foreign, (library, foreign)


def mapped_ucx(output: str) -> dict[str, set[str]]:
    """By folder, the UCX libraries that a process had in its memory; UCX's modules, in ``ucx/``, are left out."""
    found: dict[str, set[str]] = {}
    for path in map(Path, output.splitlines()):
        if re.search(r"uc[pstm]\.so", path.name) and path.parent.name != "ucx":
            found.setdefault(str(path.parent), set()).add(path.name)
    return found


TELEGRAD = SUM_OVER_UCX
MPI = "import mpi4py.MPI as M; assert M.COMM_WORLD.allreduce(3) == 3 * M.COMM_WORLD.size\n"
# A program that gives MPI's symbols, and with them those of its UCX, to everything that is loaded later.
GLOBAL_MPI = """
import ctypes, pathlib, sys
ctypes.CDLL(str(pathlib.Path(sys.prefix) / "lib" / "libmpi.so.12"), ctypes.RTLD_GLOBAL)
"""
SHOW_MAPS = """
fields = (line.rstrip("\\n").split(maxsplit=5) for line in open("/proc/self/maps"))  # a path may hold spaces
print(*sorted({of[5] for of in fields if len(of) > 5 and ".so" in of[5]}), sep="\\n")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(MPI + TELEGRAD, id="mpi-first"),
        pytest.param(TELEGRAD + MPI, id="telegrad-first"),
        pytest.param(GLOBAL_MPI + MPI + TELEGRAD, id="mpi-first-with-global-symbols"),
    ],
)
def test_telegrad_and_mpi_each_run_on_their_own_ucx(program: str) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'telegrad[test]')")
    found = mapped_ucx(run(sys.executable, "-c", program + SHOW_MAPS))
    assert found.pop(str(Path(telegrad._core.__file__).parent / "_ucx" / "lib"), None) == BUNDLED, found
    assert list(found.values()) == [{name.replace("telegrad_", "") for name in BUNDLED}], found


def test_ucx_leaves_the_signals_of_the_program_alone() -> None:
    """UCX would take SIGSEGV and others to print a backtrace, and so hide faulthandler's or a debugger's."""
    caught = run(sys.executable, "-c", f"{SUM_OVER_UCX}\nprint(open('/proc/self/status').read())")
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", caught)
    crashes = (4, 6, 7, 8, 11)  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
    assert not any(int(mask, 16) >> (number - 1) & 1 for number in crashes), mask


def cmake() -> str:
    found = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("cmake is not installed (make puts it into .venv)")
    return found


@pytest.mark.timeout(600)
def test_a_build_without_ucx_says_what_to_install(user: Path, tmp_path: Path) -> None:
    message = fails(cmake(), "-S", REPOSITORY, "-B", tmp_path, f"-DPython_EXECUTABLE={user}")
    assert "UCX is missing" in message
    assert "pip install libucx-cu12" in message
    assert "cmake.define.TELEGRAD_UCX=system" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-DTELEGRAD_UCX=wheel", "-Ducx_ROOT=/nowhere"], ["ucx_ROOT='/nowhere'", "pip install libucx-cu12"]),
        (["-DTELEGRAD_UCX=wheel"], ["ucx_ROOT=''", "TELEGRAD_UCX=none"]),
        (["-DTELEGRAD_UCX=yes"], ["TELEGRAD_UCX='yes'", "wheel, system, none"]),
        (
            [
                "-DTELEGRAD_UCX=system",
                "-DCMAKE_DISABLE_FIND_PACKAGE_ucx=ON",
                "-DCMAKE_DISABLE_FIND_PACKAGE_PkgConfig=ON",
            ],
            ["TELEGRAD_UCX=system", "libucx-dev"],
        ),
    ],
)
def test_the_core_says_which_ucx_it_looked_for(options: list[str], expected: list[str], tmp_path: Path) -> None:
    message = fails(cmake(), "-S", REPOSITORY / "core", "-B", tmp_path, *options)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("maybe", "TELEGRAD_MPI='maybe' is not one of auto, on, off"),
        ("on", "TELEGRAD_MPI=on, but CMake finds no MPI: pip install mpich"),
    ],
)
def test_the_core_says_what_the_mpi_driver_needs(wanted: str, expected: str, tmp_path: Path) -> None:
    absent = "-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON"
    message = fails(cmake(), "-S", REPOSITORY / "core", "-B", tmp_path, f"-DTELEGRAD_MPI={wanted}", absent)
    assert expected in message


@pytest.mark.parametrize(
    "options", [["-DTELEGRAD_MPI=off"], ["-DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON"]], ids=["off", "no MPI"]
)
def test_the_core_is_built_without_mpi_too(options: list[str], tmp_path: Path) -> None:
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = run(cmake(), "-S", REPOSITORY / "core", "-B", tmp_path, "-G", "Ninja", *options, **tools)
    assert ("No MPI found: the mpi driver is not built" in said) == ("DISABLE" in options[0])
    assert "drivers/mpi" not in (tmp_path / "build.ninja").read_text()


def test_a_build_folder_of_the_core_that_is_none_is_refused(tmp_path: Path) -> None:
    message = fails(cmake(), "-S", REPOSITORY / "core", "-B", tmp_path, "-DTELEGRAD_BUILT=/nowhere")
    assert "TELEGRAD_BUILT='/nowhere' is no build folder" in message


def test_a_build_by_itself_compiles_the_core(tmp_path: Path) -> None:
    """As for a user; `make` links the extension with the core that its C++ tests are linked with."""
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run(cmake(), "-S", REPOSITORY, "-B", tmp_path, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}", **tools)
    planned = (tmp_path / "build.ninja").read_text()
    core = REPOSITORY / "core"
    others = {"bindings", "fuzz", "ucx", "mpi"}  # other targets than the library
    sources = [path.relative_to(core) for path in core.rglob("*.cpp")]
    for source in (path for path in sources if others.isdisjoint(path.parts)):
        assert f"build core/CMakeFiles/telegrad.dir/{source}.o:" in planned


def test_the_package_refuses_to_be_built_without_ucx(tmp_path: Path) -> None:
    message = fails(cmake(), "-S", REPOSITORY, "-B", tmp_path, "-DTELEGRAD_UCX=none")
    assert "the Python package needs UCX" in message
