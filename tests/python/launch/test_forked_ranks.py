"""Ranks that are forked from a server (tests/forked_ranks.py) are what executed ones are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forked_ranks import RankServers
from telegrad.launch import SINGLE_THREADED, RankExit, Ranks, RanksTimedOut
from telegrad.launch import ranks as launcher
from telegrad.tools.bench import netlab

TESTS = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {**SINGLE_THREADED, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


@pytest.fixture(scope="module")
def servers() -> Iterator[RankServers]:
    made = RankServers()
    yield made
    made.close()


@pytest.fixture
def forked(servers: RankServers, monkeypatch: pytest.MonkeyPatch) -> RankServers:
    monkeypatch.setattr(launcher, "start_process", servers.start)
    servers.kind = "numpy"
    return servers


_Prefix = Callable[[int], Sequence[str]]


def _run(
    function: str, size: int, *arguments: str, prefix_of: _Prefix | None = None, **environment: str
) -> tuple[list[list[str]], list[RankExit]]:
    lines: list[list[str]] = [[] for _ in range(size)]
    with Ranks(
        f"fresh_programs:{function}",
        size,
        arguments=arguments,
        timeout_s=200.0,
        environment={**_ENVIRONMENT, **environment},
        environment_of=lambda rank: {"MASTER_PORT": str(rank)},
        prefix_of=prefix_of,
        on_line=lambda rank, line: lines[rank].append(line),
    ) as ranks:
        return lines, ranks.wait(until_all=True)


def _facts(prefix_of: _Prefix | None = None, **environment: str) -> list[dict[str, Any]]:
    lines, exits = _run("tell", 3, prefix_of=prefix_of, **environment)
    assert [end.returncode for end in exits] == [0] * 3, exits
    return [json.loads(line) for (line,) in lines]


def test_a_forked_rank_finds_what_an_executed_one_finds(
    forked: RankServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        started = _facts(TMPDIR=str(tmp_path), TELEGRAD_SOMETHING="else")
        forked.kind = "exec"
        wanted = _facts(TMPDIR=str(tmp_path), TELEGRAD_SOMETHING="else")
    finally:
        os.sched_setaffinity(0, cores)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for found, usual in zip(started, wanted, strict=True):
        # Where a selector of the launcher has its number, a rank has its exchange.
        assert len(found.pop("descriptors")) == len(usual.pop("descriptors"))
        assert found == usual
        assert found["is_a_child"]
        assert (found["blocked"], found["folder"], found["temporary"]) == (
            sorted(before | {signal.SIGUSR2}),
            str(tmp_path),
            str(tmp_path),
        )


@pytest.mark.skipif(netlab.why_unavailable() is not None, reason=str(netlab.why_unavailable()))
@pytest.mark.parametrize("own_memory", [False, True], ids=["network", "network and memory"])
def test_a_forked_rank_is_in_its_network(
    forked: RankServers, own_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with netlab.Netlab(3, "1gbit") as lab:
        if own_memory:
            lab.open_memory()
        started = _facts(lab.prefix_of)
        executed = _executed({}, forked, lab.prefix_of)
        forked.kind = "exec"
        wanted = _facts(lab.prefix_of)
    assert executed == 0
    for found, usual in zip(started, wanted, strict=True):
        del found["descriptors"], usual["descriptors"]
        assert found == usual
        assert found["interfaces"] == found["interfaces_shown"]
        assert "lo" in found["interfaces"]
    assert len({one["memory"] for one in started}) == (3 if own_memory else 1)


def test_no_two_ranks_draw_the_same_random_numbers_and_strings_have_two_hashes(forked: RankServers) -> None:
    forked.kind = "torch"
    lines, exits = _run("draw", 4)
    assert [end.returncode for end in exits] == [0] * 4, exits
    *drawn, hashes = zip(*(json.loads(line) for (line,) in lines), strict=True)
    assert [len(set(numbers)) for numbers in drawn] == [4, 4, 4]
    assert (hashes[0], hashes[1]) == (hashes[2], hashes[3])
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("function", "argument", "status"),
    [("say_goodbye", (), 0), ("end_by", ("SIGTERM",), -15), ("end_by", ("SIGABRT",), -6), ("exit_with", ("7",), 7)],
)
def test_it_ends_as_any_process_does(
    forked: RankServers, function: str, argument: tuple[str, ...], status: int
) -> None:
    lines, (end,) = _run(function, 1, *argument)
    forked.kind = "exec"
    usual_lines, (usual_end,) = _run(function, 1, *argument)
    assert (lines, end.returncode) == (usual_lines, usual_end.returncode)
    assert end.returncode == status


def test_a_server_outlives_the_thread_that_started_it_and_is_replaced_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = RankServers()
    monkeypatch.setattr(launcher, "start_process", servers.start)
    servers.kind = "numpy"
    try:
        starter = threading.Thread(target=_run, args=("say_goodbye", 1))
        starter.start()
        starter.join()
        server = servers._servers["numpy", 0]._process
        assert [end.returncode for end in _run("say_goodbye", 1)[1]] == [0]
        assert servers._servers["numpy", 0]._process is server
        assert _lives(server.pid)
        server.kill()
        server.wait()
        assert [end.returncode for end in _run("say_goodbye", 1)[1]] == [0]
        assert servers._servers["numpy", 0]._process is not server
    finally:
        servers.close()


def test_what_a_library_has_set_in_this_process_executes_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = RankServers()
    monkeypatch.setattr(launcher, "start_process", servers.start)
    servers.kind = "numpy"
    try:
        assert [end.returncode for end in _run("say_goodbye", 1)[1]] == [0]
        before = servers._servers["numpy", 0]
        servers.follow({**os.environ, "TELEGRAD_CACHE": "elsewhere"})  # read when it is used
        assert servers._servers == {("numpy", 0): before}
        monkeypatch.setenv("KMP_SOMETHING", "set while a library was loaded")
        servers.follow(os.environ)
        assert servers._servers == {}
        assert [end.returncode for end in _run("say_goodbye", 1)[1]] == [0]
        assert servers._servers.keys() == {("numpy", 0)}, "the rank was executed"
        assert servers._servers["numpy", 0] is not before
    finally:
        servers.close()


def test_what_it_raises_is_shown(forked: RankServers) -> None:
    (failed,) = _run("fail", 1)[1]
    assert failed.returncode == 1
    assert failed.stderr.startswith("Traceback")
    assert failed.stderr.endswith("LookupError: a mistake of this rank\n")


def test_one_that_hangs_says_where_and_is_ended(forked: RankServers) -> None:
    with (
        pytest.raises(RanksTimedOut, match=r"(?s)ranks \[0, 1\] of 2 were not done.*hang_in_this_function"),
        Ranks("rank_programs:hang_in_this_function", 2, timeout_s=3.0, environment=_ENVIRONMENT) as ranks,
    ):
        ranks.wait()


@pytest.mark.parametrize("changed", [{"UCX_LOG_LEVEL": "warn"}, {"OMP_NUM_THREADS": "2"}, {"PYTHONHASHSEED": "1"}])
def test_what_a_library_may_have_read_while_it_was_loaded_executes_the_rank(
    forked: RankServers, changed: dict[str, str]
) -> None:
    assert _executed({}, forked) == 0
    assert _executed(changed, forked) == 2


def _executed(changed: dict[str, str], servers: RankServers, prefix_of: _Prefix | None = None) -> int:
    count = 0

    def note(rank: int, line: str) -> None:
        nonlocal count
        count += "rank_main" in line

    with Ranks(
        "fresh_programs:show_command",
        2,
        timeout_s=60.0,
        environment={**_ENVIRONMENT, **changed},
        prefix_of=prefix_of,
        on_line=note,
    ) as ranks:
        ranks.wait()
    return count


def test_ranks_and_servers_do_not_outlive_the_pytest_process() -> None:
    program = (
        "import forked_ranks\n"
        "from telegrad.launch import Ranks, SINGLE_THREADED, ranks\n"
        "servers = forked_ranks.RankServers()\n"
        "servers.kind = 'numpy'\n"
        "ranks.start_process = servers.start\n"
        "show = lambda rank, line: print(line, servers._servers['numpy', 0]._process.pid, flush=True)\n"
        "with Ranks('rank_programs:ignore_sigterm', 1, timeout_s=60, environment=SINGLE_THREADED, on_line=show) as r:\n"
        "    r.wait()\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join([_ENVIRONMENT["PYTHONPATH"], str(TESTS)])},
    )
    assert launcher.stdout is not None
    rank, server = map(int, launcher.stdout.readline().split())
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 20
    while any(map(_lives, (rank, server))):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
