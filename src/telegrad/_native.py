"""Loads the compiled core once, and says what to do where that fails.

UCX reads its environment while its library loads. It must not install signal handlers in a training job, for crashes
or (``UCX_DEBUG_SIGNO``) for SIGHUP, which the program or nohup may want otherwise, and must stay quiet; but another UCX
in this process (MPI's) must not inherit that, so these variables exist only during the import.

The UCX that comes with the package has no transport that registers memory for long (no RDMA, no GPU), so it need not
hear when memory is unmapped: without its patches in libc's functions it loads 0.4 s faster, 50 ms for each of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_LOADING_ENVIRONMENT = {"UCX_HANDLE_ERRORS": "none", "UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "fatal"}
_BUNDLED_ONLY = {"UCX_MEM_MMAP_HOOK_MODE": "none"}


def _is_bundled() -> bool:
    """Has the package its own UCX (cmake/bundle_ucx.cmake), or is the core linked with the system's?"""
    return any(os.path.isdir(os.path.join(folder, "_ucx")) for folder in sys.modules[__package__].__path__)


@contextmanager
def _environment_for_loading() -> Iterator[None]:
    wanted = _LOADING_ENVIRONMENT | (_BUNDLED_ONLY if _is_bundled() else {})
    added = [name for name in wanted if name not in os.environ]  # what the user has set stays
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def asked_for_diagnosis() -> bool:
    """Is this a command that must work without the core: ``telegrad doctor``, ``env`` or ``report``?"""
    return os.path.basename(sys.argv[0]) == "telegrad" and sys.argv[1:2] in (["doctor"], ["env"], ["report"])


def load_core() -> ModuleType:
    """Imports ``telegrad._core``. Raises ``ImportError`` with the remedy if it is absent or cannot be loaded."""
    try:
        with _environment_for_loading():
            return importlib.import_module("telegrad._core")
    except ModuleNotFoundError as error:
        if error.name != "telegrad._core":
            raise
        raise ImportError(
            "telegrad._core, the compiled part of telegrad, is not installed: run `pip install .` in the repository "
            "(it needs a C++20 compiler; the other build requirements are fetched by pip)"
        ) from error
    except ImportError as error:
        raise ImportError(
            f"telegrad._core was found but does not load: {error}. If the message names libucp, libuct, libucs or "
            "libucm, UCX is missing: install telegrad again with `pip install .` (bundles UCX from the libucx-cu12 "
            "wheel), or build against the system's UCX with `pip install . -C cmake.define.TELEGRAD_UCX=system`"
        ) from error
