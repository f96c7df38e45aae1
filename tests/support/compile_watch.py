"""Fails where Triton compiles a kernel that should have been compiled before. For processes that do not interpret."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from manylora.kernels.triton.compiles import CompileWatch


@contextmanager
def no_compiles() -> Iterator[CompileWatch]:
    """What runs in the block must find all its kernels compiled; the log says for what each other one was compiled.

    Raises:
        AssertionError: It does not.
    """
    with CompileWatch() as watch:
        yield watch
    assert not watch.counts, (
        f"compiled in a block that should find all kernels compiled: {dict(watch.counts)}"
    )
