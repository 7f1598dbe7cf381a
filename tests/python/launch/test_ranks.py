"""The launcher, with processes that need no network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telegrad.errors import RendezvousError
from telegrad.launch import RankExit, RankFailed, Ranks, RanksTimedOut, join

pytestmark = pytest.mark.ranks("exec")

_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def _ranks(function: str, size: int, *arguments: str, **options: object) -> Ranks:
    options = {"timeout_s": 60.0, "environment": _ENVIRONMENT, **options}
    return Ranks(f"rank_programs:{function}", size, arguments=arguments, **options)  # type: ignore[arg-type]


def _gone(process: int) -> bool:
    """True once a process that is not our child has ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_ranks_exchange_bytes_of_any_length_in_rounds() -> None:
    lines: list[tuple[int, str]] = []
    with _ranks("swap", 3, "2", on_line=lambda rank, line: lines.append((rank, line))) as ranks:
        exits = ranks.wait()
    assert [(end.rank, end.returncode) for end in exits] == [(0, 0), (1, 0), (2, 0)]
    assert sorted(lines) == sorted((r, f"[{n}, {1000 + n}, {2000 + n}] True") for r in range(3) for n in range(2))


def test_a_rank_that_leaves_before_it_joins_is_named_to_the_others() -> None:
    with _ranks("leave_before_joining", 3) as ranks:
        exits = ranks.wait(until_all=True)
    assert [end.returncode for end in exits] == [1, 0, 1]
    assert "RendezvousError: rank 0 of 3: rank 1 ended before it joined" in exits[0].stderr


def test_an_exchange_refuses_more_than_addresses_take() -> None:
    with pytest.raises(RankFailed, match="an exchange carries at most 1048576"), _ranks("say_too_much", 1) as ranks:
        ranks.wait()


def test_the_first_failure_ends_all_and_is_shown() -> None:
    begin = time.monotonic()
    with (
        pytest.raises(RankFailed, match="rank 1 ended with exit status 1") as caught,
        _ranks("fail_on_rank_1", 3) as ranks,
    ):
        ranks.wait()
    assert "LookupError: a mistake of rank 1" in str(caught.value)
    assert caught.value.exits[0].rank == 1
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("returncode", "how"),
    [
        (3, "exit status 3"),
        (-11, "SIGSEGV"),
        (-9, "SIGKILL (where memory runs out it is the kernel's"),
        (-40, "signal 40"),
    ],
)
def test_how_a_rank_ended(returncode: int, how: str) -> None:
    assert str(RankExit(2, returncode, "last\n")).startswith(f"rank 2 ended with {how}")


def test_a_time_out_kills_and_shows_where_the_ranks_were() -> None:
    ranks = _ranks("hang_in_this_function", 2, timeout_s=3.0)
    with (
        pytest.raises(RanksTimedOut, match=r"ranks \[0, 1\] of 2 were not done within 3 s: allow more") as caught,
        ranks,
    ):
        ranks.wait()
    assert "hang_in_this_function" in str(caught.value)


def test_a_time_out_before_ranks_run_kills_none_of_them_unseen() -> None:
    """The signal that asks where a rank is would end one that has no handler for it yet."""
    ranks = _ranks("swap", 2, timeout_s=1.0, prefix_of=lambda _: ["sh", "-c", "exec sleep 60", "sh"])
    with ranks:
        with pytest.raises(RanksTimedOut, match=r"ranks \[0, 1\] of 2 were not done within 1 s: allow more") as caught:
            ranks.wait()
        assert ranks.running() == [0, 1]
    assert caught.value.timeout_s == 1.0
    assert str(caught.value).splitlines()[1:] == [f"rank {rank} was still being started" for rank in range(2)]


