"""Order of the requests of one adapter of one tenant. Knows nothing of other tenants, of pages or of adapters.

Each order is a sort key, and says which request in the step makes way for one that is not in it. A lower `priority`
goes first in all of them. Requests that have started, and were paused or preempted, go before those that have not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from manylora.engine.fairness.shares import FairPlace, SortKey

InnerName = Literal["fifo", "shortest", "slack", "mlfq"]


class InnerOrder:
    """First in, first out. The other orders change some of these rules."""

    def key(self, place: FairPlace) -> SortKey:
        """Sorts requests: the smallest goes first. No two requests have the same key.

        It must not change while the request is queued, except in `renew`. Here: priority, started or not, arrival.
        """
        return (place.priority, not place.has_started, place.arrival_index)

    def yields(self, row: FairPlace, place: FairPlace) -> bool:
        """True if `row`, the last of those in the step, makes way for `place`. Here: only to a better priority."""
        return place.priority < row.priority

    def charge(self, charges: Iterable[tuple[FairPlace, float]]) -> None:
        """Take note of units computed for requests that are in the step. Here: nothing to count."""

    def due(self, stopped: Iterable[FairPlace], now_s: float) -> list[FairPlace]:  # noqa: ARG002 - for heirs
        """Requests that lost their rows and get another key now: they leave the queue and come back. Here: none."""
        return []

    def renew(self, place: FairPlace) -> None:
        """Change the fields that the key of a request that is due is made of."""


MAX_OVERTAKING_S = 60.0
"""A request goes before all that arrive more than this many seconds after it, however short or urgent they are."""
OVERTAKING_S_PER_TOKEN = 0.1
"""Seconds for each token by which a request is longer; shorter requests that arrive within them may overtake it."""


class ShortestPredicted(InnerOrder):
    """The fewest predicted output tokens first (the idea of S3, arXiv:2306.06000, used for order).

    Waiting counts like being shorter, so that a long request is not overtaken without end.
    """

    def key(self, place: FairPlace) -> SortKey:
        """Priority, started or not, arrival in seconds plus a time for each predicted token, arrival."""
        grace_s = min(OVERTAKING_S_PER_TOKEN * place.predicted_tokens, MAX_OVERTAKING_S)
        return (
            place.priority,
            not place.has_started,
            place.arrived_s + grace_s,
            place.arrival_index,
        )


class LeastSlack(InnerOrder):
    """The least time left until the deadline of the first token, after the time that the prompt takes.

    No deadline counts as one after `MAX_OVERTAKING_S`, as does a later one.
    """

    def key(self, place: FairPlace) -> SortKey:
        """Priority, started or not, the last moment to start, arrival."""
        start_by_s = min(place.standing.start_by_s, place.arrived_s + MAX_OVERTAKING_S)
        return (place.priority, not place.has_started, start_by_s, place.arrival_index)


FIRST_QUANTUM = 32.0
"""Units that a request may use at the first level; each further level has twice as much."""
NUM_LEVELS = 12
MAX_PAUSE_S = 0.4
"""Seconds without its row after which a request goes to the front; this leaves time to give it one within 0.5 s."""
RETURN_QUANTUM = 16.0
"""Units that a request may use after it came to the front because of its pause."""
AT_THE_FRONT = -1


class Mlfq(InnerOrder):
    """Skip-join multi-level feedback queue of FastServe (arXiv:2305.05920): short requests pass long ones.

    A request joins at the first level whose quantum its prompt fits in, and goes down a level when it has used the
    quantum. Requests of lower levels pause for requests of higher ones, for about half a second at most.
    """

    def key(self, place: FairPlace) -> SortKey:
        """Priority, level, started or not, arrival."""
        if place.standing.level is None:
            place.standing.level = self._first_level(place)
        return (place.priority, place.standing.level, not place.has_started, place.arrival_index)

    def yields(self, row: FairPlace, place: FairPlace) -> bool:
        """True if `place` has a better priority or a higher level."""
        return self.key(place)[:2] < self.key(row)[:2]

    def charge(self, charges: Iterable[tuple[FairPlace, float]]) -> None:
        """Count against the quantum of the level."""
        for place, units in charges:
            standing = place.standing
            level = self._first_level(place) if standing.level is None else standing.level
            standing.level_units += units
            if level == AT_THE_FRONT and standing.level_units >= RETURN_QUANTUM:
                self._enter_level(place, standing.level_below_front)
            elif level != AT_THE_FRONT and standing.level_units >= FIRST_QUANTUM * 2**level:
                self._enter_level(place, min(level + 1, NUM_LEVELS - 1))

    def due(self, stopped: Iterable[FairPlace], now_s: float) -> list[FairPlace]:
        """Requests that have been without a row for `MAX_PAUSE_S`, with their pages or without."""
        before_s = now_s - MAX_PAUSE_S
        return [
            place
            for place in stopped
            if place.standing.level != AT_THE_FRONT and place.standing.stopped_s <= before_s
        ]

    def renew(self, place: FairPlace) -> None:
        """Go to the front."""
        place.standing.level_below_front = place.standing.level or 0
        self._enter_level(place, AT_THE_FRONT)

    def _enter_level(self, place: FairPlace, level: int) -> None:
        place.standing.level = level
        place.standing.level_units = 0.0

    def _first_level(self, place: FairPlace) -> int:
        quantum = FIRST_QUANTUM
        level = 0
        while quantum < place.num_prompt and level < NUM_LEVELS - 1:
            quantum *= 2
            level += 1
        return level


def inner_order(name: InnerName) -> InnerOrder:
    """The order of that name."""
    return {"fifo": InnerOrder, "shortest": ShortestPredicted, "slack": LeastSlack, "mlfq": Mlfq}[
        name
    ]()
