"""Calls over several processes: every result comes, and no process is left, however the first one ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from telegrad.tools.sim.measure import call_in_processes

_PROCESSES = 2


def _square(number: int) -> int:
    if number < 0:
        raise ValueError("below zero")
    return number * number


def test_every_result_comes() -> None:
    found: dict[int, int] = {}
    call_in_processes(_square, range(5), _PROCESSES, found.__setitem__)
    assert found == {number: number * number for number in range(5)}


def test_an_error_is_raised_here() -> None:
    with pytest.raises(ValueError, match="below zero"):
        call_in_processes(_square, [1, -1], _PROCESSES, lambda item, result: None)


def test_no_process_outlives_one_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from pathlib import Path
            from telegrad.tools.sim.measure import call_in_processes

            def wait(number):
                Path(sys.argv[1], str(os.getpid())).touch()
                time.sleep(100)

            if __name__ == "__main__":
                call_in_processes(wait, range(2), 2, print)
            """
        )
    )
    folder = tmp_path / "processes"
    folder.mkdir()
    with subprocess.Popen([sys.executable, program, folder]) as first:
        while len(list(folder.iterdir())) < _PROCESSES:
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
    for one in folder.iterdir():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            while _is_running(int(one.name)):
                time.sleep(0.05)


def _is_running(process: int) -> bool:
    os.kill(process, 0)
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
