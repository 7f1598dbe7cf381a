"""Communicators of programs that have MPI: how mpi4py's communicators become ours.

Neither mpi4py nor an MPI library is needed until somebody hands such a communicator over."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from telegrad.communicator.rendezvous.joining import Exchange
from telegrad.errors import RendezvousError

DRIVERS = ("mpi", "ucx")
_POLL_S = 2e-4
_left_to_mpi: list[object] = []  # memory of exchanges that were given up, into which MPI may still write
_forked = False  # from a process that ran MPI


def _note_fork() -> None:
    global _forked
    mpi: Any = sys.modules.get("mpi4py.MPI")
    _forked = _forked or (mpi is not None and mpi.Is_initialized())


os.register_at_fork(after_in_child=_note_fork)
_BUILD = (
    "build telegrad from source where mpicxx of that MPI is in PATH: `pip install . -C cmake.define.TELEGRAD_MPI=on` "
    "in its repository or sdist"
)


MakeDriver = Callable[[int, int], object]
"""A driver for the core: of this rank, in a communicator of so many ranks."""


@dataclass(frozen=True)
class MpiPeers:
    """This process's place in an MPI communicator. ``make_driver`` is ``None`` where MPI only finds the peers."""

    rank: int
    size: int
    exchange: Exchange
    make_driver: MakeDriver | None


def find_mpi_peers(comm: Any, *, driver: str, join_timeout_s: float) -> MpiPeers:
    """Peers of mpi4py's ``comm``, whose ranks all call this.

    Raises ``TypeError`` or ``ValueError`` for what is no intracommunicator and for an unknown ``driver``,
    ``ImportError`` where the mpi driver is not there or belongs to another MPI, ``RendezvousError`` where MPI is not
    running, and ``TransportError`` where its thread level does not allow the driver."""
    if driver not in DRIVERS:
        raise ValueError(f"driver={driver!r} is none that from_mpi() has: use {' or '.join(map(repr, DRIVERS))}")
    mpi = checked_intracommunicator(comm)
    if driver == "ucx":
        return MpiPeers(comm.rank, comm.size, MpiExchange(comm, mpi, join_timeout_s), None)
    native = load_driver(mpi)
    network = native.network_of(mpi._addressof(comm), join_timeout_s)
    return MpiPeers(
        network.rank,
        network.size,
        lambda blob: list(network.exchange(blob, join_timeout_s)),
        lambda rank, size: native.make_driver(network, rank, size),
    )


