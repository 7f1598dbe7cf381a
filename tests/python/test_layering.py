"""The house's rules, read from the sources: who may include or import whom, and how long a file may be."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE, PACKAGE = ROOT / "core", ROOT / "src" / "telegrad"

# docs/design.md, "Direction". Each folder may use itself and what is listed here.
MAY_INCLUDE = {
    "base": set(),
    "kernels": {"base"},
    "sparse": {"base", "kernels"},
    "transport": {"base", "kernels", "sparse"},
    "collectives": {"base", "kernels", "sparse", "transport"},
    "session": {"base", "kernels", "sparse", "transport", "collectives"},
    "progress": {"base", "kernels", "sparse", "transport", "collectives", "session"},
    "drivers": {"base", "transport"},
    "joining": {
        *("base", "kernels", "sparse", "transport", "collectives", "session", "progress", "drivers"),
    },
    "telegrad": {
        *("base", "kernels", "sparse", "transport", "collectives", "session", "progress", "drivers", "joining"),
    },
    "linear": {"base"},
    "fuzz": {"base", "kernels", "sparse", "linear"},
    "simulation": {"base", "kernels", "sparse", "transport", "collectives", "session", "drivers"},
    "bindings": {
        *("base", "kernels", "sparse", "transport", "collectives", "session", "progress", "drivers", "simulation"),
        *("linear", "joining"),
    },
}
FOREIGN = {"ucp", "ucs", "uct", "ucm", "mpi.h", "Python.h", "nanobind", "torch", "cuda", "cuda_runtime.h"}
MAY_INCLUDE_FOREIGN = {"drivers": {"ucp", "ucs", "uct", "ucm", "mpi.h"}, "bindings": {"nanobind", "Python.h"}}
MAY_INCLUDE_FOREIGN["telegrad"] = {"mpi.h"}  # what joins the ranks of an MPI communicator

# Names are folders of the package, modules beside them, or the compiled core.
BASICS = {"errors", "stream", "_core"}
LIBRARY = {*BASICS, "ops", "compress", "comm"}
MAY_IMPORT = {
    "errors": set(),
    "stream": {"_core"},
    "_native": set(),
    "_interfaces": set(),
    "__init__": {*LIBRARY, "_native", "calibration", "plan", "train"},
    "ops": BASICS,
    "compress": {*BASICS, "ops"},
    "comm": {*BASICS, "_interfaces", "ops", "plan"},
    "plan": {"errors"},
    "calibration": {*BASICS, "comm", "launch", "plan"},
    "launch": {"errors", "comm", "plan"},
    "train": {*LIBRARY, "plan", "calibration"},
    "lightning": {"comm", "errors", "train"},
    "transformers": {"comm", "train"},
    "linear": {*LIBRARY, "plan", "launch"},
    "torch_backend": {*LIBRARY, "plan"},
    "sim": {*LIBRARY, "plan", "launch"},
    "bench": {*LIBRARY, "plan", "train", "linear", "sim", "launch", "calibration"},
    "demo": {*LIBRARY, "plan", "train", "linear", "sim", "launch", "bench"},
    "doctor": {*LIBRARY, "_interfaces", "launch", "bench"},
    "report": {
        "errors",
        "plan",
        "linear",
        "sim",
        "calibration",
        "bench",
        "demo",
        "doctor",
    },  # shows what these have found
    "cli": {
        *LIBRARY,
        "plan",
        "train",
        "linear",
        "sim",
        "report",
        "launch",
        "calibration",
        "bench",
        "demo",
        "doctor",
    },
    "__main__": {"cli"},
}
MAY_IMPORT_TORCH = {
    "train",
    "lightning",
    "transformers",
    "linear",
    "torch_backend",
    "bench",
    "demo",
    "cli",
}  # others only inside functions, or not at all
NEVER_IMPORTS_TORCH = {"plan", "compress", "ops", "errors", "stream"}
GPU_KERNELS = "triton"  # folders of ops that work on torch tensors: others import them inside functions only

MOST_LINES = 1000


def cpp_sources() -> list[Path]:
    return sorted(path for path in CORE.rglob("*") if path.suffix in (".cpp", ".hpp", ".h"))


def python_sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def includes(text: str) -> Iterator[str]:
    yield from re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.MULTILINE)


def cpp_faults(folder: str, text: str) -> list[str]:
    faults = []
    for name in includes(text):
        first = name.partition("/")[0]
        if first in MAY_INCLUDE and first != folder and first not in MAY_INCLUDE[folder]:
            faults.append(f"{folder} must not include {name}")
        if first in FOREIGN and first not in MAY_INCLUDE_FOREIGN.get(folder, set()):
            faults.append(f"{folder} must not include the foreign header {name}")
    return faults


def imported(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every imported module by its full name, and whether the import runs when the file is loaded."""
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and isinstance(branch.test, ast.Name) and branch.test.id == "TYPE_CHECKING"
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        runs = id(node) not in inside_functions and id(node) not in for_types
        if isinstance(node, ast.Import):
            yield from ((alias.name, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the whole name instead of a relative import"
            if str(node.module).partition(".")[0] == "telegrad":
                yield from ((f"{node.module}.{alias.name}", runs) for alias in node.names)
            else:
                yield str(node.module), runs


def python_faults(room: str, source: str, public: set[str], *, of_gpu: bool = False) -> list[str]:
    faults = []
    for name, runs in imported(ast.parse(source)):
        parts = name.split(".")
        if of_gpu and parts[0] == "torch":
            continue
        if parts[0] == "telegrad" and GPU_KERNELS in parts and runs and not of_gpu:
            faults.append(f"{room} must not import {name} when it is loaded")
        if parts[0] == "telegrad":
            target = parts[1] if len(parts) > 1 else "__init__"
            if target in public or target == "__init__":
                target = "comm"  # the package's front door: SparseStream, Communicator, …
            if target != room and target not in MAY_IMPORT[room]:
                faults.append(f"{room} must not import {name}")
        elif parts[0] == "torch" and (room in NEVER_IMPORTS_TORCH or (runs and room not in MAY_IMPORT_TORCH)):
            faults.append(
                f"{room} must not import torch{' when it is loaded' if room not in NEVER_IMPORTS_TORCH else ''}"
            )
    return faults


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def public_names() -> set[str]:
    """What the package's front door offers, without the modules behind it."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value)) - MAY_IMPORT.keys()
    raise AssertionError("src/telegrad/__init__.py has no __all__")


PUBLIC = public_names()


@pytest.mark.parametrize("table", [MAY_INCLUDE, MAY_IMPORT], ids=["core", "package"])
def test_the_tables_have_a_bottom(table: dict[str, set[str]]) -> None:
    graphlib.TopologicalSorter(table).prepare()  # raises CycleError if two rooms may reach each other


@pytest.mark.parametrize("path", cpp_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_includes_point_down(path: Path) -> None:
    folder = path.relative_to(CORE).parts[0]
    assert folder in MAY_INCLUDE, f"core/{folder} is a new room: give it its place in MAY_INCLUDE and in docs/design.md"
    assert cpp_faults(folder, path.read_text()) == []


def installed_headers() -> set[str]:
    (names,) = re.findall(r"set\(public_headers ([^)]*)\)", (CORE / "cmake" / "install.cmake").read_text())
    return {f"telegrad/{name}.hpp" for name in [*names.split(), "ucx", "mpi"]} | {"base/types.hpp"}


@pytest.mark.parametrize("name", sorted(installed_headers()))
def test_installed_headers_include_each_other_only(name: str) -> None:
    own = {one for one in includes((CORE / name).read_text()) if "/" in one}
    assert own <= installed_headers()


@pytest.mark.parametrize("path", python_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{room} is a new room: give it its place in MAY_IMPORT and in docs/design.md"
    assert not {name.partition(".")[0] for name, _ in imported(ast.parse(path.read_text()))} & {"lab", "tests"}
    of_gpu = room == "ops" and GPU_KERNELS in path.relative_to(PACKAGE).parts
    assert python_faults(room, path.read_text(), PUBLIC, of_gpu=of_gpu) == []


@pytest.mark.parametrize("path", cpp_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_conditional_compilation_outside_drivers_and_kernels(path: Path) -> None:
    if path.relative_to(CORE).parts[0] in ("drivers", "kernels"):
        return
    found = re.findall(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*", path.read_text(), re.MULTILINE)
    assert found == [], "drivers and kernels are the only places that differ by platform"


def test_no_file_is_too_long() -> None:
    kinds = {".py", ".pyi", ".cpp", ".hpp", ".h", ".sh", ".cmake", ".txt"}
    places = [CORE, ROOT / "src", ROOT / "lab", ROOT / "tests", ROOT / "examples", ROOT / "benchmarks", ROOT / "cmake"]
    files = [path for place in places for path in place.rglob("*") if path.suffix in kinds and path.is_file()]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


@pytest.mark.parametrize(
    ("folder", "text", "faulty"),
    [
        ("base", '#include "session/session.hpp"', True),
        ("collectives", '#include "drivers/ucx/ucx_driver.hpp"', True),
        ("drivers", '#include "session/session.hpp"', True),
        ("progress", '  #  include "session/session.hpp"', False),
        ("transport", "#include <ucp/api/ucp.h>", True),
        ("drivers", "#include <ucp/api/ucp.h>", False),
        ("kernels", "#include <nanobind/nanobind.h>", True),
        ("session", "#include <vector>", False),
    ],
)
def test_the_reader_of_includes(folder: str, text: str, faulty: bool) -> None:
    assert bool(cpp_faults(folder, text)) is faulty


@pytest.mark.parametrize(
    ("room", "source", "faulty"),
    [
        ("ops", "from telegrad.compress import Compressor", True),
        ("compress", "from telegrad import comm", True),
        ("compress", "import telegrad.comm.work as work", True),
        ("compress", "from telegrad.ops.select import cpu", False),
        ("compress", "def f():\n    import torch", True),
        ("compress", "from telegrad.ops.select import triton", True),
        ("ops", "def f():\n    from telegrad.ops.select import triton", False),
        ("ops", "import torch", True),
        ("comm", "import torch", True),
        ("comm", "def f():\n    import torch.distributed", False),
        ("comm", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("comm", "def f():\n    from telegrad.train import DDPState", True),
        ("plan", "from telegrad import Communicator", True),
        ("plan", "from telegrad.compress import Compressor", True),
        ("plan", "if True:\n    import torch", True),
        ("train", "from telegrad import _core", False),
        ("train", "from telegrad.cli import main", True),
        ("bench", "from telegrad import SparseStream", False),
    ],
)
def test_the_reader_of_imports(room: str, source: str, faulty: bool) -> None:
    assert bool(python_faults(room, source, PUBLIC)) is faulty


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in ROOT.glob("tests/**/test_*.py")]
    assert sorted(names) == sorted(set(names))
