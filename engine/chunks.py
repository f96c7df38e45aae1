"""What each row computes: one token where it decodes, and chunks of prompts in what the token budget leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import itemgetter

from weft.engine.draft import Draft
from weft.engine.failures import INTERNAL
from weft.engine.preemption import Preemption
from weft.engine.request import FinishReason, RequestError
from weft.engine.request_state import RequestState
from weft.engine.request_table import RequestTable
from weft.engine.step_budget import StepBudget

logger = logging.getLogger(__name__)


class Chunks:
    """Plans the chunks of each step.

    Args:
        table: The requests.
        preemption: Where pages come from that others have.
        budget: Tokens of a step.
        page_tokens: Tokens of a page.
        finish: Ends a request that cannot go on.
    """

    def __init__(
        self,
        table: RequestTable,
        preemption: Preemption,
        budget: StepBudget,
        page_tokens: int,
        finish: Callable[[str, FinishReason, RequestError], None],
    ) -> None:
        self._table = table
        self._preemption = preemption
        self._budget = budget
        self._page_tokens = page_tokens
        self._finish = finish
        self._budget_used = 0
        """Tokens of the budget in the step that was planned last."""

    def tokens_left(self) -> int:
        """Tokens for prompts beside the rows that decode, as of now."""
        table = self._table
        counted = sum(state.has_row for state in table.prefilling)
        if self._budget.is_bounded:
            batch = (state for state in table.running if state.in_batch_lane and state not in table.prefilling)
            counted += sum(state.has_row for state in batch)
        return self._budget.tokens(table.num_rows - counted)

    def note_step(self, seconds: float) -> None:
        """Take note of how long the step took that was planned last."""
        self._budget.note_step(self._budget_used, seconds)

    def plan(self, draft: Draft) -> None:
        """Say what each row computes, the most entitled first where tokens or pages are short."""
        rows = self._with_leases(self._table.rows())
        draft.by_place = None  # rows changed hands
        draft.budget = budget = self.tokens_left()
        page_tokens, is_bounded, turn = self._page_tokens, self._budget.is_bounded, self._table.order.turn
        needy: list[tuple[tuple[float, ...], bool, RequestState]] = []
        for state in rows:
            if state.next_chunk is None or (is_bounded and state.in_batch_lane):
                is_free = state.num_left == 1 and not (is_bounded and state.in_batch_lane)
                needy.append((turn(state), is_free, state))
        needy.sort(key=itemgetter(0))
        counts: dict[RequestState, int] = {}
        for _, is_free, state in needy:
            if state.status != "running":
                continue  # it was preempted for one that is more entitled
            count = 1 if is_free else min(state.num_left, draft.budget)
            if count > 0 and not self._preemption.grow(state, state.num_computed + count, draft):
                count = min(count, state.pages.table.num_blocks * page_tokens - state.num_computed)
            counts[state] = count
            draft.budget -= 0 if is_free else count
        self._budget_used = budget - draft.budget
        for state in rows:
            count = counts.get(state, 1)
            if count > 0 and state.has_row:  # it may have been preempted since
                draft.chunks.append(state.next_chunk or state.chunk(count))
                state.last_step = draft.step

    def _with_leases(self, rows: list[RequestState]) -> list[RequestState]:
        """The rows but for requests whose adapter slot is not what their lease says, which are ended; a bug's doing."""
        stale = self._table.residency.stale_leases([state.lease for state in rows if state.lease is not None])
        if not stale:
            return rows
        for state in [state for state in rows if state.lease in stale]:
            logger.error("request %s lost its adapter slot: %s", state.request_id, state.lease)
            self._finish(state.request_id, "error", INTERNAL)
        return self._table.rows()
