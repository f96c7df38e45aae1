"""Wakes a thread that polls file descriptors, from any other thread."""

from __future__ import annotations

import os


class Wakeup:
    """A pipe to oneself."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._reader

    def wake(self) -> None:
        """Make the descriptor readable. Any thread may call it."""
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wakeups already

    def clear(self) -> None:
        """Forget all wakeups so far."""
        try:
            while os.read(self._reader, 4096):
                pass
        except BlockingIOError:
            return
