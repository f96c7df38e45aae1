"""The command lines of benchmarks: their parser, and kinds of numbers."""

from __future__ import annotations

import argparse
from pathlib import Path


def bench_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """A parser of a command of `weft bench`, to which a benchmark adds its own options.

    Args:
        command: As it is called.
        description: What it asks and how.
    """
    parser = argparse.ArgumentParser(
        prog=f"weft bench {command}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=None, help="write the result here")
    return parser


def positive(text: str) -> int:
    """A whole number from 1.

    Raises:
        argparse.ArgumentTypeError: It is not.
    """
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Whole numbers from 1, comma-separated; an empty text is none.

    Raises:
        argparse.ArgumentTypeError: They are not.
    """
    return [positive(each) for each in text.split(",")] if text else []
