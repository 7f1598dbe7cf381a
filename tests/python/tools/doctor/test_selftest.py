"""The self-test with real ranks: it passes here, and finds what is wrong where something is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from telegrad import _core
from telegrad.tools.doctor.selftest import (
    CASES,
    KILLED,
    MISMATCHED,
    NETWORKS,
    CheckOutcome,
    SelfTest,
    as_json,
    checks_of,
    run,
)

pytestmark = [
    pytest.mark.ranks("exec"),
    pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX"),
]


def _environment(how: str) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "TELEGRAD_TEST_HOW": how}


def _wrong(how: str, timeout_s: float = 60.0) -> dict[str, str]:
    """The faults that the self-test finds over TCP with spoilt ranks, by check."""
    test = SelfTest(program="selftest_programs", environment=_environment(how), networks=("tcp",), timeout_s=timeout_s)
    return {outcome.check: outcome.fault for outcome in run(test) if outcome.fault}


def test_it_passes_here_says_each_check_as_it_comes_and_passes_over_lines_of_others() -> None:
    told: list[CheckOutcome] = []
    test = SelfTest(ranks=3, timeout_s=60.0, program="selftest_programs", environment=_environment("nonsense"))
    outcomes = run(test, on_outcome=told.append)
    assert [outcome for outcome in outcomes if outcome.fault] == []
    assert told == outcomes
    assert [(outcome.network, outcome.check) for outcome in outcomes] == checks_of(test)
    assert len(outcomes) == len(NETWORKS) * (len(CASES) + 2)


def test_a_wrong_sum_is_found_and_placed() -> None:
    wrong = _wrong("one rank computes wrongly")
    fault = "rank 1: 1 of 1000 values of the sum of 1000 elements are wrong: [17] is "
    assert set(wrong) == {"dense, ring", "dense, recursive doubling"}
    assert wrong["dense, ring"].startswith(fault)


def test_a_lost_entry_of_a_sparse_vector_is_found_on_all_ranks() -> None:
    wrong = _wrong("one rank loses an entry")
    assert set(wrong) == {"sparse into dense"}
    assert "rank 0: 1 of 50000 values" in wrong["sparse into dense"]
    assert "rank 1: 1 of 50000 values" in wrong["sparse into dense"]


def test_a_rank_that_dies_is_told_with_its_last_words_and_the_rest_goes_on() -> None:
    wrong = _wrong("a rank dies")
    first, *others = CASES
    assert "rank 1 ended with exit status 1: rank 1 does not feel well" in wrong[first]
    assert {wrong[check] for check in others} == {"not reached"}
    assert not {KILLED, MISMATCHED} & set(wrong)


def test_survivors_that_name_the_wrong_rank_are_found() -> None:
    wrong = _wrong("the survivors lie")
    assert set(wrong) == {KILLED}
    assert wrong[KILLED] == "rank 0 got PeerFailed (peer 0): it was me instead of PeerFailed of rank 1"


def test_a_hang_ends_with_the_time_limit_and_says_where() -> None:
    wrong = _wrong("the ranks hang", timeout_s=6.0)
    first = next(iter(CASES))
    assert wrong[first].startswith("not done within 6 s; a rank was here: File ")
    assert "in collectives" in wrong[first]
    assert wrong[KILLED] == "not reached within 6 s"


def test_one_rank_is_too_few() -> None:
    with pytest.raises(ValueError, match="ranks=1 must be at least 2"):
        run(SelfTest(ranks=1))


def test_json_says_whether_all_passed() -> None:
    test = SelfTest()
    good, bad = CheckOutcome("tcp", "barrier", "", 0.1), CheckOutcome("tcp", "sparse", "wrong")
    assert as_json([good], test)["passed"] is True
    assert as_json([good, bad], test) == {
        "kind": "telegrad self-test",
        "version": 1,
        "ranks": 2,
        "passed": False,
        "checks": [
            {"network": "tcp", "check": "barrier", "fault": "", "took_s": 0.1},
            {"network": "tcp", "check": "sparse", "fault": "wrong", "took_s": None},
        ],
    }
