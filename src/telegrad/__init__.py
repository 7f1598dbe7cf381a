"""telegrad: compressed gradients for data-parallel training on slow networks.

Under DDP: ``comm = telegrad.Communicator.from_torch()``, then ``ddp.register_comm_hook(telegrad.DDPState(comm, ddp),
telegrad.ddp_hook)``. ``import telegrad`` needs numpy only; names that need torch are imported at their first use.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

# UCX reads its environment while its library loads. It must not install signal handlers in a training job, for crashes
# or (`UCX_DEBUG_SIGNO`) for SIGHUP, which the program or nohup may want otherwise, and must stay quiet. But another UCX
# in this process (MPI's) must not inherit that, so these variables exist only during the import.
# The UCX that comes with the package has no transport that registers memory for long (no RDMA, no GPU), so it need not
# hear when memory is unmapped: without its patches in libc's functions it loads 0.4 s faster, 50 ms for each of them.
_LOADING_ENVIRONMENT = {"UCX_HANDLE_ERRORS": "none", "UCX_DEBUG_SIGNO": "0", "UCX_LOG_LEVEL": "fatal"}
_BUNDLED_ONLY = {"UCX_MEM_MMAP_HOOK_MODE": "none"}


def _is_bundled() -> bool:
    """Has the package its own UCX (cmake/bundle_ucx.cmake), or is the core linked with the system's?"""
    return any(os.path.isdir(os.path.join(folder, "_ucx")) for folder in __path__)


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


def _asked_for_diagnosis() -> bool:
    """Is this a command that must work without the core: ``telegrad doctor``, ``env`` or ``report``?"""
    return os.path.basename(sys.argv[0]) == "telegrad" and sys.argv[1:2] in (["doctor"], ["env"], ["report"])


def _load_core() -> None:
    """Imports ``telegrad._core``. Raises ``ImportError`` with the remedy if it is absent or cannot be loaded."""
    try:
        with _environment_for_loading():
            importlib.import_module("telegrad._core")
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
            "libucm, UCX is missing. Install telegrad again with `pip install .` (bundles UCX from the libucx-cu12 "
            "wheel), or build against the system's UCX with `pip install . -C cmake.define.TELEGRAD_UCX=system`"
        ) from error


try:
    _load_core()
except ImportError:
    if not _asked_for_diagnosis():
        raise
else:
    from telegrad import errors
    from telegrad.communicator import (
        BoundedTopkState,
        Communicator,
        CustomReduction,
        DeviceEntries,
        GTopkState,
        OkTopkState,
        ReduceOp,
        Work,
        join,
    )
    from telegrad.cost import Tuning
    from telegrad.errors import (
        ChoiceWarning,
        MismatchedCall,
        NonFiniteGradient,
        PeerFailed,
        RendezvousError,
        TimeoutExpired,
        TransportError,
    )
    from telegrad.sparse_vector import SparseVector

if TYPE_CHECKING:
    from telegrad.ddp import (
        BoundedTopk,
        Cheapest,
        DDPState,
        LowRank,
        Momentum,
        OkTopk,
        Quantised,
        TopK,
        Warmup,
        ddp_hook,
    )
    from telegrad.diloco import DiLoCo
    from telegrad.diloco.fragment import Streaming
    from telegrad.synchronizer import AutoPlan, Elastic, ReplicaSynchronizer, Synchronizer
    from telegrad.tuning import calibrate

    __version__: str

__all__ = [
    "AutoPlan",
    "BoundedTopk",
    "BoundedTopkState",
    "Cheapest",
    "ChoiceWarning",
    "Communicator",
    "CustomReduction",
    "DDPState",
    "DeviceEntries",
    "DiLoCo",
    "Elastic",
    "GTopkState",
    "LowRank",
    "MismatchedCall",
    "Momentum",
    "NonFiniteGradient",
    "OkTopk",
    "OkTopkState",
    "PeerFailed",
    "Quantised",
    "ReduceOp",
    "RendezvousError",
    "ReplicaSynchronizer",
    "SparseVector",
    "Streaming",
    "Synchronizer",
    "TimeoutExpired",
    "TopK",
    "TransportError",
    "Tuning",
    "Warmup",
    "Work",
    "__version__",
    "calibrate",
    "ddp_hook",
    "errors",
    "join",
]

_LAZY = {
    "AutoPlan": "synchronizer",
    "BoundedTopk": "ddp",
    "Cheapest": "ddp",
    "DDPState": "ddp",
    "DiLoCo": "diloco",
    "Elastic": "synchronizer",
    "LowRank": "ddp",
    "Momentum": "ddp",
    "OkTopk": "ddp",
    "Quantised": "ddp",
    "ReplicaSynchronizer": "synchronizer",
    "Streaming": "diloco",
    "Synchronizer": "synchronizer",
    "TopK": "ddp",
    "Warmup": "ddp",
    "calibrate": "tuning",
    "ddp_hook": "ddp",
}
_PACKAGES = {
    "compress",
    "ddp",
    "diloco",
    "launch",
    "linear",
    "synchronizer",
    "tuning",
}  # that nothing here has imported


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _LAZY and name not in _PACKAGES:
        raise AttributeError(f"module 'telegrad' has no attribute {name!r}")
    try:
        found = importlib.import_module(f"telegrad.{_LAZY.get(name, name)}")
        return getattr(found, name) if name in _LAZY else found
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"telegrad.{name} needs torch: pip install 'telegrad[torch]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_PACKAGES, "__version__"})


def _version() -> str:
    """Of the installed package; ``"unknown"`` where its files were copied without what pip knows of it."""
    import importlib.metadata  # slow to import, and hardly ever needed

    try:
        return importlib.metadata.version("telegrad")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
