"""The PMI server, with ranks that are sockets of this process: what MPICH says, and what it must hear."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator

import pytest

from telegrad.launch.ranks import PmiServer


class _Job:
    def __init__(self, size: int) -> None:
        self.selector = selectors.DefaultSelector()
        self.server = PmiServer(size, self.selector)
        self.ranks = [socket.socket(fileno=os.dup(self.server.end_of(rank))) for rank in range(size)]
        for rank in range(size):
            self.server.started(rank)

    def close(self) -> None:
        self.server.close()
        for rank in self.ranks:
            rank.close()
        self.selector.close()

    def serve(self) -> None:
        while ready := self.selector.select(0):
            for key, _ in ready:
                key.data()

    def ask(self, rank: int, text: str) -> str:
        self.ranks[rank].sendall(text.encode())
        self.serve()
        return self.hear(rank)

    def hear(self, rank: int) -> str:
        """What has come for ``rank``; nothing if nothing has."""
        try:
            return self.ranks[rank].recv(1 << 16, socket.MSG_DONTWAIT).decode()
        except BlockingIOError:
            return ""


@pytest.fixture
def job() -> Iterator[_Job]:
    made = _Job(2)
    yield made
    made.close()


def test_a_rank_finds_its_descriptor_and_number_in_the_environment() -> None:
    with selectors.DefaultSelector() as selector:
        server = PmiServer(3, selector)
        assert server.environment_of(2) == {"PMI_FD": str(server.end_of(2)), "PMI_RANK": "2", "PMI_SIZE": "3"}
        server.close()


def test_it_introduces_itself(job: _Job) -> None:
    assert job.ask(0, "cmd=init pmi_version=1 pmi_subversion=1\n") == (
        "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"
    )
    assert job.ask(1, "cmd=get_maxes\n").startswith("cmd=maxes kvsname_max=64 keylen_max=64 vallen_max=1024")
    assert job.ask(0, "cmd=get_universe_size\n") == "cmd=universe_size size=2 rc=0\n"
    assert job.ask(0, "cmd=finalize\n") == "cmd=finalize_ack rc=0\n"


def test_what_one_rank_puts_another_gets(job: _Job) -> None:
    assert job.ask(0, "cmd=get kvsname=job key=where\n") == ("cmd=get_result rc=-1 msg=key_not_found value=unknown\n")
    assert job.ask(1, "cmd=put kvsname=job key=where value=a=[3]b\n") == "cmd=put_result rc=0 msg=success\n"
    assert job.ask(0, "cmd=get kvsname=job key=where\n") == "cmd=get_result rc=0 msg=success value=a=[3]b\n"


def test_commands_may_come_in_pieces_and_several_at_once(job: _Job) -> None:
    assert job.ask(0, "cmd=get_app") == ""
    assert job.ask(0, "num\ncmd=get_universe_size\n") == "cmd=appnum appnum=0 rc=0\ncmd=universe_size size=2 rc=0\n"


def test_every_job_has_a_name_of_its_own_in_which_all_ranks_agree(job: _Job) -> None:
    name = job.ask(0, "cmd=get_my_kvsname\n")
    assert name.startswith("cmd=my_kvsname kvsname=telegrad_")
    assert job.ask(1, "cmd=get_my_kvsname\n") == name
    other = _Job(1)
    assert other.ask(0, "cmd=get_my_kvsname\n") != name
    other.close()


def test_a_barrier_lets_all_go_on_once_all_have_come(job: _Job) -> None:
    for _ in range(2):
        assert job.ask(0, "cmd=barrier_in\n") == ""
        assert job.ask(1, "cmd=barrier_in\n") == "cmd=barrier_out rc=0\n"
        assert job.hear(0) == "cmd=barrier_out rc=0\n"


def test_who_waits_for_a_rank_that_is_gone_is_told(job: _Job) -> None:
    assert job.ask(0, "cmd=barrier_in\n") == ""
    job.ranks[1].close()
    job.serve()
    assert job.hear(0) == "cmd=barrier_out rc=-1\n"


def test_an_endless_line_ends_the_connection(job: _Job) -> None:
    assert job.ask(0, "x" * (1 << 15)) == ""
    with pytest.raises(OSError, match=r"(Broken pipe|reset)"):
        job.ranks[0].sendall(b"cmd=init\n")
