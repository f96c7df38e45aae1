"""What each row computes: one token where it decodes, and chunks of prompts in what the token budget leaves."""

from __future__ import annotations

import logging
import math
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
        self._planned_units = 0.0
        """Price of the step that was planned last, where it was bounded."""
        self._has_interactive = False
        """Whether it has a row that is not of the batch lane."""

    @property
    def _is_bounded(self) -> bool:
        """Whether steps are kept to a length; then requests in the batch lane that decode are part of the budget."""
        num_batch = self._table.order.num_batch_rows
        return self._budget.has_target or (num_batch > 0 and (num_batch < self._table.num_rows or self._budget.is_calm))

    def tokens_left(self) -> int:
        """Tokens for prompts, and see `_is_bounded`, as of now."""
        table = self._table
        if not self._is_bounded:
            return self._budget.tokens(table.num_rows - sum(state.has_row for state in table.prefilling), 0.0)
        decoding = [state for state in table.rows() if not state.in_batch_lane and state not in table.prefilling]
        return self._budget.tokens(len(decoding), sum(self._price(state) for state in decoding))

    def note_step(self, seconds: float) -> None:
        """Take note of how long the step took that was planned last."""
        self._budget.note_step(self._planned_units, seconds, self._has_interactive)

    def plan(self, draft: Draft) -> None:
        """Say what each row computes, the most entitled first where tokens or pages are short."""
        rows = self._with_leases(self._table.rows())
        draft.by_place = None  # rows changed hands
        draft.budget = self.tokens_left()
        self._has_interactive = self._table.num_rows > self._table.order.num_batch_rows
        is_bounded, batch_units = self._is_bounded, self._batch_units(rows)
        page_tokens, turn = self._page_tokens, self._table.order.turn
        needy = [
            (turn(state), state) for state in rows if state.next_chunk is None or (is_bounded and state.in_batch_lane)
        ]
        needy.sort(key=itemgetter(0))
        counts: dict[RequestState, int] = {}
        for _, state in needy:
            if state.status != "running":
                continue  # it was preempted for one that is more entitled
            count, price = 1, 0.0
            if is_bounded and state.in_batch_lane:
                price = self._price(state)
                count = min(state.num_left, max(math.ceil(min(draft.budget, batch_units) / price), 0))
                batch_units -= count * price
            elif state.num_left != 1:
                price = self._price(state) if self._budget.has_target else 1.0
                count = min(state.num_left, max(math.ceil(draft.budget / price), 0))
            if count > 0 and not self._preemption.grow(state, state.num_computed + count, draft):
                count = min(count, state.pages.table.num_blocks * page_tokens - state.num_computed)
            counts[state] = count
            draft.budget -= math.ceil(count * price)
        self._planned_units = 0.0
        for state in rows:
            count = counts.get(state, 1)
            if count > 0 and state.has_row:  # it may have been preempted since
                self._planned_units += count * self._price(state) if is_bounded else 0.0
                draft.chunks.append(state.next_chunk or state.chunk(count))
                state.last_step = draft.step

    def _batch_units(self, rows: list[RequestState]) -> float:
        """Units for the batch lane beside the interactive requests of this step."""
        if not self._is_bounded:
            return math.inf
        prices = [self._price(state) for state in rows if not state.in_batch_lane and state.num_left == 1]
        return self._budget.batch_units(sum(prices) if self._has_interactive else None)

    def _price(self, state: RequestState) -> float:
        """Units of its next token."""
        return self._table.service.token_price(state)

    def _with_leases(self, rows: list[RequestState]) -> list[RequestState]:
        """The rows but for requests whose adapter slot is not what their lease says, which are ended; a bug's doing."""
        stale = self._table.residency.stale_leases([state.lease for state in rows if state.lease is not None])
        if not stale:
            return rows
        for state in [state for state in rows if state.lease in stale]:
            logger.error("request %s lost its adapter slot: %s", state.request_id, state.lease)
            self._finish(state.request_id, "error", INTERNAL)
        return self._table.rows()
