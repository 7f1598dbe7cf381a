"""What real processes hear when something goes wrong: who is to blame, on every survivor, within seconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from joined import DRIVER, MPI_MISSING, is_over_mpi

from telegrad import _core
from telegrad.launch import SINGLE_THREADED, RankExit, Ranks

pytestmark = [
    pytest.mark.skipif(not hasattr(_core.Communicator, "ucx"), reason="built without UCX"),
    pytest.mark.timeout(90),
]
_ENVIRONMENT = {
    **SINGLE_THREADED,
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
}

_SOON_S = 20.0  # on a busy machine; well before the time-outs of 60 s
of_its_own = pytest.mark.ranks("exec")  # where signals, exits and what a process holds are those of a real start
_ONLY_MPI = (
    "test_a_rank_that_fails_inside_mpis_collective_is_named",
    "test_a_collective_of_mpis_that_never_ends_times_out",
    "test_an_error_of_mpis_collective_is_reported",
    "test_a_rank_that_mpi_does_not_let_go_hears_who_has_died",
    "test_all_take_the_same_bits_where_mpis_differ",
)

Facts = dict[int, list[dict[str, Any]]]

_JOINS_BY_ADDRESS = "it is about addresses that are exchanged before the ranks join; MPI's ranks have joined already"
_NOT_OVER_MPI = {
    "test_nothing_is_left_after_a_failure": "MPI's own shared memory and descriptors come and go as it likes",
    "test_a_rank_that_dies_before_the_others_join_is_named": _JOINS_BY_ADDRESS,
    "test_ctrl_c_ends_joining": _JOINS_BY_ADDRESS,
}


@pytest.fixture(params=["ucx", "mpi"], autouse=True)
def _driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs over each driver. MPI's ranks are started by our launcher too: mpiexec ends all when one dies."""
    monkeypatch.setenv(DRIVER, request.param)
    arguments = request.node.callspec.params
    if request.param == "ucx":
        if "mpi" in f"{arguments.get('arguments')}{arguments.get('what')}" or request.node.originalname in _ONLY_MPI:
            pytest.skip("it is about MPI's own collectives")
        return
    if MPI_MISSING:
        pytest.skip(MPI_MISSING)
    if reason := _NOT_OVER_MPI.get(request.node.originalname):
        pytest.skip(reason)
    if arguments.get("transports", ""):
        pytest.skip("which network MPI takes is its own business")
    if arguments.get("size", 3) != 3:
        pytest.skip("one number of ranks is enough to see the driver's part")


def _run(
    function: str,
    size: int,
    *arguments: str,
    once_ready: Callable[[Ranks], None] | None = None,
    transports: str = "",
    reports: Path | None = None,
    preload: Path | None = None,
    meanwhile: Callable[[Ranks], None] = lambda _: None,
) -> tuple[Facts, list[RankExit]]:
    """Runs the ranks, and returns what each said and how it ended. ``once_ready`` is called when all ranks said that
    they are, and ``meanwhile`` as they start."""
    facts: Facts = defaultdict(list)

    def take(rank: int, line: str) -> None:
        if line.startswith("{"):  # UCX may complain of a peer that is gone
            facts[rank].append(json.loads(line))

    with Ranks(
        f"failure_program:{function}",
        size,
        timeout_s=45.0,
        arguments=arguments,
        environment={
            **_ENVIRONMENT,
            **({"UCX_TLS": transports} if transports else {}),
            **({"TELEGRAD_REPORT_DIR": str(reports)} if reports else {}),
            **({"LD_PRELOAD": str(preload)} if preload else {}),
        },
        on_line=take,
        mpich=is_over_mpi(),
    ) as ranks:
        meanwhile(ranks)
        while once_ready is not None and sum("ready" in said for rank in facts for said in facts[rank][:1]) < size:
            assert len(ranks.running()) == size, "a rank ended before all were ready"
            ranks.listen()
        if once_ready is not None:
            once_ready(ranks)
        return facts, ranks.wait(until_all=True)


