"""The verdict names the culprit of made-up jobs, whatever else is wrong with their reports."""

from __future__ import annotations

import dataclasses
import random

import pytest

pytest.importorskip("rich")

from hang_jobs import NOW_S, Call, Job
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.tools.report.hang import ends_of, told_ranks, told_seconds, verdict, verdicts

X = Call(count=4096, algorithm="ring")
SIZES = [2, 3, 4, 5, 8, 16, 33, 64]


def _late(size: int, culprits: set[int], before: int = 16, pairs: bool = False) -> Job:
    job = Job(size, before)
    (job.wait_in_pairs if pairs else job.wait_round_the_ring)(X, culprits)
    return job


def test_the_sentence() -> None:
    job = _late(4, {2})
    job.files[2]["host"], job.files[2]["pid"] = "b", 12
    found = verdict(job.reports())
    assert found.sentence == (
        f"rank 2 (host b, pid 12) has not called operation 16, {X.text}: ranks 0, 1, 3 have waited for it since 31 s"
    )
    assert (found.kind, found.culprits, found.tag, found.call, found.waiting) == (
        "not_called",
        [2],
        16,
        X.text,
        [0, 1, 3],
    )
    assert found.details == [
        f"rank 2 last called operation 15, {Call(count=115).text}, 40 s ago (completed); "
        "it has been busy with something else for 40 s"
    ]
    assert found.notes == []


def test_who_waits_on_another_communicator_is_not_said_to_be_busy() -> None:
    job, other = _late(3, {2}), Job(2, 0, communicator="aaaaaaaa")
    other.files[1]["pid"], other.files[1]["host"] = job.files[2]["pid"], job.files[2]["host"]
    other.files[0]["pid"] = 5
    other.call(1, X, waits_for=[0])
    (found, _), _ = verdicts([*job.reports(), *other.reports()])
    assert found.sentence.startswith("rank 2 (host node0, pid 1002) has not called operation 16")
    (detail,) = found.details
    assert detail.endswith(f"(completed); it waits in operation 0 of the communicator aaaaaaaa, {X.text}")
    for change in ({"failure": {"error": "PeerFailed", "peer": 0, "message": "gone"}}, {"written_unix_s": NOW_S - 500}):
        before = {name: other.files[1][name] for name in change}
        other.files[1].update(change)
        (detail,) = verdicts([*job.reports(), *other.reports()])[0][0].details
        assert detail.endswith("it has been busy with something else for 40 s")
        other.files[1].update(before)
    other.files[1]["operations"].clear()
    other.message(1, "recv", 0)
    (detail,) = verdicts([*job.reports(), *other.reports()])[0][0].details
    assert detail.endswith("it waits in recv(count=5, dtype=f32, source=0, tag=0) of the communicator aaaaaaaa")


def test_who_waits_for_a_message_is_not_said_to_be_busy() -> None:
    job = _late(3, {2})
    job.message(2, "recv", 0)
    last, message = verdict(job.reports()).details
    assert last.endswith("40 s ago (completed)")
    assert message.startswith("rank 2 waits in recv(count=5, dtype=f32, source=0, tag=0) for rank 0")


