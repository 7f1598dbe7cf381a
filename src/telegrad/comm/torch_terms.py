"""What torch says, and how long it can be told to wait."""

from __future__ import annotations

from datetime import timedelta

_LONGEST_S = 1e8  # infinity it cannot be told


def first_line(error: BaseException) -> str:
    """What an error of torch's says, without the stack that it may hold."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def torch_timeout(seconds: float) -> timedelta:
    """So many seconds, which may be infinity."""
    return timedelta(seconds=min(seconds, _LONGEST_S))
