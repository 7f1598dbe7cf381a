"""``python -m lab topk --bytes``: all bytes of calls, beside the bound and beside another version."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from topk_recordings import recording
from typer.testing import CliRunner

from lab.topk import beside, command, made_up_calls, timed_calls
from lab.topk.made_up_calls import made, rows_of
from lab.topk.schemes import most_bytes
from lab.topk.traffic import BESIDE, THIS, Part, all_rows, made_up_rows, parts_of, ratios, recorded_rows, summary
from telegrad.launch import RankFailed
from telegrad.sparse_vector import SparseVector

# Answers as a rank does, with a checksum of its own for each version.
_SAYS_ITS_VERSION = """
import json, os, sys, zlib
folder, version = sys.argv[1:3]
print(json.dumps({"ready": True}), flush=True)
for _ in open(f"{folder}/{version}-{os.environ['TELEGRAD_RANK']}"):
    row = {"seconds": 1.0, "bytes": 1, "checksum": zlib.crc32(version.encode()), "exact": True}
    print(json.dumps(row), flush=True)
"""

_app = typer.Typer()
_app.command()(command.command)


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(_app, arguments, env={"COLUMNS": "220"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """Runs the same telegrad, but is another file."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    file.chmod(0o755)
    return file


def test_what_a_call_moves_is_what_its_reports_say() -> None:
    from telegrad import OkTopkState

    given = [SparseVector(*made("uniform", rank, 0, 2000, 20), 2000) for rank in range(5)]
    done, row = made_up_calls.called(given, [OkTopkState(20) for _ in range(5)])
    reports = [one.report for one in done]
    assert row["bytes_max"] == max(max(one.bytes_sent, one.bytes_received) for one in reports)
    assert (row["given"], row["kept"], row["exact"]) == (20, 20, True)
    assert row["time_s"] > 0


def test_entries_are_as_described() -> None:
    indices, values = made("uniform", 1, 0, 500, 5)
    assert indices.size == np.unique(indices).size == 5
    assert values.dtype == np.float32
    assert np.unique(np.abs(values)).size == 5
    assert not np.array_equal(indices, made("uniform", 1, 1, 500, 5)[0])
    assert set(made("ties", 1, 0, 500, 5)[1]) == {1.0}
    assert made("ties-one-full", 0, 0, 500, 5)[0].size == 500
    assert made("ties-one-full", 1, 0, 500, 5)[0].size == 5