def checked_intracommunicator(comm: Any) -> Any:
    """mpi4py's module ``MPI``, if ``comm`` is one of its intracommunicators and MPI is running."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(comm, mpi.Comm):
        raise TypeError(f"comm={comm!r} is no communicator of mpi4py: give one, such as MPI.COMM_WORLD")
    if _forked:
        raise RendezvousError(
            "this process was forked from one that runs MPI, and MPI works in that one only: start child processes "
            "with the 'spawn' method, or let mpiexec start all ranks"
        )
    if not mpi.Is_initialized() or mpi.Is_finalized():
        state = "finalised" if mpi.Is_finalized() else "not initialised"
        raise RendezvousError(f"MPI is {state}: call from_mpi() between MPI.Init_thread() and MPI.Finalize()")
    if comm == mpi.COMM_NULL:
        raise ValueError("comm is MPI.COMM_NULL: this process is in no group; call from_mpi() on the members only")
    if comm.Is_inter():
        raise ValueError(
            "comm is an inter-communicator, of two groups: merge them (comm.Merge()), or give the communicator of one"
        )
    return mpi


def driver_module(mpi: Any) -> str:
    """The name of telegrad's module for the ABI of ``mpi``, mpi4py's module ``MPI``.

    ``telegrad._mpi_abi`` for the standard ABI (MPI 5.0, ``libmpi_abi.so.1``), else ``telegrad._mpi``, which has the
    ABI of the MPI that telegrad was built with: MPICH's in telegrad's wheels."""
    asked = getattr(mpi, "Get_abi_version", None)  # of mpi4py 4.1; older ones know no standard ABI
    return "telegrad._mpi_abi" if asked is not None and asked()[0] > 0 else "telegrad._mpi"


def load_driver(mpi: Any) -> Any:
    """telegrad's module for mpi4py's ``mpi``. Raises ``ImportError`` if it is not there, or runs on another MPI."""
    theirs = _first_line(mpi.Get_library_version())
    name = driver_module(mpi)
    try:
        native = importlib.import_module(name)
    except ModuleNotFoundError as error:
        lacks = "MPI" if name == "telegrad._mpi" else "a driver for MPI's standard ABI, which mpi4py uses here"
        raise ImportError(
            f"this telegrad was built without {lacks}: {_BUILD}; or give driver='ucx', which needs MPI only to find "
            "the peers"
        ) from error
    except ImportError as error:
        raise ImportError(_mismatch(f"does not load beside it ({error})", theirs)) from error
    check_same_mpi(mpi, native)
    return native


def check_same_mpi(mpi: Any, native: Any) -> None:
    """Raises ``ImportError`` unless mpi4py's ``mpi`` and telegrad's module are on one and the same MPI library."""
    theirs, ours = _first_line(mpi.Get_library_version()), _first_line(native.library_version())
    if mpi._sizeof(mpi.COMM_WORLD) != native.handle_bytes or theirs != ours:
        raise ImportError(_mismatch(f"was built for another ({ours})", theirs))
    if not native.is_initialized():
        raise ImportError(_mismatch("has loaded another copy of it", theirs))


def _first_line(version: str) -> str:
    return " ".join(version.split("\n")[0].split())


def _mismatch(what: str, theirs: str) -> str:
    return (
        f"mpi4py runs on {theirs.split(',')[0]}, and telegrad's mpi driver {what}. The driver has the ABI of the MPI "
        "that telegrad was built with. Wheels have MPICH's ABI (MPICH, Intel MPI, Cray MPI, MVAPICH) and MPI's "
        f"standard ABI (MPICH 5, Open MPI 6, Intel MPI). For another MPI {_BUILD}; or give driver='ucx', which needs "
        "MPI only to find the peers"
    )


class MpiExchange:
    """Allgather of bytes over mpi4py's ``comm``; waits for the others at most ``timeout_s``, and Ctrl-C ends it."""

    repeats = True

    def __init__(self, comm: Any, mpi: Any, timeout_s: float) -> None:
        self._comm = comm
        self._mpi = mpi
        self._timeout_s = timeout_s

    def __call__(self, blob: bytes) -> list[bytes]:
        """Every rank's ``blob``, by rank. Raises ``RendezvousError`` if not all ranks come in time."""
        own_length = memoryview(bytearray(len(blob).to_bytes(8, sys.byteorder))).cast("q")
        lengths = memoryview(bytearray(8 * self._comm.size)).cast("q")
        self._wait(self._comm.Iallgather(own_length, lengths), own_length, lengths)
        every = bytearray(sum(lengths))
        counts = list(lengths)
        self._wait(self._comm.Iallgatherv([blob, self._mpi.BYTE], [every, counts, self._mpi.BYTE]), blob, every, counts)
        blobs, at = [], 0
        for length in lengths:
            blobs.append(bytes(every[at : at + length]))
            at += length
        return blobs

    def _wait(self, request: Any, *memory: object) -> None:
        deadline = time.monotonic() + self._timeout_s
        try:
            while not request.Test():
                if time.monotonic() > deadline:
                    raise RendezvousError(
                        f"not all ranks of the MPI communicator came within {self._timeout_s:g} s: every one of them "
                        "must call from_mpi(). It cannot be joined again: give a duplicate of it (comm.Dup())",
                        rank=self._comm.rank,
                    )
                time.sleep(_POLL_S)
        except BaseException:
            _left_to_mpi.append((request, memory))
            raise
