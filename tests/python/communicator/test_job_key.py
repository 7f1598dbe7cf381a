"""TELEGRAD_JOB_KEY, TELEGRAD_JOB_KEY_FILE and TELEGRAD_INTEGRITY: who joins, and what those are told who do not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from telegrad.launch import Ranks

KEY = "b7e0f1d2c3a495867768594a3b2c1d0e"
OTHER = "00000000000000000000000000000000000"
SUMS = [[6.0, 6.0]] * 3


def _meet(environments: list[Mapping[str, str]]) -> list[dict[str, Any]]:
    said: dict[int, dict[str, Any]] = {}
    with Ranks(
        "job_key_program:meet",
        len(environments),
        timeout_s=90,
        environment={"PYTHONPATH": str(Path(__file__).parent)},
        environment_of=lambda rank: environments[rank],
        on_line=lambda rank, line: said.update({rank: json.loads(line)}),
    ) as ranks:
        exits = ranks.wait()
    for one in exits:
        assert KEY not in one.stderr
    assert KEY not in json.dumps(said)
    return [said[rank] for rank in range(len(environments))]


@pytest.mark.parametrize("transports", ["all", "tcp,self"])
@pytest.mark.parametrize(
    "environment",
    [{"TELEGRAD_JOB_KEY": KEY}, {"TELEGRAD_JOB_KEY": KEY, "TELEGRAD_INTEGRITY": "1"}, {"TELEGRAD_INTEGRITY": "1"}],
)
def test_ranks_with_one_key_join_and_refuse_nothing_of_each_other(environment: dict[str, str], transports: str) -> None:
    for found in _meet([{**environment, "UCX_TLS": transports}] * 3):
        assert found == {"sums": SUMS, "part": 3.0, "refused": 0}


def test_the_key_may_lie_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    from_file = {"TELEGRAD_JOB_KEY_FILE": str(file)}
    for found in _meet([from_file, {"TELEGRAD_JOB_KEY": KEY}, from_file]):
        assert found["sums"] == SUMS


@pytest.mark.parametrize(
    ("right", "odd", "text_of_odd", "text_of_right"),
    [
        ({"TELEGRAD_JOB_KEY": KEY}, {"TELEGRAD_JOB_KEY": OTHER}, "ranks 0, 1 have another", "rank 2 has another"),
        ({"TELEGRAD_JOB_KEY": KEY}, {}, "ranks 0, 1 have a TELEGRAD_JOB_KEY", "rank 2 has no TELEGRAD_JOB_KEY"),
        ({}, {"TELEGRAD_INTEGRITY": "1"}, "have TELEGRAD_INTEGRITY=0", "rank 2 has TELEGRAD_INTEGRITY=1"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(
    right: dict[str, str], odd: dict[str, str], text_of_odd: str, text_of_right: str
) -> None:
    *others, third = _meet([right, right, odd])
    for found in others:
        assert found["error"] == "TransportError"
        assert found["peer"] == 2
        assert text_of_right in found["text"]
    assert third["error"] == "TransportError"
    assert third["peer"] == 0
    assert text_of_odd in third["text"]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"TELEGRAD_JOB_KEY": "short"}, "TELEGRAD_JOB_KEY has 5 characters, but a key has 32 to 4096: make one with"),
        ({"TELEGRAD_JOB_KEY": ""}, "TELEGRAD_JOB_KEY has 0 characters"),
        ({"TELEGRAD_JOB_KEY": KEY, "TELEGRAD_JOB_KEY_FILE": "/x"}, "are both set: unset one"),
        ({"TELEGRAD_JOB_KEY_FILE": "/no/such/file"}, "cannot be read"),
        ({"TELEGRAD_JOB_KEY_FILE": "/"}, "is no regular file"),
        ({"TELEGRAD_INTEGRITY": "crc"}, "TELEGRAD_INTEGRITY=crc must be 1"),
    ],
)
def test_what_cannot_be_is_named_with_its_remedy(environment: dict[str, str], text: str) -> None:
    (found,) = _meet([environment])
    assert found["error"] == "ValueError"
    assert text in found["text"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(mode)
    (found,) = _meet([{"TELEGRAD_JOB_KEY_FILE": str(file)}])
    assert found["error"] == "ValueError"
    assert f"has mode {mode:04o}" in found["text"]
    assert "chmod 600" in found["text"]
