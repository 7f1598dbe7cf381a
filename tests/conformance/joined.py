"""How the ranks of the suite join: over the driver that the environment names."""

from __future__ import annotations

import importlib.util
import os

from telegrad import Communicator, launch

DRIVER = "TELEGRAD_TEST_DRIVER"
MPI_MISSING = (
    "mpi4py is not installed (pip install 'telegrad[test]')"
    if importlib.util.find_spec("mpi4py") is None
    else "built without MPI"
    if importlib.util.find_spec("telegrad._mpi") is None
    else ""
)
"""Why the mpi driver cannot be tested here; empty: it can."""


def is_over_mpi() -> bool:
    """Do this process's ranks, or is it one of those that, join over the mpi driver?"""
    return os.environ.get(DRIVER) == "mpi"


def join(*, timeout_s: float = 1800.0, liveness_timeout_s: float | None = 8.0) -> Communicator:
    """A communicator of all ranks that telegrad's launcher has started."""
    if not is_over_mpi():
        return launch.join(timeout_s=timeout_s, liveness_timeout_s=liveness_timeout_s)
    import mpi4py

    mpi4py.rc.finalize = False  # after a death it would wait for the dead
    from mpi4py import MPI

    return Communicator.from_mpi(MPI.COMM_WORLD, timeout_s=timeout_s, liveness_timeout_s=liveness_timeout_s)
