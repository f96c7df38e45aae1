"""Gives rows, and the first pages, to the first requests in the fair order. Acts when nothing can be computed.

Each plan looks at the first requests in the fair order. One that is blocked does not block those behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from manylora.engine.request import ErrorInfo, FinishReason, error_info
from manylora.engine.scheduling.kv_pages import PrefixHit
from manylora.engine.scheduling.plan import PlanBuilder
from manylora.engine.scheduling.preemption import Preemption
from manylora.engine.scheduling.request_state import RequestState, WaitingReason
from manylora.engine.scheduling.request_table import MAX_BYPASSES, RequestTable
from manylora.errors import CapacityError, NeverFitsError

LOOK_AHEAD = 64
"""Requests without a row looked at in a step that has room, besides one for each row that is free."""
GLANCE = 4
"""Requests looked at in a step once its rows are all taken: where the most entitled get no row, others hardly do."""
GLANCE_STEPS = 4
"""Steps from one look at requests to the next, while all rows are taken and nothing changes."""
WHOLE_LOOK_STEPS = 8
"""Steps from one look at the whole look-ahead to the next, while all rows are taken; its adapters are loaded then."""

MAX_STALLS = 16
"""Empty plans in a row, while no copy or load runs, after which the first request in line is refused."""


@dataclass(eq=False)
class Rows:
    """Fills the rows of each step."""

    table: RequestTable
    preemption: Preemption
    """Takes pages and rows from others."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    finish: Callable[[str, FinishReason, ErrorInfo], None]
    """Ends a request that can never be served."""
    is_draining: bool = False
    """True if only requests that have started get rows."""

    def __post_init__(self) -> None:
        self._order = self.table.order
        self._waiting = self.table.waiting
        self._kv = self.table.kv
        self._residency = self.table.residency
        self._num_stalls = 0

    def fill(self, draft: PlanBuilder) -> None:
        """Give rows to the first in the fair order, from what is free and from shares that are ahead."""
        is_whole_look = draft.plan.step % WHOLE_LOOK_STEPS == 0
        has_room = self.table.has_free_row
        is_due = (
            has_room
            or is_whole_look
            or self._waiting.has_changed
            or draft.plan.step % GLANCE_STEPS == 0
        )
        if not self._order.num_queued or not (is_due or self._waiting.num_loading()):
            return
        self._waiting.has_changed = False
        prefilling = self.table.prefilling
        draft.prefilling = [
            (self._order.turn(state.place), state.num_left, state.place.in_batch_lane)
            for state in prefilling
            if state.place.has_row
        ]
        overdue = [state for state in self._waiting.overdue() if self._may_run(state)]
        looked = {state.request_id: state for state in overdue[:1]}
        for state in overdue[:1]:
            self._try_row(state, draft)
        blocked: list[RequestState] = []
        num_bypassed = num_glanced = 0
        num_looked = LOOK_AHEAD + self.table.max_rows - self.table.num_rows
        line = self._order.candidates(self._order.num_queued if self.is_draining else num_looked)
        for place in line:
            state = self.table.requests[place.request_id]
            reason: WaitingReason | None = None
            # Requests that are overdue keep waiting those that are not far more entitled.
            if state.status == "running" or all(
                self._order.is_behind(late.place, place) for late in overdue
            ):
                looked[state.request_id] = state
                reason = self._try_row(state, draft)
                if reason is None:
                    num_bypassed = len(blocked)
                elif reason == "NO_PAGES" or (
                    reason == "NO_ROOM"
                    and not (state.adapter.is_holding and self._waiting.is_unread(state))
                ):
                    blocked.append(state)
            num_glanced += reason == "NEW" and not self.table.has_free_row
            if num_glanced >= GLANCE and not is_whole_look:
                break
        line.close()
        for state in blocked[:num_bypassed]:
            self._waiting.bypass(state)
        if has_room or is_whole_look:
            self._waiting.drop_holds(lambda state: state.request_id in looked)
            self._residency.expect(
                [
                    digest
                    for state in looked.values()
                    if (digest := state.adapter.digest) and state.adapter.is_holding
                ]
            )

    def waits_for_leader(self, state: RequestState) -> bool:
        """True if a fork waits for tokens of its leader; a fork that cannot have them any more goes on alone."""
        source = state.source
        if source is None:
            return False
        leader = source.leader
        is_without_pages = (
            leader.pages.num_preemptions if state.beam is None else leader.status == "waiting"
        )
        if (
            self.table.requests.get(leader.request_id) is not leader
            or is_without_pages
            or state.pages.num_preemptions
        ):
            state.source = None
            return False
        return leader.cursor.num_complete < source.num_tokens

    def end_stall(self) -> None:
        """Note that something was computed."""
        self._num_stalls = 0

    def resolve_stall(self, draft: PlanBuilder) -> None:
        """Remove an obstacle of the first in line, which may give the plan something to do."""
        first = self._first_in_line()
        waiting = self._waiting
        # An adapter that is being read has no pages yet, so it is in nobody's way, however long it takes.
        if first is None or self._kv.pool.num_quarantined or self._residency.transfers.is_copying:
            return
        waiting.drop_holds(lambda state: state.adapter.digest == first.adapter.digest)
        if first.status == "waiting":
            waiting.bypass(first, MAX_BYPASSES)
        in_the_way = [
            state for state in self.table.running if state.is_idle and not _are_beams(state, first)
        ]
        if in_the_way:
            last = max(in_the_way, key=lambda state: self._order.entitlement(state.place))
            self.preemption.preempt(last, draft)
            return
        self._num_stalls += 1
        if self._num_stalls > MAX_STALLS:
            self._num_stalls = 0
            error = CapacityError(
                "Pinned adapters leave too little room for this request. Try again, or unpin some."
            )
            self.finish(first.request_id, "error", error_info(error))

    def _may_run(self, state: RequestState) -> bool:
        return state.place.has_started or not self.is_draining

    def _first_in_line(self) -> RequestState | None:
        """Most entitled request that runs and is not idle, or else of those that idle ones wait for, or of all."""
        table = self.table
        running = [state for state in table.running if not state.is_idle]
        awaited = [
            state
            for state in table.waiting
            if any(_are_beams(state, idle) for idle in table.running)
        ]
        begun = running or [state for state in awaited if not state.is_idle]
        if begun:
            return min(begun, key=lambda state: table.order.entitlement(state.place))
        line = table.order.candidates(LOOK_AHEAD)
        looked = (table.requests[place.request_id] for place in line)
        able = (state for state in looked if self._may_run(state) and not state.is_idle)
        first = next((state for state in able if not table.waiting.is_unread(state)), None)
        line.close()
        return first

    def _try_row(self, state: RequestState, draft: PlanBuilder) -> WaitingReason | None:
        """Give a request a row, and pages if it has none; or note and return the reason why not."""
        is_waiting = state.status == "waiting"
        reason = self._why_not(state, draft) if is_waiting else "FORK" if state.is_idle else None
        if reason is None:
            row = None if self.table.has_free_row else self._row_for(state)
            if row is None and not self.table.has_free_row:
                reason = "NEW"
            elif is_waiting:
                reason = self._start(state, row, draft)
            else:
                self._take_row(row, draft)
                self._order.start(state.place)
        elif reason == "NO_ROOM" and state.adapter.is_holding:
            self.preemption.make_way_for_adapter(state, draft)
        if reason is not None and state.status == "waiting":
            state.waiting_reason = reason
            if reason in ("LOADING", "NO_ROOM"):
                self._order.pass_over(state.place)
        return reason

    def _row_for(self, state: RequestState) -> RequestState | None:
        """Request in the step that makes way for this one."""
        row = self._order.row_for(state.place)
        return None if row is None else self.table.requests[row.request_id]

    def _take_row(self, row: RequestState | None, draft: PlanBuilder) -> None:
        if row is not None and row.place.has_row:  # else it was preempted for its pages
            self.preemption.pause(row, draft)

    def _why_not(self, state: RequestState, draft: PlanBuilder) -> WaitingReason | None:
        """Reason why a waiting request cannot start, besides a row and pages for its tokens."""
        adapter = state.request.adapter
        if state.is_idle:
            return "FORK"
        if state.cursor.in_flight or not self._may_run(state):
            return "NEW"
        if adapter is not None:
            if not self._check_fits(state):
                return "NEW"
            if adapter.digest == draft.leaving_adapter:
                return "NO_ROOM"
            may_hold = state.adapter.is_holding or self._residency.state(adapter.digest) == "device"
            if not may_hold and not self.preemption.has_room_for_adapter(state, draft):
                return "NO_ROOM"
            self._waiting.hold(state)
            if self._residency.state(adapter.digest) != "device":
                draft.needed += self.preemption.pages_to_start(state, draft)
                return self._residency.waiting_reason(adapter.digest)
        if self.waits_for_leader(state):
            return "FORK"
        return None if self._kv.may_look_up(state) else "NEW"

    def _check_fits(self, state: RequestState) -> bool:
        """Refuse a request once it is known that its adapter leaves no room for it even in an empty pool."""
        ref = state.request.adapter
        if state.adapter.num_pages is None and ref is not None:
            num_pages = self._residency.pages_needed(ref)
            state.adapter.num_pages = num_pages
            state.place.load_units = self.table.service.prices.load(num_pages)
            try:
                self._kv.check_fits(state.request, num_pages)
            except NeverFitsError as error:
                self.finish(state.request_id, "error", error_info(error))
                return False
        return True

    def _start(
        self, state: RequestState, row: RequestState | None, draft: PlanBuilder
    ) -> WaitingReason | None:
        """Give a waiting request pages, and a row: a free one, or that of `row`, which is paused."""
        turn = self._order.turn(state.place)
        # Prompts of the batch lane that are ahead have few tokens in a step with interactive requests.
        num_ahead = sum(
            left
            for other, left, is_batch in draft.prefilling
            if other < turn and (state.place.in_batch_lane or not is_batch)
        )
        # A fork of a beam computes one token, like requests that decode.
        is_free = state.beam is not None and state.source is not None
        if num_ahead >= draft.budget and not is_free:
            return "NEW"
        adapter = state.adapter
        if adapter.digest is not None:
            adapter.lease = self._residency.acquire(adapter.digest)
            if adapter.lease is None:
                return self._residency.waiting_reason(adapter.digest)
        hit = self._kv.prefix_hit(state)
        count = 1 if is_free else min(state.num_tokens - hit.num_tokens, draft.budget - num_ahead)
        num_tokens = max(hit.num_tokens + count, state.tokens_to_reserve)
        if not self._find_pages(state, hit, num_tokens, draft):
            if adapter.lease is not None:
                self._residency.release(adapter.lease.digest)  # no step has used it
                adapter.lease = None
            return "NO_PAGES"
        self._take_row(row, draft)
        self.table.run(state)
        if state.num_left > 1:
            draft.prefilling.append((turn, state.num_left, state.place.in_batch_lane))
        draft.plan.started.add(state.request_id)
        if state.first_output.queue_s is None:
            self._note_first_start(state)
        return None

    def _find_pages(
        self, state: RequestState, hit: PrefixHit, num_tokens: int, draft: PlanBuilder
    ) -> bool:
        """Give a waiting request its pages, from what is free or idle or from shares that are far ahead."""
        # The other beams of a search cannot grow before this one has started.
        room = (
            0
            if state.beam is not None and state.output_token_ids
            else self.preemption.room_to_grow()
        )
        if self._kv.start(state, hit, num_tokens, room, draft):
            return True
        num_pages = self._kv.num_lacking(hit, num_tokens) + room
        if not self.preemption.make_way(state, num_pages, draft) or self.waits_for_leader(state):
            return False
        # What was swapped out is there only in the next step. What was found before may be gone.
        hit = self._kv.prefix_hit(state)
        return hit.num_tokens < num_tokens and self._kv.start(state, hit, num_tokens, room, draft)

    def _note_first_start(self, state: RequestState) -> None:
        first_output = state.first_output
        first_output.queue_s = self.clock() - state.place.arrived_s
        first_output.num_cached = min(state.pages.num_computed, state.num_prompt)
        if not first_output.keeps_prompt_logprobs:
            self._kv.note_lookup(state.num_prompt, first_output.num_cached)


def _are_beams(state: RequestState, other: RequestState) -> bool:
    """True if both are beams of one search."""
    return (
        state.beam is not None
        and other.beam is not None
        and state.beam.search_id == other.beam.search_id
    )