def _only(facts: Facts, rank: int, key: str) -> Any:
    said = [fact for fact in facts[rank] if key in fact]
    assert len(said) == 1, facts
    return said[0]


@pytest.mark.parametrize("transports", ["", "tcp,self"])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("reduce_for_ever", ("256", "recursive_doubling")),
        ("reduce_for_ever", ("256", "ring")),
        ("reduce_for_ever", ("1000000", "ring")),
        ("reduce_for_ever", ("1000000", "recursive_doubling")),
        ("reduce_for_ever", ("1000000", "mpi")),
        ("wait_for_one", ()),
        ("idle_then_reduce", ()),
    ],
)
def test_survivors_of_a_killed_rank_hear_its_name(function: str, arguments: tuple[str, ...], transports: str) -> None:
    killed_s = 0.0

    def kill(ranks: Ranks) -> None:
        nonlocal killed_s
        killed_s = time.monotonic()
        ranks.signal(1, signal.SIGKILL)

    facts, exits = _run(function, 3, *arguments, once_ready=kill, transports=transports)
    assert [end.returncode for end in exits] == [0, -9, 0], exits
    for rank in (0, 2):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"], failure["rank"]) == ("PeerFailed", 1, rank), failure
        assert failure["host"] == socket.gethostname(), failure
        assert failure["at_s"] - killed_s < _SOON_S
        assert _only(facts, rank, "closed_s")["closed_s"] < _SOON_S


