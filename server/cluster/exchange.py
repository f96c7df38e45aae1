"""What ends an exchange with a replica from outside: the client or the replica is gone, or the gateway shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import ReplicaLostError


class Exchange:
    """The exchange of one request, with one replica after the other."""

    def __init__(self) -> None:
        self._cut_by: BaseException | None = None
        self._is_lost = False
        self._task: asyncio.Task[object] | None = None

    def cut(self, error: BaseException) -> None:
        """End the exchange with this error, with any replica; the first error counts."""
        if self._cut_by is None:
            self._cut_by = error
            self._interrupt()

    def lose(self) -> None:
        """End the exchange with the present replica by ReplicaLostError."""
        self._is_lost = True
        self._interrupt()

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block that `cut` and `lose` end."""
        if self._cut_by is not None:
            raise self._cut_by
        self._task, self._is_lost = asyncio.current_task(), False
        try:
            yield
        except asyncio.CancelledError:
            if self._task is None or not (self._is_lost or self._cut_by):
                raise
            self._task.uncancel()
            raise (self._cut_by or ReplicaLostError()) from None
        finally:
            self._task = None

    def _interrupt(self) -> None:
        if self._task is not None:
            self._task.cancel()
