"""The most that a quarter of an hour on a GPU can tell: pieces of the verbs in the order of their worth.

A piece is started only if it fits the time that is left, and runs in a process of its own: one that hangs, crashes or
loses the device costs no more than the case that it was in. What a case found is in the file of its verb at once. The
next call runs what is missing; a case that was cut off because the time was up is run again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from manylora.benchmarks.gpu.case_log import (
    DONE,
    FAILED,
    UNFINISHED,
    is_failure,
    line,
    read,
    settle,
)
from manylora.benchmarks.report import Figures
from manylora.config import environment

LOG = "first.log"
TABLE = "first.md"
HANGS = 2.5
"""A piece that takes this many times its expected duration hangs."""
TINY_S = 20.0
"""Expected duration of each piece on toy sizes, on a slow CPU."""
CLOSING_S = 5.0
"""Kept for the table, and for the end of a process."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Cases of a verb that share what they need."""

    verb: str
    only: str
    """A pattern of their names."""
    seconds: float
    """Expected on an H100 or H200, start and compilation of kernels included."""

    def names(self, cases: Sequence[str]) -> list[str]:
        """The names of its cases, among all of its verb."""
        return [name for name in cases if re.search(self.only, name)]


PIECES = (
    Piece("agree", "", 70),
    Piece("step", r"decode, 32 rows, (0|32) adapters", 100),
    Piece("kernels", r"LoRA, (32 rows, (32|1) of rank 16|mixed)", 40),
    Piece("memory", "copies", 20),
    Piece("profile", r" 0 adapters", 50),
    Piece("kernels", r"attention, 32 rows, context (1,024|64)|top-p sampling", 40),
    Piece("step", r"decode, 32 rows, 1 adapters|decode, (1|8|64) rows, 0", 80),
    Piece("step", "prompt of 2048", 60),
    Piece("check", "tests", 300),
    Piece("kernels", "constants of (decode|LoRA)", 120),
)
"""In the order of their worth."""


class Prediction(NamedTuple):
    """A figure of one case, between two bounds."""

    low: float
    high: float
    of: str = ""
    """The figure of the same case that the bounds are multiples of; empty where they have the case's unit."""

    def bounds(self, found: Figures) -> tuple[float, float]:
        """The bounds in the unit of the case.

        Args:
            found: What the case found.
        """
        unit = found[self.of] if self.of else 1.0
        return self.low * unit, self.high * unit


PREDICTIONS = {
    ("step", "decode, 32 rows, 0 adapters"): Prediction(5.6, 7.5),
    ("step", "decode, 32 rows, 1 adapters"): Prediction(6.2, 8.8),
    ("step", "decode, 32 rows, 32 adapters"): Prediction(6.8, 9.7),
    ("kernels", "LoRA, 32 rows, 1 of rank 16"): Prediction(4 * 6, 4 * 10),
    ("kernels", "LoRA, 32 rows, 32 of rank 16"): Prediction(1.4, 2.5, of="floor"),
    ("kernels", "LoRA, mixed ranks as one rank"): Prediction(1.0, 1.1, of="even"),
    ("kernels", "attention, 32 rows, context 1,024"): Prediction(47, 60),
    ("memory", "copies of 768 KiB"): Prediction(1.0, 1 / 0.85, of="floor"),
    ("memory", "copies of 2048 KiB"): Prediction(1.0, 1 / 0.85, of="floor"),
}
"""Figures of an H200 that were predicted before Manylora ran on a GPU, by verb and case. Where they come from is in
`benchmarks/results/nvidia-h200/NOTES.md`."""