@pytest.mark.parametrize("entries", ["uniform", "ties", "ties-one-full"])
def test_calls_keep_to_the_bound_and_ties_to_2k(entries: str) -> None:
    rows = made_up_rows(Part(THIS, entries, 6, 30, 3), None)
    assert [row["call"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert 0 < row["bytes_of_bound"] <= 1
        assert row["bytes_over_4k"] == row["bytes_max"] / 120
        assert 30 - 7 <= row["kept"] <= 60
        most = (max(row["given"], row["kept"]), 30, 6, 3000)
        steps = {name: row[name] for name in ("cut", "exact", "balanced")}
        assert row["bound_bytes"] == most_bytes(*most, **steps) <= most_bytes(*most)


def test_recorded_gradients_are_summed_with_residuals() -> None:
    rows = list(recorded_rows(recording(), 0.01, 4, calls=3))
    assert [row["call"] for row in rows] == [0, 1, 2]
    assert {row["k"] for row in rows} == {36}
    assert all(row["bytes_of_bound"] <= 1 for row in rows)
    assert rows[0]["exact"]
    assert rows[0]["kept"] == 36


def test_another_version_makes_the_same_calls(other_python: Path) -> None:
    parts = [Part(version, "uniform", 3, 20, 2) for version in (THIS, BESIDE)]
    seen: list[str] = []
    rows = all_rows(parts, other_python, None, 0.01, on_done=seen.append)
    here, there = rows[:2], rows[2:]
    for one, other in zip(here, there, strict=True):
        assert one["bytes_max"] == other["bytes_max"]
        assert one["time_s"] == other["time_s"]
    assert seen == ["uniform, 3 ranks, k = 20", "uniform, 3 ranks, k = 20 (beside)"]
    assert ratios(rows) == ["3 ranks, k = 20: 1.0 times fewer bytes, 1.00 of the time"]
    lines = summary(rows)
    assert [line[0] for line in lines] == ["uniform", "uniform (beside)"]
    assert lines[1][5] == "–"
    assert lines[0][7] == "1/2"


def test_a_version_that_fails_says_why(tmp_path: Path) -> None:
    file = tmp_path / "python"
    file.write_text("#!/bin/sh\necho no such collective >&2\nexit 3\n")
    file.chmod(0o755)
    with pytest.raises(RuntimeError, match="failed: no such collective"):
        made_up_rows(Part(BESIDE, "uniform", 2, 5, 1), file)


def test_rows_come_as_a_program_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", ['["ties", 2, 5, 1]'])
    made_up_calls.main()
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row == next(rows_of("ties", 2, 5, 1))


def test_ties_are_among_ranks_that_were_asked_for() -> None:
    parts = parts_of([4, 8], [50, 20], 3, [(8, 50)])
    assert [part.ranks for part in parts if part.version == THIS and part.entries == "uniform"] == [4, 8, 4, 8]
    assert [(part.ranks, part.k) for part in parts if part.version == BESIDE] == [(8, 50)]
    assert {(part.entries, part.ranks, part.k) for part in parts if part.entries != "uniform"} == {
        ("ties", 4, 20),
        ("ties-one-full", 4, 20),
    }


def test_the_command_writes_rows_and_says_both_versions(
    tmp_path: Path, other_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, written = tmp_path / "gradients.npz", tmp_path / "rows.json"
    recording(8).save(kept)
    monkeypatch.setattr(command, "_BESIDE", ((8, 20), (8, 10)))
    options = ["--bytes", "--ranks", "4,8", "--k", "20", "--calls", "2", "--gradients", str(kept)]
    status, said = _run(*options, "--beside", str(other_python), "--json", str(written))
    assert status == 0
    assert "8 ranks, k = 20: 1.0 times fewer bytes" in said
    result: dict[str, Any] = json.loads(written.read_text())
    assert {(row["version"], row["entries"], row["ranks"]) for row in result["rows"]} == {
        ("this", "uniform", 4),
        ("this", "uniform", 8),
        ("beside", "uniform", 8),
        ("this", "ties", 4),
        ("this", "ties-one-full", 4),
        ("this", "recorded", 4),
        ("this", "recorded", 8),
    }
    assert result["about"]["gradients"] == "gradients of lstm after 5 steps"


def test_calls_over_a_network_are_of_both_versions_in_turn(
    tmp_path: Path, other_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, written = tmp_path / "gradients.npz", tmp_path / "rows.json"
    recording(2).save(kept)
    monkeypatch.setattr(beside, "RANKS", 2)
    monkeypatch.setattr(beside, "BLOCKS", (1, 2))
    monkeypatch.setattr(beside, "_CALIBRATION_S", 0.5)
    options = ["--bytes", "--ranks", "2", "--k", "20", "--calls", "1", "--gradients", str(kept), "--samples", "3"]
    status, said = _run(*options, "--beside", str(other_python), "--network", "tcp", "--json", str(written))
    assert status == 0
    assert "2 ranks over tcp, recorded gradients, k = 36" in said
    rows = json.loads(written.read_text())["timed"]
    assert [(row["version"], row["blocks"], row["k"]) for row in rows] == [
        ("this", 1, 36),
        ("beside", 1, 36),
        ("this", 2, 72),
        ("beside", 2, 72),
    ]
    for row in rows:
        assert (row["network"], row["ranks"], row["samples"], row["exact"]) == ("tcp", 2, 3, 1)
        assert row["n"] == row["blocks"] * recording().elements
        assert 0 < row["min_s"] <= row["median_s"]
    for this, other in zip(rows[::2], rows[1::2], strict=True):
        assert other["bytes"] == pytest.approx(this["bytes"], rel=0.2)  # each chooses its own messages


def test_each_version_of_a_timed_call_takes_its_turn_and_all_sums_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    program = tmp_path / "wrong.py"
    program.write_text(_SAYS_ITS_VERSION)
    monkeypatch.setattr(timed_calls, "__file__", str(program))
    versions = {THIS: Path(sys.executable), BESIDE: Path(sys.executable)}
    with pytest.raises(RuntimeError, match="differ in the first sum, which is exact: 2 checksums"):
        beside.timed_rows(
            versions, recording(), 0.01, network="tcp", ranks=2, blocks=1, samples=4, on_sample=seen.append
        )
    order = [said.partition(":")[0] for said in seen]
    assert order == [THIS, BESIDE, BESIDE, THIS, THIS, BESIDE, BESIDE, THIS]


def test_a_timed_rank_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import sys\nsys.exit('no such collective')\n")
    monkeypatch.setattr(timed_calls, "__file__", str(program))
    with pytest.raises(RankFailed, match="no such collective"):
        beside.timed_rows({THIS: Path(sys.executable)}, recording(), 0.01, network="tcp", ranks=2, blocks=1, samples=1)
    program.write_text("")
    with pytest.raises(RuntimeError, match="ranks ended before they were told to"):
        beside.timed_rows({THIS: Path(sys.executable)}, recording(), 0.01, network="tcp", ranks=2, blocks=1, samples=1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--bytes", "--simulate"), "--bytes has no such choice"),
        (("--bytes", "--network", "1gbit"), "--bytes needs it for calls over a network, by --beside"),
        (("--bytes", "--samples", "5"), "--bytes needs it for calls over a network, by --beside"),
        (("--bytes", "--blocks", "5"), "--bytes has no such choice"),
        (("--k", "5"), "it is for --bytes"),
        (("--bytes", "--k", "0"), "is no list of numbers of entries"),
        (("--bytes", "--k", "5,x"), "is no list of numbers of entries"),
        (("--bytes", "--ranks", "2048"), "use 2 to 1024 ranks"),
        (("--bytes", "--beside", "/bin/false"), "is no Python with another telegrad"),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], why: str) -> None:
    status, said = _run(*options)
    assert status == 2
    assert why in said
