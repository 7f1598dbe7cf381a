"""What is kept of a calibration, and when its table looks like noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from telegrad.cost import Costs, DecisionTable, Place, TableEntry, Tuning
from telegrad.tuning.calibration import (
    NoisyCalibration,
    doubts_about,
    doubts_about_load,
    doubts_about_sizes,
    store_unless_noisy,
)


def _tuning(steps: int) -> Tuning:
    names = ("ring", "recursive_doubling")
    choices = tuple(TableEntry(0 if step == 0 else 1 << step, names[step % 2]) for step in range(steps))
    place = Place("ucx", (("here", 4),))
    return Tuning(
        place, Costs(2e-6, 1e-10, 1e-10, 3e-11), DecisionTable(4, choices), "2026-11-21T12:00:00+00:00", "0.1.0", 0.1
    )


def test_a_table_of_many_steps_is_doubted() -> None:
    assert doubts_about(_tuning(8)) == ()
    assert doubts_about(_tuning(9)) == ("the table has 9 steps, more than 8",)


def test_a_machine_is_busy_where_more_runs_than_it_has_cores() -> None:
    assert doubts_about_load([(2.0, 2), (1.5, 16)]) == ()
    assert doubts_about_load([(2.5, 2), (20.0, 16), (6.0, 4)]) == (
        "the machine of rank 2 was busy before (load 6.0 on 4 cores)",
    )


def test_a_sweep_that_ended_before_long_vectors_is_doubted() -> None:
    assert doubts_about_sizes({4: {}, 256 << 10: {}}) == ()
    assert doubts_about_sizes([1024, 4]) == (
        "nothing longer than 1,024 bytes was measured: give more --seconds (seconds=)",
    )


def test_noise_never_replaces_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TELEGRAD_CACHE", str(tmp_path))
    path = store_unless_noisy(_tuning(9), ["noise"])
    assert Tuning.from_json(path.read_text()) == _tuning(9)
    with pytest.raises(NoisyCalibration, match=f"load; noise; {path} stays as it is: .*or delete that file first"):
        store_unless_noisy(_tuning(2), ["load", "noise"])
    assert Tuning.from_json(path.read_text()) == _tuning(9)
    assert store_unless_noisy(_tuning(3), []) == path
    assert Tuning.from_json(path.read_text()) == _tuning(3)
