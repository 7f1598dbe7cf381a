"""CPU seconds of each file of tests and each test, with those of every process it has started: ``make test-cost``.

A process is counted with the test during which it ends: a server that forks torchrun's ranks with the last one that
uses it, a server of ``forked_ranks.py`` with none. Wall time would be noise: several files run at a time.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Generator

import pytest

_PROPERTY = "cpu_s"
_SHOWN = 60


def _used_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


class CpuCost:
    def __init__(self) -> None:
        self._before_s = 0.0
        self._tests: Counter[str] = Counter()
        self._files: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._before_s = _used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A phase's seconds travel in its report, also from the processes that run tests."""
        report = yield
        now_s = _used_s()
        report.user_properties.append((_PROPERTY, now_s - self._before_s))
        self._before_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties)[_PROPERTY]
        self._tests[report.nodeid] += seconds
        self._files[report.nodeid.split("::")[0]] += seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = self._files.total()
        for title, seconds in (("files", self._files), ("tests", self._tests)):
            terminalreporter.section(f"CPU seconds of {title}, {total:.0f} in all")
            for name, one in seconds.most_common(_SHOWN):
                terminalreporter.line(f"{one:8.2f} {name}")
