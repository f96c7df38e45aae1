"""What happens when nothing can be computed although something wants to: adapters or idle beams are in the way."""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.failures import request_error
from weft.engine.request import FinishReason, RequestError
from weft.engine.scheduling.plan_builder import PlanBuilder
from weft.engine.scheduling.preemption import Preemption
from weft.engine.scheduling.request_state import RequestState
from weft.engine.scheduling.request_table import RequestTable
from weft.engine.scheduling.rows import LOOK_AHEAD
from weft.engine.scheduling.waiting import MAX_BYPASSES
from weft.errors import CapacityError
from weft.memory.pool import PagePool

MAX_STALLS = 16
"""Plans that may come to nothing, with nothing under way, before the first in line is refused."""


class Stall:
    """Makes way for the first in line, or refuses it.

    Args:
        table: The requests.
        preemption: Takes pages.
        pool: Where pages come from.
        finish: Ends a request that does not fit beside what is pinned.
    """

    def __init__(
        self,
        table: RequestTable,
        preemption: Preemption,
        pool: PagePool,
        finish: Callable[[str, FinishReason, RequestError], None],
    ) -> None:
        self._table = table
        self._preemption = preemption
        self._pool = pool
        self._finish = finish
        self._num_stalls = 0

    def end(self) -> None:
        """Something was computed."""
        self._num_stalls = 0

    def resolve(self, draft: PlanBuilder) -> None:
        """Change what is in the way of the first in line, which may give the plan something to do."""
        first = self._first_in_line()
        waiting = self._table.waiting
        # An adapter that is being read has no pages yet, so it is in nobody's way, however long it takes.
        if first is None or self._pool.num_quarantined or self._table.residency.is_copying:
            return
        waiting.drop_holds(keep=first.digest)
        if first.status == "waiting":
            waiting.bypass(first, MAX_BYPASSES)
        in_the_way = [state for state in self._table.running if state.is_idle and not _are_beams(state, first)]
        if in_the_way:
            self._preemption.preempt(max(in_the_way, key=self._table.order.place), draft)
            return
        self._num_stalls += 1
        if self._num_stalls > MAX_STALLS:
            self._num_stalls = 0
            error = CapacityError("Pinned adapters leave too little room for this request. Try again, or unpin some.")
            self._finish(first.request_id, "error", request_error(error))

    def _first_in_line(self) -> RequestState | None:
        """The most entitled that runs and is not idle, or else of those that idle ones wait for, or of all."""
        table = self._table
        running = [state for state in table.running if not state.is_idle]
        awaited = [state for state in table.waiting if any(_are_beams(state, idle) for idle in table.running)]
        able = running or [state for state in awaited if not state.is_idle]
        if able:
            return min(able, key=table.order.place)
        line = table.order.candidates(LOOK_AHEAD)
        first = next((state for state in line if not state.is_idle and not table.waiting.is_unread(state)), None)
        line.close()
        return first


def _are_beams(state: RequestState, other: RequestState) -> bool:
    """Whether both are beams of one search."""
    return state.beam is not None and other.beam is not None and state.beam.search_id == other.beam.search_id
