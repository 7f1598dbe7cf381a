"""``import torch`` registers the backend: what that loads, what it leaves alone, and when it does not happen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.distributed as dist

import telegrad_autoload

SUM = """
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.distributed.init_process_group("telegrad")
x = torch.ones(3)
torch.distributed.all_reduce(x)
found = [type(torch.distributed.group.WORLD).__module__, x.tolist()]
torch.distributed.destroy_process_group()
"""
SUMMED = ["telegrad.torch_backend.process_group", [1.0, 1.0, 1.0]]


def found_by(program: str, *, autoload: str = "1") -> Any:
    """``found``, which the program leaves in a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::RuntimeWarning",
            "-c",
            f"import json, os, sys\n{program}\nprint(json.dumps(found))",
        ],
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_installed_package_has_the_entry_point() -> None:
    (entry,) = entry_points(group="torch.backends", name="telegrad")  # pip install -e . writes it
    assert entry.load() is telegrad_autoload.autoload


@pytest.fixture(scope="module")
def after_import() -> Any:
    """What a process finds after ``import torch``, and that sums over the backend then."""
    return found_by(
        """
import torch
available = torch.distributed.is_backend_available("telegrad")
loaded = [name for name in sys.modules if name.startswith("telegrad")]
defaults = dict(torch.distributed.Backend.default_device_backend_map)
"""
        + SUM
        + 'found = {"available": available, "loaded": loaded, "defaults": defaults, "sum": found}\n'
    )


@pytest.fixture(scope="module")
def without_autoload() -> Any:
    """The same where autoload is switched off, until the entry point is called by hand."""
    return found_by(
        """
import torch
from importlib.metadata import entry_points
available = torch.distributed.is_backend_available("telegrad")
defaults = dict(torch.distributed.Backend.default_device_backend_map)
before = set(sys.modules)
(entry,) = entry_points(group="torch.backends", name="telegrad")
entry.load()()
loaded = sorted(set(sys.modules) - before)
found = {"available": available, "loaded": loaded, "defaults": defaults}
""",
        autoload="0",
    )


def test_import_torch_loads_one_module_of_telegrad(after_import: Any) -> None:
    assert (after_import["available"], after_import["loaded"]) == (True, ["telegrad_autoload"])


def test_registration_loads_nothing_that_torch_has_not_loaded(without_autoload: Any) -> None:
    assert without_autoload["loaded"] == ["telegrad_autoload"]


def test_programs_that_name_no_backend_get_what_they_got(after_import: Any, without_autoload: Any) -> None:
    assert after_import["defaults"] == without_autoload["defaults"]


def test_a_group_by_name(after_import: Any) -> None:
    assert after_import["sum"] == SUMMED


@pytest.mark.parametrize(
    "imports",
    [
        "import telegrad.ddp",
        "import telegrad.torch_backend",
        "from telegrad.torch_backend.process_group import ProcessGroup",
        "from telegrad.communicator.rendezvous.store_exchange import StoreExchange; import torch.distributed",
    ],
)
def test_imports_of_telegrad_before_torch(imports: str) -> None:
    """torch calls back while a module of telegrad is half loaded."""
    program = f"""
{imports}
import torch
found = [torch.distributed.is_backend_available("telegrad"), torch.distributed.Backend.backend_list.count("telegrad")]
"""
    assert found_by(program) == [True, 1]


def test_where_autoload_is_switched_off(without_autoload: Any) -> None:
    assert without_autoload["available"] is False
    assert found_by("import torch, telegrad.torch_backend" + SUM, autoload="0") == SUMMED


def test_a_second_registration_changes_nothing() -> None:
    plugin = dist.Backend._plugins["TELEGRAD"]
    telegrad_autoload.register()
    assert dist.Backend._plugins["TELEGRAD"] is plugin
    assert dist.Backend.backend_list.count("telegrad") == 1


def test_without_torch_distributed() -> None:
    program = """
import torch
torch.distributed.is_available = lambda: False
del torch.distributed.Backend
import telegrad_autoload
telegrad_autoload.autoload()
try:
    import telegrad.torch_backend
except ImportError as error:
    found = str(error)
"""
    assert "telegrad.torch_backend needs torch.distributed" in found_by(program, autoload="0")


def test_a_failed_registration_is_a_warning_and_no_failed_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypeError("register_backend() got an unexpected keyword argument")

    monkeypatch.setattr(dist.Backend, "backend_list", [])
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    with pytest.warns(RuntimeWarning, match=r"'telegrad' in this process: TypeError: register_backend\(\) got"):
        telegrad_autoload.autoload()
    with pytest.raises(TypeError):
        telegrad_autoload.register()


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        telegrad_autoload.autoload()
    assert torch.distributed.is_backend_available("telegrad")
