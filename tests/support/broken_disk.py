"""A disk that takes nothing for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from manylora.registry.usage import journal


@contextmanager
def broken_disk(monkeypatch: pytest.MonkeyPatch, error: int) -> Iterator[None]:
    """The journal's disk takes nothing during the block."""

    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(journal, "_write_all", refuse)
        yield
