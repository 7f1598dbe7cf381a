"""``telegrad simulate``: tables, files, and what it says to bad options."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lab.common import experiments
from telegrad import _core
from telegrad.tools.cli.simulate import SimulationSettings, app, sizes_of

COLLECTIVES = ("allreduce", "sparse-allreduce")


def simulate(*arguments: str, columns: int = 160) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": str(columns), "TERM": "dumb"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def rows_of(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["rows"])


def test_all_algorithms_over_lists_and_ranges(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    status, output = simulate("allreduce", "--ranks", "2..8", "--bytes", "4,64KiB", "--json", str(file))
    assert status == 0, output
    rows = rows_of(file)
    assert [(row["ranks"], row["bytes"], row["algorithm"]) for row in rows] == [
        (ranks, size, name)
        for ranks in (2, 4, 8)
        for size in (4, 65536)
        for name in ("ring", "recursive_doubling", "rabenseifner", "auto")
    ]
    for row in rows:
        assert row["time_s"] == pytest.approx(row["closed_form_s"], rel=0.01)
        assert row["events"] > 0
    for place in range(0, len(rows), 4):
        *named, auto = rows[place : place + 4]
        assert auto["time_s"] == min(row["time_s"] for row in named)
        assert auto["chosen"] in ("ring", "recursive_doubling", "rabenseifner")
    eight = next(row for row in rows if (row["ranks"], row["bytes"], row["algorithm"]) == (8, 65536, "ring"))
    assert (eight["messages_per_rank"], eight["bytes_per_rank"]) == (14, 2 * 7 * 8192)
    network = json.loads(file.read_text())["network"]
    assert network["name"] == "100gbit"
    assert network["alpha_s"] == 2e-6
    assert "recursive_doubling" in output
    assert "assumes RDMA" in output


def test_aluminum_s_figure(tmp_path: Path) -> None:
    """Recursive doubling is over 20 times as fast as the ring at 2,048 ranks and 8 KiB."""
    file = tmp_path / "rows.json"
    asked = ("allreduce", "--ranks", "2048", "--bytes", "8KiB", "--algorithm", "recursive_doubling")
    assert simulate(*asked, "--json", str(file))[0] == 0
    (row,) = rows_of(file)
    assert row["time_s"] * 20 < 2 * 2047 * 2e-6  # the ring's latencies alone


def test_a_plot_of_ranks_and_of_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    status, output = simulate("allreduce", "--ranks", "16", "--bytes", "8KiB", "--plot", "--json", "rows.json")
    assert status == 0, output
    assert "plot: simulate-allreduce.png" in output
    assert (tmp_path / "simulate-allreduce.png").read_bytes()[:4] == b"\x89PNG"
    rows = rows_of(tmp_path / "rows.json")
    assert {row["ranks"] for row in rows if row["bytes"] == 8192} == {2, 4, 8, 16}
    assert {row["bytes"] for row in rows if row["ranks"] == 16} == {8192, *(4 * 8**power for power in range(9))}


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_every_collective_draws_and_tells(operation: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn, file = tmp_path / "drawn.svg", tmp_path / "rows.json"
    status, output = simulate(
        operation, "--ranks", "5", "--bytes", "64KiB", "--plot-file", str(drawn), "--json", str(file)
    )
    assert status == 0, output
    assert f"plot: {drawn}" in output
    assert "<svg" in drawn.read_text()
    first = rows_of(file)[0]
    assert (first["operation"], first["ranks"]) == (operation.replace("-", "_"), 5)
    assert first["time_s"] > 0


def test_sparse_sums_fill_in(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    common = ("sparse-allreduce", "--ranks", "8", "--bytes", "4MiB", "--density", "0.01", "--json", str(file))
    assert simulate(*common)[0] == 0
    (spread,) = rows_of(file)
    assert simulate(*common, "--overlap", "1")[0] == 0
    (same,) = rows_of(file)
    entries = 1 << 20
    assert spread["algorithm"] == "split_allgather"
    assert spread["nnz"] == same["nnz"] == round(0.01 * entries)
    assert spread["result_nnz"] == pytest.approx(entries * (1 - 0.99**8), rel=0.02)
    assert same["result_nnz"] == same["nnz"]
    assert same["time_s"] < spread["time_s"]


def test_wire_formats_of_sparse_sums(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    common = ("sparse-allreduce", "--ranks", "8", "--bytes", "4MiB", "--density", "0.01", "--json", str(file))
    sent = {}
    for wire in ("raw", "blocked", "indices", "packed", "indices-bf16", "packed-bf16", "qsgd2", "auto"):
        status, output = simulate(*common, "--network", "1gbit", "--wire", wire)
        assert status == 0, output
        (row,) = rows_of(file)
        sent[wire], named = row["bytes_per_rank"], row["wire"]
    assert sent["raw"] > sent["blocked"] > sent["indices"] > sent["packed"] == sent["auto"]
    assert sent["auto"] > sent["indices-bf16"] > sent["packed-bf16"] > sent["qsgd2"]
    assert named == "packed-f32"  # a slow network: packing pays
    assert "sparse allreduce, packed-f32: virtual time" in output
    assert simulate(*common, "--network", "100gbit")[0] == 0
    assert rows_of(file)[0]["wire"] == "blocked-f32"
    # What rounds goes by all algorithms but one; with payloads its results are right within what rounding may do.
    assert simulate(*common, "--wire", "packed-int8", "--algorithm", "all", "--payloads")[0] == 0
    assert [row["algorithm"] for row in rows_of(file)] == ["split_allgather", "split_dense_allgather", "ring", "auto"]


@pytest.mark.parametrize(("ranks", "per_node"), [("2..16", 4), ("8", 16), ("8", 8)])
def test_by_two_levels_on_one_node_is_what_auto_is(ranks: str, per_node: int, tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "x.png"
    common = ("--bytes", "64KiB", "--ranks-per-node", str(per_node), "--json", str(file), "--plot-file", str(picture))
    status, output = simulate("allreduce", "--ranks", ranks, *common)
    assert status == 0, output
    by = {(row["ranks"], row["bytes"], row["algorithm"]): row for row in rows_of(file)}
    for (count, size, name), row in by.items():
        if name == "two_level":
            alone = count <= per_node
            assert row["chosen"] == (by[count, size, "auto"]["chosen"] if alone else "two_level")
    assert "two_level of ranks that are all on one node: what auto is there" in output


def test_a_narrow_place_cuts_no_number() -> None:
    common = ("allreduce", "--ranks", "256", "--bytes", "8KiB")
    (narrow, output), (wide, whole) = simulate(*common, columns=40), simulate(*common)
    assert (narrow, wide) == (0, 0)
    assert output.split() == whole.split()


def test_costs_nodes_noise_and_payloads_reach_the_simulator(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["allreduce", "--ranks", "8", "--bytes", "32KiB", "--algorithm", "recursive_doubling", "--jobs", "1"]

    def time_s(*more: str) -> float:
        status, output = simulate(*arguments, *more, "--json", str(file))
        assert status == 0, output
        return float(rows_of(file)[0]["time_s"])

    own = ("--alpha", "1e-5", "--beta", "1e-9", "--gamma", "0")
    assert time_s(*own) == pytest.approx(3 * (1e-5 + 32768 * 1e-9), rel=1e-6)
    assert time_s(*own, "--beta-exchange", "2e-9") == pytest.approx(3 * (1e-5 + 32768 * 2e-9), rel=1e-6)
    assert time_s(*own, "--payloads") == time_s(*own)
    assert time_s(*own, "--ranks-per-node", "4") < time_s(*own)
    assert time_s(*own, "--ranks-per-node", "4", "--oversubscription", "4") > time_s(*own, "--ranks-per-node", "4")
    noisy = (*own, "--jitter", "1", "--start-noise", "1e-4")
    assert time_s(*noisy, "--seed", "5") == time_s(*noisy, "--seed", "5") != time_s(*noisy, "--seed", "6")
    assert rows_of(file)[0]["closed_form_s"] is None


@pytest.mark.parametrize(
    ("operation", "option", "value", "message"),
    [
        ("allreduce", "--ranks", "4x", "'4x' is no number of ranks: write it like 2048, 4,64,2048 or 2..4096"),
        ("allreduce", "--ranks", "0", "0 ranks cannot be simulated: use 1 to 8,192"),
        (
            "allreduce",
            "--ranks",
            "2..9000",
            "9000 ranks cannot be simulated: use 1 to 8,192; memory grows with the pairs",
        ),
        ("allreduce", "--bytes", "99999999999GiB", "99999999999GiB cannot be simulated: use 1 TiB (1024GiB) at most"),
        ("allreduce", "--algorithm", "all,magic", "'magic' does not exist: use ring, recursive_doubling, rabenseifner"),
        ("allreduce", "--beta-exchange", "1e-12", "beta_exchange_s_per_byte=1e-12 is below beta_s_per_byte=8.16"),
        ("allreduce", "--seed", "18446744073709551616", "'--seed'"),
        ("allreduce", "--ranks-per-node", "99999999999", "'--ranks-per-node'"),
        ("allreduce", "--json", "/proc/rows.json", "cannot write /proc/rows.json: No such file or directory"),
        ("allreduce", "--plot-file", "/proc/plot.png", "cannot write /proc/plot.png: No such file or directory"),
        ("allreduce", "--ranks", "8..2", "range '8..2' ends before it begins: write the smaller number first"),
        ("allreduce", "--bytes", "6", "use a multiple of 4 bytes"),
        ("sparse-allreduce", "--bytes", "4..x", "write it like 4, 64KiB or 16MiB"),
        ("allreduce", "--algorithm", "magic", "use ring, recursive_doubling, rabenseifner, auto, all"),
        (
            "allreduce",
            "--network",
            "wifi",
            "network 'wifi' is not known: use 1gbit, 10gbit, 25gbit, 40gbit, 100gbit, 200gbit, 400gbit or any",
        ),
        ("allreduce", "--alpha", "-1", "alpha_s=-1.0 is no cost"),
        ("allreduce", "--jitter", "-1", "jitter=-1.0 must be a finite number, 0 or more"),
        ("allreduce", "--oversubscription", "2", "2 needs nodes: give --ranks-per-node too"),
        ("allreduce", "--node-beta", "1e-9", "1e-09 needs nodes: give --ranks-per-node too"),
        ("sparse-allreduce", "--density", "0", "0 is no share: use a number above 0 and up to 1"),
        ("sparse-allreduce", "--wire", "zip", "wire='zip' does not exist for sparse vectors: use auto, raw, blocked"),
        ("sparse-allreduce", "--wire", "packed-f64", "does not fit a sparse vector of f32: only float32 values"),
        ("sparse-allreduce", "--overlap", "1.5", "1.5 is no share: use a number from 0 to 1"),
        ("allreduce", "--json", "/nowhere/rows.json", "the folder /nowhere does not exist"),
        ("allreduce", "--plot-file", "/nowhere/plot.png", "the folder /nowhere does not exist"),
        ("allreduce", "--seed", "-1", "'--seed'"),
        ("allreduce", "--jobs", "0", "'--jobs'"),
    ],
)
def test_bad_options_name_option_value_and_remedy(operation: str, option: str, value: str, message: str) -> None:
    status, output = simulate(operation, option, value)
    said = " ".join(output.replace("│", " ").split())
    assert status == 2
    assert option in said
    assert message in said


def test_recursive_doubling_takes_no_rounded_values() -> None:
    asked = ("sparse-allreduce", "--ranks", "2", "--bytes", "4KiB", "--algorithm", "recursive_doubling")
    status, output = simulate(*asked, "--wire", "packed-bf16")
    assert status == 2
    said = " ".join(output.replace("│", " ").split())
    assert "recursive_doubling takes no rounded values, as 'packed-bf16' makes them: use another --algorithm" in said


@pytest.mark.parametrize("option", ["--json", "--plot-file"])
def test_a_file_that_cannot_be_written_after_all_is_said(option: str) -> None:
    status, output = simulate("allreduce", "--ranks", "3", "--bytes", "4", option, "/dev/full")
    assert status == 1
    assert "cannot write /dev/full: No space left on device" in output
    assert "the simulation failed" not in output


def test_files_are_looked_at_before_the_work_and_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("simulated")

    monkeypatch.setattr(_core, "measure", fails)
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("kept")
    link.symlink_to(tmp_path / "elsewhere.json")
    for path in (old, link, tmp_path / "new.json"):
        assert simulate("allreduce", "--algorithm", "ring", "--ranks", "2", "--json", str(path))[0] == 1
    assert old.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_vectors_may_be_empty(operation: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for more in ((), ("--payloads",)):
        status, output = simulate(operation, "--ranks", "5", "--bytes", "0", "--json", str(file), *more)
        assert status == 0, output
        assert {row["bytes"] for row in rows_of(file)} == {0}
        assert all(row["time_s"] > 0 for row in rows_of(file))


def test_all_may_be_one_of_several_algorithms(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    asked = ("allreduce", "--ranks", "4", "--bytes", "4", "--algorithm", "all,ring", "--json", str(file))
    assert simulate(*asked)[0] == 0
    assert [row["algorithm"] for row in rows_of(file)] == ["ring", "recursive_doubling", "rabenseifner", "auto"]


def test_a_signal_ends_a_long_point_at_once() -> None:
    """Any: which ones are interrupts, test_command_ends.py sees of all commands."""
    # Over a billion events: minutes, but for the signal.
    options = ("--ranks", "64", "--bytes", "1024GiB", "--algorithm", "ring", "--jobs", "1")
    start = "from telegrad.tools.cli import main; main()"
    command = (sys.executable, "-c", start, "simulate", "allreduce", *options)
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    try:
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        begun: list[int] = []
        while not any(_spent_s(child) > 3 for child in begun):  # until then a process may still be starting
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < deadline, "no process simulates"
            time.sleep(0.05)
            begun = [int(child) for child in children.read_text().split()]
        running.send_signal(signal.SIGTERM)
        output, _ = running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 130, output
    assert "interrupted: nothing was written" in output
    while any(_spent_s(child) > 0 for child in begun):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


def _spent_s(process: int) -> float:
    """Of processor time; 0 if it is over."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return 0.0 if state == "Z" else (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK")


