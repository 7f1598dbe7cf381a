"""What MPICH's ranks leave in /dev/shm if they are killed: they remove it themselves only in MPI_Finalize."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_FILES = "/dev/shm/mpich_shm_"


def mapped_by(processes: Iterable[int]) -> set[Path]:
    """MPICH's files in shared memory that these processes, which are still alive, have mapped: nobody else's."""
    found = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process}/maps").read_text(errors="surrogateescape")
        except OSError:  # it has just ended, or nobody may look
            continue
        for line in maps.splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(_FILES) and not path.endswith(" (deleted)"):
                found.add(Path(path))
    return found


def remove(files: Iterable[Path]) -> None:
    """Removes those of ``files`` that are still there."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