_NO_PIDFD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/syscall.h>
long syscall(long number, long a, long b, long c, long d, long e, long f) {
  if (number == SYS_pidfd_open) return errno = ENOSYS, -1;
  return ((long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"))(number, a, b, c, d, e, f);
}
"""


# A driver does not know which collective waits for whom: so each end and network has one of the two calls.
@pytest.mark.parametrize(
    ("transports", "has_pidfd", "number", "call"),
    [
        pytest.param("", True, signal.SIGKILL, "recv", id="memory alone, killed"),
        pytest.param("", True, signal.SIGSTOP, "barrier", id="memory alone, frozen"),
        pytest.param("all", True, signal.SIGKILL, "barrier", id="memory and tcp, killed"),
        pytest.param("all", True, signal.SIGSTOP, "recv", id="memory and tcp, frozen"),
        pytest.param("tcp,self", True, signal.SIGKILL, "recv", id="tcp, killed"),
        pytest.param("tcp,self", True, signal.SIGSTOP, "barrier", id="tcp, frozen"),
        pytest.param("", False, signal.SIGKILL, "barrier", id="memory, no pidfd, killed"),
        pytest.param("", False, signal.SIGSTOP, "recv", id="memory, no pidfd, frozen"),
        pytest.param("tcp,self", False, signal.SIGKILL, "barrier", id="as between hosts, killed"),
        pytest.param("tcp,self", False, signal.SIGSTOP, "recv", id="as between hosts, frozen"),
    ],
)
def test_a_rank_is_named_that_nobody_has_sent_anything_to(
    number: signal.Signals, call: str, transports: str, has_pidfd: bool, tmp_path: Path
) -> None:
    """In joining rank 4 has heard of rank 1 through others only."""

    def clear_away(ranks: Ranks) -> None:
        while ranks.running() not in ([], [1]):
            ranks.listen()
        ranks.signal(1, signal.SIGKILL)

    library = None if has_pidfd else tmp_path / "no_pidfd.so"
    if library is not None:
        compiler = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", library]
        subprocess.run(compiler, input=_NO_PIDFD.encode(), check=True, timeout=60)
    arguments = (str(int(number)), call)
    facts, exits = _run("end_unmet", 6, *arguments, meanwhile=clear_away, transports=transports, preload=library)
    assert [exits[rank].returncode for rank in (0, 2, 3, 4, 5)] == [0] * 5, exits
    for rank in (0, 2, 3, 4, 5):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"], failure["rank"]) == ("PeerFailed", 1, rank), failure


@pytest.mark.parametrize("transports", ["", "tcp,self"])
def test_a_rank_that_stood_still_is_told_by_ranks_that_have_ended(transports: str) -> None:
    """Ranks 3 and 5, which rank 2 has heard nothing of before, tell it of rank 1 and end: UCX finds no way back."""

    def end_others(ranks: Ranks) -> None:
        ranks.signal(2, signal.SIGSTOP)
        ranks.signal(1, signal.SIGKILL)
        while ranks.running() != [2]:
            ranks.listen()
        ranks.signal(2, signal.SIGCONT)

    facts, exits = _run("wait_for_one_another", 6, once_ready=end_others, transports=transports)
    assert [exits[rank].returncode for rank in (0, 2, 3, 4, 5)] == [0] * 5, exits
    for rank in (0, 2, 3, 4, 5):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"], failure["rank"]) == ("PeerFailed", 1, rank), failure


def test_a_call_after_a_peer_has_closed_fails_and_names_it() -> None:
    facts, exits = _run("reduce_after_a_close", 3)
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in (0, 2):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"]) == ("PeerFailed", 1), failure
        assert "closed its communicator" in failure["text"]


def test_survivors_of_a_frozen_rank_hear_its_name() -> None:
    facts, exits = _run("reduce_for_ever", 3, "256", "ring", "5", once_ready=_freeze_then_kill)
    assert exits[1].returncode == -9
    for rank in (0, 2):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"]) == ("PeerFailed", 1), failure
        assert "silent" in failure["text"]


_INSIDE_MPI = """
#include <mpi.h>
#include <signal.h>
#include <unistd.h>
static int calls;
int MPI_Iallreduce(
  const void* from, void* into, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Request* request
) {
  int rank, code;
  PMPI_Comm_rank(comm, &rank);
  if (rank != 1 && !ALL || calls++ < PASS) return PMPI_Iallreduce(from, into, n, type, op, comm, request);
  FAIL
}
"""
_BEGINS = "code = PMPI_Iallreduce(from, into, n, type, op, comm, request);"
_NEVER_ENDS = "static char none; return PMPI_Irecv(&none, 1, MPI_BYTE, rank, 7, comm, request);"
_CHANGES_A_BIT = """PMPI_Iallreduce(from, into, n, type, op, comm, request);
PMPI_Wait(request, MPI_STATUS_IGNORE);
*(char*)into ^= 1;
return PMPI_Ibarrier(MPI_COMM_SELF, request);"""


def _preloaded(folder: Path, does: str, everywhere: bool = False, passed: int = 8) -> Path:
    """A library in which rank 1, or every rank, does so in the MPI_Iallreduce after so many."""
    return _compiled(
        folder, _INSIDE_MPI.replace("FAIL", does).replace("ALL", str(int(everywhere))).replace("PASS", str(passed))
    )


def _compiled(folder: Path, source: str) -> Path:
    library = folder / "inside.so"
    given = ["-shared", "-fPIC", "-w", "-x", "c", "-", "-o", library]
    subprocess.run([Path(sys.prefix) / "bin" / "mpicc", *given], input=source.encode(), check=True, timeout=60)
    return library


@pytest.mark.parametrize("count", ["256", "1000000"])
@pytest.mark.parametrize(
    "does",
    [
        "kill(getpid(), SIGKILL);",
        _BEGINS + " kill(getpid(), SIGKILL);",
        _BEGINS + " kill(getpid(), SIGSTOP); return code;",
    ],
    ids=["killed before", "killed after", "frozen"],
)
def test_a_rank_that_fails_inside_mpis_collective_is_named(does: str, count: str, tmp_path: Path) -> None:
    def end_frozen(ranks: Ranks) -> None:
        while ranks.running() != [1]:
            ranks.listen()
        ranks.signal(1, signal.SIGKILL)

    once_ready = end_frozen if "STOP" in does else None
    facts, exits = _run("reduce_by_mpi", 3, count, once_ready=once_ready, preload=_preloaded(tmp_path, does))
    assert [end.returncode for end in exits] == [0, -9, 0], exits
    for rank in (0, 2):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"], failure["rank"]) == ("PeerFailed", 1, rank), failure
        assert f"allreduce(count={count}, dtype=f32, reduction=sum, algorithm=mpi)" in failure["text"], failure
        assert _only(facts, rank, "closed_s")["closed_s"] < 6.0
        assert _only(facts, rank, "untouched")["untouched"]


def test_a_collective_of_mpis_that_never_ends_times_out(tmp_path: Path) -> None:
    facts, exits = _run("reduce_by_mpi", 3, "1000", "4", preload=_preloaded(tmp_path, _NEVER_ENDS))
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in range(3):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["rank"]) == ("TimeoutExpired", rank), failure
        assert "waiting for the network's own collective" in failure["text"], failure
        assert "all ranks have called it" in failure["text"], failure
        assert _only(facts, rank, "untouched")["untouched"]


_NEVER_RETURNS = """
#include <fcntl.h>
#include <mpi.h>
#include <unistd.h>
int MPI_Improbe(int source, int tag, MPI_Comm comm, int *found, MPI_Message *message, MPI_Status *status) {
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0 && access("FOLDER/begin", F_OK) == 0) {
    close(open("FOLDER/begun", O_CREAT | O_WRONLY, 0600));
    for (;;) usleep(1000);
  }
  return PMPI_Improbe(source, tag, comm, found, message, status);
}"""


@pytest.mark.parametrize(
    ("function", "arguments"), [("reduce_for_ever", ("256", "recursive_doubling")), ("idle_then_reduce", ())]
)
def test_a_rank_that_mpi_does_not_let_go_hears_who_has_died(
    function: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """MPICH waits for ever for what a killed process has not written to its queue. In the second case the program does
    something else: telegrad's thread is in there."""

    def kill(ranks: Ranks) -> None:
        (tmp_path / "begin").touch()
        while not (tmp_path / "begun").exists():
            ranks.listen()
        ranks.signal(1, signal.SIGKILL)

    library = _compiled(tmp_path, _NEVER_RETURNS.replace("FOLDER", str(tmp_path)))
    facts, exits = _run(function, 3, *arguments, once_ready=kill, preload=library)
    assert [end.returncode for end in exits] == [0, -9, 0], exits
    for rank in (0, 2):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"], failure["rank"]) == ("PeerFailed", 1, rank), failure
        assert ("MPI did not return from a call" in failure["text"]) == (rank == 0), failure
        assert _only(facts, rank, "closed_s")["closed_s"] < 10.0


def test_an_error_of_mpis_collective_is_reported(tmp_path: Path) -> None:
    facts, exits = _run("reduce_by_mpi", 3, "1000", preload=_preloaded(tmp_path, "return MPI_ERR_OTHER;", True))
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in range(3):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["rank"], failure["peer"]) == ("TransportError", rank, None), failure
        assert "MPI_Iallreduce failed: " in failure["text"], failure
        assert "algorithm=mpi" in failure["text"], failure