def test_a_simulation_that_fails_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise RuntimeError("rank 0: allreduce(…) cannot go on")

    monkeypatch.setattr(_core, "measure", fails)
    status, output = simulate("allreduce", "--algorithm", "ring", "--ranks", "2")
    assert status == 1
    assert "cannot go on" in output


def test_ctrl_c_ends_with_status_130_and_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_core, "measure", interrupted)
    status, output = simulate("allreduce", "--algorithm", "ring", "--ranks", "2", "--json", str(tmp_path / "rows.json"))
    assert status == 130
    assert "interrupted: nothing was written" in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_help_teaches_with_an_example(operation: str) -> None:
    status, output = simulate(operation, "--help")
    said = " ".join(output.replace("│", " ").split())
    assert status == 0
    assert f"telegrad simulate {operation} --ranks" in said
    for field in (
        "--ranks",
        "--network",
        "--oversubscription",
        "--seed",
        "--plot-file",
    ):
        assert field in said


def test_ranges_and_lists() -> None:
    assert sizes_of("4..64MiB") == [4 * 4**power for power in range(13)]
    assert sizes_of("4,1KiB,4") == [4, 1024]
    assert sizes_of("4..100") == [4, 16, 64, 100]
    assert sizes_of("0..64") == [0, 4, 16, 64]
    assert sizes_of("0KiB,4") == [0, 4]
    assert SimulationSettings(ranks="2..4096").all_ranks() == [1 << power for power in range(1, 13)]
    assert SimulationSettings(ranks="3..7,64").all_ranks() == [3, 6, 7, 64]
    assert SimulationSettings(ranks="5..5").all_ranks() == [5]


def test_one_rank_that_takes_no_time_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "plot.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, output = simulate("allreduce", "--ranks", "1", "--gamma", "0", "--plot-file", str(drawn))
    assert status == 0, output
    assert drawn.is_file()


def test_options_that_the_document_names_exist() -> None:
    text = (Path(__file__).resolve().parents[4] / "docs" / "explanation" / "simulation.md").read_text()
    named = set(re.findall(r"`(--[a-z-]+)", text))
    lab = experiments.app(["simulated-faults", "simulated-membership", "collectives", "sparse-sweep"])
    options = {*_options_of(typer.main.get_command(app)), *_options_of(typer.main.get_command(lab))}
    assert {"--critical-path", "--timeline", "--oversubscription"} <= named
    assert named <= options


def _options_of(command: Any) -> set[str]:
    inner = (_options_of(one) for one in getattr(command, "commands", {}).values())
    return {option for parameter in command.params for option in parameter.opts}.union(*inner)
