"""Defects that overlap of steps could bring in, to plant one at a time in simulations with overlap."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

import pytest

from manylora.engine.core import EngineCore
from manylora.engine.fairness.shares import FairPlace
from manylora.engine.scheduling import outcomes
from manylora.engine.scheduling.kv_pages import KvPages
from manylora.engine.scheduling.plan import Chunk, ChunkResult, StepPlan
from manylora.engine.scheduling.request_pages import StepCursor
from manylora.engine.scheduling.request_state import RequestState
from manylora.engine.scheduling.rows import Rows
from manylora.engine.scheduling.scheduler import Scheduler
from simulation.defects import Plant


def take_in_the_later_step_first(patch: pytest.MonkeyPatch) -> None:
    settle = EngineCore._settle

    def hasty(self: EngineCore, num_left: int = 0) -> None:
        self._in_flight.reverse()
        settle(self, num_left)

    patch.setattr(EngineCore, "_settle", hasty)


def take_results_of_another_step(patch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def late(self: Scheduler, plan: StepPlan, results: list[ChunkResult]) -> None:
        for chunk in plan.chunks:
            state = self.table.requests.get(chunk.request_id)
            if state is not None and len(state.cursor.in_flight) > 1:
                state.cursor.in_flight.reverse()
        commit(self, plan, results)

    patch.setattr(Scheduler, "commit", late)


def reuse_pages_while_the_next_step_reads_them(patch: pytest.MonkeyPatch) -> None:
    complete = Scheduler.complete
    patch.setattr(Scheduler, "complete", lambda self, _: complete(self, self._step))


def take_the_token_of_another_row(patch: pytest.MonkeyPatch) -> None:
    begin = StepCursor.begin

    def crossed(self: StepCursor, chunk: Chunk, plan: StepPlan) -> None:
        begin(self, chunk, plan)
        if chunk.token_source:
            chunk.token_source -= 1

    patch.setattr(StepCursor, "begin", crossed)


def charge_for_rows_whose_request_had_ended(patch: pytest.MonkeyPatch) -> None:
    plan_step = Scheduler.plan
    commit = Scheduler.commit
    planned: dict[str, FairPlace] = {}

    def remember(self: Scheduler) -> StepPlan | None:
        plan = plan_step(self)
        for chunk in plan.chunks if plan is not None else []:
            planned[chunk.request_id] = self.table.requests[chunk.request_id].place
        return plan

    def charge_all(self: Scheduler, plan: StepPlan, results: list[ChunkResult]) -> None:
        ended = [chunk for chunk in plan.chunks if chunk.request_id not in self.table.requests]
        self.table.service.charge([(planned[chunk.request_id], chunk) for chunk in ended])
        commit(self, plan, results)

    patch.setattr(Scheduler, "plan", remember)
    patch.setattr(Scheduler, "commit", charge_all)


def go_on_after_the_end_while_a_row_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    reason = outcomes._finish_reason
    patch.setattr(
        outcomes,
        "_finish_reason",
        lambda state, *args: None if state.cursor.in_flight else reason(state, *args),
    )


def publish_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    publish = KvPages.publish

    def early(self: KvPages, state: RequestState, _num_full: int) -> None:
        publish(self, state, state.pages.num_computed // self.geometry.page_tokens)

    patch.setattr(KvPages, "publish", early)


def plan_past_the_last_token(patch: pytest.MonkeyPatch) -> None:
    begin = StepCursor.begin

    def eager(self: StepCursor, chunk: Chunk, plan: StepPlan) -> None:
        before = self.num_coming
        begin(self, chunk, plan)
        if chunk.sample is not None:
            self.num_coming = before + 1

    patch.setattr(StepCursor, "begin", eager)


def forget_that_a_step_fills_the_pages_of_a_request_without_a_chunk(
    patch: pytest.MonkeyPatch,
) -> None:
    start = KvPages.start

    def forgetful(self: KvPages, state: RequestState, *args: Any) -> bool:
        before = state.pages.last_step
        has_started = start(self, state, *args)
        state.pages.last_step = before
        return has_started

    patch.setattr(KvPages, "start", forgetful)


def start_again_before_the_token_in_flight_is_known(patch: pytest.MonkeyPatch) -> None:
    why_not = Rows._why_not

    def careless(self: Rows, state: RequestState, *args: Any) -> Any:
        cursor = state.cursor
        in_flight, cursor.in_flight = cursor.in_flight, []
        reason = why_not(self, state, *args)
        cursor.in_flight = in_flight
        return reason

    patch.setattr(Rows, "_why_not", careless)


OVERLAP_DEFECTS: tuple[Plant, ...] = tuple(
    plant
    for plant in list(globals().values())
    if isfunction(plant) and plant.__module__ == __name__
)