def test_all_take_the_same_bits_where_mpis_differ(tmp_path: Path) -> None:
    facts, exits = _run("differ_in_bits", 3, preload=_preloaded(tmp_path, _CHANGES_A_BIT, passed=0))
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in range(3):
        assert facts[rank] == [{"right": True, "nan": "0x7ff8000000000000", "equal": True}]


def _freeze_then_kill(ranks: Ranks) -> None:
    ranks.signal(1, signal.SIGSTOP)
    while ranks.running() != [1]:
        ranks.listen()
    ranks.signal(1, signal.SIGKILL)


MISMATCHES = [
    "count",
    "dtype",
    "reduction",
    "algorithm",
    "operation",
    "order",
    "root",
    "everybody waits for another root",
    "dtype of a broadcast",
    "dtype of an all_gather",
    "switch_factor",
    "fewer calls",
    "mpi",
    "count of mpi",
    "operation of mpi",
]
# With four ranks other messages are under way only where other operations or algorithms meet.
_WITH_FOUR = ("algorithm", "operation", "everybody waits for another root", "fewer calls")


@pytest.mark.parametrize(("what", "size"), [*((one, 3) for one in MISMATCHES), *((one, 4) for one in _WITH_FOUR)])
def test_every_rank_hears_of_a_mismatched_call(what: str, size: int) -> None:
    facts, exits = _run("call_differently", size, what)
    assert [end.returncode for end in exits] == [0] * size, exits
    for rank in range(size):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["rank"], failure["peer"]) == ("MismatchedCall", rank, 1), failure
        assert "the ranks called different things as operation 1: rank" in failure["text"], failure
        assert failure["untouched"] or what in ("root", "dtype of a broadcast")  # rooted: who is right may go on


