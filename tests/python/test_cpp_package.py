"""The library as a C++ program finds it: installed from the build folder of the core, found by CMake, and used by the
programs of examples/cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BUILT = REPOSITORY / "build" / "core"
TOOLS = Path(sys.executable).parent
HEADERS = ("communicator", "errors", "sparse_vector", "telegrad", "work")

# Two ranks of one process join over UCX, and sum.
UCX_PROGRAM = """
#include <telegrad/ucx.hpp>

#include <barrier>
#include <cstdio>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

int main() {
  std::barrier meet(2);
  std::vector<std::vector<std::byte>> blobs(2);
  double sums[2] = {0, 0};
  const auto rank = [&](telegrad::Rank r) {
    const auto exchange = [&, r](const std::vector<std::byte>& mine) {
      blobs[r] = mine;
      meet.arrive_and_wait();
      return blobs;
    };
    auto comm = telegrad::ucx::join(r, 2, exchange, {.timeout_s = 60.0});
    const auto sum = comm.all_reduce(telegrad::SparseVector<double>(100, {r, 50}, {1.0, 2.0})).result();
    for (const double value : sum.values()) sums[r] += value;
    if (comm.driver() != "ucx") sums[r] = -1;
  };
  std::jthread other([&] { rank(1); });
  rank(0);
  other.join();
  std::printf("%g %g\\n", sums[0], sums[1]);
  const auto none = [](const std::vector<std::byte>&) { return std::vector<std::vector<std::byte>>{}; };
  for (const telegrad::Rank r : {0U, 2U}) {
    try {
      telegrad::ucx::join(r, 2, none);
    } catch (const std::invalid_argument& error) {
      std::printf("%s\\n", error.what());
    }
  }
  std::fflush(stdout);
  const pid_t child = fork();
  if (child != 0) return waitpid(child, nullptr, 0) == child ? 0 : 1;
  try {
    telegrad::ucx::join(0, 1, none);
  } catch (const std::invalid_argument& error) {
    std::printf("%s\\n", error.what());
  }
  std::fflush(stdout);
  _exit(0);
}
"""

CMAKE_OF_UCX = """
cmake_minimum_required(VERSION 3.22)
project(program LANGUAGES CXX)
find_package(telegrad 0.1 REQUIRED COMPONENTS ucx)
add_executable(program program.cpp)
target_link_libraries(program PRIVATE telegrad::ucx)
"""


def run(*command: str | Path, timeout: float = 600.0) -> str:
    done = attempt(*command, timeout=timeout)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def attempt(*command: str | Path, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
    path = f"{TOOLS}:{os.environ['PATH']}"
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | {"PATH": path},
        timeout=timeout,
    )


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{TOOLS}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def fails_to_find(prefix: Path, request: str, folder: Path) -> str:
    """What CMake says where ``find_package(telegrad …)`` does not succeed, its line breaks made spaces."""
    (folder / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.22)\nproject(p LANGUAGES CXX)\nfind_package(telegrad {request})\n"
    )
    done = attempt(tool("cmake"), "-S", folder, "-B", folder / "build", f"-Dtelegrad_ROOT={prefix}")
    assert done.returncode != 0, done.stdout
    return " ".join(done.stderr.split())


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an installation; what the Python package is linked with is not compiled again."""
    if not (BUILT / "CMakeCache.txt").is_file():
        pytest.skip("build/core is not there (make build makes it)")
    folder = tmp_path_factory.mktemp("prefix")
    known = run(tool("cmake"), "--build", BUILT, "--target", "help")
    targets = [name for name in ("telegrad", "telegrad_ucx", "telegrad_mpi") if f"{name}:" in known]
    run(tool("cmake"), "--build", BUILT, "--target", *targets)
    run(tool("cmake"), "--install", BUILT, "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def examples(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    given = [f"-Dtelegrad_ROOT={prefix}"]
    mpi = TOOLS.parent
    if " " in str(mpi) and (mpi / "include" / "mpi.h").is_file():  # FindMPI cuts the compiler wrapper's paths there
        given += [f"-DMPI_CXX_INCLUDE_PATH={mpi / 'include'}", "-DMPI_CXX_LIB_NAMES=mpi", "-DMPI_CXX_SKIP_MPICXX=ON"]
        given += [f"-DMPI_mpi_LIBRARY={mpi / 'lib' / 'libmpi.so'}"]
    run(tool("cmake"), "-S", REPOSITORY / "examples" / "cpp", "-B", folder, *given)
    run(tool("cmake"), "--build", folder)
    return folder


def test_headers_are_below_one_folder_and_need_nothing_else(prefix: Path, tmp_path: Path) -> None:
    assert [path.name for path in (prefix / "include").iterdir()] == ["telegrad"]
    assert {path.name for path in (prefix / "include" / "telegrad").iterdir()} >= {f"{name}.hpp" for name in HEADERS}
    source = tmp_path / "all.cpp"
    source.write_text("".join(f"#include <telegrad/{name}.hpp>\n" for name in HEADERS))
    compiler = os.environ.get("CXX", "c++")
    warnings = ["-Wall", "-Wextra", "-Wconversion", "-Werror"]
    run(tool(compiler), "-std=c++20", "-fsyntax-only", *warnings, "-I", prefix / "include", source)


@pytest.mark.timeout(600)
def test_threads_sum_sparse_vectors(examples: Path) -> None:
    found = run(examples / "local", "3", timeout=60)
    assert found.splitlines() == ["7: 3", "1000: 0.5", "1001: 0.5", "1002: 0.5"]


@pytest.mark.timeout(600)
def test_ranks_of_an_mpi_job_sum_sparse_vectors(examples: Path) -> None:
    if not (examples / "sum_over_mpi").is_file():
        pytest.skip("build/core has no MPI driver (pip install mpich, then make)")
    found = run(tool("mpiexec"), "-n", "4", examples / "sum_over_mpi", timeout=120)
    assert found.splitlines() == ["7: 4", "1000: 0.5", "1001: 0.5", "1002: 0.5", "1003: 0.5"]


def test_the_mpi_example_is_short() -> None:
    assert len((REPOSITORY / "examples" / "cpp" / "sum_over_mpi.cpp").read_text().splitlines()) < 40


@pytest.mark.timeout(600)
def test_a_program_joins_over_ucx(prefix: Path, tmp_path: Path) -> None:
    if not (prefix / "include" / "telegrad" / "ucx.hpp").is_file():
        pytest.skip("build/core has no UCX")
    (tmp_path / "program.cpp").write_text(UCX_PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_OF_UCX)
    run(tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", f"-Dtelegrad_ROOT={prefix}")
    run(tool("cmake"), "--build", tmp_path / "build")
    sums, no_answer, no_rank, forked = run(tmp_path / "build" / "program", timeout=60).splitlines()[-4:]  # UCX may warn
    assert sums == "6 6"
    assert "exchange returned 0 addresses for size=2 ranks" in no_answer
    assert "rank=2 is no rank of 2" in no_rank
    assert "forked from one that had joined over UCX" in forked


def test_a_ucx_that_pkg_config_found_is_found_by_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only configured: there is nothing behind it to build with."""
    tool("pkg-config")
    for name in ("ucx", "ucx-ucs"):
        (tmp_path / f"{name}.pc").write_text(f"Name: {name}\nDescription: none\nVersion: 1.18\nLibs:\nCflags:\n")
    monkeypatch.setenv("PKG_CONFIG_PATH", str(tmp_path))
    core = ["-S", REPOSITORY / "core", "-B", tmp_path / "core", "-DTELEGRAD_TESTS=OFF", "-DTELEGRAD_UCX=system"]
    run(tool("cmake"), *core, "-DCMAKE_DISABLE_FIND_PACKAGE_ucx=ON")
    installed = (tmp_path / "core" / "telegradConfig.cmake").read_text()
    assert 'if("" STREQUAL "")' in installed  # by pkg-config; else here is the folder of UCX's own package


@pytest.mark.parametrize(("given", "message"), [("/nowhere", "ucx_ROOT='/nowhere' has none"), (None, None)])
def test_ucx_root_says_where_ucx_is(prefix: Path, tmp_path: Path, given: str | None, message: str | None) -> None:
    if not (prefix / "include" / "telegrad" / "ucx.hpp").is_file():
        pytest.skip("build/core has no UCX")
    (tmp_path / "program.cpp").write_text("int main() {}\n")
    (tmp_path / "CMakeLists.txt").write_text(CMAKE_OF_UCX)
    options = [f"-Dtelegrad_ROOT={prefix}", *([] if given is None else [f"-Ducx_ROOT={given}"])]
    done = attempt(tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", *options)
    assert (done.returncode == 0) == (message is None)
    assert message is None or message in " ".join(done.stderr.split())


def test_what_is_not_there_is_named(prefix: Path, tmp_path: Path) -> None:
    message = fails_to_find(prefix, "0.1 REQUIRED COMPONENTS rdma", tmp_path)
    assert "This telegrad was installed without the component 'rdma'" in message


def test_another_minor_version_is_refused(prefix: Path, tmp_path: Path) -> None:
    message = fails_to_find(prefix, "0.9 REQUIRED", tmp_path)
    assert "0.1.0" in message


def test_the_package_has_the_version_of_the_python_package(prefix: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    text = (prefix / "lib" / "cmake" / "telegrad" / "telegradConfigVersion.cmake").read_text()
    assert f'set(PACKAGE_VERSION "{project["version"]}")' in text
