"""On what and with what a figure was measured: without that it says nothing."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, system, versions and commit, as they go into result files."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "ucx": _ucx(),
        **{name: version_of(name) for name in ("telegrad", "torch", "numpy")},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The commit of the repository that this package is run from, with ``+`` if it was changed; outside one what
    ``TELEGRAD_COMMIT`` says, or None."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", __file__) is None:  # installed inside somebody else's repository
        return os.environ.get("TELEGRAD_COMMIT")
    head = git("rev-parse", "--short=12", "HEAD")
    return head if head is None else head + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _ucx() -> str | None:
    try:
        from telegrad import _core
    except ImportError:  # a description must not need what may be broken
        return None
    return _core.ucx_version() if hasattr(_core, "ucx_version") else None


def version_of(package: str) -> str | None:
    """``None``: it is not there, or goes by another name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_text(machine: Mapping[str, object]) -> str:
    """What ``describe_machine()`` says, in one line."""
    return f"{machine['processor']}, {machine['cores']} cores; commit {machine['commit']}"
