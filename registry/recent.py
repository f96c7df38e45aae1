"""Answers read a moment ago, so that each request need not ask the database again.

Correct because whoever changes the database says so: `forget` drops everything, and an answer whose question was
asked before the change is not remembered after it. The age limit covers changes made by another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

MAX_ENTRIES = 10_000
MAX_AGE_S = 30.0

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Recent(Generic[KeyT, ValueT]):
    """A bounded map whose entries age. Thread: one event loop."""

    def __init__(
        self, monotonic: Callable[[], float], max_entries: int = MAX_ENTRIES, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._monotonic = monotonic
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._entries: dict[KeyT, tuple[float, ValueT]] = {}
        self.epoch = 0
        """Counts changes. Take it before asking the database, and give it to `remember`."""

    def get(self, key: KeyT) -> ValueT | None:
        """The answer, if it was read since the last change and not too long ago."""
        read_at, value = self._entries.get(key, (None, None))
        if read_at is None or self._monotonic() - read_at >= self._max_age_s:
            return None
        return value

    def remember(self, key: KeyT, value: ValueT, epoch: int) -> None:
        """Keep an answer, unless something changed since its question was asked at `epoch`."""
        if epoch != self.epoch:
            return
        if len(self._entries) >= self._max_entries:
            self._entries.clear()
        self._entries[key] = (self._monotonic(), value)

    def forget(self) -> None:
        """Something changed: no earlier answer counts any more."""
        self.epoch += 1
        self._entries.clear()
