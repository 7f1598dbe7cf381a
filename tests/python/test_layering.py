"""The rules of the layout, read from the sources: who may include or import whom, and how long a file may be."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE, PACKAGE = ROOT / "core", ROOT / "src" / "telegrad"

# docs/explanation/design.md, "Layers". Each of these folders may include itself and those before it.
LAYERS = (
    *("base", "kernels", "codec", "transport"),
    *("collectives/support", "collectives/dense", "collectives/sparse", "collectives/topk"),
    *("session", "progress"),
)
# Each folder, with those in it that are not listed, may include itself and what is listed here.
MAY_INCLUDE = {
    **{layer: set(LAYERS[:place]) for place, layer in enumerate(LAYERS)},
    "drivers/processes": {"base", "transport"},
    "drivers/ucx": {"base", "transport", "drivers/processes"},
    "drivers/mpi": {"base", "transport", "drivers/processes"},
    "drivers/local": {"base", "transport"},
    "drivers/sim": {"base", "transport"},
    "joining": {*LAYERS, "drivers/processes", "drivers/ucx", "drivers/mpi"},
    "api/telegrad": {"base"},
    "api": {*LAYERS, "drivers/local", "drivers/ucx", "drivers/mpi", "joining", "api/telegrad"},
    "linear": {"base", "kernels"},
    "fuzz": {*LAYERS, "drivers/processes", "linear"} - {"progress"},
    "simulation": {*LAYERS, "drivers/sim"} - {"progress"},
    "bindings": {
        *(*LAYERS, "drivers/local", "drivers/ucx", "drivers/mpi", "joining", "simulation", "linear"),
    },
}
FOREIGN = {"ucp", "ucs", "uct", "ucm", "mpi.h", "Python.h", "nanobind", "torch", "cuda", "cuda_runtime.h"}
MAY_INCLUDE_FOREIGN = {"drivers": {"ucp", "ucs", "uct", "ucm", "mpi.h"}, "bindings": {"nanobind", "Python.h"}}
MAY_INCLUDE_FOREIGN["api"] = {"mpi.h"}  # what joins the ranks of an MPI communicator

# Names are folders of the package, modules beside them, or the compiled core.
BASICS = {"errors", "sparse_vector", "_core"}
LIBRARY = {*BASICS, "kernels", "compress", "communicator"}
MAY_IMPORT = {
    "errors": set(),
    "sparse_vector": {"_core"},
    "_interfaces": set(),
    "__init__": {*LIBRARY, "cost", "ddp", "diloco", "synchronizer", "tuning"},
    "kernels": BASICS,
    "compress": {*BASICS, "kernels"},
    "cost": {"errors"},
    "communicator": {*BASICS, "_interfaces", "kernels", "cost"},
    "launch": {"errors", "communicator", "cost"},
    "tuning": {*BASICS, "communicator", "cost", "launch"},
    "ddp": LIBRARY,
    "synchronizer": {*LIBRARY, "cost", "ddp", "tuning"},
    "diloco": {*LIBRARY, "ddp"},
    "integrations": {"errors", "communicator", "ddp"},
    "torch_backend": {*LIBRARY, "cost"},
    "linear": {*LIBRARY, "cost", "launch"},
    "tools": {*LIBRARY, "_interfaces", "cost", "ddp", "launch", "linear", "synchronizer", "tuning"},
    "__main__": {"tools"},
}
# Others only inside functions, or not at all.
MAY_IMPORT_TORCH = {"ddp", "diloco", "integrations", "linear", "synchronizer", "tools", "torch_backend"}
NEVER_IMPORTS_TORCH = {"compress", "cost", "errors", "kernels", "sparse_vector"}
GPU_KERNELS = "triton"  # modules and folders that work on torch tensors: others import them inside functions only

# Today's cycles among modules, imports for types and those inside functions included: of each package the number of
# modules that lie in one. Numbers may only become smaller. A factory that imports its implementations late is one.
CYCLES = {
    "telegrad.communicator": 9,
    "telegrad.communicator.cuda": 3,
    "telegrad.kernels.feedback": 2,
    "telegrad.kernels.select": 4,
    "telegrad.kernels.staging": 2,
}

MOST_LINES = 1000


def cpp_sources() -> list[Path]:
    return sorted(path for path in CORE.rglob("*") if path.suffix in (".cpp", ".hpp", ".h"))


def python_sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def includes(text: str) -> Iterator[str]:
    yield from re.findall(r'^\s*#\s*include\s*[<"]([^">]+)[">]', text, re.MULTILINE)


def included_folder(name: str) -> str | None:
    """The folder under core/ of an included file, if that is one of ours."""
    path = "api/" + name if name.startswith("telegrad/") else name
    return path.rpartition("/")[0] if room_of_folder(path.rpartition("/")[0]) else None


def room_of_folder(folder: str) -> str | None:
    """Its entry in MAY_INCLUDE: its own, or that of the folder around it."""
    while folder and folder not in MAY_INCLUDE:
        folder = folder.rpartition("/")[0]
    return folder or None


def cpp_faults(folder: str, text: str) -> list[str]:
    faults = []
    folder = room_of_folder(folder)
    assert folder is not None, f"core/{folder} is new: add it to MAY_INCLUDE and docs/explanation/design.md"
    for name in includes(text):
        target = included_folder(name)
        other = None if target is None else room_of_folder(target)
        if other is not None and other != folder and other not in MAY_INCLUDE[folder]:
            faults.append(f"{folder} must not include {name}")
        first = name.partition("/")[0]
        if first in FOREIGN and first not in MAY_INCLUDE_FOREIGN.get(folder.partition("/")[0], set()):
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


def python_faults(folder: str, source: str, public: set[str], *, of_gpu: bool = False) -> list[str]:
    faults = []
    for name, runs in imported(ast.parse(source)):
        parts = name.split(".")
        if of_gpu and parts[0] == "torch":
            continue
        if parts[0] == "telegrad" and GPU_KERNELS in parts and runs and not of_gpu:
            faults.append(f"{folder} must not import {name} when it is loaded")
        if parts[0] == "telegrad":
            target = parts[1] if len(parts) > 1 else "__init__"
            if target in public or target == "__init__":
                target = "communicator"  # names of the package itself: SparseVector, Communicator, …
            if target != folder and target not in MAY_IMPORT[folder]:
                faults.append(f"{folder} must not import {name}")
        elif parts[0] == "torch" and (folder in NEVER_IMPORTS_TORCH or (runs and folder not in MAY_IMPORT_TORCH)):
            faults.append(
                f"{folder} must not import torch{' when it is loaded' if folder not in NEVER_IMPORTS_TORCH else ''}"
            )
    return faults


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_among(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which of these modules each imports, also for types only and inside functions. The package ``telegrad`` itself is
    left out: it hands names through, and whoever imports a part of it has imported it."""
    found: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = {name for name, _ in imported(ast.parse(source))}
        known = {name if name in sources else name.rpartition(".")[0] for name in names}
        found[module] = {name for name in known if name in sources} - {module, "telegrad"}
    return found