@settings(max_examples=25)
@given(st.data())
def test_who_has_not_called_is_named(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES), "size")
    ranks = st.integers(0, size - 1)
    culprits = data.draw(st.sets(ranks, min_size=1, max_size=max(1, size // 3)), "culprits")
    missing = data.draw(st.sets(ranks, max_size=size // 2), "innocent ranks without a report") - culprits
    pairs = size & (size - 1) == 0 and data.draw(st.booleans(), "pairs")
    before = data.draw(st.sampled_from([0, 1, 16, 100]), "before")
    job = _late(size, culprits, before, pairs)
    for _ in range(data.draw(st.integers(0, 3), "more in flight")):
        for rank in set(range(size)) - culprits:
            job.call(rank, dataclasses.replace(X, count=7))
    found = verdict(job.reports(missing))
    if missing | culprits == set(range(size)):  # nobody is left who has called
        assert found.kind == "nothing"
        return
    assert (found.kind, found.tag, found.culprits) == ("not_called", before, sorted(culprits))
    assert found.call == X.text
    assert told_ranks(culprits) in found.sentence


@settings(max_examples=25)
@given(st.data())
def test_a_dead_rank_without_report_is_named(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES), "size")
    ranks = st.integers(0, size - 1)
    culprit = data.draw(ranks, "culprit")
    others = data.draw(st.sets(ranks, max_size=size // 4), "other ranks without a report") - {culprit}
    pairs = size & (size - 1) == 0 and data.draw(st.booleans(), "pairs")
    job = _late(size, {culprit}, pairs=pairs)
    state = data.draw(st.sampled_from(["failed", "closed", "alive"]), "what the others say of it")
    job.knows(culprit, state=state, heard_s_ago=77.0)
    found = verdict(job.reports(others | {culprit}))
    if len(others) == size - 1:
        assert found.kind == "nothing"
        return
    assert found.kind == "no_report"
    assert found.culprits == (sorted(others | {culprit}) if state == "alive" else [culprit])
    about = next(text for text in found.details if text.startswith(f"rank {culprit} "))
    assert "left no report" in about
    assert f"hold it for {state}" in about
    assert "77 s before" in about


@settings(max_examples=25)
@given(st.data())
def test_who_called_something_else_is_named(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(SIZES), "size")
    culprits = data.draw(
        st.sets(st.integers(1 if size == 2 else 0, size - 1), min_size=1, max_size=max(1, (size - 1) // 2)), "culprits"
    )
    changes = [{"count": 5}, {"dtype": "bf16"}, {"reduction": "avg"}, {"algorithm": "recursive_doubling"}]
    change = data.draw(st.sampled_from([*changes, {"operation": "barrier"}, {"root": 1}]), "change")
    odd = dataclasses.replace(X, **change)  # type: ignore[arg-type]
    job = Job(size, 3)
    state = data.draw(st.sampled_from(["running", "failed"]), "state")
    for rank in range(size):
        job.call(rank, odd if rank in culprits else X, state=state, waits_for=[(rank + 1) % size])
    found = verdict(job.reports())
    assert (found.kind, found.tag, found.culprits, found.call) == ("mismatch", 3, sorted(culprits), X.text)
    assert odd.text in found.sentence
    assert X.text in found.sentence


def test_a_tie_goes_to_the_side_of_the_lowest_rank() -> None:
    job = Job(4, 0)
    for rank, call in enumerate([X, dataclasses.replace(X, count=1)] * 2):
        job.call(rank, call)
    found = verdict(job.reports())
    assert found.culprits == [1, 3]
    assert "as many ranks" in " ".join(found.details)


@pytest.mark.parametrize(
    ("odd", "others", "kind", "text"),
    [
        ("BA", "AB", "order", "called them in the other order"),
        ("CAB", "AB", "mismatch", "it looks as if rank 1 had made one call more than rank 0: c(count=1"),
        ("B", "AB", "mismatch", "it looks as if rank 1 had left out a call: a(count=1"),
        ("D", "AB", "mismatch", ""),
    ],
)
def test_where_calls_part(odd: str, others: str, kind: str, text: str) -> None:
    job = Job(3, 2)
    for rank in range(3):
        for letter in odd if rank == 1 else others:
            job.call(rank, Call(letter.lower(), 1))
    found = verdict(job.reports())
    assert (found.kind, found.culprits, found.tag) == (kind, [1], 2)
    assert text in " ".join(found.details)
    assert bool(found.details) is bool(text)


def test_a_mismatch_behind_the_stuck_operation_does_not_hide_who_is_late() -> None:
    job = _late(4, {3})
    for rank, call in enumerate([X, X, dataclasses.replace(X, count=1)]):
        job.call(rank, call)
    assert (verdict(job.reports()).kind, verdict(job.reports()).culprits) == ("not_called", [3])


@pytest.mark.parametrize("size", SIZES[1:])
def test_waits_are_followed_to_the_rank_that_left_no_report(size: int) -> None:
    """All have called; one froze in the middle of it."""
    frozen = size // 2
    job = _late(size, {frozen})
    job.knows(frozen, called=17)
    found = verdict(job.reports({frozen}))
    assert (found.kind, found.culprits, found.tag) == ("no_report", [frozen], 16)
    assert "all ranks called operation 16" in found.sentence


def test_waits_are_followed_to_the_rank_that_waits_for_nobody() -> None:
    job = Job(5, 1)
    job.wait_round_the_ring(X, {3})
    job.call(3, X)
    found = verdict(job.reports())
    assert (found.kind, found.culprits) == ("waits", [3])
    assert "waits for nobody" in found.sentence


def test_a_broadcast_that_its_root_has_left_behind() -> None:
    call = Call("broadcast", 10, root=0)
    job = Job(4, 1)
    job.call(0, call, state="completed")
    for rank in (1, 3):
        job.call(rank, call, waits_for=[0])
    job.call(2, call, state="completed")
    found = verdict(job.reports())
    assert (found.kind, found.culprits, found.tag, found.waiting) == ("waits", [0], 1, [1, 3])
    assert "finished it while others still need messages" in found.sentence


def test_a_broadcast_that_one_rank_never_called() -> None:
    job = Job(4, 1)
    for rank in (0, 1, 3):
        job.call(rank, Call("broadcast", 10, root=0), state="completed")
    found = verdict(job.reports())
    assert (found.kind, found.culprits, found.tag, found.waiting) == ("not_called", [2], 1, [])


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_circle_is_told_as_such(size: int) -> None:
    job = _late(size, set())
    found = verdict(job.reports())
    assert (found.kind, found.culprits) == ("cycle", list(range(size)))
    assert f"in a circle (rank 0 for {size - 1}, {size - 1} for {size - 2}, " in found.sentence
    assert len(found.sentence) < 400
    assert "no rank is to blame" in found.sentence


def test_who_failed_is_named_by_most() -> None:
    job = _late(4, {2})
    for rank in (0, 1, 3):
        job.files[rank]["failure"] = {"error": "PeerFailed", "peer": 2, "message": "rank 2 failed: killed"}
        job.files[rank]["operations"][-1]["state"] = "failed"
    found = verdict(job.reports({2}))
    assert (found.kind, found.culprits) == ("failed", [2])
    assert found.sentence == (
        f"rank 2 (host node0, pid 1002) has failed during operation 16, {X.text}: ranks 0, 1, 3 say so"
    )
    assert "PeerFailed on rank 0: rank 2 failed: killed" in found.details


def test_many_missing_reports_are_told_together() -> None:
    details = verdict(_late(64, {63}).reports(set(range(20)))).details
    assert "ranks 0–19 left no report (dead, on another node, or its folder is another one)" in details
    assert len(details) == 2


def test_a_mismatch_that_only_the_errors_tell() -> None:
    """With a rank that left no report."""
    job = _late(4, {2})
    for rank in (0, 1, 3):
        job.files[rank]["failure"] = {"error": "MismatchedCall", "peer": 2, "message": "rank 2 called barrier()"}
    found = verdict(job.reports({2}))
    assert (found.kind, found.culprits) == ("mismatch", [2])
    assert "MismatchedCall on rank 0: rank 2 called barrier()" in found.details


def test_ranks_that_blame_different_peers_are_all_told() -> None:
    job = _late(4, {2})
    for rank, peer in ((0, 2), (1, 2), (3, None)):
        job.files[rank]["failure"] = {"error": "PeerFailed", "peer": peer, "message": "gone"}
    found = verdict(job.reports({2}))
    assert found.culprits == [2]
    assert "rank 3 is named by other ranks" in found.details


def test_a_time_out_is_no_cause() -> None:
    job = _late(4, {2})
    for file in job.files:
        file["failure"] = {"error": "TimeoutExpired", "peer": 2, "message": "timed out"}
    assert verdict(job.reports()).kind == "not_called"


def test_nothing_is_stuck() -> None:
    found = verdict(Job(3, 70).reports())
    assert (found.kind, found.culprits, found.tag) == ("nothing", [], None)
    assert found.sentence == "no operation is stuck: all ranks have completed the 70 that they called"
    assert verdict(Job(3, 0).reports()).kind == "nothing"
    found = verdict(Job(3, 5).reports({1}))
    assert "on ranks 0, 2" in found.sentence


def test_an_older_report_blames_nobody() -> None:
    """Rank 1's report is of an earlier signal: since then it has completed more with the others."""
    job = Job(4, 10)
    old = job.copy().files[1]
    for rank in range(4):
        for tag in range(10, 14):
            job.call(rank, Call(count=100 + tag), state="completed")
    job.wait_round_the_ring(X, {3})
    old["written_unix_s"] -= 600
    job.files[1] = old
    found = verdict(job.reports())
    assert (found.kind, found.culprits, found.tag) == ("not_called", [3], 14)
    assert any("rank 1's report is older" in note for note in found.notes)


def _asked(job: Job) -> Job:
    for file in job.files:
        file["why"] = "signal"
    return job


def _between_calls(apart: int, ago_s: float) -> Job:
    """A job that goes on: rank 0 writes first, and the others when they have completed ``apart`` more operations."""
    job = _asked(Job(3, 10))
    job.call(0, X, ago_s=ago_s, waits_for=[2], sends_to=[1])
    for rank in (1, 2):
        for _ in range(apart):
            job.call(rank, X, state="completed", ago_s=ago_s)
        job.call(rank, X, ago_s=ago_s, waits_for=[0])
    return job


@pytest.mark.parametrize("apart", [0, 1, 2, 5])
def test_a_job_that_was_running_accuses_nobody(apart: int) -> None:
    found = verdict(_between_calls(apart, ago_s=0.3).reports())
    assert (found.kind, found.culprits) == ("running", [])
    assert "nobody had waited longer than 0.3 s; if it hangs, ask every rank again" in found.sentence


def test_messages_of_a_job_that_was_running() -> None:
    job = _asked(Job(2, 3))
    job.message(0, "recv", 1, ago_s=0.2)
    assert verdict(job.reports()).kind == "running"
    job.message(0, "recv", 1, ago_s=2.0)
    assert verdict(job.reports()).culprits == [1]


@pytest.mark.parametrize("change", [{"why": "timeout"}, {"failure": {"error": "PeerFailed", "peer": 2, "message": ""}}])
def test_a_short_wait_that_has_ended_badly_is_no_running_job(change: dict[str, object]) -> None:
    job = _asked(Job(3, 10))
    for rank in (0, 1):
        job.call(rank, X, ago_s=0.3)
        job.files[rank].update(change)
    assert verdict(job.reports()).culprits == [2]
    job = _asked(Job(3, 10))
    for rank in (0, 1):
        job.call(rank, X, ago_s=0.3)
    job.knows(2, state="failed")
    assert verdict(job.reports({2})).culprits == [2]


@pytest.mark.parametrize("apart", [2, 5])
def test_a_wait_that_later_operations_refute_accuses_nobody(apart: int) -> None:
    """Rank 0's report is of long ago: what it waited for then is over, and the others wait now."""
    job = _between_calls(apart, ago_s=31.0)
    found = verdict(job.reports())
    assert found.tag == 10 + apart
    assert found.culprits == [0]
    assert found.sentence.startswith(
        "rank 0 (host node0, pid 1000) has left an older report than the others and is not known to have called "
        f"operation {10 + apart}"
    )


def test_reports_of_an_earlier_job_are_told_apart() -> None:
    now, old = _late(3, {1}), Job(2, 4, communicator="0000aaaa")
    for file in old.files:
        file["written_unix_s"] = NOW_S - 5000
        file["pid"] += 500
    current, stale = verdicts([*old.reports(), *now.reports()])
    assert [one.communicator for one in current] == ["3fa9c2d1"]
    assert [one.communicator for one in stale] == ["0000aaaa"]


def test_two_communicators_of_one_job_both_count() -> None:
    first, second = _late(3, {1}), Job(3, 4, communicator="0000aaaa")
    for file in second.files:
        file["written_unix_s"] -= 100
    current, stale = verdicts([*second.reports(), *first.reports()])
    assert [one.communicator for one in current] == ["3fa9c2d1", "0000aaaa"]
    assert stale == []
    assert current[0].notes == []
    assert current[1].notes == ["its reports are 100 s older than those of 3fa9c2d1"]


def test_the_order_of_files_does_not_matter() -> None:
    reports = _late(16, {3, 9}).reports({5, 11})
    expected = verdicts(reports)
    for seed in range(5):
        random.Random(seed).shuffle(reports)
        assert verdicts(reports) == expected


def test_ranks_that_disagree_about_the_size_of_the_job() -> None:
    job = _late(4, {3})
    job.files[1]["world_size"] = 9
    found = verdict(job.reports())
    assert found.world_size == 4
    assert any("speaks of 9 ranks instead of 4" in note for note in found.notes)


def test_unfinished_operations_that_are_no_longer_listed() -> None:
    job = _late(3, {1}, before=100)
    job.files[0]["completed"] -= 2
    assert "rank 0 has 2 unfinished operations that are no longer listed" in verdict(job.reports()).notes


@settings(max_examples=100)
@given(st.integers(1, 40), st.randoms(use_true_random=False))
def test_the_ends_of_random_wait_graphs(size: int, dice: random.Random) -> None:
    waits = {rank: sorted({dice.randrange(size) for _ in range(dice.randrange(3))} - {rank}) for rank in range(size)}
    reach = {rank: _reachable(rank, waits) for rank in range(size)}
    roots, circles = ends_of(waits)
    assert roots == [rank for rank in range(size) if not waits[rank]]
    ended = {rank for rank in range(size) if reach[rank] and all(rank in reach[to] for to in reach[rank])}
    assert {rank for circle in circles for rank in circle} <= ended
    for circle in circles:
        assert all(b in waits[a] for a, b in zip(circle, [*circle[1:], circle[0]], strict=True))
    assert {frozenset(reach[circle[0]]) for circle in circles} == {frozenset(reach[rank]) for rank in ended}


def _reachable(start: int, waits: dict[int, list[int]]) -> set[int]:
    seen: set[int] = set()
    wave = list(waits[start])
    while wave:
        rank = wave.pop()
        if rank not in seen:
            seen.add(rank)
            wave += waits[rank]
    return seen


def test_a_chain_as_long_as_the_largest_job() -> None:
    assert ends_of({rank: [rank + 1] for rank in range(5000)}) == ([5000], [])


def test_words() -> None:
    assert told_ranks([3]) == "rank 3"
    assert told_ranks([4, 0, 1, 2]) == "ranks 0, 1, 2, 4"
    assert told_ranks([*range(9), 11]) == "ranks 0–8, 11"
    assert [told_seconds(s) for s in (0.04, 31.2, 1805, 36000)] == ["0.0 s", "31 s", "30 min", "10.0 h"]


def test_the_verdict_on_a_group_says_which_ranks_of_its_parent_it_means() -> None:
    job = _late(4, {1})
    for file in job.files:
        file["group"] = {"name": "split(color=2)", "parent_ranks": [7, 5, 3, 1]}
    assert verdict(job.reports({1})).details[-1] == (
        "this is the communicator split(color=2); rank 1 here is rank 5 of its parent"
    )
    assert not any("split" in text for text in verdict(_late(4, {1}).reports({1})).details)
