"""Runs the cases of a verb, one after the other, and keeps what each found in a file that is whole at any time.

A case that fails is kept with its error, and the rest goes on. A case that was begun and not ended, because the process
died in it, is kept as failed too. The next run of the verb skips all cases that the file has.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.benchmarks.report import without_nan
from weft.errors import ConfigError

Figures = Mapping[str, Any]
"""What a case found. Of these, the printed line shows `measured`, `floor`, `goal` (the most that `measured` should be)
and `unit`; a goal that is missed, or `ok` that is False, makes the exit status 1."""
DONE, FAILED, UNFINISHED = 0, 1, 3
"""Exit statuses: all cases are done; one failed or missed its goal; the time was up before the last one."""


UNMEASURED = {"error", "absent"}


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    name: str
    run: Callable[[Mapping[str, Figures]], Figures]
    """Gets what the cases before it found, by name."""


class CaseLog:
    """The file of one verb.

    Args:
        path: The file; what it has already is kept.
        about: What is the same for all cases: command, commit, GPU, versions. That of the last run is kept.
        again: Whether cases that failed or were absent are run again.
        is_well: Asked after an error whether the device still works.

    Raises:
        ConfigError: The file is not one of ours, or has the figures of another commit or GPU.
    """

    def __init__(
        self, path: Path, about: Figures, *, again: bool = False, is_well: Callable[[], bool] = lambda: True
    ) -> None:
        self._path, self._about, self._is_well = path, about, is_well
        self.cases: dict[str, Figures] = {}
        """By name, in the order in which they were run."""
        if path.exists():
            try:
                kept = json.loads(path.read_text())
                cases: dict[str, Figures] = kept["cases"]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"--out: {path} is not what this verb writes ({error}); move it away") from error
            for name in ("commit", "gpu"):
                if identity(kept.get(name)) != identity(without_nan(about.get(name))):
                    raise ConfigError(f"--out: {path} was measured with another {name}; take another folder")
            self.cases = {name: found for name, found in cases.items() if not (again and found.keys() & UNMEASURED)}

    def run(self, cases: Sequence[Case], seconds: float, clock: Callable[[], float] = time.monotonic) -> int:
        """Run what the file does not have; stops before a case that would probably not end in time.

        Args:
            cases: In the order of their worth.
            seconds: For all of them, from now on.
            clock: Tells the time in seconds.

        Returns:
            The exit status.
        """
        start_s = before_s = clock()
        longest_s = 0.0
        for index, case in enumerate(cases):
            if case.name in self.cases:
                continue
            if before_s - start_s + longest_s > seconds:
                print(f"time is up: {len(cases) - index} cases are left; run it again to go on", flush=True)
                return UNFINISHED
            self._keep(case.name, {"error": "the process ended in this case"})
            found = self._found(case)
            now_s = clock()
            self._keep(case.name, {**found, "seconds": now_s - before_s})
            print(line(case.name, found), flush=True)
            if "error" in found and not self._is_well():
                print("the device is lost: run it again in a new process to go on", flush=True)
                return FAILED
            longest_s, before_s = max(longest_s, now_s - before_s), now_s
        return FAILED if any(is_failure(self.cases[case.name]) for case in cases) else DONE

    def _found(self, case: Case) -> Figures:
        try:
            return case.run(self.cases)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next case may work
            return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}

    def _keep(self, name: str, found: Figures) -> None:
        self.cases[name] = found
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps(without_nan({**self._about, "cases": self.cases}), indent=1, default=str) + "\n")
        whole.replace(self._path)


def identity(value: Any) -> Any:  # noqa: ANN401 - JSON
    """A commit, or of what is known of a GPU its name: what must not change between the cases of a file."""
    return value.get("name") if isinstance(value, dict) else value


def is_failure(found: Figures) -> bool:
    """Whether a case failed or missed its goal; one that says `absent` could not be run here, and is no failure."""
    return "error" in found or found.get("ok", True) is False or found.get("measured", 0.0) > found.get("goal", 1e99)


def line(name: str, found: Figures) -> str:
    """A case in one line: what was measured, its floor and its goal."""
    if "error" in found or "absent" in found:
        text = f"error: {found['error']}" if "error" in found else f"absent: {found['absent']}"
        return f"{name:60} {text.splitlines()[0][:160]}"
    parts = [f"{key} {found[key]:,.4g}" for key in ("measured", "floor", "goal") if found.get(key) is not None]
    if found.get("floor"):
        parts.insert(2, f"({found['measured'] / found['floor']:.2f}x)")
    verdict = "MISSED" if is_failure(found) else "ok" if "goal" in found or "ok" in found else ""
    return f"{name:60} {'  '.join(parts)} {found.get('unit', '')}  {verdict}".rstrip()
