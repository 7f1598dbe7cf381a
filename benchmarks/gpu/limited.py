"""Commands that may hang, as whatever waits for a GPU may: each within its limit, and its children with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_KILLED_S = 5.0  # until the end by force is known: what is inside the driver may not end at all


def run_limited(
    command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str], *, interrupted_s: float
) -> int | None:
    """The status of a command that writes into ``log``; ``None``: it had to be ended. Its children end with it.
    ``interrupted_s``: from Ctrl-C to the end by force; 0: by force at once."""
    if limit_s <= 0:
        return None
    with log.open("a") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None and interrupted_s > 0:
                process.send_signal(signal.SIGINT)  # it writes what it has, and ends its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(interrupted_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)


def last_of(log: Path, lines: int) -> str:
    """What was written there last."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
