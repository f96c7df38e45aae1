"""Processes for tests of Triton: one interprets kernels or compiles them, and never does both."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from manylora.config import environment

SUPPORT = Path(__file__).parent
TIMEOUT_S = 570
"""For a slow machine that does other things as well; tests have 10 s more."""


def run_interpreted(files: Iterable[Path], *options: str) -> str:
    """What pytest prints about files of tests, which pass in a process that interprets Triton."""
    pytest.importorskip("triton", reason="needs Triton, which is there on Linux")
    inherited = {
        name: value for name, value in environment().items() if not name.startswith("PYTEST_")
    }
    pytest_command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *map(str, files)]
    printed = _run(pytest_command, {**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert " passed" in printed
    return printed


def run_compiling(
    arguments: list[str], cache: Path, *, timeout_s: int = TIMEOUT_S, **variables: str
) -> str:
    """What Python prints in a process that compiles kernels, which are kept in the folder `cache`."""
    inherited = {name: value for name, value in environment().items() if name != "TRITON_INTERPRET"}
    own = {**inherited, "TRITON_CACHE_DIR": str(cache), **variables}
    return _run(arguments, own, timeout_s)


def _run(arguments: list[str], variables: Mapping[str, str], timeout_s: int = TIMEOUT_S) -> str:
    command = [sys.executable, "-P", *arguments]
    result = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-4000:]
    return result.stdout