@dataclass(eq=False)
class FirstLook:
    """One call: what is left to do, and what was found, now or before.

    Args:
        out: Folder of the results.
        options: Of every verb.
        cases: The names of the cases of each verb.
        seconds: For all of it.
        pieces: To run, the first of them first.
        command: Starts a verb, but for its name and options.
    """

    out: Path
    options: Sequence[str]
    cases: Mapping[str, Sequence[str]]
    seconds: float
    pieces: Sequence[Piece]
    command: Sequence[str] = (sys.executable, "-P", "-m", "manylora.benchmarks.main", "gpu")
    failures: dict[Piece, str] = field(default_factory=dict)
    """Reasons for which processes ended that found nothing."""

    def run(self) -> int:
        """Run the pieces that fit; returns the exit status."""
        self._end_s = time.monotonic() + self.seconds - CLOSING_S
        for verb in {piece.verb for piece in self.pieces}:
            settle(self._file(verb))  # it was cut off with the process that ran this
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            for piece in self.pieces:
                self._finish(piece)
        except KeyboardInterrupt:
            print("ended early: run it again to go on", flush=True)
        finally:
            signal.signal(signal.SIGTERM, before)
        table = self.table()
        (self.out / TABLE).write_text(table)
        print(table, flush=True)
        found = [self.found(piece) for piece in self.pieces]
        if self.failures or any(is_failure(case) for each in found for case in each.values()):
            return FAILED
        return UNFINISHED if any(map(self._missing, self.pieces)) else DONE

    def found(self, piece: Piece) -> dict[str, Figures]:
        """Results of a piece's cases so far."""
        kept = read(self._file(piece.verb))["cases"]
        return {name: kept[name] for name in self._names(piece) if name in kept}

    def table(self) -> str:
        """Make a table of all cases, beside what was predicted of them."""
        rows = ["| verb | case | measured | predicted | ratio |", "|---|---|---|---|---|"]
        for piece in self.pieces:
            found = self.found(piece)
            missing = [self.failures.get(piece, "not run: no time was left"), "", ""]
            for name in self._names(piece):
                cells = row(piece.verb, name, found[name]) if name in found else missing
                rows.append("| " + " | ".join([piece.verb, name, *cells]).replace("\n", " ") + " |")
        return "\n".join(rows) + "\n"

    def _file(self, verb: str) -> Path:
        return self.out / f"{verb}.json"

    def _names(self, piece: Piece) -> list[str]:
        return piece.names(self.cases[piece.verb])

    def _missing(self, piece: Piece) -> list[str]:
        """The names of its cases that were not tried yet."""
        found = self.found(piece)
        return [name for name in self._names(piece) if name not in found]

    def _finish(self, piece: Piece) -> None:
        """Run a piece until all its cases were tried; a process that dies is followed by one for the other cases."""
        num_cases = len(self._names(piece))
        while missing := self._missing(piece):
            left_s = self._end_s - time.monotonic()
            expected_s = piece.seconds * len(missing) / num_cases
            if left_s < expected_s:
                return
            limit_s = HANGS * expected_s
            why = self._process(piece, min(left_s, limit_s), is_last=left_s <= limit_s)
            after = self.found(piece)
            tried = [name for name in missing if name in after]
            for name in tried:
                print(f"{piece.verb:8} {line(name, after[name])}", flush=True)
            if not tried:
                if why:
                    self.failures[piece] = why
                return

    def _process(self, piece: Piece, limit_s: float, *, is_last: bool) -> str:
        """Run a process for a piece; returns why it ended, which is empty where the time was up or all is well.

        Args:
            piece: To run.
            limit_s: Seconds after which it is killed.
            is_last: Whether the time is up then: the case that it is in is no failure.
        """
        limits = ["--out", str(self.out), "--seconds", str(limit_s)]
        is_interpreted = "--tiny" in self.options and piece.verb == "agree"
        path = self.out / LOG
        why = ""
        with path.open("a") as log:
            start = log.tell()
            process = subprocess.Popen(
                [*self.command, piece.verb, "--only", piece.only, *limits, *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it is ended with all that it starts
                env=environment() | ({"TRITON_INTERPRET": "1"} if is_interpreted else {}),
            )
            try:
                status = process.wait(limit_s)
                if status not in (DONE, UNFINISHED):
                    lines = path.read_bytes()[start:].decode(errors="replace").splitlines()
                    why = f"ended with status {status}: {' | '.join(lines[-3:])}"
            except subprocess.TimeoutExpired:
                why = "" if is_last else f"did not end within {limit_s:.0f} s"
            finally:
                # With all that it started; a process that waits in the driver is left behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(CLOSING_S)
                settle(self._file(piece.verb), why)
        return why


def row(verb: str, name: str, found: Figures) -> list[str]:
    """The cells of a case: measured, predicted, and measured as a multiple of the nearest predicted figure."""
    if "measured" not in found:
        reason = str(found.get("error") or found.get("absent") or found.get("note", ""))
        return [reason.splitlines()[0][:160], "", ""]
    measured = found["measured"]
    shown = f"{measured:,.4g} {found.get('unit', '')}"
    if is_failure(found) and "goal" in found:
        shown += f", missed {found['goal']:,.4g}"
    if (verb, name) not in PREDICTIONS:
        return [shown, "", ""]
    low, high = PREDICTIONS[verb, name].bounds(found)
    return [shown, f"{low:,.4g} to {high:,.4g}", f"{measured / min(max(measured, low), high):.2f}"]
