"""A plugin of pytest that writes what becomes of each test as soon as it is known, into the file TELEGRAD_OUTCOMES: a
test that hangs or ends the process leaves no report. ``read`` tells it again.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "TELEGRAD_OUTCOMES"
_GROUP = re.compile(r"@[^\]@]+$")  # pytest-xdist puts it behind a test's name, by which pytest does not know the test


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="begun")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        _write(test=report.nodeid, outcome=report.outcome, reason=reason)


def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
    if not hasattr(session.config, "workerinput"):  # a worker of pytest-xdist
        _write(outcome="finished", status=int(exitstatus))


def _write(**line: Any) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


@dataclass
class Outcomes:
    """Of the tests in a file. ``broken``: those in which the process ended, or was ended. ``skipped``: reasons by name.
    ``finished``: pytest has come to its end, with status ``status``."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    finished: bool = False
    status: int | None = None

    @property
    def seen(self) -> list[str]:
        return [*self.passed, *self.failed, *self.broken, *self.skipped]


def read(path: Path) -> Outcomes:
    """What the file says; nothing if there is none. Tests are as they were told last."""
    found = Outcomes()
    latest: dict[str, tuple[str, str]] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        line = json.loads(text)
        if line["outcome"] == "finished":
            found.finished, found.status = True, line["status"]
            continue
        found.finished = False
        test = _GROUP.sub("", line["test"])
        if latest.get(test, ("", ""))[0] != "failed":  # what follows a failure is its clearing up
            latest[test] = line["outcome"], line.get("reason", "")
    for test, (outcome, reason) in latest.items():
        if outcome == "skipped":
            found.skipped[test] = reason
        else:
            {"passed": found.passed, "failed": found.failed, "begun": found.broken}[outcome].append(test)
    return found
