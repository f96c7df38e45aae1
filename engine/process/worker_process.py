"""An engine process: its start before its settings are known, its signs of life, and the decision that it has stopped.

The process imports torch for a second or more, so a server starts it before its own imports. Importing this module
takes no time.

A thread of the engine writes two counts to a page of memory that both processes share: its own beats, and the turns of
the engine's loop. In a stopped process neither grows. In a step that never ends, only the beats grow.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from manylora.config import environment

KEPT_FROM_ENGINE = frozenset(
    {"MANYLORA_ADMIN_KEY", "MANYLORA_PEPPER", "MANYLORA_REGISTRY__DATABASE_URL"}
)
"""Environment variables that the engine does not get, because it does not need them."""
LOOK_S = 0.5
"""Seconds between two beats, and between two looks. Time is counted in looks, so a time in which the client stood still
or the machine slept does not count."""
SILENT_S = 6.0
"""Time without a beat after which an engine at rest has stopped."""
SILENT_START_S = 30.0
"""`SILENT_S` of a starting engine, which cannot beat before Python has imported it."""
STUCK_S = 60.0
"""Shortest time without a turn of the loop after which a step counts as one that does not end."""
STUCK_STEPS = 20.0
"""`STUCK_S` in multiples of the longest step, for slow machines."""

STARVED_CPU_S = 0.05
"""A process that wants to run but gets less CPU time than this between two looks is starved by other processes."""

_COUNTS = struct.Struct("=QQ")
_TICKS = os.sysconf("SC_CLK_TCK")
_IS_TRACED = "t"
_COULD_RUN = "R"
_AT_REST = "ST"
"""States of a process that waits or was stopped. A process that waits for a disk or a core may soon go on."""


class Signs(NamedTuple):
    """Counts at one moment, and the operating system's state of the process."""

    beats: int
    turns: int
    cpu_ticks: int = 0
    """CPU time that it has used, in ticks."""
    state: str = "S"
    """State of the process: one letter, as in /proc/PID/stat."""


class Pulse:
    """The page with the counts, by its descriptor, which stays open."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    @staticmethod
    def create() -> int:
        """Make a page and return its descriptor. It is in memory, so a full disk cannot stop a beat."""
        fd = os.memfd_create("manylora-pulse")
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def write(self, beats: int, turns: int) -> None:
        """Set the counts."""
        _COUNTS.pack_into(self._page, 0, beats, turns)

    def signs(self, pid: int) -> Signs:
        """Read the counts, and the state of the process with this id."""
        beats, turns = _COUNTS.unpack_from(self._page)
        try:
            # The name before the last parenthesis may contain anything.
            fields = (
                Path(f"/proc/{pid}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()
            )
        except OSError:  # the process has ended, which is noticed elsewhere
            return Signs(beats, turns)
        return Signs(beats, turns, cpu_ticks=int(fields[11]) + int(fields[12]), state=fields[0])


class Heart:
    """Thread of the engine that beats while the interpreter runs.

    Args:
        pulse: Page that it writes to.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self.turns: Callable[[], int] = lambda: 0
        """Returns the number of turns of the engine's loop."""

    def start(self) -> None:
        """Beat until the process ends."""
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def _beat(self) -> None:
        beats = 0
        pause = threading.Event()
        while True:
            beats += 1
            self._pulse.write(beats, self.turns())
            pause.wait(LOOK_S)


class StallDetector:
    """Judges the signs of one life of the engine. It gets them every `LOOK_S`.

    Args:
        silent_s: Seconds without a beat after which the process has stopped.
        stuck_s: Seconds without a turn after which a step does not end.
    """

    def __init__(self, silent_s: float = SILENT_S, stuck_s: float = STUCK_S) -> None:
        self._silent_s = silent_s
        self._stuck_s = stuck_s
        self._last: Signs | None = None
        self._silent_looks = 0
        self._stuck_looks = 0

    def problem(self, signs: Signs) -> str | None:
        """Sentence about the stall of the engine; None while it lives."""
        last = self._last
        self._last = signs
        if last is None or signs.state == _IS_TRACED:  # a debugger holds it
            self._silent_looks = self._stuck_looks = 0
            return None
        if signs.state == _COULD_RUN and signs.cpu_ticks - last.cpu_ticks < STARVED_CPU_S * _TICKS:
            self._silent_looks = 0
            return None
        has_moved = (
            signs.beats != last.beats
            or signs.cpu_ticks != last.cpu_ticks
            or signs.state not in _AT_REST
        )
        self._silent_looks = 0 if has_moved else self._silent_looks + 1
        self._stuck_looks = 0 if signs.turns != last.turns else self._stuck_looks + 1
        if self._silent_looks * LOOK_S >= self._silent_s:
            return f"gave no sign of life for {self._silent_s:.0f} s"
        if self._stuck_looks * LOOK_S >= self._stuck_s:
            return f"did not end a step for {self._stuck_s:.0f} s"
        return None


class Worker(NamedTuple):
    """An engine process that waits for its launch on standard input, and ends when standard input ends."""

    process: subprocess.Popen[bytes]
    pulse: Pulse
    pulse_fd: int
    """Descriptor of the page of `Pulse` in the process."""


def start_worker() -> Worker:
    """Start an engine process."""
    kept = {name: value for name, value in environment().items() if name not in KEPT_FROM_ENGINE}
    command = [sys.executable, "-P", "-m", "manylora.engine.process.worker"]
    fd = Pulse.create()
    try:
        pulse = Pulse(fd)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=kept, pass_fds=[fd])  # noqa: S603 - our own program
    finally:
        os.close(fd)
    return Worker(process, pulse, fd)
