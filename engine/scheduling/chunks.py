"""Chunks of each step: one token for each row that decodes, and parts of prompts in what the budget leaves.

Without `scheduler.itl_target_ms` prompts take what `scheduler.step_tokens` leaves. The batch lane makes the decoding
part of a step with interactive requests longer by at most `scheduler.batch_stretch`. For a minute after such a step,
its own steps are kept as short, and the next interactive request does not wait long. With a target, all steps keep it.

The time of a step is predicted with a line, `seconds = overhead + unit_s * units`, which is fitted to the last steps.
Units are those of `manylora.engine.fairness.service`; one is the time of a prompt token, so the slope is known from the
start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter

from manylora.config import SchedulerConfig
from manylora.engine.scheduling.plan import Chunk, PlanBuilder, SampleSpec, StepPlan
from manylora.engine.scheduling.preemption import Preemption
from manylora.engine.scheduling.request_state import RequestState
from manylora.engine.scheduling.request_table import RequestTable

MIN_TOKENS = 16
"""Tokens of prompts of interactive requests in a step, however slow steps are."""
TARGET_AIM = 0.9
"""Part of the target that steps are to take: half of them take longer than predicted, and the way to the client takes
time too."""
KEPT = 0.98
"""Weight of a step, relative to the step after it."""
PRIOR_VARIANCE = 64.0
"""Variance of units below which steps tell little about the slope, so that the one measured at start is kept."""
MAX_SLOPE_ERROR = 4.0
"""Largest factor between the slope and the one measured at start."""
MAX_SURPRISE = 3.0
"""Largest multiple of the predicted time, and of the mean, that a step counts as: a longer one says that the machine
paused."""
USUAL_FRACTION = 0.05
"""Weight of the last step in the mean of steps with interactive requests."""
KEEPS_SHORT_S = 60.0
"""Seconds of steps after the last interactive request, after which the batch lane fills whole steps again."""


class StepTime:
    """Predicts the seconds of a step from its units, by weighted least squares.

    Args:
        unit_s: Seconds of a unit, as measured at start.
    """

    def __init__(self, unit_s: float) -> None:
        self._start_unit_s = unit_s
        self._weight = 0.0
        self._units = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def note(self, units: float, seconds: float) -> None:
        """Learn from a step."""
        if self._weight > 1 / (1 - KEPT) / 2:
            seconds = min(seconds, MAX_SURPRISE * max(self.seconds(units), self._seconds))
        self._weight = self._weight * KEPT + 1
        share = 1 / self._weight
        units_off = units - self._units
        seconds_off = seconds - self._seconds
        self._units += share * units_off
        self._seconds += share * seconds_off
        self._variance = (1 - share) * (self._variance + share * units_off * units_off)
        self._covariance = (1 - share) * (self._covariance + share * units_off * seconds_off)

    @property
    def unit_s(self) -> float:
        """Seconds of one more unit."""
        start_s = self._start_unit_s
        slope = (self._covariance + PRIOR_VARIANCE * start_s) / (self._variance + PRIOR_VARIANCE)
        return min(max(slope, start_s / MAX_SLOPE_ERROR), start_s * MAX_SLOPE_ERROR)

    def seconds(self, units: float) -> float:
        """Predicted time of a step of `units`; negative where the line is too steep."""
        return self._seconds + self.unit_s * (units - self._units)

    def units(self, seconds: float) -> float:
        """Units of a step that is predicted to take `seconds`."""
        return self._units + (seconds - self._seconds) / self.unit_s


class StepBudget:
    """Tokens and units that steps may compute.

    Args:
        config: The target and the stretch.
        step_tokens: Most tokens in one step.
        unit_s: Seconds of a unit, as measured at start.
    """

    def __init__(self, config: SchedulerConfig, step_tokens: int, unit_s: float) -> None:
        self.max_tokens = step_tokens
        self._target_s = (
            None if config.itl_target_ms is None else TARGET_AIM * config.itl_target_ms / 1000
        )
        self._stretch = config.batch_stretch
        self._time = StepTime(unit_s)
        self._usual_s = 0.0
        """Seconds of steps with interactive requests of late, without the part of the batch lane."""
        self._batch_s = math.inf
        """Time of steps since the last one with an interactive request."""

    @property
    def has_target(self) -> bool:
        """True if steps have a target."""
        return self._target_s is not None

    @property
    def keeps_short(self) -> bool:
        """True if there were interactive requests in the last minute: then steps of the batch lane are kept short."""
        return self._batch_s < KEEPS_SHORT_S

    def units(self, decoding: float) -> float:
        """Units that a target leaves beside the `decoding` units of interactive requests; may be below 0."""
        return math.inf if self._target_s is None else self._time.units(self._target_s) - decoding

    def batch_units(self, decoding: float | None) -> float:
        """Units for the batch lane, besides the bound of `units`.

        Args:
            decoding: Units of the interactive requests that decode in the step. Prompts do not count: the longer one
                is, the longer a first token waits anyway. None: no interactive request is in the step.
        """
        if self._target_s is not None:
            return math.inf
        if decoding is None:
            return self._time.units(self._stretch * self._usual_s)
        return (self._stretch - 1) * max(self._time.seconds(decoding), 0.0) / self._time.unit_s

    def note_step(
        self, units: float, batch_units: float, seconds: float, has_interactive: bool
    ) -> None:
        """Learn from a step.

        Args:
            units: Price of the step; 0 where it was not counted.
            batch_units: Part of `units` that the batch lane caused.
            seconds: Time that the step took.
            has_interactive: True if an interactive request was in it.
        """
        self._batch_s = 0.0 if has_interactive else self._batch_s + seconds
        if units:
            self._time.note(units, seconds)
        if has_interactive:
            own_s = max(seconds - batch_units * self._time.unit_s, 0.0)
            self._usual_s += (own_s - self._usual_s) * (USUAL_FRACTION if self._usual_s else 1.0)


@dataclass(eq=False)
class Chunks:
    """Plans the chunks of each step."""

    table: RequestTable
    preemption: Preemption
    """Takes pages from others."""
    budget: StepBudget

    @property
    def _is_bounded(self) -> bool:
        """True if steps are kept to a length; then tokens that the batch lane decodes are counted too."""
        num_batch = self.table.order.num_batch_rows
        return self.budget.has_target or (
            num_batch > 0 and (num_batch < self.table.num_rows or self.budget.keeps_short)
        )

    def tokens_left(self) -> int:
        """Tokens for prompts of interactive requests, before rows change hands; a target counts them as units."""
        tokens, units = self._left()
        return tokens if units == math.inf else min(tokens, max(int(units), MIN_TOKENS))

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Take note of the seconds that a step took."""
        self.budget.note_step(plan.units, plan.batch_units, seconds, plan.has_interactive)

    def plan(self, draft: PlanBuilder) -> None:
        """Plan the chunk of each row, the most entitled first where tokens or pages are short."""
        rows = self.table.rows()
        plan = draft.plan
        self.preemption.forget_order()  # rows changed hands
        is_bounded = self._is_bounded
        plan.has_interactive = self.table.num_rows > self.table.order.num_batch_rows
        draft.budget, units = self._left()
        batch_units = (
            self._left_for_batch(rows, units, plan.has_interactive) if is_bounded else math.inf
        )
        floor = MIN_TOKENS if self.budget.has_target else 0
        page_tokens = self.table.kv.geometry.page_tokens
        turn = self.table.order.turn
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
            price = self._price(state) if is_bounded_batch or self.budget.has_target else 0.0
            count = 1 if is_free else max(min(state.num_left, draft.budget), 0)
            if is_bounded_batch:
                count = min(count, _whole(batch_units, price))
            elif not is_free and price:
                count = min(count, _whole(max(units, floor), price))
            if count > 0 and not self.preemption.grow(state, pages.num_computed + count, draft):
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
        self.table.note_progress()

    def _left(self) -> tuple[int, float]:
        """Tokens and units besides those of the rows that decode."""
        table = self.table
        if not self._is_bounded:
            num_prefilling = sum(state.place.has_row for state in table.prefilling)
            return self.budget.max_tokens - (table.num_rows - num_prefilling), math.inf
        decoding = [
            state
            for state in table.rows()
            if not state.place.in_batch_lane and state not in table.prefilling
        ]
        units = sum(self._price(state) for state in decoding) if self.budget.has_target else 0.0
        return self.budget.max_tokens - len(decoding), self.budget.units(units)

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
            min(units, self.budget.batch_units(sum(prices) if has_interactive else None)), 1.0
        )

    def _price(self, state: RequestState) -> float:
        """Units of its next token."""
        prices = self.table.service.prices
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
