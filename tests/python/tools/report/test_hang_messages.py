"""Verdicts on jobs that hang in a message between two ranks."""

from __future__ import annotations

import json

import pytest
from hang_jobs import Call, Job

from telegrad.tools.report.hang import verdict
from telegrad.tools.report.hang_files import BadReport, parse

X = Call(count=4096)


def test_a_receive_of_what_nobody_sends_is_followed_to_who_waits_for_nobody() -> None:
    job = Job(4, before=3)
    job.message(0, "recv", 1, tag=7)
    job.message(1, "send", 2)
    found = verdict(job.reports())
    assert (found.kind, found.culprits, found.waiting, found.tag) == ("not_called", [2], [0, 1], None)
    assert (
        "ranks 0, 1 wait for a message since 31 s; rank 2 (host node0, pid 1002) has not made the call"
        in found.sentence
    )
    assert found.details[0] == (
        "rank 0 waits in recv(count=5, dtype=f32, source=1, tag=7) for rank 1, which has not sent it, since 31 s"
    )
    assert "for rank 2, which has not received it" in found.details[1]


def test_who_takes_anybodys_message_waits_for_all() -> None:
    job = Job(3, before=3)
    job.message(0, "recv", None, tag=7)
    found = verdict(job.reports())
    assert (found.kind, found.culprits) == ("not_called", [1, 2])
    assert found.details[0].startswith(
        "rank 0 waits in recv(count=5, dtype=f32, source=any, tag=7) for any rank, none of which has sent it"
    )


def test_ranks_that_receive_from_each_other_are_a_circle() -> None:
    job = Job(3, before=3)
    job.message(0, "recv", 2)
    job.message(2, "recv", 0)
    found = verdict(job.reports())
    assert (found.kind, found.culprits) == ("cycle", [0, 2])
    assert found.sentence.endswith("in a circle (rank 0 for 2, 2 for 0)")


def test_a_peer_without_a_report_is_named() -> None:
    job = Job(3, before=3)
    job.message(0, "recv", 2)
    found = verdict(job.reports(missing={2}))
    assert (found.kind, found.culprits) == ("no_report", [2])


def test_who_is_late_for_an_operation_because_of_a_message_is_told_so() -> None:
    job = Job(3, before=3)
    job.message(2, "recv", 1, tag=9)
    for rank in (0, 1):
        job.call(rank, X, waits_for=[2])
    found = verdict(job.reports())
    assert (found.kind, found.culprits, found.tag) == ("not_called", [2], 3)
    (told,) = (text for text in found.details if "recv" in text)
    assert told.startswith(
        "rank 2 waits in recv(count=5, dtype=f32, source=1, tag=9) for rank 1, which has not sent it"
    )
    assert told.endswith(f"rank 1 waits in operation 3, {X.text}")


def test_a_report_without_messages_is_read_and_a_damaged_message_is_not() -> None:
    job = Job(2, before=1)
    assert job.reports()[0].messages == ()
    job.message(0, "recv", 1)
    job.files[0]["messages"][0]["peer"] = 2
    with pytest.raises(BadReport, match=r'"messages\[0\].peer" is 2'):
        parse(json.dumps(job.files[0]).encode())
