"""benchmarks/gpu/probe.py: what it asks, as far as a device without hardware can be asked, and what becomes of a
process that hangs."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    sys.modules.pop("probe", None)
    import probe

    return probe


class Driver:
    """Stands for cuda.bindings.driver. A stream that waits holds up no host and no other stream; it copies when it is
    synchronised, or at once if it is ``hasty``."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, *, hasty: bool = False) -> None:
        self._hasty, self._made = hasty, itertools.count(10)
        self._copies: list[tuple[int, int, int]] = []

    def CUstream(self, handle: int) -> int:  # noqa: N802
        return handle

    def cuMemHostGetDevicePointer(self, address: int, _: int) -> tuple[int, int]:  # noqa: N802
        return 0, address

    def cuStreamSynchronize(self, _: int) -> tuple[int]:  # noqa: N802
        for copy in self._copies:
            ctypes.memmove(*copy)
        self._copies.clear()
        return (0,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:  # noqa: N802
        self._copies.append((target, source, nbytes))
        return self.cuStreamSynchronize(stream) if self._hasty else (0,)

    def cuCtxGetStreamPriorityRange(self) -> tuple[int, int, int]:  # noqa: N802
        return 0, 0, -5

    def cuEventQuery(self, event: int) -> tuple[int]:  # noqa: N802
        return (600 if event % 7 == 0 else 0,)

    def __getattr__(self, name: str) -> Callable[..., tuple[int, ...]]:
        made = ("cuStreamCreate", "cuStreamCreateWithPriority", "cuEventCreate", "cuMemAlloc", "cuMemHostAlloc")
        return lambda *_: (0, next(self._made)) if name in made else (0,)


class Torch:
    """torch, whose CUDA tensors and pinned ones are plain ones here."""

    cuda = SimpleNamespace(
        set_device=lambda _: None,
        synchronize=lambda: None,
        Stream=lambda: SimpleNamespace(cuda_stream=5),
        ExternalStream=lambda handle: handle,
        stream=contextlib.nullcontext,
    )

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("zeros", "empty", "full", "rand", "arange"):
            return found
        return lambda *sizes, device="cpu", pin_memory=False, **options: found(*sizes, **options)


def rows_of(probe: ModuleType, group: str, driver: Driver, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    probe.QUESTIONS[group](probe.Device(Torch(), driver))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if "failed" in row] == []
    return {row["question"]: row for row in rows}


def test_it_says_why_it_cannot_ask(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: None)
    assert probe.main(["--json", str(tmp_path / "rows.json")]) == 1
    assert capsys.readouterr().out == "no GPU: torch sees none here, and nothing was asked\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("hasty", [False, True])
def test_what_a_copy_behind_a_wait_sees(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], hasty: bool
) -> None:
    monkeypatch.setattr(probe, "_KERNELS", 2)
    rows = rows_of(probe, "visibility", Driver(hasty=hasty), capsys)
    copies = [row["holds"] for question, row in rows.items() if question.startswith("a copy of")]
    assert copies == [not hasty] * 8
    (values,) = (row for question, row in rows.items() if question.startswith("old values"))
    assert (values["found"], values["holds"]) == (1 << 16, False)  # kernels run at once here, before the host writes


def test_what_stands_still(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "_HELD_S", 0.3)
    driver = Driver()
    make = driver.cuEventCreate
    monkeypatch.setattr(driver, "cuEventCreate", lambda flags: [time.sleep(0.6), make(flags)][1], raising=False)
    rows = rows_of(probe, "standstills", driver, capsys)
    assert len(rows) == 12
    made = rows["making a stream while a stream waits"]["found"]
    assert made["stands_still"] is False
    assert 0 <= made["seconds"] < 0.3
    assert rows["making an event while a stream waits"]["found"]["stands_still"] is True


