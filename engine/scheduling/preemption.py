"""Taking pages when none are free: from holds of waiting requests, and from less entitled requests."""

from __future__ import annotations

from collections import Counter

from manylora.engine.scheduling.plan import PlanBuilder
from manylora.engine.scheduling.request_state import RequestState
from manylora.engine.scheduling.request_table import MAX_BYPASSES, RequestTable

PAUSED_DIVISOR = 2
"""Paused requests keep at most one in this number of the pool's pages; the next to lose its row loses its pages too."""
GROWTH_DIVISOR = 16
"""Running requests keep a block each to grow into, together at most one in this number of the pool's pages."""


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
        self._by_entitlement: list[RequestState] | None = None
        """Requests with pages, the most entitled first; None until this plan asks for others' pages."""
        self._unobtainable: int | None = None
        """The smallest number of pages that this plan failed to take from others."""
        self._has_looked_for_slot = False
        """True if this plan has looked for an adapter slot that others give up."""

    def begin_plan(self) -> None:
        """Note that a plan is begun."""
        self._by_entitlement = None
        self._unobtainable = None
        self._has_looked_for_slot = False

    def forget_order(self) -> None:
        """Note that rows changed hands."""
        self._by_entitlement = None

    def room_to_grow(self) -> int:
        """Pages that admissions, and adapters on their way to the device, leave to those that run."""
        return min(len(self._table.running) * self._num_groups, self._pool_pages // GROWTH_DIVISOR)

    def preempt(self, state: RequestState, draft: PlanBuilder | None) -> None:
        """Take the pages from a request; without a draft there is no step that could swap them out."""
        how = self._kv.preempt(state, draft)
        self._table.stop(state)
        self._table.preemptions[how] += 1

    def undo_start(self, state: RequestState, step: int) -> None:
        """Take the pages from a request that a failed step was to fill; nobody gets them, so it is no preemption."""
        pages = state.pages
        num_preemptions = pages.num_preemptions
        progress_mark = pages.progress_mark
        pages.last_step = max(pages.last_step, step)
        self.preempt(state, None)
        pages.num_preemptions = num_preemptions
        pages.progress_mark = progress_mark
        self._table.preemptions["recompute"] -= 1

    def pause(self, state: RequestState, draft: PlanBuilder) -> None:
        """Take the row from a request, which keeps its pages unless those of paused requests become too many."""
        num_blocks = sum(other.pages.table.num_blocks for other in (state, *self._table.paused))
        is_over = PAUSED_DIVISOR * num_blocks * self._num_groups > self._pool_pages
        if is_over and _may_preempt(state, draft):
            self.preempt(state, draft)
        else:
            self._order.stop(state.place)

    def grow(self, state: RequestState, num_tokens: int, draft: PlanBuilder) -> bool:
        """Give a request with a row pages for `num_tokens` tokens, if need be from what is idle and less entitled.

        Args:
            state: The request.
            num_tokens: Tokens from the first one on.
            draft: The plan.

        Returns:
            True if it has them; if not, it keeps the pages it had.
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
            # A batch may go before those that are more entitled to pages.
            draft.plan.started.add(state.request_id)
            return True
        draft.promised += count
        return False

    def make_way(self, state: RequestState, num_pages: int, draft: PlanBuilder) -> bool:
        """Have pages come free for a waiting request, from those whose shares are far ahead of its own.

        Returns:
            True if a request was preempted; none is where all of them together have too few pages.
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
        if lack <= 0 or (self._unobtainable is not None and lack >= self._unobtainable):
            return []
        users = Counter(other.adapter.digest for other in self._table.running)
        last_first = (
            other.place
            for other in reversed(self._most_entitled_first())
            if other.status == "running" and _may_preempt(other, draft)
        )
        victims = []
        for place in self._order.yielding(state.place, last_first):
            other = self._table.requests[place.request_id]
            digest = other.adapter.digest
            victims.append(other)
            lack -= self._kv.num_alone(other)
            users[digest] -= 1
            if digest is not None and not users[digest] and not self._waiting.holders_of(digest):
                lack -= other.adapter.num_pages or 0  # nobody uses its adapter any more
            if lack <= 0:
                return victims
        self._unobtainable = num_pages - self._kv.num_available
        return []

    def has_room_for_adapter(self, state: RequestState, draft: PlanBuilder) -> bool:
        """True if there are, or could be, pages for a waiting request's adapter and for the first tokens it computes.

        An adapter that came without them would lose its pages to what the running requests grow, and come again. One
        of unknown size is read in any case. A request that is overdue gets the pages that come free.
        """
        if (
            state.adapter.num_pages is None
            or state.num_bypasses >= MAX_BYPASSES
            or not self._table.running
        ):
            return True
        num_pages = (
            state.adapter.num_pages
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
        num_pages = (state.adapter.num_pages or 0) + self.room_to_grow()
        self.make_way(state, num_pages, draft)
        if (
            self._has_looked_for_slot
            or self._kv.num_available < num_pages
            or self._waiting.is_unread(state)
        ):
            return
        self._has_looked_for_slot = True
        if self._table.residency.transfers.lacks_slot:
            self._make_slot(state, draft)

    def _make_slot(self, state: RequestState, draft: PlanBuilder) -> None:
        """Have the fewest requests give an adapter up that all are far ahead of this one."""
        users: dict[str, list[RequestState]] = {}
        for other in self._table.running:
            if other.adapter.digest is not None:
                users.setdefault(other.adapter.digest, []).append(other)
        for digest, running in sorted(users.items(), key=lambda item: len(item[1])):
            if not all(_may_preempt(other, draft) for other in running):
                continue
            group = [other.place for other in (*running, *self._waiting.holders_of(digest))]
            if len(list(self._order.yielding(state.place, group))) == len(group):
                for victim in running:
                    self.preempt(victim, draft)
                draft.leaving_adapter = digest
                self._waiting.drop_holds(lambda each: each.adapter.digest != draft.leaving_adapter)
                return

    def _less_entitled(self, state: RequestState, draft: PlanBuilder) -> RequestState | None:
        """Request to preempt for the growth of `state`: the least entitled one behind it, paused ones first."""
        others = self._most_entitled_first()
        while others and not (others[-1].status == "running" and _may_preempt(others[-1], draft)):
            others.pop()
        entitlement = self._order.entitlement
        if others and entitlement(others[-1].place) > entitlement(state.place):
            return others[-1]
        return None

    def _most_entitled_first(self) -> list[RequestState]:
        """Requests with pages, the most entitled first, as of the first time that the plan asks."""
        if self._by_entitlement is None:
            entitlement = self._order.entitlement
            self._by_entitlement = sorted(
                self._table.running, key=lambda state: entitlement(state.place)
            )
        return self._by_entitlement


def _may_preempt(state: RequestState, draft: PlanBuilder) -> bool:
    """True if a request with pages may lose them: it is not protected, and this step is not to fill them."""
    return not state.pages.is_protected and state.request_id not in draft.plan.started
