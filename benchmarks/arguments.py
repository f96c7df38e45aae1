"""Kinds of numbers on the command lines of benchmarks."""

from __future__ import annotations

import argparse


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
