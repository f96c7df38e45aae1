"""Options that the pool's benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from weft.benchmarks.pool_shape import NUM_FILES
from weft.benchmarks.report import DEFAULT_CACHE


def pool_parser(
    name: str, description: str | None, *, requests: int, repeats: int, max_running: int
) -> argparse.ArgumentParser:
    """A parser with the common options, to which a benchmark adds its own.

    Args:
        name: Of its module.
        description: What it asks and how.
        requests: Default of `--requests`.
        repeats: Default of `--repeats`.
        max_running: Default of `--max-running`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -P -m weft.benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--requests", type=int, default=requests, help="in each run")
    add("--repeats", type=int, default=repeats)
    add("--max-running", type=int, default=max_running, help="requests in a step")
    add("--files", type=int, default=NUM_FILES, help="files of adapter weights")
    add("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the generated files")
    add("--quick", action="store_true", help="a small run that shows that it works; its figures say nothing")
    add("--json", type=Path, default=None, help="write the result here")
    return parser
