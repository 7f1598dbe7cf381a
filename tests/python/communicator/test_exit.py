"""What the other ranks hear when one leaves, and Ctrl-C while waiting, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telegrad.launch import RankFailed, Ranks

pytestmark = pytest.mark.ranks("exec")

_SOON_S = 20.0  # on a busy machine; well before the time-outs
_ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}


def _ranks(function: str, lines: list[str], *arguments: str) -> Ranks:
    return Ranks(
        f"exit_program:{function}",
        2,
        arguments=arguments,
        environment=_ENVIRONMENT,
        on_line=lambda rank, line: lines.append(line.rstrip()) if rank == 0 else None,
        timeout_s=60,
    )


@pytest.mark.parametrize("how", ["exception", "with", "exit", "exit among others"])
def test_the_others_hear_of_it_soon_and_why(how: str) -> None:
    lines: list[str] = []
    with _ranks("leave", lines, how) as ranks:
        exits = ranks.wait(until_all=True)
    assert [exit.returncode for exit in exits] == [0, 0 if how.startswith("exit") else 1]
    assert len(lines) == 1
    seconds, _, text = lines[0].partition(" ")
    assert float(seconds) < _SOON_S  # close() gives the others some seconds to close too
    assert "rank 1" in text
    if not how.startswith("exit"):
        assert "LookupError" in text
        assert "no such file: data.bin" in text


@pytest.mark.parametrize("attempt", range(4))
def test_daemon_threads_in_calls_do_not_end_the_process(attempt: int) -> None:
    program = [sys.executable, "-c", "import exit_program; exit_program.daemon_threads()"]
    ended = subprocess.run(program, env=os.environ | _ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("call", ["all_reduce", "split"])
def test_ctrl_c_while_waiting(call: str) -> None:
    lines: list[str] = []
    with _ranks("interrupted", lines, call) as ranks:
        while "waiting" not in lines:
            ranks.listen()
        time.sleep(0.3)
        start_s = time.monotonic()
        ranks.signal(0, signal.SIGINT)
        try:
            while "interrupted" not in lines:
                ranks.listen()
        except RankFailed:
            pytest.fail("rank 0 ended before it could say so")
        assert time.monotonic() - start_s < _SOON_S
