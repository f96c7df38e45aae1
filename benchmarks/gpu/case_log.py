"""Runs the cases of a verb, one after the other, and keeps what each found in a file that is whole at any time.

A case that fails is kept with its error, and the rest goes on. A case in which the process died is kept as failed too.
The next run of the verb skips all cases that the file has.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from manylora.benchmarks.report import Figures, without_nan

Cases = Mapping[str, Callable[[], Figures]]
"""Measurements by name, in the order of their worth.

The printed line of its figures shows `measured`, `floor`, `goal` (the most that `measured` should be), `unit` and
`note`. A missed goal, or `ok` that is False, makes the exit status 1. `absent` says why the case was not run."""
UNFINISHED_CASE = "the process ended in this case"
"""The error of a case from its start to its end."""
DONE = 0
"""The exit status when all cases are done."""
FAILED = 1
"""The exit status when a case failed or missed its goal."""
UNFINISHED = 3
"""The exit status when the time was up before the last case."""


def run_cases(
    path: Path,
    about: Figures,
    cases: Cases,
    seconds: float,
    is_well: Callable[[], bool] = lambda: True,
) -> int:
    """Run what the file of a verb does not have; stops before a case that would probably not end in time.

    Args:
        path: The file. One of another commit or GPU is renamed, and a new one begun.
        about: What is the same for all cases, `commit` and `gpu` among it. That of the last run is kept.
        cases: To run.
        seconds: For all of them, from now on.
        is_well: Asked after an error whether the device still works.

    Returns:
        The exit status.
    """
    kept = read(path)
    if any(kept.get(name, about[name]) != about[name] for name in ("commit", "gpu")):
        path.rename(path.with_stem(f"{path.stem} {kept['gpu']} {kept['commit']}"))
        kept = read(path)
    found_by_name: dict[str, Figures] = kept["cases"]

    def keep(name: str, found: Figures) -> None:
        found_by_name[name] = found
        write(path, {**about, "cases": found_by_name})

    end_s = time.monotonic() + seconds
    longest_s = 0.0
    for name in [name for name in cases if name not in found_by_name]:
        start_s = time.monotonic()
        if start_s + longest_s > end_s:
            print("time is up: run it again to go on", flush=True)
            return UNFINISHED
        keep(name, {"error": UNFINISHED_CASE})
        try:
            found = cases[name]()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next case may work
            found = {
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc(),
            }
        found["seconds"] = time.monotonic() - start_s
        longest_s = max(longest_s, found["seconds"])
        keep(name, found)
        print(line(name, found), flush=True)
        if "error" in found and not is_well():
            print("the device is lost: run it again to go on", flush=True)
            return FAILED
    return FAILED if any(is_failure(found_by_name[name]) for name in cases) else DONE


def write(path: Path, content: Figures) -> None:
    """Replace a file of results, which is whole at any time, also after the machine was taken away."""
    whole = path.with_suffix(".part")
    with whole.open("w") as file:
        file.write(json.dumps(without_nan(content), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    whole.replace(path)


def settle(path: Path, error: str = "") -> None:
    """Give the case in which a verb's process ended another error; without one it is run again.

    Args:
        path: The file; it may be missing.
        error: Why it ended.
    """
    kept = read(path)
    for name, found in list(kept["cases"].items()):
        if found.get("error") == UNFINISHED_CASE:
            kept["cases"][name] = {"error": error}
            if not error:
                del kept["cases"][name]
            write(path, kept)


def read(path: Path) -> Figures:
    """A file of results; one that is missing has no cases."""
    return dict(json.loads(path.read_text())) if path.exists() else {"cases": {}}


def is_failure(found: Figures) -> bool:
    """Say if a case failed or missed its goal; one that says `absent` could not be run here, and is no failure."""
    return (
        "error" in found
        or not found.get("ok", True)
        or found.get("measured", 0.0) > found.get("goal", 1e99)
    )


def line(name: str, found: Figures) -> str:
    """A case in one line: what was measured, as a multiple of its floor, and whether it misses its goal."""
    for reason in ("error", "absent"):
        if reason in found:
            return f"{name:60} {reason}: {found[reason]}".splitlines()[0][:240]
    parts = [f"{key} {found[key]:,.4g}" for key in ("measured", "floor", "goal") if key in found]
    parts += [found[key] for key in ("unit", "note") if key in found]
    parts += [f"({found['measured'] / found['floor']:.2f}x)"] if "floor" in found else []
    return "  ".join([f"{name:58}", *parts, *(["MISSED"] if is_failure(found) else [])])
