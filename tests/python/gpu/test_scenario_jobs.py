"""gpu_jobs.py: a scenario that fails or hangs takes none of those behind it along. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_jobs import reports

_PROGRAM = """
import atexit, os, time
import gpu_jobs

RANK = int(os.environ["RANK"])


def good(): pass
def bad_on_one():
    if RANK == 1:
        atexit.register(time.sleep, 60)  # as where the driver waits for a stream
        raise ValueError("planted")
def between(): pass
def hanging():
    if RANK == 0: time.sleep(60)
def last(): pass


def run_all(which, store):
    files = [store.removeprefix("file://") + f"-{which}-{rank}" for rank in range(2)]
    open(files[RANK], "x").close()
    while not os.path.exists(files[1 - RANK]):
        time.sleep(0.01)
    gpu_jobs._SCENARIO_S = gpu_jobs._END_S = 2.0
    gpu_jobs.run_scenarios((good, bad_on_one, between, hanging, last))
"""


@pytest.mark.ranks("torch")
def test_a_scenario_that_fails_or_hangs_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted_scenarios.py").write_text(_PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["good", "bad_on_one", "between", "hanging", "last"]
    found = reports("planted_scenarios:run_all", 2, names, ["which"], tmp_path / "store", "cpu", timeout_s=60)
    for said in found:
        assert [said[name] for name in ("good", "between", "last")] == ["ok"] * 3
    assert found[0]["bad_on_one"] == "ok"
    assert "planted" in found[1]["bad_on_one"]
    assert "hanging" not in found[0]
    assert "rank 1: last ok" in capsys.readouterr().out
    met = sorted(path.name for path in tmp_path.glob("store-*-0"))
    assert met == ["store-0-which-0", "store-2-which-0", "store-4-which-0"]
