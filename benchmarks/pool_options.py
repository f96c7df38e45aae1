"""Options that the pool's benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.benchmarks.pool_shape import NUM_FILES
from weft.benchmarks.report import DEFAULT_CACHE


def add_pool_options(parser: argparse.ArgumentParser, *, requests: int, repeats: int, max_running: int) -> None:
    """Add the common options, with these defaults."""
    add = parser.add_argument
    add("--requests", type=int, default=requests, help="in each run")
    add("--repeats", type=int, default=repeats)
    add("--max-running", type=int, default=max_running, help="requests in a step")
    add("--files", type=int, default=NUM_FILES, help="files of adapter weights")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated files")
