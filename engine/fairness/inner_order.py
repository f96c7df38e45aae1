"""In what order requests of one adapter of one tenant go. Knows nothing of other tenants, of pages or of adapters.

Each order is a sort key, and says which request in the step makes way for one that is not in it. A lower `priority`
goes first in all of them. Requests that have started, and were paused or preempted, go before those that have not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from manylora.engine.scheduling.request_state import RequestState

InnerName = Literal["fifo", "shortest", "slack", "mlfq"]
SortKey = tuple[float, ...]


class InnerOrder:
    """First in, first out. The other orders change some of these rules."""

    def key(self, state: RequestState) -> SortKey:
        """Sorts requests: the smallest goes first. No two requests have the same key.

        It must not change while the request is queued, except in `renew`. Here: priority, started or not, arrival.
        """
        return (state.priority, not state.has_started, state.arrival_index)

    def yields(self, row: RequestState, state: RequestState) -> bool:
        """Whether `row`, the last of those in the step, makes way for `state`. Here: only to a better priority."""
        return state.priority < row.priority

    def charge(self, charges: Iterable[tuple[RequestState, float]]) -> None:
        """Take note of units computed for requests that are in the step. Here: nothing to count."""

    def due(self, stopped: Iterable[RequestState], now_s: float) -> list[RequestState]:  # noqa: ARG002 - for heirs
        """Requests that lost their rows and get another key now: they leave the queue and come back. Here: none."""
        return []

    def renew(self, state: RequestState) -> None:
        """Change what the key of a request that is due is made of."""


MAX_OVERTAKING_S = 60.0
"""A request goes before all that arrive so many seconds after it, however short or urgent they are."""
OVERTAKING_S_PER_TOKEN = 0.1
"""A request may be overtaken by shorter ones that arrive within so many seconds for each token more that it has."""


class ShortestPredicted(InnerOrder):
    """The fewest predicted output tokens first (the idea of S3, arXiv:2306.06000, used for order).

    Waiting counts like being shorter, so that a long request is not overtaken without end.
    """

    def key(self, state: RequestState) -> SortKey:
        """Priority, started or not, arrival in seconds plus a time for each predicted token, arrival."""
        grace_s = min(OVERTAKING_S_PER_TOKEN * state.predicted_tokens, MAX_OVERTAKING_S)
        return (
            state.priority,
            not state.has_started,
            state.arrived_s + grace_s,
            state.arrival_index,
        )


class LeastSlack(InnerOrder):
    """The least time left until the deadline of the first token, after the time that the prompt takes.

    No deadline counts as one after `MAX_OVERTAKING_S`, as does a later one.
    """

    def key(self, state: RequestState) -> SortKey:
        """Priority, started or not, the last moment to start, arrival."""
        start_by_s = min(state.start_by_s, state.arrived_s + MAX_OVERTAKING_S)
        return (state.priority, not state.has_started, start_by_s, state.arrival_index)


FIRST_QUANTUM = 32.0
"""Units that a request may use at the first level; each further level has twice as much."""
NUM_LEVELS = 12
MAX_PAUSE_S = 0.4
"""A request without its row goes to the front after so many seconds, which leaves time to give it one within 0.5 s."""
RETURN_QUANTUM = 16.0
"""Units that a request may use after it came to the front because of its pause."""
AT_THE_FRONT = -1


class Mlfq(InnerOrder):
    """Skip-join multi-level feedback queue of FastServe (arXiv:2305.05920): short requests pass long ones.

    A request joins at the first level whose quantum its prompt fits in, and goes down a level when it has used the
    quantum. Requests of lower levels pause for requests of higher ones, for about half a second at most.
    """

    def key(self, state: RequestState) -> SortKey:
        """Priority, level, started or not, arrival."""
        if state.level is None:
            state.level = self._first_level(state)
        return (state.priority, state.level, not state.has_started, state.arrival_index)

    def yields(self, row: RequestState, state: RequestState) -> bool:
        """To a better priority or a higher level."""
        return self.key(state)[:2] < self.key(row)[:2]

    def charge(self, charges: Iterable[tuple[RequestState, float]]) -> None:
        """Count against the quantum of the level."""
        for state, units in charges:
            level = self._first_level(state) if state.level is None else state.level
            state.level_units += units
            if level == AT_THE_FRONT and state.level_units >= RETURN_QUANTUM:
                state.level, state.level_units = state.level_below_front, 0.0
            elif level != AT_THE_FRONT and state.level_units >= FIRST_QUANTUM * 2**level:
                state.level, state.level_units = min(level + 1, NUM_LEVELS - 1), 0.0

    def due(self, stopped: Iterable[RequestState], now_s: float) -> list[RequestState]:
        """Those that have been without a row for long, with their pages or without."""
        before_s = now_s - MAX_PAUSE_S
        return [
            state for state in stopped if state.level != AT_THE_FRONT and state.paused_s <= before_s
        ]

    def renew(self, state: RequestState) -> None:
        """Go to the front."""
        state.level_below_front = state.level or 0
        state.level, state.level_units = AT_THE_FRONT, 0.0

    def _first_level(self, state: RequestState) -> int:
        quantum, level = FIRST_QUANTUM, 0
        while quantum < state.num_prompt and level < NUM_LEVELS - 1:
            quantum, level = 2 * quantum, level + 1
        return level


def inner_order(name: InnerName) -> InnerOrder:
    """The order of that name."""
    return {"fifo": InnerOrder, "shortest": ShortestPredicted, "slack": LeastSlack, "mlfq": Mlfq}[
        name
    ]()
