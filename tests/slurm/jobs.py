"""Batch jobs of a Slurm cluster, and what is expected of them."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 420.0
"""For a job to do the next thing: Slurm notices a lost node, a requeued job waits two minutes, the machine is busy."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
Found = TypeVar("Found")


class CaseFailed(Exception):  # noqa: N818
    """A job does not do what is expected; the message says what, and what the job has printed."""


class Job:
    """A job of a script of examples/slurm, on all nodes of ``cluster``. ``settings``: environment variables."""

    def __init__(self, cluster: Cluster, script: str, *arguments: str, **settings: str) -> None:
        self._cluster = cluster
        self._output = cluster.folder / f"{script}.out"
        self._output.unlink(missing_ok=True)
        paths = [str(Path(sys.executable).parent), cluster.environment()["PATH"]]
        modules = [str(ROOT / "tests" / "python" / "train"), str(ROOT / "examples")]
        self.id = cluster.run(
            *("sbatch", "--parsable", f"--nodes={len(cluster.names)}", f"--output={self._output}", f"--chdir={ROOT}"),
            str(ROOT / "examples" / "slurm" / script),
            *arguments,
            changes={
                "PATH": os.pathsep.join(paths),
                "PYTHONPATH": os.pathsep.join(modules),
                "PYTHONUNBUFFERED": "1",
                **settings,
            },
        )

    def said(self) -> str:
        """All that it has printed."""
        return self._output.read_text() if self._output.exists() else ""

    def state(self) -> str:
        """As squeue says it, such as RUNNING."""
        return self._cluster.run("squeue", "--noheader", "--states=all", f"--jobs={self.id}", "--format=%T")

    def nodes(self) -> str:
        """Those that Slurm counts as its own, such as ``node[1-2]``."""
        return self._cluster.run("squeue", "--noheader", f"--jobs={self.id}", "--format=%N")

    def expect(self, right: bool, otherwise: str) -> None:
        """Raises ``CaseFailed`` unless ``right``."""
        if not right:
            raise CaseFailed(f"{otherwise}; the job is {self.state() or 'gone'}, and has printed:\n{self.said()}")

    def wait(self, look: Callable[[], Found | None], what: str, most_s: float = MOST_S) -> Found:
        """The first that ``look`` finds. Raises ``CaseFailed`` when that takes too long, or the job ends without."""
        deadline = time.monotonic() + most_s
        while True:
            ended = self.state() in ENDED
            if (found := look()) is not None:
                return found
            self.expect(not ended, f"ended without {what}")
            self.expect(time.monotonic() < deadline, f"no {what} within {most_s:.0f} s")
            time.sleep(0.25)

    def wait_until_printed(self, pattern: str, times: int = 1) -> None:
        """Until it has printed lines that match ``pattern``, so many."""
        lines = re.compile(pattern, re.MULTILINE)
        self.wait(lambda: len(lines.findall(self.said())) >= times or None, f"{pattern!r} ({times} times)")

    def wait_until(self, *states: str) -> None:
        """Until it is in one of the ``states``."""
        self.wait(lambda: self.state() in states or None, " or ".join(states))

    def wait_until_completed(self) -> None:
        """Raises ``CaseFailed`` where it ends otherwise."""
        self.wait_until(*ENDED)
        self.expect(self.state() == "COMPLETED", "ended with an error")