def test_a_rank_that_never_calls_is_named_after_timeout_s(tmp_path: Path) -> None:
    facts, exits = _run("run_into_the_time_limit", 3, reports=tmp_path)
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in (0, 2):
        error = _only(facts, rank, "error")
        assert (error["error"], error["peer"]) == ("TimeoutExpired", 1), error
        assert "timeout_s=3 s" in error["text"], error
        assert "rank 1 has not called it" in error["text"], error
    verdict = _verdict(tmp_path)
    assert verdict.startswith("rank 1 ("), verdict
    assert "has not called operation 6" in verdict, verdict


@of_its_own
def test_ctrl_c_ends_a_wait() -> None:
    sent_s = 0.0

    def interrupt(ranks: Ranks) -> None:
        nonlocal sent_s
        time.sleep(0.5)
        sent_s = time.monotonic()
        ranks.signal(0, signal.SIGINT)
        while 0 in ranks.running():
            ranks.listen()
        for rank in (1, 2):
            ranks.signal(rank, signal.SIGKILL)

    facts, exits = _run("wait_for_ctrl_c", 3, once_ready=interrupt)
    assert exits[0].returncode == 0, exits[0]
    interrupted = _only(facts, 0, "error")
    assert interrupted["error"] == "KeyboardInterrupt"
    assert interrupted["at_s"] - sent_s < _SOON_S
    assert _only(facts, 0, "closed_s")["closed_s"] < _SOON_S


@of_its_own
def test_other_signals_do_not_end_a_wait() -> None:
    def disturb(ranks: Ranks) -> None:
        for _ in range(5):
            time.sleep(0.1)
            ranks.signal(0, signal.SIGUSR2)

    facts, exits = _run("ignore_interrupts_of_others", 2, once_ready=disturb)
    assert [end.returncode for end in exits] == [0, 0], exits
    assert _only(facts, 0, "error")["caught"] >= 1


@of_its_own
@pytest.mark.parametrize("how", ["exit", "_exit", "close"])
def test_a_forked_childs_end_does_nothing(how: str) -> None:
    facts, exits = _run("fork_and_go_on", 2, how)
    assert [end.returncode for end in exits] == [0, 0], exits
    for rank in range(2):
        assert _only(facts, rank, "error") == {"error": None, "child": 0, "right": True}
        assert exits[rank].stderr == ""


@of_its_own
def test_the_others_hear_why_a_rank_ended() -> None:
    facts, exits = _run("end_by_mistake", 3)
    assert [end.returncode for end in exits] == [0, 1, 0], exits
    for rank in (0, 2):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"]) == ("PeerFailed", 1), failure
        assert "LookupError: a mistake of rank 1" in failure["text"], failure


