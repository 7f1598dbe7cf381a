"""``telegrad simulate training-step``: what it simulates, prints, writes and draws, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from telegrad.synchronizer.trace import Trace
from telegrad.tools.advise.sending import SCHEMES
from telegrad.tools.advise.step import PLANS
from telegrad.tools.cli.simulate import app


def step(*arguments: str, columns: int = 120) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["training-step", *arguments], env={"COLUMNS": str(columns), "TERM": "dumb"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def written(*arguments: str, file: Path) -> dict[str, Any]:
    status, output = step(*arguments, "--json", str(file))
    assert status == 0, output
    return dict(json.loads(file.read_text()))


def test_gradients_of_float16_take_what_those_of_bfloat16_take(tmp_path: Path) -> None:
    options = ("--ranks", "16", "--network", "1gbit", "--scheme", "dense", "--gradients")
    half = written(*options, "float16", file=tmp_path / "half.json")
    brain = written(*options, "bfloat16", file=tmp_path / "brain.json")
    assert (half["gradients"], half["rows"]) == ("float16", brain["rows"])


def test_gradients_of_bfloat16_take_half_the_network(tmp_path: Path) -> None:
    options = ("--ranks", "16", "--network", "1gbit", "--scheme", "dense,sparse")
    wide = written(*options, file=tmp_path / "wide.json")
    narrow = written(*options, "--gradients", "bfloat16", file=tmp_path / "narrow.json")
    assert (wide["gradients"], narrow["gradients"]) == ("float32", "bfloat16")
    for one, other in zip(narrow["rows"], wide["rows"], strict=True):
        assert one["compute_s"] == other["compute_s"]
        least = 0.49 if one["scheme"] == "dense" else 0.5
        assert least < one["communicate_s"] / other["communicate_s"] < (0.55 if one["scheme"] == "dense" else 0.95)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gradients", "float64"), "'float64' is not float32, bfloat16, float16"),
        (("--gradients", "float16"), "float16 is sent densely: give --scheme dense"),
        (("--gradients", "bfloat16", "--scheme", "qsgd8"), "bfloat16 is not quantised: leave qsgd out"),
        (("--gradients", "bfloat16", "--outer", "30", "--ranks", "4"), "--outer has no use for it"),
    ],
)
def test_gradients_that_are_refused(options: tuple[str, ...], message: str) -> None:
    status, output = step(*options, columns=200)
    assert status == 2
    assert message in output


def test_a_sweep_to_4096_ranks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "drawn.svg"
    found = written("--plot-file", str(drawn), file=tmp_path / "rows.json")
    assert {(row["ranks"], row["scheme"]) for row in found["rows"]} == {
        (1 << power, scheme) for power in range(1, 13) for scheme in ("dense", "sparse", "oktopk")
    }
    assert found["network"]["name"] == "10gbit"
    assert "Tesla V100: half of its peak" in found["device"]
    picture = drawn.read_text()
    for label in ("resnet50", "dense", "oktopk", "time of a step"):
        assert label in picture


def test_the_table_names_what_differs(tmp_path: Path) -> None:
    status, output = step("--ranks", "4,8", "--model", "vgg16", "--scheme", "dense", "--plan", "all")
    assert status == 0
    assert "training steps of vgg16, 10gbit" in output
    assert "α 20 µs" in output
    assert "half of its peak" in output
    for plan in PLANS:
        assert plan in output
    assert "select" not in output.split("exposed:")[0]


def test_all_schemes(tmp_path: Path) -> None:
    found = written("--ranks", "4", "--scheme", "all", file=tmp_path / "rows.json")
    assert [row["scheme"] for row in found["rows"]] == [*SCHEMES]


def test_strong_scaling_with_inefficient_small_batches(tmp_path: Path) -> None:
    options = ("--ranks", "8..256", "--global-samples", "256", "--fixed-ms", "4", "--scheme", "dense")
    found = written(*options, file=tmp_path / "rows.json")
    assert [row["samples"] for row in found["rows"]] == [32, 16, 8, 4, 2, 1]
    first, last = found["rows"][0], found["rows"][-1]
    assert last["compute_s"] - 0.004 == pytest.approx((first["compute_s"] - 0.004) / 32)


def test_a_recorded_profile(tmp_path: Path) -> None:
    trace = tmp_path / "mine.json"
    trace.write_text(Trace(("b", "a"), (4 << 20, 8 << 20), (0.01, 0.02), 0.015, "by hand").to_json())
    found = written("--trace", str(trace), "--ranks", "4", file=tmp_path / "rows.json")
    assert found["workload"] == "by hand"
    assert {(row["model"], row["samples"]) for row in found["rows"]} == {("mine", 1)}
    assert found["rows"][0]["compute_s"] == pytest.approx(0.045)
    halved = written("--trace", str(trace), "--ranks", "4", "--compute-ms", "22.5", file=tmp_path / "rows.json")
    assert halved["rows"][0]["compute_s"] == pytest.approx(0.0225)


def test_nodes_and_overlap_change_the_step(tmp_path: Path) -> None:
    common = ("--ranks", "16", "--scheme", "dense")

    def step_s(*more: str) -> float:
        return float(written(*common, *more, file=tmp_path / "rows.json")["rows"][0]["step_s"])

    flat, nodes = step_s(), step_s("--ranks-per-node", "4")
    shared = step_s("--ranks-per-node", "4", "--oversubscription", "4")
    assert nodes < shared < flat * 1.05
    assert step_s("--no-overlap") > flat


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "resnet"), "--model: 'resnet' is not known: use one of resnet50, "),
        (("--device", "tpu"), "--device: device 'tpu' is not known: use one of k80, "),
        (("--scheme", "topk"), "--scheme: 'topk' does not exist: use dense, sparse, "),
        (("--plan", "best"), "--plan: 'best' does not exist: use fixed, wfbp, single, greedy, optimal, all"),
        (
            ("--json", "same.png", "--plot-file", "same.png"),
            "--plot-file: same.png is what --json writes: name another",
        ),
        (("--density", "0"), "--density: 0 is no share: use a number above 0, up to 1"),
        (("--samples", "0"), "--samples: 0 is no mini-batch: use a number above 0"),
        (("--global-samples", "-1"), "--global-samples: -1 is no mini-batch"),
        (("--global-samples", "7", "--ranks", "4,8"), "--global-samples: 7 is less than a sample for each of 8 ranks"),
        (("--scheme", "dense,qsgd4", "--density", "0.1"), "--density: --scheme dense,qsgd4 selects no entries"),
        (("--compute-ms", "0"), "--compute-ms: 0 is no time: use milliseconds above 0"),
        (("--fixed-ms", "-1"), "--fixed-ms: -1 is no time: use milliseconds, 0 or more"),
        (("--compute-ms", "5", "--fixed-ms", "6"), "--fixed-ms: fixed_s=0.006 must be from 0 to 0.005"),
        (("--network", "fast"), "--network: network 'fast' is not known"),
        (("--ranks", "10000"), "--ranks: 10000 ranks cannot be simulated"),
        (("--ranks", "6", "--ranks-per-node", "4"), "--ranks-per-node: 4 ranks a node do not make 6 ranks"),
    ],
)
def test_bad_options_are_named_with_a_remedy(options: tuple[str, ...], said: str) -> None:
    status, output = step(*options, columns=1000)
    assert status == 2
    assert said in output


def test_a_fixed_part_beyond_a_recorded_step_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "mine.json"
    trace.write_text(Trace(("a",), (4 << 20,), (0.01,), 0.005).to_json())
    status, output = step("--trace", str(trace), "--fixed-ms", "20", columns=1000)
    assert status == 2
    assert "--fixed-ms: fixed_s=0.02 must be from 0 to 0.015" in output


@pytest.mark.parametrize(
    ("text", "said"),
    [("3", "this is no trace"), ("{", "cannot read"), (Trace((), (), (), 1.0).to_json(), "has no gradients")],
    ids=["number", "damaged", "empty"],
)
def test_a_file_that_is_no_profile_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    status, output = step("--trace", str(path), columns=1000)
    assert status == 2
    assert "--trace: " in output
    assert said in output


def test_a_known_model_beside_a_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(Trace(("a",), (4 << 20,), (0.01,), 0.005).to_json())
    status, output = step("--trace", str(path), "--model", "vgg16", columns=1000)
    assert status == 2
    assert "--model: --trace says what a step computes: leave this out" in output


def test_brackets_in_names_of_files_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("ü [b].json").write_text(Trace(("a",), (4 << 20,), (0.01,), 0.005).to_json())
    files = ("--json", "rows [b].json", "--plot-file", "[b].png")
    status, output = step("--trace", "ü [b].json", "--ranks", "4", *files)
    assert status == 0
    assert "training steps of ü [b], 10gbit" in output
    assert "rows: rows [b].json" in output
    assert "plot: [b].png" in output
    assert "ü [b]; selection" in output


def test_files_that_cannot_be_written_are_said_first(tmp_path: Path) -> None:
    status, output = step("--json", str(tmp_path / "none" / "rows.json"), columns=1000)
    assert status == 2
    assert "does not exist: make it first" in output
    assert "training steps" not in output


def test_rounds_of_an_outer_loop(tmp_path: Path) -> None:
    arguments = ("--outer", "30", "--model", "qwen-72b", "--ranks", "4,20", "--network", "500mbit")
    arguments += ("--compute-ms", "40000")
    status, output = step(*arguments)
    assert status == 0
    assert "rounds of qwen-72b, 30 inner steps, 500mbit" in output
    assert "assumes TCP" in output
    found = written(*arguments, file=tmp_path / "rows.json")["rows"]
    assert [row["replicas"] for row in found] == [4] * 6 + [20] * 6
    assert all((row["every"], row["compute_s"]) == (30, pytest.approx(1200.0)) for row in found)
    dense, _, _, _, sparse, streaming = found[6:]
    assert dense["exchange_s"] > 9000 > 500 > sparse["exchange_s"]
    assert streaming["exposed_s"] == 0


@pytest.mark.parametrize("option", ["--scheme=dense", "--density=0.1", "--plan=all", "--no-overlap", "--plot"])
def test_an_outer_loop_refuses_what_it_does_not_use(option: str) -> None:
    status, output = step("--outer", "30", option)
    assert status == 2
    assert "leave this out" in output


def test_an_outer_loop_of_one_replica() -> None:
    status, output = step("--outer", "30", "--ranks", "1")
    assert status == 2
    assert "--ranks" in output
    assert "1 replica exchanges nothing: give at least 2" in output
