"""Time and CPU time of each file of tests; a run of many files ends with a list of the slowest."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass

import pytest

SHOWN = 20
SUITE_FILES = 10
"""Files in a run that ends with the list."""
CPU_PROPERTY = "cpu_s"


@dataclass
class FileTime:
    """Seconds of the tests of one file."""

    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    """Of the test process, and of its child processes that have ended."""


class TimeByFile:
    """Plugin of pytest: each test process adds CPU time to its reports, and the process that prints sums them."""

    def __init__(self) -> None:
        self.counted_s = _cpu_s()
        self.files: defaultdict[str, FileTime] = defaultdict(FileTime)

    def pytest_collection_finish(self) -> None:
        self.counted_s = _cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _cpu_s()
        report.user_properties = [*report.user_properties, (CPU_PROPERTY, now_s - self.counted_s)]
        self.counted_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = self.files[report.nodeid.partition("::")[0]]
        file.elapsed_s += report.duration
        file.cpu_s += sum(
            float(str(value)) for name, value in report.user_properties if name == CPU_PROPERTY
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.files) < SUITE_FILES:
            return
        slowest = sorted(self.files.items(), key=lambda entry: entry[1].elapsed_s, reverse=True)[
            :SHOWN
        ]
        cpu_s = sum(file.cpu_s for file in self.files.values())
        terminalreporter.section(
            f"slowest of {len(self.files)} files, which took {cpu_s:.0f} s of CPU time"
        )
        for name, file in slowest:
            terminalreporter.write_line(f"{file.elapsed_s:7.1f} s {file.cpu_s:7.1f} s CPU  {name}")


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
