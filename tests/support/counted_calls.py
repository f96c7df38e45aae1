"""Counts calls of functions, in Python and in C: the work that was done, on however busy a machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

MOST_CALLS = 2_000_000
"""For any file that may be uploaded: about a second of work."""


@contextmanager
def counted_calls() -> Iterator[Callable[[], int]]:
    """Yields a function that tells how many calls there were since the block began."""
    count = 0

    def on_event(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield lambda: count
    finally:
        sys.setprofile(before)
