"""Cases that are programs of their own: tests on the device, and the same under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from manylora.benchmarks.gpu.case_log import Cases
from manylora.benchmarks.gpu.setup import Setup
from manylora.benchmarks.report import Figures
from manylora.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (
    sys.executable,
    "-P",
    "-m",
    "pytest",
    "-p",
    "no:cacheprovider",
    "-q",
    "-m",
    "gpu",
    "tests/kernels",
)
SANITIZER = (
    "compute-sanitizer",
    "--target-processes",
    "all",
    "--error-exitcode",
    "9",
    "--print-limit",
    "20",
)
UNCACHED = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1")
"""Without torch's cache of memory, which hides accesses outside of a tensor."""
SANITIZED = {
    "memcheck": "bfloat16 and (uniform-896 or deltas or attention) or captured_graph or no_distribution",
    "racecheck": "bfloat16 and (repeat or deltas) or captured_graph",
    "synccheck": "bfloat16 and repeat or captured_graph",
}
"""Tests by the tool that watches them: memory accesses, races in shared memory, barriers."""


def check_cases(setup: Setup) -> Cases:
    """The tests that want a GPU."""
    # Beside tests/kernels only the files that have such tests: others may need packages that the machine does not have.
    files = [
        str(file)
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in file.read_text()
    ]
    jobs = ["-n", str(setup.jobs), "--dist", "worksteal"] if setup.jobs > 1 else []
    return {"tests": partial(run, setup, "tests", [*PYTEST, *files, *jobs])}


def sanitize_cases(setup: Setup) -> Cases:
    """A few tests under each tool."""
    return {
        tool: partial(
            run, setup, tool, [*SANITIZER, "--tool", tool, *UNCACHED, *PYTEST, "-k", tests]
        )
        for tool, tests in SANITIZED.items()
    }


def run(setup: Setup, name: str, command: Sequence[str]) -> Figures:
    """Run a program, for as long as the verb may take; what it prints goes to NAME.log in the folder of the results.

    Raises:
        EngineError: It failed, or its time was up.
    """
    if shutil.which(command[0]) is None:
        return {"absent": f"{command[0]} is not on PATH"}
    path = setup.out / f"{name}.log"
    limited = [
        "timeout",
        "--kill-after=5",
        str(setup.seconds),
        *command,
    ]  # with all the processes that it starts
    with path.open("w") as log:
        status = subprocess.run(
            limited, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, check=False
        ).returncode
    last = path.read_text(errors="replace").splitlines()[-3:]
    if status:
        ended = (
            f"was stopped after {setup.seconds:.0f} s"
            if status in (124, 137)
            else f"ended with status {status}"
        )
        raise EngineError(f"{name} {ended}; {path} has what it printed: {' | '.join(last)}")
    return {"note": "".join(last[-1:])}
