"""How the process of one rank comes to be: the one place that Ranks asks for one.

It must not know what ranks do, nor when they end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_RANK_MAIN = "telegrad.launch.rank_main"


@dataclass(frozen=True)
class Start:
    """What is to run. ``prefix`` stands before the command; ``environment`` is all of it; ``descriptors`` are inherited
    under the numbers that they have here."""

    target: str
    arguments: Sequence[str]
    prefix: Sequence[str]
    environment: Mapping[str, str]
    descriptors: Sequence[int]


@dataclass(frozen=True)
class Process:
    """A child of this process that leads a process group of its own, with its standard output and error.

    ``wait()`` blocks until it has ended, and returns its exit status: negative for a signal, as in ``subprocess``.
    """

    pid: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    wait: Callable[[], int]


def start(asked: Start) -> Process:
    """Raises ``OSError`` if the command cannot be run."""
    process = subprocess.Popen(
        [*asked.prefix, sys.executable, "-m", _RANK_MAIN, asked.target, *asked.arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=asked.environment,
        pass_fds=asked.descriptors,
        # To be signalled as one. Not a session: Linux makes each a scheduling group of its own (autogroup), within
        # which alone sched_yield() yields, and ranks that outnumber cores must yield to each other.
        process_group=0,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    return Process(process.pid, process.stdout, process.stderr, process.wait)
