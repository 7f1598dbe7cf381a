"""``import telegrad``: what it needs, what it leaves alone, and what it says when something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import telegrad
from telegrad.errors import NonFiniteGradient, PeerFailed


def _run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=_env(environment)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _env(extra: dict[str, str]) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    return {**environment, "PYTHONPATH": ":".join(sys.path), **extra}


def test_imports_numpy_only() -> None:
    program = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "rich", "typer", "matplotlib", "mpi4py"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
import numpy, telegrad
comm = telegrad.Communicator.local(1)[0]
comm.all_reduce(numpy.ones(3, numpy.float32))
assert "telegrad.ddp" not in sys.modules and "torch" not in sys.modules
future = comm.barrier(async_op=True).get_future
torch_users = (lambda: telegrad.DDPState, lambda: telegrad.ddp_hook, lambda: telegrad.ddp)
for use in (*torch_users, lambda: telegrad.Synchronizer, telegrad.Communicator.from_torch, future):
    try:
        use()
    except ImportError as error:
        print("needs torch" in str(error) and "pip install 'telegrad[torch]'" in str(error))
"""
    assert _run(program).split() == ["True"] * 6


@pytest.mark.parametrize(("module", "most"), [("telegrad", 42), ("telegrad.ddp", 70)])
def test_few_of_our_modules_are_loaded(module: str, most: int) -> None:
    """Who reads along meets no more. The numbers may only shrink."""
    if module != "telegrad":
        pytest.importorskip("torch")
    count = "print(len([one for one in sys.modules if one.split('.')[0] == 'telegrad']))"
    assert int(_run(f"import sys, {module}; {count}")) <= most


@pytest.mark.parametrize("name", ["compress.ExactTopK", "ddp.JsonLines", "launch.Ranks", "linear.train"])
def test_packages_are_there_without_an_import_of_their_own(name: str) -> None:
    assert _run(f"import telegrad; print(callable(telegrad.{name}))") == "True"


def test_forecasts_load_no_torch() -> None:
    """It takes longer to load than most of them take to compute."""
    commands = "telegrad.tools.cli.simulate, telegrad.tools.cli.advise, telegrad.tools.cli.profile"
    assert _run(f"import sys, {commands}; print('torch' in sys.modules)") == "False"


def test_public_names() -> None:
    assert set(telegrad.__all__) <= set(dir(telegrad))
    assert all(hasattr(telegrad, name) for name in telegrad.__all__)
    with pytest.raises(AttributeError, match="module 'telegrad' has no attribute 'AllReduce'"):
        telegrad.AllReduce  # noqa: B018
    with pytest.raises(AttributeError, match="module 'telegrad.synchronizer' has no attribute 'Syncroniser'"):
        telegrad.synchronizer.Syncroniser  # noqa: B018


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert telegrad.__version__ == importlib.metadata.version("telegrad")
    assert _run("import sys, telegrad; print('importlib.metadata' in sys.modules)") == "False"
    monkeypatch.setattr(importlib.metadata, "version", _no_package)
    assert telegrad.__version__ == "unknown"


def _no_package(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_ucx_variables_exist_only_while_loading() -> None:
    program = """
import os, sys
seen = []
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "telegrad._core":
            names = ("UCX_HANDLE_ERRORS", "UCX_DEBUG_SIGNO", "UCX_LOG_LEVEL", "UCX_MEM_MMAP_HOOK_MODE")
            seen.append(tuple(os.environ.get(name) for name in names))
sys.meta_path.insert(0, Spy())
import telegrad
print(seen, {name: value for name, value in os.environ.items() if name.startswith("UCX_")})
"""
    hooks = "none" if any((Path(folder) / "_ucx").is_dir() for folder in telegrad.__path__) else None
    assert _run(program) == f"[('none', '0', 'fatal', {hooks!r})] {{}}"
    asked = {"UCX_LOG_LEVEL": "warn", "UCX_MEM_MMAP_HOOK_MODE": "bistro"}
    assert _run(program, **asked) == f"[('none', '0', 'warn', 'bistro')] {asked}"


@pytest.mark.parametrize("hangup", ["SIG_DFL", "SIG_IGN", "lambda *_: None"])
def test_signals_stay_as_the_program_has_them(hangup: str) -> None:
    program = f"""
import signal
import numpy
def signals():
    with open("/proc/self/status") as status:
        return dict(line.split() for line in status if line.startswith(("SigCgt", "SigIgn")))
signal.signal(signal.SIGHUP, {hangup if hangup.startswith("lambda") else "signal." + hangup})
before = signals()
import telegrad
print(signals() == before)
"""
    assert _run(program) == "True"


def test_the_systems_ucx_keeps_its_memory_hooks(tmp_path: Path) -> None:
    """Its RDMA transports need them; only a package with a UCX of its own goes without."""
    for bundled in (False, True):
        if bundled:
            (tmp_path / "_ucx").mkdir()
        program = f"""
import os, telegrad
telegrad.__path__ = [{str(tmp_path)!r}]
with telegrad._environment_for_loading():
    print(os.environ.get("UCX_MEM_MMAP_HOOK_MODE"))
"""
        assert _run(program) == ("none" if bundled else "None")


def _text_without_core(raised: str) -> str:
    program = f"""
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "telegrad._core":
            raise {raised}
sys.meta_path.insert(0, Broken())
try:
    import telegrad
except ImportError as error:
    print(error)
"""
    return _run(program)


def test_core_not_installed() -> None:
    text = _text_without_core('ModuleNotFoundError("No module", name="telegrad._core")')
    assert "telegrad._core, the compiled part of telegrad, is not installed: run `pip install .`" in text


def test_ucx_library_missing() -> None:
    text = _text_without_core('ImportError("libucp.so.0: cannot open shared object file")')
    assert "telegrad._core was found but does not load: libucp.so.0: cannot open" in text
    assert "UCX is missing" in text
    assert "TELEGRAD_UCX=system" in text


def test_a_missing_dependency_is_not_taken_for_a_missing_core() -> None:
    assert _text_without_core('ModuleNotFoundError("No module named numpy", name="numpy")') == "No module named numpy"


def test_built_without_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutUcx:
        pass

    monkeypatch.setattr(telegrad._core, "Communicator", WithoutUcx)  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match=r"built without UCX \(TELEGRAD_UCX=none\).*TELEGRAD_UCX=system"):
        telegrad.Communicator.from_exchange(0, 1, lambda blob: [blob])


def test_errors_survive_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(PeerFailed("gone", rank=1, peer=2, operation="all_reduce", tag=7)))
    assert (str(error), error.rank, error.peer, error.operation, error.tag) == ("gone", 1, 2, "all_reduce", 7)
    other = pickle.loads(pickle.dumps(NonFiniteGradient("nan", rank=1, parameter="weight")))
    assert (str(other), other.rank, other.parameter) == ("nan", 1, "weight")
