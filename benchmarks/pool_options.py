"""Options that the pool's benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.benchmarks.arguments import bench_parser
from weft.benchmarks.pool_shape import NUM_FILES
from weft.benchmarks.report import DEFAULT_CACHE


def pool_parser(
    command: str, description: str | None, *, requests: int, repeats: int, max_running: int
) -> argparse.ArgumentParser:
    """A parser with the common options, to which a benchmark adds its own.

    Args:
        command: As it is called.
        description: What it asks and how.
        requests: Default of `--requests`.
        repeats: Default of `--repeats`.
        max_running: Default of `--max-running`.
    """
    parser = bench_parser(command, description)
    add = parser.add_argument
    add("--requests", type=int, default=requests, help="in each run")
    add("--repeats", type=int, default=repeats)
    add("--max-running", type=int, default=max_running, help="requests in a step")
    add("--files", type=int, default=NUM_FILES, help="files of adapter weights")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated files")
    return parser
