"""How checks are run: none can hang or break the others, and only what makes telegrad unusable is an error."""

from __future__ import annotations

import sys
import threading

import pytest

from telegrad.tools.doctor.installation import (
    Check,
    Finding,
    NotTried,
    ProbeFailed,
    as_json,
    ask,
    is_usable,
    reason_of,
    run_checks,
)


def _raises() -> list[Finding]:
    raise LookupError("no such\nfile")


def _leaves() -> list[Finding]:
    sys.exit("I go")


def _not_tried() -> list[Finding]:
    raise NotTried("the sun does not shine")


_GOOD = Check("good", lambda: [Finding("good", "ok", "fine"), Finding("also", "note", "slow", "be patient")])


def test_findings_come_one_by_one_in_order() -> None:
    begun: list[str] = []
    seen: list[Finding] = []
    found = run_checks(
        [_GOOD, Check("last", lambda: [Finding("last", "ok", "")])], on_begin=begun.append, on_finding=seen.append
    )
    assert begun == ["good", "last"]
    assert [finding.check for finding in found] == ["good", "also", "last"]
    assert seen == found


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (_raises, "the check failed: LookupError: no such file"),
        (_leaves, "the check failed: SystemExit: I go"),
        (list, "the check failed: it said nothing"),
    ],
)
def test_a_broken_check_is_a_line_and_the_others_run(run: object, text: str) -> None:
    found = run_checks([Check("broken", run, mend="mend me"), _GOOD])  # type: ignore[arg-type]
    assert found[0] == Finding("broken", "failed", text, "mend me")
    assert [finding.check for finding in found[1:]] == ["good", "also"]
    assert is_usable(found)


def test_a_broken_essential_check_is_an_error() -> None:
    found = run_checks([Check("core", _raises, essential=True), _GOOD])
    assert found[0].status == "error"
    assert not is_usable(found)


def test_a_hanging_check_is_told_as_such_and_the_others_run() -> None:
    never = threading.Event()
    slow = Check("slow", lambda: [Finding("slow", "ok", str(never.wait(30)))], timeout_s=0.2, mend="wake it")
    found = run_checks([slow, _GOOD])
    assert found[0] == Finding("slow", "failed", "the check hangs: not done within 0.2 s", "wake it")
    assert len(found) == 3
    never.set()


def test_what_was_not_tried_is_a_note_unless_essential() -> None:
    found = run_checks([Check("a", _not_tried, mend="no"), Check("b", _not_tried, essential=True)])
    assert found == [
        Finding("a", "note", "not tried: the sun does not shine"),
        Finding("b", "error", "not tried: the sun does not shine"),
    ]


def test_json_has_every_finding_and_the_verdict() -> None:
    assert as_json([Finding("a", "missing", "b", "c"), Finding("d", "error", "e")]) == {
        "kind": "telegrad doctor",
        "version": 1,
        "usable": False,
        "findings": [
            {"check": "a", "status": "missing", "text": "b", "mend": "c"},
            {"check": "d", "status": "error", "text": "e", "mend": ""},
        ],
    }


def test_a_long_reason_is_one_line_and_cut() -> None:
    assert reason_of(KeyError()) == "KeyError"
    assert reason_of(ValueError("x\n" * 1000)).count("\n") == 0
    assert len(reason_of(ValueError("x\n" * 1000))) < 400


def test_another_process_answers() -> None:
    assert ask("print('noise'); print(json.dumps({'a': 1}))", timeout_s=30) == {"a": 1}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("import sys; sys.exit(3)", "the process ended with status 3"),
        ("import os; os.kill(os.getpid(), 11)", "the process was ended by SIGSEGV"),
        ("import time; time.sleep(60)", "it was not done within 2 s"),
        ("print('{')", "the process gave no answer but '{"),
        ("print(3)", "the process gave no object but '3'"),
        ("", "the process gave no answer but ''"),
    ],
)
def test_a_process_that_does_not_answer_says_why(program: str, reason: str) -> None:
    with pytest.raises(ProbeFailed) as caught:
        ask(program, timeout_s=2 if "sleep" in program else 30)
    assert reason in str(caught.value)
