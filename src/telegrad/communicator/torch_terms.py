"""What torch says, and how long it can be told to wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

_LONGEST_S = 1e8  # infinity it cannot be told


def first_line(error: BaseException) -> str:
    """What an error of torch's says, without the stack that it may hold."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def torch_timeout(seconds: float) -> timedelta:
    """So many seconds, which may be infinity."""
    return timedelta(seconds=min(seconds, _LONGEST_S))


def address_of(store: Any) -> str | None:
    """Where a store is served, as its processes were told; ``None``: it is not served over TCP, or does not say."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) and host else None
