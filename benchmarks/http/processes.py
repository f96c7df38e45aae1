"""CPU time, memory and open files of servers that run on this machine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import psutil

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that processes have taken and hold."""

    cpu_s: float
    mib: float
    files: int


def usage(pid: int, *, has_children: bool = True) -> Usage:
    """Read the usage of a process, and of all below it."""
    top = psutil.Process(pid)
    cpu_s = mib = 0.0
    files = 0
    for process in [top, *(top.children(recursive=True) if has_children else [])]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a child that has just ended
            times = process.cpu_times()
            cpu_s += times.user + times.system
            mib += process.memory_info().rss / MIB
            files += process.num_fds()
    return Usage(cpu_s, mib, files)
