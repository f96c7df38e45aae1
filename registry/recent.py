"""Answers read a moment ago, so that each request need not ask the database again.

Correct because whoever changes the database says so: `forget` drops everything, and an answer whose question was
asked before the change is not remembered after it. What another process changed is seen after a second. While the
database cannot answer, an answer serves for a minute, so that an outage stops no one who was there before it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from weft.errors import CapacityError, WeftError

MAX_ENTRIES = 10_000
MAX_AGE_S = 1.0
MAX_OUTAGE_S = 60.0

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Recent(Generic[KeyT, ValueT]):
    """A bounded map whose entries age. Thread: one event loop."""

    def __init__(self, monotonic: Callable[[], float], max_entries: int = MAX_ENTRIES) -> None:
        self._monotonic = monotonic
        self._max_entries = max_entries
        self._entries: dict[KeyT, tuple[float, ValueT]] = {}
        self._epoch = 0

    async def ask(self, key: KeyT, question: Callable[[], Awaitable[ValueT]]) -> ValueT:
        """The answer of a moment ago, or else that of `question`, which reads the database.

        Raises:
            WeftError: What the question raised. For a CapacityError, only without an answer of the last minute.
        """
        read_at, known = self._entries.get(key, (float("-inf"), None))
        asked_at, epoch = self._monotonic(), self._epoch
        age = asked_at - read_at
        if known is not None and age < MAX_AGE_S:
            return known
        try:
            answer = await question()
        except CapacityError:
            if known is None or age >= MAX_OUTAGE_S or epoch != self._epoch:
                raise
            return known
        except WeftError:
            self._entries.pop(key, None)
            raise
        if epoch == self._epoch:
            if len(self._entries) >= self._max_entries:
                self._entries.clear()
            self._entries[key] = (asked_at, answer)
        return answer

    def forget(self) -> None:
        """Something changed: no earlier answer counts any more."""
        self._epoch += 1
        self._entries.clear()
