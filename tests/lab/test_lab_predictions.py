"""``python -m lab predictions``: its options, what it prints and writes, and how it ends; without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lab import predictions
from lab.predictions import Measurement, PredictionPlan, measurements_of
from lab.predictions import calibration as calibration_plan
from telegrad.tools.bench.netlab import NetlabError

_app = typer.Typer()
_app.command()(predictions.command)
_BETA = 8e-9


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "200"})
    return done.exit_code, " ".join(done.output.split())


def _ideal(wrong: int = 0) -> Callable[..., Any]:
    """A network on which everything takes 8 ns a byte."""

    def run(plan: PredictionPlan, *, timeout_s: float, on_sample: Callable[[Measurement], None]) -> Any:
        assert timeout_s > 0
        times: dict[Measurement, list[float]] = {}
        for one in measurements_of(plan):
            times[one] = [max(one.bytes, 4) * _BETA] * plan.repetitions
            for _ in range(plan.repetitions):
                on_sample(one)
        return predictions.Measured(times, dict.fromkeys(times, 2), dict.fromkeys(times, wrong))

    return run


@pytest.fixture
def half_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator that says twice the measured time of broadcasts, and 1.1 times that of all others."""

    def predict(one: Measurement, ranks: int, costs: dict[str, float], calls: int) -> float:
        assert calls == 2
        assert costs["beta_s_per_byte"] == pytest.approx(_BETA)
        return one.bytes * _BETA * (2.0 if one.operation == "broadcast" else 1.1)

    monkeypatch.setattr(predictions, "predict", predict)


@pytest.mark.usefixtures("half_as_fast")
def test_table_file_and_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(predictions, "run", _ideal())
    found, drawn = tmp_path / "rows.json", tmp_path / "plot.png"
    status, output = _run(
        *("--ranks", "2,4", "--network", "100mbit", "--sizes", "256KiB,4MiB", "--repetitions", "3"),
        *("--json", str(found), "--plot-file", str(drawn)),
    )
    assert status == 0, output
    result = json.loads(found.read_text())
    assert [row["ranks"] for row in result["rows"]] == [2] * 24 + [4] * 24
    for row in result["rows"]:
        assert row["network"] == "100mbit"
        assert row["ratio"] == pytest.approx(row["predicted_s"] / row["median_s"])
        assert row["within"] is (row["op"] != "broadcast")
        assert row["judged"] is (row["density"] is None or (row["density"], row["bytes"]) == (0.1, 4 << 20))
    assert [(one["ranks"], one["network"]) for one in result["calibrations"]] == [(2, "100mbit"), (4, "100mbit")]
    for calibration in result["calibrations"]:
        assert calibration["beta_s_per_byte"] == pytest.approx(_BETA)
        assert set(calibration) == {
            *("ranks", "network", "alpha_s", "beta_s_per_byte", "exchange", "gamma_s_per_byte"),
            *("message_s", "round_s", "points"),
        }
        assert [(one["kind"], one["bytes"]) for one in calibration["points"]] == [
            (one.operation, one.bytes) for one in calibration_plan()
        ]
        assert all(0 < one["min_s"] <= one["median_s"] <= one["p90_s"] for one in calibration["points"])
    assert result["within"] == 0.2
    assert result["machine"]["cores"] >= 1
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert "38 of 42 predictions from 256 KiB up are within 20 %" in output
    assert "worst: ratio 2.000 (broadcast, 256 KiB, 2 ranks)" in output
    assert "worst below: ratio 1.100 (sparse_allreduce split_allgather 1 %, 256 KiB, 2 ranks)" in output
    assert "β 8.000 ns/B (1.000 Gbit/s)" in output


@pytest.mark.usefixtures("half_as_fast")
def test_wrong_values_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "run", _ideal(wrong=1))
    status, output = _run("--ranks", "2", "--network", "tcp", "--sizes", "1MiB")
    assert status == 1
    assert "12 values are wrong" in output


def test_a_network_that_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise NetlabError("network namespaces need root: run the command as root (sudo)")

    monkeypatch.setattr(predictions, "run", run)
    status, output = _run("--ranks", "4")
    assert status == 1
    assert "4 ranks, 1gbit: network namespaces need root" in output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--network", "wifi", "use shm, tcp, or a rate"),
        ("--sizes", "6", "use a multiple of 4 bytes"),
        ("--ranks", "four", "'four' are no numbers: write them like 4,8"),
        ("--ranks", "4,5", "5 ranks cannot be calibrated in pairs: use even numbers from 2 up"),
        ("--ranks", "0", "use even numbers from 2 up"),
        ("--repetitions", "2", "'--repetitions'"),
        ("--json", "/nowhere/rows.json", "the folder /nowhere does not exist"),
        ("--plot-file", "/nowhere/plot.png", "the folder /nowhere does not exist"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    status, output = _run(option, value)
    assert status == 2
    assert message in output


def test_help_explains_every_option() -> None:
    status, output = _run("--help")
    assert status == 0
    for option in ("--ranks", "--network", "--sizes", "--repetitions", "--json", "--plot-file", "--timeout"):
        assert option in output


@pytest.mark.usefixtures("half_as_fast")
def test_the_table_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "run", _ideal())
    arguments = ("--ranks", "16", "--network", "100mbit", "--sizes", "256KiB,64MiB", "--repetitions", "3")
    output = CliRunner().invoke(_app, arguments, env={"COLUMNS": "80"}).output
    assert "…" not in output.replace(" … ", "")  # nothing is cut off
    for name in ("recursive_doubling", "sparse_allreduce", "split_allgather", "reduce_scatter"):
        assert name in output
    ring = next(line for line in output.splitlines() if "64 MiB" in line)
    assert ring.split() == ["64", "MiB", "64", "MiB", "590.56", "ms", "536.87", "ms", "1.100", "0"]
