"""Where a rank leaves its report when an operation hangs, and the signal that asks for one.

The core writes the reports; this module only reads the environment. ``telegrad report`` (telegrad.report.hang) reads
them.
"""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import warnings

from telegrad import _core

FOLDER = "TELEGRAD_REPORT_DIR"
"""Names the folder; every rank of a job can share one."""
SIGNAL = "TELEGRAD_REPORT_SIGNAL"
"""Names the signal (``SIGUSR1`` if unset), or says ``none``."""


def report_folder() -> str:
    """The folder that reports are written to: ``TELEGRAD_REPORT_DIR``, else one of this user in the system's temporary
    folder. It is made here, so that nobody else can do so later. Empty, after a warning, if it cannot be used."""
    chosen = os.environ.get(FOLDER)
    folder = chosen or os.path.join(tempfile.gettempdir(), f"telegrad-reports-{os.getuid()}")
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        warnings.warn(
            f"hanging operations leave no reports, set {FOLDER} to a folder that can be made: {error}", stacklevel=2
        )
        return ""
    if chosen:
        return folder
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return folder
    warnings.warn(
        f"{folder} is not a folder that only you can write to, so hanging operations leave no reports: remove it, or "
        f"set {FOLDER}",
        stacklevel=2,
    )
    return ""


def report_signal() -> signal.Signals | None:
    """The signal that asks for reports; None if the user wants none. Raises ``ValueError`` for one that means
    something else."""
    name = os.environ.get(SIGNAL) or "SIGUSR1"
    if name.lower() == "none":
        return None
    known = {member.name: member for member in signal.Signals}
    chosen = known.get(name.upper()) or known.get(f"SIG{name.upper()}")
    if chosen is None or not (chosen in (signal.SIGUSR1, signal.SIGUSR2) or chosen >= signal.SIGRTMIN):
        raise ValueError(f"{SIGNAL}={name!r} has another meaning: use SIGUSR1, SIGUSR2, SIGRTMIN or none")
    return chosen


def report_on_signal() -> None:
    """From now on the signal makes the engine write a report of every communicator of this process.

    A handler that was there before still runs; one that is installed later replaces ours.
    """
    chosen = report_signal()
    if chosen is not None:
        _core.report_on_signal(chosen)