def cycles(uses: dict[str, set[str]]) -> list[set[str]]:
    """The modules that reach each other, for each such group of two or more."""
    reached: dict[str, set[str]] = {}
    for module in uses:
        seen, left = set[str](), [module]
        while left:
            new = uses[left.pop()] - seen
            seen |= new
            left += new
        reached[module] = seen
    groups = {frozenset(other for other in reached[one] if one in reached[other]) for one in uses}
    return [set(group) for group in groups if group]


def package_around(modules: set[str]) -> str:
    parts = [module.split(".") for module in modules]
    common = [step[0] for step in zip(*parts, strict=False) if len(set(step)) == 1]
    return ".".join(common)


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def public_names() -> set[str]:
    """What the package itself offers, without the modules behind it."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value)) - MAY_IMPORT.keys()
    raise AssertionError("src/telegrad/__init__.py has no __all__")


PUBLIC = public_names()


@pytest.mark.parametrize("table", [MAY_INCLUDE, MAY_IMPORT], ids=["core", "package"])
def test_the_tables_have_a_bottom(table: dict[str, set[str]]) -> None:
    graphlib.TopologicalSorter(table).prepare()  # raises CycleError if two folders may reach each other


def test_core_includes_point_down() -> None:
    found = {path: cpp_faults(str(path.relative_to(CORE).parent), path.read_text()) for path in cpp_sources()}
    assert {str(path): faults for path, faults in found.items() if faults} == {}


def test_no_two_folders_of_the_core_include_each_other() -> None:
    """Nor three in a ring: also of folders that share an entry in MAY_INCLUDE."""
    uses: dict[str, set[str]] = {}
    for path in cpp_sources():
        folder = str(path.relative_to(CORE).parent)
        others = {included_folder(name) for name in includes(path.read_text())} - {folder, None}
        uses.setdefault(folder, set()).update(str(other) for other in others)
    graphlib.TopologicalSorter(uses).prepare()  # raises CycleError


def test_every_included_file_is_there() -> None:
    """An include that the reader takes for a foreign one would pass unseen."""
    for path in cpp_sources():
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
            assert (CORE / name).is_file() or (CORE / "api" / name).is_file(), f"{path}: {name}"
            assert included_folder(name) is not None, f"{path}: {name}"


def installed_headers() -> set[str]:
    (names,) = re.findall(r"set\(public_headers ([^)]*)\)", (CORE / "cmake" / "install.cmake").read_text())
    own = {f"telegrad/{name}.hpp" for name in [*names.split(), "ucx", "mpi"]}
    return own | {"base/types.hpp", "base/given_reduction.hpp"}


@pytest.mark.parametrize("name", sorted(installed_headers()))
def test_installed_headers_include_each_other_only(name: str) -> None:
    folder = CORE / "api" if name.startswith("telegrad/") else CORE
    own = {one for one in includes((folder / name).read_text()) if "/" in one}
    assert own <= installed_headers()


def test_python_imports_point_down() -> None:
    found: dict[str, list[str]] = {}
    for path in python_sources():
        folder, text = folder_of(path), path.read_text()
        assert folder in MAY_IMPORT, (
            f"{folder} is new: give it its place in MAY_IMPORT and in docs/explanation/design.md"
        )
        assert not {name.partition(".")[0] for name, _ in imported(ast.parse(text))} & {"lab", "tests"}, path
        of_gpu = folder == "kernels" and GPU_KERNELS in path.relative_to(PACKAGE).with_suffix("").parts
        if faults := python_faults(folder, text, PUBLIC, of_gpu=of_gpu):
            found[str(path)] = faults
    assert found == {}


def test_no_further_modules_import_each_other() -> None:
    """Not for types and not late either: what one module needs of another is a reason to part or to merge them."""
    found: dict[str, int] = {}
    members: dict[str, list[list[str]]] = {}
    for group in cycles(imports_among({module_of(path): path.read_text() for path in python_sources()})):
        package = package_around(group)
        found[package] = found.get(package, 0) + len(group)
        members.setdefault(package, []).append(sorted(group))
    assert found == CYCLES, members


def test_the_reader_of_cycles() -> None:
    late = "def f():\n    from telegrad.a import two"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from telegrad.a.three import Three"
    sources = {
        "telegrad": "from telegrad.a import x",
        "telegrad.a": "",
        "telegrad.a.one": late,
        "telegrad.a.two": typed,
    }
    assert cycles(imports_among({**sources, "telegrad.a.three": "from telegrad import x"})) == []
    (group,) = cycles(imports_among({**sources, "telegrad.a.three": "from telegrad.a.one import f"}))
    assert group == {"telegrad.a.one", "telegrad.a.two", "telegrad.a.three"}
    assert package_around(group) == "telegrad.a"
    assert package_around({"telegrad.a", "telegrad.a.one"}) == "telegrad.a"


def test_no_conditional_compilation_outside_drivers_kernels_and_the_codec() -> None:
    """Drivers and loops over data are the only places that differ by platform."""
    others = [one for one in cpp_sources() if one.relative_to(CORE).parts[0] not in ("drivers", "kernels", "codec")]
    conditions = re.compile(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*", re.MULTILINE)
    found = {str(path): conditions.findall(path.read_text()) for path in others}
    assert {path: lines for path, lines in found.items() if lines} == {}


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
        ("collectives/dense", '#include "drivers/ucx/ucx_driver.hpp"', True),
        ("collectives/dense", '#include "collectives/sparse/auto.hpp"', True),
        ("collectives/topk", '#include "collectives/sparse/split.hpp"', False),
        ("kernels", '#include "codec/wire.hpp"', True),
        ("drivers/ucx", '#include "session/session.hpp"', True),
        ("drivers/ucx", '#include "drivers/mpi/mpi_driver.hpp"', True),
        ("simulation/explorer", '#include "simulation/measure.hpp"', False),
        ("simulation/explorer", '#include "progress/engine.hpp"', True),
        ("session", '#include "telegrad/work.hpp"', True),
        ("progress", '  #  include "session/session.hpp"', False),
        ("transport", "#include <ucp/api/ucp.h>", True),
        ("drivers/ucx", "#include <ucp/api/ucp.h>", False),
        ("kernels", "#include <nanobind/nanobind.h>", True),
        ("session", "#include <vector>", False),
    ],
)
def test_the_reader_of_includes(folder: str, text: str, faulty: bool) -> None:
    assert bool(cpp_faults(folder, text)) is faulty


@pytest.mark.parametrize(
    ("folder", "source", "faulty"),
    [
        ("kernels", "from telegrad.compress import Compressor", True),
        ("compress", "from telegrad import communicator", True),
        ("compress", "import telegrad.communicator.work as work", True),
        ("compress", "from telegrad.kernels.select import cpu", False),
        ("compress", "def f():\n    import torch", True),
        ("compress", "from telegrad.kernels.select import triton", True),
        ("kernels", "def f():\n    from telegrad.kernels.select import triton", False),
        ("kernels", "import torch", True),
        ("communicator", "import torch", True),
        ("communicator", "def f():\n    import torch.distributed", False),
        ("communicator", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("communicator", "def f():\n    from telegrad.ddp import DDPState", True),
        ("cost", "from telegrad import Communicator", True),
        ("cost", "from telegrad.compress import Compressor", True),
        ("cost", "if True:\n    import torch", True),
        ("ddp", "from telegrad import _core", False),
        ("ddp", "from telegrad.tools.cli import main", True),
        ("tools", "from telegrad import SparseVector", False),
    ],
)
def test_the_reader_of_imports(folder: str, source: str, faulty: bool) -> None:
    assert bool(python_faults(folder, source, PUBLIC)) is faulty


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in ROOT.glob("tests/**/test_*.py")]
    assert sorted(names) == sorted(set(names))
