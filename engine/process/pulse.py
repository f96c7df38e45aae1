"""Signs of life of the engine process, and when their absence means that it has stopped.

A thread of the engine writes two counts to a page of memory that both processes share: its own beats, and the turns of
the engine's loop. A process that is stopped shows neither. A step that never ends shows beats and no turns.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.5
"""Seconds between two beats, and between two looks. Time is counted in looks: a client that stood still itself, or a
machine that slept, finds out nothing about the engine in that time."""
SILENT_S = 6.0
"""An engine at rest without a beat for this time has stopped."""
SILENT_START_S = 30.0
"""`SILENT_S` of an engine that starts: nothing beats before Python has imported it."""
STUCK_S = 60.0
"""Shortest time without a turn of the loop after which a step counts as one that does not end."""
STUCK_STEPS = 20.0
"""`STUCK_S` in durations of the longest step, for slow machines."""

STARVED_CPU_S = 0.05
"""A process that could run, and had less processor time than this between two looks, is kept from it by others."""

_COUNTS = struct.Struct("=QQ")
_TICKS = os.sysconf("SC_CLK_TCK")
_IS_TRACED = "t"
_COULD_RUN = "R"
_AT_REST = "ST"
"""States of a process that waits, or was stopped. One that waits for a disk or for a core may be about to go on."""


@dataclass(frozen=True, slots=True)
class Signs:
    """Counts at one moment, and the operating system's word on the process."""

    beats: int
    turns: int
    cpu_ticks: int = 0
    """Processor time that it has used."""
    state: str = "S"
    """One letter, as in /proc/PID/stat."""


class Pulse:
    """The page with the counts, by its descriptor, which is left open."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    @staticmethod
    def create() -> int:
        """Descriptor of a new page; it is in memory, so no full disk can stop a beat."""
        fd = os.memfd_create("manylora-pulse")
        os.ftruncate(fd, mmap.PAGESIZE)
        return fd

    def write(self, beats: int, turns: int) -> None:
        """Set the counts."""
        _COUNTS.pack_into(self._page, 0, beats, turns)

    def signs(self, pid: int) -> Signs:
        """The counts now, of the process with this id."""
        beats, turns = _COUNTS.unpack_from(self._page)
        try:
            # The name before the last parenthesis may hold anything.
            fields = (
                Path(f"/proc/{pid}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()
            )
        except OSError:  # it has ended, which others notice
            return Signs(beats, turns)
        return Signs(beats, turns, cpu_ticks=int(fields[11]) + int(fields[12]), state=fields[0])


class Heart:
    """The thread of the engine that beats, as long as the interpreter runs.

    Args:
        pulse: Where it writes.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self.turns: Callable[[], int] = lambda: 0
        """Counts what the engine's loop has done."""

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
    """Judges the signs of one life of the engine, which are shown to it every `LOOK_S`.

    Args:
        silent_s: Seconds without a beat that mean a stop.
        stuck_s: Seconds without a turn that mean a step without an end.
    """

    def __init__(self, silent_s: float = SILENT_S, stuck_s: float = STUCK_S) -> None:
        self._silent_s = silent_s
        self._stuck_s = stuck_s
        self._last: Signs | None = None
        self._silent_looks = 0
        self._stuck_looks = 0

    def problem(self, signs: Signs) -> str | None:
        """A sentence about the engine if it has stopped; None while it lives."""
        last, self._last = self._last, signs
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
