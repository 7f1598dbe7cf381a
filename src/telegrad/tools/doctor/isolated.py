"""Asks a Python process of its own: what is tried there may crash, hang or print without harm to who asks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

# If the asking process is killed, the answering one goes too.
_PREAMBLE = "import ctypes, json; ctypes.CDLL(None).prctl(1, 9)\n"


class ProbeFailed(Exception):  # noqa: N818 - named by what happened
    """The process gave no answer; the message is the last that it said, or how it ended."""


def ask(program: str, *, timeout_s: float) -> dict[str, Any]:
    """Runs ``program`` (Python source; it finds ``json`` imported) and returns the JSON object in its last line.

    Raises ``ProbeFailed`` if it does not end well within ``timeout_s`` seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PREAMBLE + program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"it was not done within {timeout_s:g} s") from error
    if done.returncode < 0:
        raise ProbeFailed(f"the process was ended by {signal.Signals(-done.returncode).name}")
    lines = done.stderr.strip().splitlines()
    if done.returncode != 0:
        raise ProbeFailed(lines[-1] if lines else f"the process ended with status {done.returncode}")
    answers = done.stdout.strip().splitlines()
    try:
        answer = json.loads(answers[-1])
    except (IndexError, ValueError) as error:
        raise ProbeFailed(f"the process gave no answer but {done.stdout[-200:]!r}") from error
    if not isinstance(answer, dict):
        raise ProbeFailed(f"the process gave no object but {answers[-1][:200]!r}")
    return answer
