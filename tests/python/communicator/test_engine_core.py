"""TELEGRAD_ENGINE_CORE: where the engine's thread runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from telegrad import Communicator, _core
from telegrad.communicator.communicator import ENGINE_CORE

pytestmark = pytest.mark.usefixtures("kernel_chooses_again")


@pytest.fixture
def kernel_chooses_again() -> Iterator[None]:
    yield
    _core.set_engine_core(-1)


# In a process of its own: here another test's communicator may have made the engine already.
_PROGRAM = """
import os
import time
from pathlib import Path
from telegrad import Communicator

def engines():
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return [task for task in tasks if Path(f"/proc/self/task/{task}/comm").read_text() == "telegrad\\n"]

with Communicator.local(1)[0] as comm:
    while not engines():  # a thread names itself once it runs
        time.sleep(0.01)
    print(*os.sched_getaffinity(*engines()))
"""


def test_the_engine_stays_on_its_core() -> None:
    core = str(max(os.sched_getaffinity(0)))
    environment = {**os.environ, ENGINE_CORE: core}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == (core, 0), done.stderr


@pytest.mark.parametrize("text", ["100000", "-1", "two", "1.0", " "])
def test_a_core_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENGINE_CORE, text)
    allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    with pytest.raises(ValueError, match=f"is no core that this process may use: use one of {allowed}, or unset it"):
        Communicator.local(1)
    with pytest.raises(ValueError, match="no core"):
        Communicator.from_exchange(0, 1, lambda mine: [mine])
