"""benchmarks/gpu/smoke.py, blocks.py and hook.py: what they run and tell, on the CPU and in Triton's interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from telegrad.tools.bench.machine import version_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))

    def load(name: str) -> ModuleType:
        sys.modules.pop(name, None)
        return import_module(name)

    return load


def test_a_step_that_fails_or_hangs_takes_no_other_along(
    program: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = [sys.executable, "-c"]
    steps = {
        "good": [*python, "pass"],
        "bad": [*python, "raise SystemExit('it broke')"],
        "hanging": [*python, "import time; print('so far', flush=True); time.sleep(60)"],
        "last": [*python, "pass"],
    }
    path = tmp_path / "rows.json"
    begin = time.monotonic()
    assert program("smoke").run_all(steps, path, {"gpu": "A Fast GPU"}, limit_s=3.0) is False
    assert time.monotonic() - begin < 30
    result = json.loads(path.read_text())
    assert result["machine"] == {"gpu": "A Fast GPU"}
    assert [(row["step"], row["holds"]) for row in result["rows"]] == [
        *(("good", True), ("bad", False), ("hanging", False), ("last", True))
    ]
    said = [row.get("failed") for row in result["rows"]]
    assert said == [None, "status 1; it broke", "was ended after 3 s; so far", None]
    assert "hanging: DOES NOT HOLD: was ended after 3 s" in capsys.readouterr().out


def test_an_interrupt_takes_the_step_along_and_is_told(tmp_path: Path) -> None:
    """As where the runner ends the part: a step that goes on would have the GPU."""
    path, told = tmp_path / "rows.json", tmp_path / "pid"
    step = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(ROOT / 'benchmarks' / 'gpu')!r}); import smoke; "
        f"smoke.run_all({{'hanging': [sys.executable, '-c', {step!r}]}}, pathlib.Path({str(path)!r}), {{}})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], process_group=0, stderr=subprocess.DEVNULL)
    while not told.exists() or not told.read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["holds"], row["failed"]) == (False, "was interrupted")
    for _ in range(500):
        if not Path("/proc", told.read_text()).exists():
            break
        time.sleep(0.02)
    assert not Path("/proc", told.read_text()).exists()


def test_the_steps_are_what_commands_take(
    program: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from lab.common.experiments import app
    from telegrad.tools.cli import make_app

    monkeypatch.setattr("telegrad.tools.bench.device.gpu_name", lambda: None)
    smoke = program("smoke")
    for command in smoke._steps().values():
        if command[1] == "-m":
            done = CliRunner().invoke(app() if command[2] == "lab" else make_app(), command[3:])
            assert (done.exit_code, "no GPU: torch sees none here" in done.output) == (1, True), done.output
        else:
            assert command[2] == "--step"
            assert command[3] in smoke.STEPS


def test_two_processes_and_a_selection_hold_here(
    program: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke = program("smoke")
    assert version_of("numpy") == np.__version__
    assert version_of("no-such-package") is None
    monkeypatch.setattr(smoke, "_STEP_S", 60.0)
    smoke.host()
    if os.environ.get("TRITON_INTERPRET") == "1":
        smoke.selection("cpu", 20_000)


def test_a_selection_that_is_wrong_is_seen(
    program: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    smoke = program("smoke")
    from telegrad.compress import Residual

    chosen: list[Residual] = []

    class Wrong:
        """It loses the sign of one sum on the second of the two devices."""

        def select(self, entry: Residual, gradient: object, indices: object, values: object, offset: int) -> int:
            chosen.append(entry)
            if len({id(one) for one in chosen}) == 2:
                entry.values[3] = -0.0
            return 200

    monkeypatch.setattr("telegrad.compress.selection_named", lambda _: Wrong())
    with pytest.raises(AssertionError):
        smoke.selection("cpu", 20_000)


def test_rows_of_blocks(program: Callable[[str], ModuleType]) -> None:
    """The launches are those of the library: what a pass chooses here is what numpy does."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is switched off")
    blocks = program("blocks")
    rows: list[dict[str, object]] = []

    def seconds_of(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    choices = {"fused_pass": ((1024, 4), (512, 1)), "take_marked": ((4, 1),), "count_digits": ((1024, 8),)}
    blocks.measure(5000, "cpu", seconds_of, rows.append, samples=1, choices=choices)
    wanted = [("fused_pass", 1024, 4), ("fused_pass", 512, 1), ("take_marked", 4, 1), ("count_digits", 1024, 8)]
    assert [(row["kernel"], row["block"], row["warps"]) for row in rows] == wanted
    assert all(row["median_s"] > 0 and row["of_copy"] > 0 for row in rows)  # type: ignore[operator]
    made = blocks.Passes(5000, "cpu")
    made.copy()
    made.fused(1024, 4)()
    bound = int(made._bound)
    sums = (made._before + made._gradient).numpy()
    reached = np.flatnonzero((sums.view(np.int32) & 0x7FFFFFFF) >= bound)
    marked = np.unpackbits(made.marks.numpy().view(np.uint8), bitorder="little")
    assert np.flatnonzero(marked).tolist() == reached.tolist()
    assert 0 < reached.size < 100


@pytest.mark.ranks("torch")
def test_rows_of_the_hook(program: Callable[[str], ModuleType]) -> None:
    from telegrad.tools.demo.job import ModelSize

    rows: list[dict[str, Any]] = []
    hook = program("hook")
    hook.measure("cpu", rows.append, size=ModelSize(width=80, layers=1, heads=2, context=8), passes=2)
    assert [row["way"] for row in rows] == list(hook.WAYS)
    for row in rows:
        assert 0 < row["median_host_in_hook_s"] < row["median_host_in_backward_s"] < row["median_pass_s"]
        assert row["first_pass_s"] > 0
        assert len(row["calls"]) == hook._CALLS
