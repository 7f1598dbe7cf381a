"""On which core the engine's thread runs, where the user says so."""

from __future__ import annotations

import os

from telegrad import _core

ENGINE_CORE = "TELEGRAD_ENGINE_CORE"
"""The number of the core that the engine's thread stays on. Unset: the kernel chooses, which is best unless a core is
kept free for it. Ranks of one host each want another core, so their launcher has to set it for each."""


def bind_engine() -> None:
    """The engine that the process's next communicator starts stays on the core of ``TELEGRAD_ENGINE_CORE``.

    Threads that wait in a blocking call run where they are: they do the engine's work themselves. Raises
    ``ValueError`` if this process may not use that core.
    """
    _core.set_engine_core(_chosen_core(os.environ.get(ENGINE_CORE, "")))


def _chosen_core(text: str) -> int:
    if not text:
        return -1
    allowed = sorted(os.sched_getaffinity(0))
    if text.isdecimal() and int(text) in allowed:
        return int(text)
    raise ValueError(
        f"{ENGINE_CORE}={text!r} is no core that this process may use: use one of {', '.join(map(str, allowed))}, or "
        "unset it"
    )
