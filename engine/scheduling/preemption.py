"""Where pages come from when none are free: from holds of waiting requests, and from less entitled requests."""

from __future__ import annotations

from collections import Counter

from manylora.engine.scheduling.plan import PlanBuilder
from manylora.engine.scheduling.request_state import RequestState
from manylora.engine.scheduling.request_table import MAX_BYPASSES, RequestTable

PAUSED_DIVISOR = 2
"""Paused requests keep one in so many pages of the pool at most; the next one to lose its row loses its pages too."""
GROWTH_DIVISOR = 16
"""Running requests keep a block each for themselves to grow into, but at most one in so many pages of the pool."""


class Preemption:
    """Chooses requests that give up pages, rows or an adapter slot, and takes these from them.

    Args:
        table: The requests.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._order = table.order
        self._waiting = table.waiting
        self._kv = table.kv
        self._num_groups = table.kv.geometry.num_groups
        self._pool_pages = table.kv.pool.capacity

    def room_to_grow(self) -> int:
        """Pages that admissions, and adapters on their way to the device, leave to those that run."""
        return min(len(self._table.running) * self._num_groups, self._pool_pages // GROWTH_DIVISOR)

    def preempt(self, state: RequestState, draft: PlanBuilder | None) -> None:
        """Take the pages from a request; without a draft there is no step that could swap them out."""
        how = self._kv.preempt(state, draft)
        self._table.stop(state, keeps_kv=how == "swap")
        self._table.preemptions[how] += 1

    def undo_start(self, state: RequestState, step: int) -> None:
        """Take the pages from a request that a failed step was to fill; nobody gets them, so it is no preemption."""
        marks = state.num_preemptions, state.progress_mark
        state.last_step = max(state.last_step, step)
        self.preempt(state, None)
        state.num_preemptions, state.progress_mark = marks
        self._table.preemptions["recompute"] -= 1

    def pause(self, state: RequestState, draft: PlanBuilder) -> None:
        """Take the row from a request, which keeps its pages unless those of paused requests become too many."""
        num_blocks = sum(other.pages.table.num_blocks for other in (state, *self._order.paused))
        if PAUSED_DIVISOR * num_blocks * self._num_groups > self._pool_pages and draft.may_preempt(
            state
        ):
            self.preempt(state, draft)
        else:
            self._order.stop(state)

    def grow(self, state: RequestState, num_tokens: int, draft: PlanBuilder) -> bool:
        """Give a request with a row pages for `num_tokens` tokens, if need be from what is idle and less entitled.

        Args:
            state: The request.
            num_tokens: Tokens from the first one on.
            draft: The plan.

        Returns:
            Whether it has them; if not, it keeps what it had.
        """
        count = self._kv.lacking(state, num_tokens)
        if count == 0:
            return True
        while self._kv.num_available < count + draft.promised:
            if not self._waiting.yield_hold():
                victim = self._less_entitled(state, draft)
                if victim is None:
                    return False
                self.preempt(victim, draft)
        if self._kv.grow(state, count, draft):
            draft.plan.started.add(
                state.request_id
            )  # a batch may go before those that are more entitled to pages
            return True
        draft.promised += count
        return False

    def make_way(self, state: RequestState, num_pages: int, draft: PlanBuilder) -> bool:
        """Have pages come free for a waiting request, from those whose shares are far ahead of its own.

        Returns:
            Whether somebody was preempted; nobody is where all of them together have too few.
        """
        victims = self._victims(state, num_pages, draft)
        for victim in victims:
            self.preempt(victim, draft)
        return bool(victims)

    def _victims(
        self, state: RequestState, num_pages: int, draft: PlanBuilder
    ) -> list[RequestState]:
        """Requests that give up pages until `num_pages` are there; none if they are already, or if all have too few."""
        lack = num_pages - self._kv.num_available
        if lack <= 0 or (draft.unobtainable is not None and lack >= draft.unobtainable):
            return []
        users = Counter(other.digest for other in self._table.running)
        last_first = [
            other for other in reversed(self._by_place(draft)) if other.status == "running"
        ]
        victims = []
        for other in self._order.yielding(state, filter(draft.may_preempt, last_first)):
            victims.append(other)
            lack -= self._kv.num_alone(other)
            users[other.digest] -= 1
            if (
                other.digest is not None
                and not users[other.digest]
                and not self._waiting.holders_of(other.digest)
            ):
                lack -= other.adapter_pages or 0  # nobody uses its adapter any more
            if lack <= 0:
                return victims
        draft.unobtainable = num_pages - self._kv.num_available
        return []

    def has_room_for_adapter(self, state: RequestState, draft: PlanBuilder) -> bool:
        """Whether there are pages for the adapter of a waiting request and for what it computes first, or could be.

        An adapter that came without them would lose its pages to what the running requests grow, and come again. One
        of unknown size is read in any case. A request that is overdue gets the pages that come free.
        """
        if (
            state.adapter_pages is None
            or state.num_bypasses >= MAX_BYPASSES
            or not self._table.running
        ):
            return True
        num_pages = (
            state.adapter_pages
            + self.pages_to_start(state, draft)
            + draft.needed
            + self.room_to_grow()
        )
        return num_pages <= self._kv.num_available or bool(self._victims(state, num_pages, draft))

    def pages_to_start(self, state: RequestState, draft: PlanBuilder) -> int:
        """Pages of the tokens that a waiting request computes first."""
        return self._kv.lacking(
            state, max(min(state.num_tokens, draft.budget), state.tokens_to_reserve)
        )

    def make_way_for_adapter(self, state: RequestState, draft: PlanBuilder) -> None:
        """Have pages, or a slot, come free for the adapter of a waiting request."""
        num_pages = (state.adapter_pages or 0) + self.room_to_grow()
        self.make_way(state, num_pages, draft)
        if (
            draft.has_looked_for_slot
            or self._kv.num_available < num_pages
            or self._waiting.is_unread(state)
        ):
            return
        draft.has_looked_for_slot = True
        if self._table.residency.lacks_slot:
            self._make_slot(state, draft)

    def _make_slot(self, state: RequestState, draft: PlanBuilder) -> None:
        """Have the fewest requests give an adapter up that all are far ahead of this one."""
        users: dict[str, list[RequestState]] = {}
        for other in self._table.running:
            if other.digest is not None:
                users.setdefault(other.digest, []).append(other)
        for digest, running in sorted(users.items(), key=lambda item: len(item[1])):
            group = [*running, *self._waiting.holders_of(digest)]
            if all(map(draft.may_preempt, running)) and len(
                list(self._order.yielding(state, group))
            ) == len(group):
                for victim in running:
                    self.preempt(victim, draft)
                self._waiting.release_holds(digest)
                draft.leaving_adapter = digest
                return

    def _less_entitled(self, state: RequestState, draft: PlanBuilder) -> RequestState | None:
        """The request to preempt for the growth of `state`: the least entitled one behind it, paused ones first."""
        by_place = self._by_place(draft)
        while by_place and not (
            by_place[-1].status == "running" and draft.may_preempt(by_place[-1])
        ):
            by_place.pop()
        return (
            by_place[-1]
            if by_place and self._order.place(by_place[-1]) > self._order.place(state)
            else None
        )

    def _by_place(self, draft: PlanBuilder) -> list[RequestState]:
        """Requests with pages, the most entitled first, as of the first time that the plan asks."""
        if draft.by_place is None:
            draft.by_place = sorted(self._table.running, key=self._order.place)
        return draft.by_place
