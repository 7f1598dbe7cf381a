"""telegrad: sparse and dense gradient exchange for data-parallel training.

``import telegrad`` needs numpy only; what trains with torch is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from telegrad._native import asked_for_diagnosis, load_core

try:
    load_core()
except ImportError:
    if not asked_for_diagnosis():
        raise
else:
    from telegrad import errors
    from telegrad.communicator import (
        BoundedTopkState,
        Communicator,
        DeviceEntries,
        GTopkState,
        OkTopkState,
        ReduceOp,
        Work,
    )
    from telegrad.cost import Tuning
    from telegrad.errors import (
        MismatchedCall,
        NonFiniteGradient,
        PeerFailed,
        RendezvousError,
        TimeoutExpired,
        TransportError,
    )
    from telegrad.sparse_vector import SparseVector
    from telegrad.tuning import calibrate

if TYPE_CHECKING:
    from telegrad.ddp import Cheapest, DDPState, Momentum, OkTopk, Quantised, TopK, Warmup, ddp_hook
    from telegrad.synchronizer import ReplicaSynchronizer, Synchronizer

    __version__: str

__all__ = [
    "BoundedTopkState",
    "Cheapest",
    "Communicator",
    "DDPState",
    "DeviceEntries",
    "GTopkState",
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
]

_NEEDS_TORCH = {
    "Cheapest": "ddp",
    "DDPState": "ddp",
    "Momentum": "ddp",
    "OkTopk": "ddp",
    "Quantised": "ddp",
    "ReplicaSynchronizer": "synchronizer",
    "Synchronizer": "synchronizer",
    "TopK": "ddp",
    "Warmup": "ddp",
    "ddp_hook": "ddp",
}
_PACKAGES = {"compress", "ddp", "launch", "linear", "synchronizer"}  # that nothing here has imported


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _NEEDS_TORCH and name not in _PACKAGES:
        raise AttributeError(f"module 'telegrad' has no attribute {name!r}")
    try:
        found = importlib.import_module(f"telegrad.{_NEEDS_TORCH.get(name, name)}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"telegrad.{name} needs torch: pip install 'telegrad[torch]'") from error
    return getattr(found, name) if name in _NEEDS_TORCH else found


def __dir__() -> list[str]:
    return sorted({*globals(), *_NEEDS_TORCH, *_PACKAGES, "__version__"})


def _version() -> str:
    """Of the installed package; ``"unknown"`` where its files were copied without what pip knows of it."""
    import importlib.metadata  # slow to import, and hardly ever needed

    try:
        return importlib.metadata.version("telegrad")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
