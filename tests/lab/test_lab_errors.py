"""``python -m lab errors``: the words for what happened, and where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab import errors
from lab.common.experiments import app
from lab.errors import BEGIN, END, Row, began_s, described, insert, markdown, table_of
from telegrad import _core

pytestmark = pytest.mark.ranks("exec")

_needs_ucx = pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX")
_MACHINE = {"torch": "2.13.0", "date": "2026-01-02T03:04:05", "cores": 2, "commit": "abc"}


def _error(named: int | None, at_s: float = 10.0, **fields: Any) -> dict[str, Any]:
    base = {"error": "PeerFailed", "named": named, "host": False, "parameter": None, "text": "", "at_s": at_s}
    return {"end": {**base, **fields}}


def test_ranks_with_the_same_fate_share_a_line() -> None:
    said = {1: [{"fault": 9.0}], 0: [_error(1, 9.021)], 2: [_error(1, 9.04, host=True)]}
    cell = described("kill", said, {0: 0, 1: -9, 2: 0}, 15.0, time_out_s=None)
    assert cell == (
        "rank 0: PeerFailed that names rank 1 after 0.03 s; "
        "rank 2: PeerFailed that names rank 1 and its host after 0.04 s"
    )
    said[2] = [_error(1, 10.23)]
    cell = described("kill", said, {}, 15.0, time_out_s=None)
    assert cell == "ranks 0, 2: PeerFailed that names rank 1 after 1.2 s"


def test_silence_and_death_are_told() -> None:
    said = {1: [{"fault": 9.0}], 0: [_error(None, 9.0, error="RuntimeError")]}
    cell = described("freeze", said, {}, 15.0, time_out_s=1800.0)
    assert cell == (
        "rank 0: RuntimeError that names nobody after 0.01 s; rank 2: nothing within 15 s (its time-out is 30 min)"
    )
    called = {rank: [{"called": 9.0}] for rank in range(3)}
    cell = described("size", called, {0: -6, 1: 1, 2: 1}, 15.0, time_out_s=None)
    assert cell == "rank 0: the process dies (SIGABRT); ranks 1, 2: the process dies (exit status 1)"


@pytest.mark.parametrize(
    ("end", "fate"),
    [
        ({"result": 6.0, "reduction": "sum"}, "no error, and the sum 6"),
        ({"result": 6.008, "reduction": "sum"}, "no error, but 6.008 instead of the sum 6"),
        ({"result": None, "reduction": "sum"}, "no error, but NaN instead of the sum 6"),
        ({"result": 4.0, "reduction": "max"}, "no error, but 4 instead of the max 3"),
        ({"result": 2.0, "reduction": "avg"}, "no error, and the avg 2"),
        ({"spoilt": 3, "gradients": 4}, "no error, but NaN in 3 of 4 gradients"),
        ({"spoilt": 0, "gradients": 4}, "no error, and NaN in 0 of 4 gradients"),
    ],
)
def test_results_are_compared_with_the_truth(end: dict[str, Any], fate: str) -> None:
    said = {rank: [{"called": 1.0}, {"end": {"error": None, "at_s": 2.0, **end}}] for rank in range(3)}
    assert described("reduction", said, {}, 15.0, time_out_s=None) == f"ranks 0, 1, 2: {fate}"


def test_a_parameter_is_named() -> None:
    said = {rank: [{"called": 9.99}, _error(1)] for rank in range(3)}
    said[1][1] = _error(1, error="NonFiniteGradient", parameter="module.0.weight")
    assert "rank 1: NonFiniteGradient that names rank 1 and the parameter `module.0.weight` after" in described(
        "nan", said, {}, 15.0, time_out_s=None
    )


def test_a_mismatch_begins_with_the_last_call() -> None:
    said = {0: [{"called": 1.0}], 1: [{"called": 3.0}]}
    assert began_s("size", said) is None
    assert began_s("size", {**said, 2: [{"called": 2.0}]}) == 3.0
    assert began_s("kill", said) is None
    assert began_s("kill", {1: [{"fault": 5.0}]}) == 5.0


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    rows = [Row("`kill -9`", {"telegrad": "ranks 0, 2: a | b", "gloo": "rank 0: c; rank 2: d"})]
    text = markdown(rows, ["telegrad", "gloo"], _MACHINE, "python -m lab errors")
    assert "| `kill -9` | ranks 0, 2: a \\| b | rank 0: c; rank 2: d |" in text
    assert "on 2026-01-02, 2 cores, torch 2.13.0, commit abc" in text
    page = tmp_path / "errors.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):  # again changes nothing
        insert(text, page)
        assert page.read_text() == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"
    assert table_of(rows, ["telegrad", "gloo"]).row_count == 1


@pytest.mark.parametrize("text", ["", f"{END}\n{BEGIN}\n", f"{BEGIN}\n", f"{BEGIN}\n{BEGIN}\n{END}\n"])
def test_a_page_without_markers_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "errors.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="must hold the lines"):
        insert("table", page)
    assert page.read_text() == text


@_needs_ucx
def test_what_really_happens_is_told() -> None:
    done = CliRunner().invoke(
        app(["errors"]), ["errors", "--peer", "none", "--scenes", "kill,size"], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0, done.output
    assert "PeerFailed that names rank 1" in done.output
    assert "MismatchedCall that names rank 1" in done.output


def test_the_page_names_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "errors.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    monkeypatch.setattr(errors, "measure", lambda *_, **__: [Row("`kill -9`", {"telegrad": "rank 0: c"})])
    done = CliRunner().invoke(app(["errors"]), ["errors", "--peer", "none", "--give-up", "3", "--into", str(page)])
    assert done.exit_code == 0, done.output
    assert "Measured by `python -m lab errors --peer none --give-up 3` on" in page.read_text()


def test_a_page_that_would_not_do_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(errors, "measure")
    page = tmp_path / "errors.md"
    page.write_text("no markers")
    done = CliRunner().invoke(app(["errors"]), ["errors", "--into", str(page)], env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "must hold the lines" in done.output
    done = CliRunner().invoke(
        app(["errors"]), ["errors", "--scenes", "kill", "--into", str(page)], env={"COLUMNS": "300"}
    )
    assert done.exit_code == 2
    assert "would lose freeze, size, dtype, reduction, nan: leave out --scenes, or this" in done.output
    assert page.read_text() == "no markers"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--peer", "nccl", "use gloo or none"),
        ("--scenes", "flood", "use kill, freeze"),
        ("--into", "/nowhere/errors.md", "does not exist"),
    ],
)
def test_bad_options_name_the_remedy(option: str, value: str, message: str) -> None:
    done = CliRunner().invoke(app(["errors"]), ["errors", option, value], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
