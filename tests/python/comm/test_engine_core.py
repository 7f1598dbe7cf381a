"""TELEGRAD_ENGINE_CORE: where the engine's thread runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from telegrad import Communicator, _core
from telegrad.comm.engine_core import ENGINE_CORE

pytestmark = pytest.mark.usefixtures("kernel_chooses_again")


@pytest.fixture
def kernel_chooses_again() -> Iterator[None]:
    yield
    _core.set_engine_core(-1)


def _engine_threads() -> list[int]:
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return [task for task in tasks if Path(f"/proc/self/task/{task}/comm").read_text() == "telegrad\n"]


def test_the_engine_stays_on_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(_engine_threads())
    core = max(os.sched_getaffinity(0))
    monkeypatch.setenv(ENGINE_CORE, str(core))
    (comm,) = Communicator.local(1)
    with comm:
        comm.barrier()
        (thread,) = set(_engine_threads()) - before
        assert os.sched_getaffinity(thread) == {core}


@pytest.mark.parametrize("text", ["100000", "-1", "two", "1.0", " "])
def test_a_core_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENGINE_CORE, text)
    allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    with pytest.raises(ValueError, match=f"is no core that this process may use: use one of {allowed}, or unset it"):
        Communicator.local(1)
    with pytest.raises(ValueError, match="no core"):
        Communicator.from_exchange(0, 1, lambda mine: [mine])
