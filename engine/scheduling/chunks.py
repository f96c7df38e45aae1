"""Chunks of each step: one token for each row that decodes, and parts of prompts in what the token budget leaves."""

from __future__ import annotations

import math
from operator import itemgetter

from manylora.engine.scheduling.plan import Chunk, PlanBuilder, SampleSpec, StepPlan
from manylora.engine.scheduling.preemption import Preemption
from manylora.engine.scheduling.request_state import RequestState
from manylora.engine.scheduling.request_table import RequestTable
from manylora.engine.scheduling.step_budget import MIN_TOKENS, StepBudget


class Chunks:
    """Plans the chunks of each step.

    Args:
        table: The requests.
        preemption: Takes pages from others.
        budget: Tokens of a step.
    """

    def __init__(self, table: RequestTable, preemption: Preemption, budget: StepBudget) -> None:
        self._table = table
        self._preemption = preemption
        self._budget = budget

    @property
    def _is_bounded(self) -> bool:
        """True if steps are kept to a length; then tokens that the batch lane decodes are counted too."""
        num_batch = self._table.order.num_batch_rows
        return self._budget.has_target or (
            num_batch > 0 and (num_batch < self._table.num_rows or self._budget.keeps_short)
        )

    def tokens_left(self) -> int:
        """Tokens for prompts of interactive requests, before rows change hands; a target counts them as units."""
        tokens, units = self._left()
        return tokens if units == math.inf else min(tokens, max(int(units), MIN_TOKENS))

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Take note of the seconds that a step took."""
        self._budget.note_step(plan.units, plan.batch_units, seconds, plan.has_interactive)

    def plan(self, draft: PlanBuilder) -> None:
        """Plan the chunk of each row, the most entitled first where tokens or pages are short."""
        rows = self._table.rows()
        plan = draft.plan
        self._preemption.forget_order()  # rows changed hands
        is_bounded = self._is_bounded
        plan.has_interactive = self._table.num_rows > self._table.order.num_batch_rows
        draft.budget, units = self._left()
        batch_units = (
            self._left_for_batch(rows, units, plan.has_interactive) if is_bounded else math.inf
        )
        floor = MIN_TOKENS if self._budget.has_target else 0
        page_tokens = self._table.kv.geometry.page_tokens
        turn = self._table.order.turn
        needy = [
            (turn(state.place), state)
            for state in rows
            if state.cursor.next_chunk is None or (is_bounded and state.place.in_batch_lane)
        ]
        needy.sort(key=itemgetter(0))
        counts: dict[RequestState, int] = {}
        for _, state in needy:
            if state.status != "running":
                continue  # it was preempted for one that is more entitled
            pages = state.pages
            is_bounded_batch = is_bounded and state.place.in_batch_lane
            is_free = state.num_left == 1 and not is_bounded_batch
            price = self._price(state) if is_bounded_batch or self._budget.has_target else 0.0
            count = 1 if is_free else max(min(state.num_left, draft.budget), 0)
            if is_bounded_batch:
                count = min(count, _whole(batch_units, price))
            elif not is_free and price:
                count = min(count, _whole(max(units, floor), price))
            if count > 0 and not self._preemption.grow(state, pages.num_computed + count, draft):
                count = min(count, pages.table.num_blocks * page_tokens - pages.num_computed)
            counts[state] = count
            if not is_free:
                draft.budget -= count
                floor -= 0 if is_bounded_batch else count
                units -= count * price
                batch_units -= count * price
        self._begin(rows, counts, plan, is_bounded)

    def _begin(
        self,
        rows: list[RequestState],
        counts: dict[RequestState, int],
        plan: StepPlan,
        is_bounded: bool,
    ) -> None:
        """Add the chunks of rows to the plan; a row without a count decodes."""
        for state in rows:
            cursor = state.cursor
            chunk = cursor.next_chunk
            count = counts.get(state, 1) if is_bounded or chunk is None else 1
            if count > 0 and state.place.has_row:  # it may have been preempted since
                if is_bounded:
                    price = count * self._price(state)
                    plan.units += price
                    plan.batch_units += price * state.place.in_batch_lane
                cursor.begin(chunk or make_chunk(state, count), plan)
        self._table.note_progress()

    def _left(self) -> tuple[int, float]:
        """Tokens and units besides those of the rows that decode."""
        table = self._table
        if not self._is_bounded:
            num_prefilling = sum(state.place.has_row for state in table.prefilling)
            return self._budget.max_tokens - (table.num_rows - num_prefilling), math.inf
        decoding = [
            state
            for state in table.rows()
            if not state.place.in_batch_lane and state not in table.prefilling
        ]
        units = sum(self._price(state) for state in decoding) if self._budget.has_target else 0.0
        return self._budget.max_tokens - len(decoding), self._budget.units(units)

    def _left_for_batch(
        self, rows: list[RequestState], units: float, has_interactive: bool
    ) -> float:
        """Units for the batch lane beside the interactive requests of this step; enough for one token."""
        prices = [
            self._price(state)
            for state in rows
            if not state.place.in_batch_lane and state.num_left == 1
        ]
        return max(
            min(units, self._budget.batch_units(sum(prices) if has_interactive else None)), 1.0
        )

    def _price(self, state: RequestState) -> float:
        """Units of its next token."""
        prices = self._table.service.prices
        return prices.next_token(state.pages.num_computed, is_prompt=state.num_left > 1)


def make_chunk(state: RequestState, count: int) -> Chunk:
    """Make a chunk of the next `count` tokens of a request; its pages are there already."""
    params = state.request.params
    start = state.pages.num_computed
    end = start + count
    targets: list[int] = []
    if state.first_output.keeps_prompt_logprobs:
        targets = state.request.prompt_token_ids[start + 1 : end + 1]
    return Chunk(
        request_id=state.request_id,
        token_ids=[0] if state.cursor.num_coming else state.tokens(start, end),
        start=start,
        block_table=state.pages.table.pages,
        adapter=state.adapter.lease,
        sample=_sample_spec(state) if end == state.num_tokens and params.max_tokens else None,
        prompt_targets=targets or None,
        num_prompt_logprobs=params.prompt_logprobs or 0,
    )


def _sample_spec(state: RequestState) -> SampleSpec:
    request = state.request
    params = request.params
    has_history = params.needs_history
    return SampleSpec(
        params=params,
        seed=state.seed,
        choice_index=request.choice_index,
        output_index=len(state.output_token_ids) + state.cursor.num_coming,
        prompt_token_ids=request.prompt_token_ids if has_history else [],
        output_token_ids=state.output_token_ids if has_history or params.bad_words else [],
    )


def _whole(units: float, price: float) -> int:
    """Tokens of a price in these units, at least one where there are any."""
    return math.ceil(max(units, 0.0) / price)
