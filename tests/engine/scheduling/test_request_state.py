"""Forks of requests: each part says what a fork keeps, and a field that is added later is not forgotten."""

from __future__ import annotations

from dataclasses import fields

import pytest

from manylora.engine.request import FlowKey
from manylora.engine.scheduling.request_pages import BlockTable
from manylora.engine.scheduling.request_state import Beam, RequestState
from simulation.driven import Simulator, adapter, request


def lived() -> RequestState:
    """A request of which every part has something to tell."""
    simulator = Simulator(load_ticks=1)
    flow = FlowKey(tenant="t", weight=2.0, priority=3, deadline_s=50.0)
    simulator.submit(request("r", prompt=9, max_tokens=9, ref=adapter("a"), flow=flow))
    simulator.pump(6)
    state = simulator.scheduler.table.requests["r"]
    state.place.standing.level = 4
    state.place.standing.level_units = 9.0
    state.place.owes_load = True
    state.place.queued_units = 9.0
    return state


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("place", {"request_id", "arrival_index", "standing", "num_charged", "has_started"}),
        ("place.standing", set()),
        ("pages", {"chain"}),
        ("adapter", set()),
        ("first_output", set()),
    ],
)
def test_a_fork_keeps_all_that_a_part_is_made_of_and_nothing_else(
    part: str, changed: set[str]
) -> None:
    state = lived()
    old = state
    new = state.fork("r/1", 1.5, 42, Beam(search_id="r"))
    for name in part.split("."):
        old, new = getattr(old, name), getattr(new, name)
    fresh = type(old)(**{each.name: getattr(new, each.name) for each in fields(old) if each.init})
    for each in fields(old):
        if each.init:
            assert each.name in changed or getattr(new, each.name) == getattr(old, each.name)
        elif hasattr(fresh, each.name):
            found = getattr(new, each.name)
            if isinstance(found, BlockTable):
                assert not found.num_blocks
            else:
                assert found == getattr(fresh, each.name), each.name


def test_a_fork_goes_on_from_the_tokens_of_its_leader() -> None:
    state = lived()
    assert state.output_token_ids
    fork = state.fork("r/1", 1.5, 42, Beam(search_id="r"))
    assert fork.request_id == fork.place.request_id == fork.request.request_id == "r/1"
    assert fork.output_token_ids == [*state.output_token_ids, 42]
    assert fork.source is not None
    assert (fork.source.leader, fork.source.num_tokens) == (state, state.num_tokens)
    assert fork.place.num_charged == state.num_tokens
    assert (fork.status, fork.place.has_started) == ("waiting", True)
    assert fork.cursor.pages is fork.pages
    assert not fork.cursor.in_flight
    assert fork.pages.chain is None or fork.pages.chain is not state.pages.chain