@pytest.mark.parametrize("locks", [False, True])
def test_whether_freeing_holds_up_other_threads(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], locks: bool
) -> None:
    monkeypatch.setattr(probe, "_HELD_S", 0.3)
    monkeypatch.setattr(probe, "_AHEAD_S", 0.05)
    driver, lock = Driver(), threading.Lock()
    copy = driver.cuMemcpyHtoDAsync

    def free(_: int) -> tuple[int]:
        with lock if locks else contextlib.nullcontext():
            time.sleep(0.6)
        return (0,)

    def copy_in_turn(*given: int) -> tuple[int]:
        with lock:
            return copy(*given)

    monkeypatch.setattr(driver, "cuMemFree", free, raising=False)
    monkeypatch.setattr(driver, "cuMemcpyHtoDAsync", copy_in_turn)
    rows = rows_of(probe, "standstills", driver, capsys)
    suffix = ", and a copy by another thread, while a stream waits"
    found = rows["giving back 512 MiB of the GPU's" + suffix]["found"]
    assert (found["stands_still"], found["copy_stands_still"]) == (True, locks)
    assert found["copy_seconds"] < found["seconds"]
    for pinned in ("4 KiB", "64 MiB"):
        quick = rows[f"giving back {pinned} of pinned memory" + suffix]["found"]
        assert (quick["stands_still"], quick["copy_stands_still"]) == (False, False)


def test_which_streams_share_a_queue(probe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(probe, "queues", Driver(), capsys)
    behind = rows["of 48 streams those that stand still behind number 0, 1 and 5"]["found"]
    assert list(behind) == ["0", "1", "5"]
    assert {len(found) for found in behind.values()} <= {6, 7}  # every seventh event has not passed
    assert all(row["holds"] is None for row in rows.values())
    asked = [question.removesuffix(", with copies both ways") for question in rows]
    assert asked[:4] == asked[4:]


def test_copies_that_hold_up_the_host_are_told(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "_HELD_S", 0.2)
    driver = Driver()
    calls = itertools.count()

    def copy_back(*_: int) -> tuple[int]:
        if next(calls) == 0:
            time.sleep(0.4)
        return (0,)

    monkeypatch.setattr(driver, "cuMemcpyDtoHAsync", copy_back, raising=False)
    probe.queues(probe.Device(Torch(), driver))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["failed"] for row in rows if "failed" in row] == ["RuntimeError: the host stood still, too"]
    assert "with copies both ways" in next(row["question"] for row in rows if "failed" in row)
    assert next(calls) > 100


def test_how_many_commands_fit_and_what_they_cost(probe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(probe, "depth", Driver(), capsys)
    assert [row["found"]["commands"] for row in rows.values()] == [6000, 6000]
    costs = rows_of(probe, "costs", Driver(), capsys)
    assert len(costs) == 4
    assert all(0 < row["found"] < 0.01 for row in costs.values())


def test_what_is_known_before_a_process_hangs_is_kept(
    probe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "_GROUP_S", 5.0)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    answer = '{"question": "a", "holds": true, "found": os.environ.get("CUDA_MODULE_LOADING")}'
    programs = {
        "standstills": f"import json, os, time; print('noise'); print(json.dumps({answer.replace('true', 'True')}),"
        "flush=True); time.sleep(60)",
        "depth": "raise SystemExit(3)",
        "costs": """print('{"question": "b", "holds": false, "failed": "RuntimeError: 700"}')""",
    }
    groups = [probe.Group("standstills", None), probe.Group("depth", "8", "LAZY"), probe.Group("costs")]
    path = tmp_path / "rows.json"
    assert not probe.ask_all(groups, path, lambda one: [sys.executable, "-c", programs[one.questions]], {"gpu": "G"})
    told = json.loads(path.read_text())
    assert told["machine"] == {"gpu": "G"}
    assert told["rows"] == [
        {**asked("standstills", None), "question": "a", "holds": True, "found": None},
        {**asked("costs", "32"), "question": "b", "holds": False, "failed": "RuntimeError: 700"},
    ]
    assert told["failures"] == [
        {**asked("standstills", None), "error": "was ended after 5 s"},
        {**asked("depth", "8", "LAZY"), "error": "ended with status 3"},
    ]
    assert "b: DOES NOT HOLD: RuntimeError: 700" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.partial"))


def asked(group: str, connections: str | None, loading: str | None = None) -> dict[str, str | None]:
    return {"group": group, "connections": connections, "loading": loading}


def test_that_all_is_well_is_said(probe: ModuleType, tmp_path: Path) -> None:
    program = """print('{"question": "a", "holds": true, "found": 1}')"""
    assert probe.ask_all([probe.Group("costs")], tmp_path / "rows.json", lambda _: [sys.executable, "-c", program], {})
    assert {group.questions for group in probe.GROUPS} == set(probe.QUESTIONS)
