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
from weft.errors import StaleSlotError

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
        rows = self._table.rows()
        draft.by_place = None  # rows changed hands
        draft.budget = budget = self.tokens_left()
        counts: dict[str, int] = {}
        leases: set[int] = set()
        needy: list[tuple[tuple[float, ...], bool, RequestState]] = []
        for state in rows:
            if state.lease is not None and state.lease.slot not in leases and not self._check_lease(state, leases):
                continue
            num_computed = state.num_computed
            is_free = state.num_tokens == num_computed + 1 and not (state.in_batch_lane and self._budget.is_bounded)
            if is_free and num_computed < state.pages.table.num_blocks * self._page_tokens:
                counts[state.request_id] = 1
            else:
                needy.append((self._table.order.turn(state), is_free, state))
        needy.sort(key=itemgetter(0))
        for _, is_free, state in needy:
            if state.status != "running":
                continue  # it was preempted for one that is more entitled
            count = 1 if is_free else min(state.num_left, draft.budget)
            if count > 0 and not self._preemption.grow(state, state.num_computed + count, counts, draft):
                count = min(count, state.pages.table.num_blocks * self._page_tokens - state.num_computed)
            if count > 0:
                counts[state.request_id] = count
                draft.budget -= 0 if is_free else count
        self._budget_used = budget - draft.budget
        for state in rows:
            if count := counts.get(state.request_id, 0):
                draft.add(state, count)

    def _check_lease(self, state: RequestState, checked: set[int]) -> bool:
        """Whether its adapter slot is still what its lease says; a slot that is goes to `checked`."""
        lease = state.lease
        if lease is None:
            return True
        try:
            self._table.residency.check_slot(*lease)
        except StaleSlotError:
            logger.exception("request %s lost its adapter slot", state.request_id)
            self._finish(state.request_id, "error", INTERNAL)
            return False
        checked.add(lease.slot)
        return True
