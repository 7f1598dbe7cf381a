"""What the judge of fault trials finds, with handmade words of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.faults.command import again, failed, percentile, summary, table_of
from lab.faults.judge import Seen, Verdict, judge
from lab.faults.trials import Call, Options, Trial

_CALLS = (Call("barrier"), Call("all_reduce", 10), Call("barrier"))


def _trial(kind: str, **fields: Any) -> Trial:
    odd = {"odd": (1,), "odd_calls": (Call("all_reduce", 11),)} if kind == "count" else {}
    fields = {"batches": tuple((call,) for call in _CALLS), "culprit": 1, "size": 3, **odd, **fields}
    return Trial(seed=5, kind=kind, network="shm", at=1, delay_s=0.0, liveness_timeout_s=8.0, **fields)


def _end(error: str | None, rank: int, at_s: float = 10.5, **fields: Any) -> dict[str, Any]:
    ended = {"error": error}
    if error:
        ended |= {"text": "mistake 5", "at_s": at_s, "at_call": 1, "since_s": 10.0, "rank": rank, "peer": 1}
    line = {"ended": ended, "closed_s": 0.1, "called_s": [1.0, 10.0 + rank / 10], "checked": 1, "wrong": []}
    return {**line, "passed_mismatch": False, "touched": False, "descriptors": 0, **fields}


def _killed(**changes: Any) -> Seen:
    said = {0: [_end("PeerFailed", 0)], 1: [{"fault": 10.25}], 2: [_end("PeerFailed", 2, 11.0)]}
    return replace(Seen(said=said, returncodes=[0, -9, 0]), **changes)


def _mismatched() -> Seen:
    return Seen({rank: [_end("MismatchedCall", rank)] for rank in range(3)}, [0, 0, 0])


def _found(verdict: Verdict) -> list[tuple[str, int | None]]:
    return [(one.sort, one.rank) for one in verdict.violations]


def test_a_killed_rank_that_all_survivors_name() -> None:
    verdict = judge(_trial("kill"), _killed())
    assert verdict.violations == ()
    assert verdict.detected_s == {0: 0.25, 2: 0.75}
    assert (verdict.limit_s, verdict.late, verdict.closed_s, verdict.checked) == (1.0, False, 0.1, 2)
    row = verdict.row()
    assert (row["seed"], row["kind"], row["blamed"], row["violations"]) == (5, "kill", 1, [])
    late = judge(_trial("kill"), _killed(said={0: [_end("PeerFailed", 0, 12.0)], 1: [{"fault": 10.0}]}))
    assert late.late


def test_a_mismatch_is_timed_from_the_last_ranks_call() -> None:
    verdict = judge(_trial("count"), _mismatched())
    assert verdict.violations == ()
    assert verdict.detected_s == pytest.approx(dict.fromkeys(range(3), 0.3))
    assert verdict.late
    assert judge(_trial("freeze"), _killed()).limit_s == 10.0


def test_a_hang() -> None:
    seen = Seen(
        {0: [_end("PeerFailed", 0)], 1: [{"fault": 1.0}]}, [None] * 3, hung=(2,), where="rank 2 was here:\nwait"
    )
    verdict = judge(_trial("kill"), seen)
    assert _found(verdict) == [("hang", 2)]
    text = failed(verdict, seen, Options())
    assert "wait" in text
    assert "python -m lab faults --only 5 --ranks 2..8 --network shm,tcp" in text


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"wrong": ["call 0, all_reduce: 1 of 10 values"]}, ("wrong sum", 0)),
        ({"touched": True}, ("wrong sum", 0)),
        ({"passed_mismatch": True}, ("wrong error", 0)),
        ({"descriptors": 2}, ("left behind", 0)),
    ],
)
def test_what_a_rank_must_not_have_seen(change: dict[str, Any], found: tuple[str, int]) -> None:
    seen = _mismatched()
    seen = replace(seen, said={**seen.said, 0: [_end("MismatchedCall", 0, **change)]})
    assert _found(judge(_trial("count"), seen)) == [found]


def test_a_rooted_operation_may_go_through_and_the_next_one_fails() -> None:
    batches = ((Call("barrier"),), (Call("broadcast", 10, root=0),), (Call("barrier"),))
    trial = _trial("count", batches=batches, odd_calls=(Call("broadcast", 11, root=0),))
    seen = _mismatched()
    through = _end("MismatchedCall", 0, passed_mismatch=True, called_s=[1.0, 10.0, 10.3])
    through["ended"]["since_s"] = 10.45
    verdict = judge(trial, replace(seen, said={**seen.said, 0: [through]}))
    assert verdict.violations == ()
    assert verdict.detected_s[0] == pytest.approx(0.05)  # it could not know before its next call


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"peer": 2}, "wrong culprit"),
        ({"peer": None}, "wrong culprit"),
        ({"host": "elsewhere"}, "wrong culprit"),
        ({"host": None}, "wrong culprit"),
        ({"error": "TransportError"}, "wrong error"),
        ({"error": None}, "wrong error"),
        ({"rank": 1}, "wrong error"),
    ],
)
def test_survivors_that_say_the_wrong_thing(change: dict[str, Any], found: str) -> None:
    line = _end("PeerFailed", 0)
    line["ended"] |= change
    seen = _killed()
    assert _found(judge(_trial("kill"), replace(seen, said={**seen.said, 0: [line]}))) == [(found, 0)]


def test_an_error_where_nothing_happened() -> None:
    sound = {rank: [_end(None, rank)] for rank in range(3)}
    assert judge(_trial("none"), Seen(sound, [0, 0, 0])).violations == ()
    verdict = judge(_trial("none"), Seen({**sound, 2: [_end("PeerFailed", 2)]}, [0, 0, 0]))
    assert _found(verdict) == [("wrong error", 2)]
    assert verdict.limit_s is None
    assert not verdict.late


@pytest.mark.parametrize(
    ("kind", "own", "text", "uncaught", "code"),
    [
        ("exception", "DeliberateMistake", "mistake 5", True, 1),
        ("exception", "DeliberateMistake", "mistake 5", False, 0),
        ("interrupt", "KeyboardInterrupt", "KeyboardInterrupt", True, -2),
        ("abort", "TransportError", "mistake 5", True, 0),
    ],
)
def test_who_ends_by_itself_says_why(kind: str, own: str, text: str, uncaught: bool, code: int) -> None:
    trial = _trial(kind, uncaught=uncaught)
    ends = {rank: _end("PeerFailed", rank) for rank in (0, 2)}
    for line in ends.values():
        line["ended"]["text"] = f"rank 1 ended: {text}"
    said = {0: [ends[0]], 1: [{"fault": 10.0}, _end(own, 1)], 2: [ends[2]]}
    assert judge(trial, Seen(said, [0, code, 0])).violations == ()
    assert _found(judge(trial, Seen(said, [0, 0 if code else 1, 0]))) == [("wrong error", 1)]
    ends[2]["ended"]["text"] = "rank 1 ended"
    assert _found(judge(trial, Seen(said, [0, code, 0]))) == [("wrong error", 2)]
    said[1][1]["ended"]["error"] = "OSError"
    assert _found(judge(trial, Seen(said, [0, code, 0])))[0] == ("wrong error", 1)


@pytest.mark.parametrize(("thaws", "code"), [(True, 0), (False, -9)])
def test_a_frozen_rank_is_killed_or_wakes_up(thaws: bool, code: int) -> None:
    trial = _trial("freeze", thaws=thaws)
    seen = _killed(returncodes=[0, code, 0])
    if thaws:
        seen = replace(seen, said={**seen.said, 1: [{"fault": 10.0}, _end("PeerFailed", 1)]})
    assert judge(trial, seen).violations == ()


def test_a_rank_that_ends_without_a_word_and_what_is_left_afterwards() -> None:
    seen = _killed(returncodes=[1, -9, 0], stderr={0: "Traceback\nSegmentation fault"}, left=("process 7: python",))
    verdict = judge(_trial("kill"), replace(seen, said={**seen.said, 0: []}))
    assert _found(verdict) == [("wrong error", 0), ("wrong error", 0), ("left behind", None)]
    assert "Segmentation fault" in str(verdict.violations[0])
    assert "process 7" in str(verdict.violations[2])


def test_the_table_and_the_summary_count_trials() -> None:
    good, bad = judge(_trial("kill"), _killed()), judge(_trial("kill"), Seen({}, [None] * 3, hung=(0, 2)))
    table = table_of([good, bad], "two trials")
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["fault"] == ["kill", "all"]
    assert cells["trials"] == ["2", "2"]
    assert all("[red]1 hangs[/]" in cell for cell in cells["violations"])
    assert cells["max"] == ["750.00 ms"] * 2
    assert cells["limit"] == ["1.00 s"] * 2
    assert "2 trials, 2 results checked: 1 hangs, 0 with wrong sums" in summary([good, bad])
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0


def test_the_command_that_repeats_a_trial_has_all_that_it_was_drawn_from() -> None:
    options = Options((3, 3), ("tcp",), ("kill", "freeze"), 1.5)
    assert again(7, options) == (
        "python -m lab faults --only 7 --ranks 3..3 --network tcp --kinds kill,freeze --liveness 1.5"
    )