def test_killed_ranks_leave_nothing_of_mpich_in_shared_memory() -> None:
    ours, other = (Path(f"/dev/shm/mpich_shm_telegrad_{os.getpid()}_{name}") for name in ("ours", "other"))
    ready: list[int] = []
    try:
        other.write_bytes(b"of another job")
        with _ranks("map_a_file", 1, str(ours), mpich=True, on_line=lambda rank, _: ready.append(rank)) as ranks:
            while not ready:
                ranks.listen()
            assert ours.exists()
        assert not ours.exists()
        assert other.exists()
    finally:
        for file in (ours, other):
            file.unlink(missing_ok=True)


def test_one_rank_can_be_killed_while_the_others_go_on() -> None:
    with _ranks("hang_in_this_function", 2, on_line=lambda rank, _: ranks.signal(rank, signal.SIGKILL)) as ranks:
        exits = ranks.wait(until_all=True)
    assert [end.returncode for end in exits] == [-9, -9]
    assert "SIGKILL" in str(exits[0])


def test_close_ends_ranks_that_refuse_to() -> None:
    numbers: list[int] = []
    with _ranks("ignore_sigterm", 1, on_line=lambda _, line: numbers.append(int(line))) as ranks:
        while not numbers:
            ranks.listen()
    assert _gone(numbers[0])


def test_a_mistake_of_the_caller_ends_the_ranks_too() -> None:
    numbers: list[int] = []

    def fail(_: int, line: str) -> None:
        numbers.append(int(line))
        raise LookupError("a mistake in on_line")

    with pytest.raises(LookupError, match="a mistake in on_line"), _ranks("ignore_sigterm", 2, on_line=fail) as ranks:
        ranks.wait()
    assert _gone(numbers[0])


def test_what_a_rank_leaves_behind_ends_with_it() -> None:
    numbers: list[int] = []
    with _ranks("leave_a_child", 1, on_line=lambda _, line: numbers.append(int(line))) as ranks:
        ranks.wait()
    assert _gone(numbers[0])


def test_ranks_do_not_outlive_a_killed_launcher() -> None:
    program = (
        "from telegrad.launch import Ranks\n"
        "show = lambda rank, line: print(line, flush=True)\n"
        "with Ranks('rank_programs:ignore_sigterm', 1, timeout_s=60, on_line=show) as ranks:\n"
        "    ranks.wait()\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env={**os.environ, **_ENVIRONMENT}
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate()
    assert _gone(rank)


def test_each_rank_has_its_own_environment_and_prefix() -> None:
    lines: dict[int, str] = {}
    with _ranks(
        "print_environment",
        2,
        "WHO",
        environment_of=lambda rank: {"WHO": f"rank {rank}"},
        prefix_of=lambda rank: ["env", "WHO=first"] if rank == 0 else [],
        on_line=lines.__setitem__,
    ) as ranks:
        ranks.wait()
    assert lines == {0: "first", 1: "rank 1"}


def test_a_script_is_a_target(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    lines: dict[int, str] = {}
    with Ranks(
        str(script), 1, timeout_s=60.0, arguments=["a", "b"], environment=_ENVIRONMENT, on_line=lines.__setitem__
    ) as ranks:
        ranks.wait()
    assert lines == {0: "__main__ ['a', 'b']"}


@pytest.mark.parametrize(
    ("target", "size", "timeout_s", "message"),
    [
        ("rank_programs:swap", 0, 1.0, "size=0 must be at least 1"),
        ("rank_programs", 1, 1.0, "target='rank_programs' must be 'module:function' or the path of a .py script"),
        ("/nowhere/script.py", 1, 1.0, "does not exist"),
        ("rank_programs:swap", 1, 0.0, "timeout_s=0.0 must be above 0"),
    ],
)
def test_bad_arguments(target: str, size: int, timeout_s: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranks(target, size, timeout_s=timeout_s)


def test_join_outside_a_launcher_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TELEGRAD_RANK", raising=False)
    with pytest.raises(
        RendezvousError, match=r"the environment has no TELEGRAD_RANK.*start this function with telegrad.launch"
    ):
        join()
