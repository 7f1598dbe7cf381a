"""``python -m lab late-averages``: what it prints, a small job, and the exposed communication that it promises."""

from __future__ import annotations

import pytest
from rich.console import Console

from lab.late_averages import WAYS, LatePlan, VirtualNetwork, accuracy_of, accuracy_table, run, table_of, virtual_rows
from telegrad import Communicator

pytestmark = pytest.mark.ranks("torch")


def test_a_small_job() -> None:
    plan = LatePlan(2, "shm", layers=3, width=16, compute_s=0.001, rounds=2, steps=1)
    rows = run(plan, timeout_s=120)
    assert [row["way"] for row in rows] == [*WAYS]
    assert {row["way"]: row["same_weights"] for row in rows} == {way: way in ("step", "forward") for way in WAYS}
    assert [len(row["turns_s"]) for row in rows] == [2] * len(WAYS)


@pytest.mark.parametrize("ratio", [0.8, 1.0])
def test_exposed_communication_in_virtual_time(ratio: float) -> None:
    rows = {row["way"]: row for row in virtual_rows(ratio)}
    assert rows["alone"]["exposed_s"] == pytest.approx(0, abs=1e-9)
    assert rows["step"]["exposed_s"] > 0.1 * rows["step"]["step_s"]
    assert rows["forward"]["exposed_s"] <= 0.6 * rows["step"]["exposed_s"]
    assert rows["forward"]["same_weights"]
    assert rows["delay"]["exposed_s"] <= 0.05 * rows["delay"]["step_s"]


def test_virtual_sums_share_the_network() -> None:
    (comm,) = Communicator.local(1)
    with comm:
        network = VirtualNetwork(comm, ranks=2, bytes_per_s=1e3, latency_s=0.0)
        x = memoryview(bytes(1000))
        one, two = (network._begin(x, in_turn=False) for _ in range(2))
        network.spend(1.0)
        assert one.span_s() is None
        two.wait()
        assert network.mark() == pytest.approx(2.0)  # each alone takes 1 s
        turns = [network._begin(x, in_turn=True) for _ in range(3)]
        turns[1].wait()
        assert network.mark() == pytest.approx(4.0)
        turns[2].wait()
        assert network.mark() == pytest.approx(5.0)


def test_tables() -> None:
    rows = [
        {"way": way, "ratio": 0.9, "step_s": 0.2, "exposed_s": exposed_s, "same_weights": way != "delay"}
        for way, exposed_s in zip(WAYS, (0.0, 0.1, 0.05, 0.01), strict=True)
    ]
    console = Console(width=120, record=True)
    console.print(table_of(rows))
    said = console.export_text()
    assert "0.50" in said
    assert "5.0%" in said
    found = [accuracy_of(delay, "SGD", 0.1, steps=3) for delay in (0, 1)]
    assert found[0]["held_out"] != found[1]["held_out"]
    console.print(accuracy_table(found))
    assert "delay=1" in console.export_text()