def _verdict(folder: Path) -> str:
    """What ``telegrad report`` says of the reports in ``folder``, in one sentence."""
    command = [sys.executable, "-c", "from telegrad.tools.cli import main; main()", "report", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done  # something is stuck
    return str(json.loads(done.stdout)["verdicts"][0]["sentence"])


def test_a_signal_makes_ranks_report_where_they_hang(tmp_path: Path) -> None:
    def ask(ranks: Ranks) -> None:
        time.sleep(1.5)  # who waits for less than a second may be about to go on
        for rank in range(3):
            ranks.signal(rank, signal.SIGUSR1)
        while len(list(tmp_path.glob("*.json"))) < 3:
            assert len(ranks.running()) == 3
            ranks.listen(0.1)
        for rank in range(3):
            ranks.signal(rank, signal.SIGKILL)

    _run("hang_at_rank_1", 3, once_ready=ask, reports=tmp_path)
    verdict = _verdict(tmp_path)
    assert verdict.startswith("rank 1 ("), verdict
    assert "has not called operation 2" in verdict, verdict
    assert stat.S_IMODE(tmp_path.stat().st_mode) & 0o077 == 0
    assert not list(tmp_path.glob("*.part"))


def test_a_rank_that_holds_pythons_lock_is_not_taken_for_dead() -> None:
    facts, exits = _run("hold_pythons_lock", 3)
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in range(3):
        assert _only(facts, rank, "error") == {"error": None, "right": True}


@pytest.mark.parametrize("transports", ["", "tcp,self"])
def test_a_forked_child_does_not_keep_its_dead_parent_alive(transports: str) -> None:
    children: list[int] = []
    killed_s = 0.0

    def kill(ranks: Ranks) -> None:
        nonlocal killed_s
        killed_s = time.monotonic()
        ranks.signal(1, signal.SIGKILL)

    try:
        facts, _ = _run("leave_a_child", 3, once_ready=kill, transports=transports)
        children += [fact["child"] for fact in facts[1] if "child" in fact]
        for rank in (0, 2):
            failure = _only(facts, rank, "error")
            assert (failure["error"], failure["peer"]) == ("PeerFailed", 1), failure
            assert failure["at_s"] - killed_s < _SOON_S
        os.kill(children[0], 0)  # it was there all the time
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_stood_still_hears_why_another_aborted_and_left(size: int) -> None:
    facts, exits = _run("abort_and_close_at_once", size)
    assert [end.returncode for end in exits] == [0] * size, exits
    for rank in range(1, size):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"]) == ("PeerFailed", 0), failure
        assert "the disk is full" in failure["text"], failure


def test_abort_from_another_thread_ends_a_wait() -> None:
    facts, exits = _run("abort_from_a_thread", 3)
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in range(3):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"]) == ("TransportError" if rank == 1 else "PeerFailed", 1), failure
        assert "enough of it" in failure["text"]


@of_its_own
def test_nothing_is_left_after_a_failure() -> None:
    facts, exits = _run("fail_and_look_around", 3)
    assert [end.returncode for end in exits] == [0] * 3, exits
    for rank in range(3):
        assert _only(facts, rank, "error") == {"error": "PeerFailed" if rank != 1 else "TransportError", "left": []}


def test_a_death_is_heard_once_also_where_a_child_holds_its_descriptors() -> None:
    facts, _ = _run("look_after_a_death_with_a_child", 2, once_ready=lambda ranks: ranks.signal(1, signal.SIGKILL))
    (after,) = [fact for fact in facts[0] if "idle_cpu_s" in fact]
    assert after["idle_cpu_s"] < 0.5, "a rank that has nothing to do keeps a core busy"


def test_a_rank_that_dies_before_the_others_join_is_named() -> None:
    facts, exits = _run("die_before_joining", 3)
    assert exits[1].returncode == -9
    for rank in (0, 2):
        failure = _only(facts, rank, "error")
        assert (failure["error"], failure["peer"]) == ("PeerFailed", 1), failure


@of_its_own
def test_ctrl_c_ends_joining() -> None:
    def interrupt(ranks: Ranks) -> None:
        time.sleep(0.5)
        ranks.signal(0, signal.SIGINT)
        while 0 in ranks.running():
            ranks.listen()
        ranks.signal(1, signal.SIGKILL)

    facts, exits = _run("join_one_who_does_not", 2, once_ready=interrupt)
    assert exits[0].returncode == 0, exits[0]
    assert _only(facts, 0, "error")["error"] == "KeyboardInterrupt"
