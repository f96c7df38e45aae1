"""Requests that are to start by some second, or be told that they did not."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from weft.engine.scheduling.request_state import RequestState

SPARE_ENTRIES = 64
"""Entries of requests that started or ended may be as many as there are requests, and this many more."""


class Deadlines:
    """Seconds by which requests are to start.

    Args:
        requests: All that live, by id.
    """

    def __init__(self, requests: Mapping[str, RequestState]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, float, str]] = []
        """(second, arrival, request)."""

    def add(self, state: RequestState, expires_s: float) -> None:
        """A request arrived that is to start by then."""
        heapq.heappush(self._heap, (expires_s, state.arrival_index, state.request_id))
        if len(self._heap) > 2 * len(self._requests) + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._awaits(entry) is not None]
            heapq.heapify(self._heap)

    def take_expired(self, now_s: float) -> Iterator[RequestState]:
        """Requests that were to start by now and never did, each once."""
        while self._heap and self._heap[0][0] <= now_s:
            state = self._awaits(heapq.heappop(self._heap))
            if state is not None:
                yield state

    def _awaits(self, entry: tuple[float, float, str]) -> RequestState | None:
        """The request that is still to start by a deadline."""
        state = self._requests.get(entry[2])
        return None if state is None or state.arrival_index != entry[1] or state.has_started else state
