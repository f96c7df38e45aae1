from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import pytest

from manylora.engine.fairness.service import Prices
from manylora.engine.request import FlowKey, GenerationRequest
from manylora.engine.scheduling.plan import Chunk
from manylora.engine.scheduling.request_table import MAX_BYPASSES
from manylora.errors import ContextLengthError, InvalidRequestError, NeverFitsError, QueueFullError
from simulation.driven import PAGE_TOKENS, Simulator, adapter, expected_tokens, request


def run_all(simulator: Simulator, requests: list[GenerationRequest]) -> None:
    simulator.submit(*requests)
    simulator.run()


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    simulator = Simulator(step_tokens=16)
    run_all(simulator, [request("one", prompt=37, max_tokens=1)])
    assert [len(plan.chunks[0].token_ids) for plan in simulator.runner.plans] == [16, 16, 5]


def test_decodes_go_before_prompts_and_the_budget_is_kept() -> None:
    simulator = Simulator(step_tokens=8, max_running=8)
    simulator.submit(request("old", prompt=2, max_tokens=20))
    simulator.pump()
    simulator.submit(request("new", prompt=30, max_tokens=1))
    simulator.pump()
    plan = simulator.runner.plans[-1]
    assert [(chunk.request_id, len(chunk.token_ids)) for chunk in plan.chunks] == [
        ("old", 1),
        ("new", 7),
    ]


def test_the_first_output_alone_tells_where_the_adapter_was_and_how_long_it_waited() -> None:
    simulator = Simulator(load_ticks=3)
    run_all(
        simulator, [request("one", max_tokens=2, ref=adapter("a")), request("base", max_tokens=1)]
    )
    first, second = simulator.outputs["one"]
    assert (first.adapter_state, first.queue_s) == ("stored", 4.0)
    assert (second.adapter_state, second.queue_s) == (None, None)
    assert simulator.outputs["base"][0].adapter_state == "base"


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_request_whose_adapter_loads_does_not_block_those_behind_it(
    policy: Literal["fair", "fcfs"],
) -> None:
    simulator = Simulator(load_ticks=10, policy=policy)
    simulator.submit(request("slow", ref=adapter("a")))
    simulator.submit(request("base"))
    simulator.pump()
    assert [chunk.request_id for chunk in simulator.runner.plans[-1].chunks] == ["base"]
    assert simulator.core.status().waiting_reasons == {"LOADING": 1}


def test_loads_are_told_who_runs_and_who_could() -> None:
    simulator = Simulator(load_ticks=10, max_running=3)
    for index in range(3):
        simulator.submit(request(f"slow {index}", ref=adapter(str(index))))
    simulator.pump()
    assert simulator.stepping[-1] == (0, 3)
    simulator.submit(request("base", max_tokens=4))
    simulator.pump()
    assert simulator.stepping[-1] == (1, 2), "two more would fit a step, and three wait"


def test_requests_that_lack_pages_do_not_hurry_loads() -> None:
    simulator = Simulator(num_pages=8, step_tokens=32, max_running=4)
    simulator.submit(request("old", prompt=20, max_tokens=4))
    simulator.pump()
    simulator.submit(request("large", prompt=24, max_tokens=4))
    simulator.pump()
    assert simulator.core.status().waiting_reasons == {"NO_PAGES": 1}
    assert simulator.stepping[-1] == (1, 0)


def test_a_request_that_was_overtaken_often_enough_keeps_waiting_only_those_behind_it() -> None:
    simulator = Simulator(num_pages=64, step_tokens=256)
    simulator.submit(
        request("runs", prompt=80, max_tokens=60, flow=FlowKey(tenant="flood"))
    )  # a third of the pages
    simulator.pump(2)
    simulator.submit(request("big", prompt=180, max_tokens=2, flow=FlowKey(tenant="flood")))
    simulator.pump()
    simulator.scheduler.table.waiting.bypass(
        simulator.scheduler.table.requests["big"], MAX_BYPASSES
    )
    simulator.submit(request("behind", prompt=4, max_tokens=2, flow=FlowKey(tenant="flood")))
    simulator.submit(request("ahead", prompt=4, max_tokens=2, flow=FlowKey(tenant="new")))
    simulator.pump(4)
    assert simulator.last("ahead").finish_reason == "length"
    assert "behind" not in simulator.outputs
    simulator.run()
    big, behind = list(simulator.outputs).index("big"), list(simulator.outputs).index("behind")
    assert big < behind
    assert simulator.tokens("big") == expected_tokens(request("big", 180), 2)


def test_a_request_that_was_overtaken_often_enough_waits_for_the_store_like_others() -> None:
    """A load that hangs, as a store does that has lost its network, keeps only those waiting that wait for it."""
    simulator = Simulator(load_ticks=1 << 30)
    simulator.submit(request("unread", ref=adapter("a")))
    simulator.pump()
    simulator.scheduler.table.requests["unread"].num_bypasses = MAX_BYPASSES
    simulator.submit(request("base"))
    simulator.pump(20)
    assert simulator.last("base").finish_reason == "length"


def test_nobody_is_preempted_where_all_who_would_give_way_have_too_few_pages() -> None:
    simulator = Simulator(num_pages=64, step_tokens=256)
    simulator.submit(request("peer", prompt=120, max_tokens=30, flow=FlowKey(tenant="peer")))
    for index in range(3):
        simulator.submit(
            request(f"f{index}", prompt=16, max_tokens=30, flow=FlowKey(tenant="flood"))
        )
    simulator.pump(6)
    assert simulator.scheduler.table.num_rows == 4
    simulator.submit(request("fits", prompt=60, max_tokens=2, flow=FlowKey(tenant="new")))
    simulator.submit(request("big", prompt=140, max_tokens=2, flow=FlowKey(tenant="newer")))
    simulator.pump()
    waiting = {state.request_id for state in simulator.scheduler.table.waiting}
    assert "big" in waiting
    assert "fits" not in waiting
    assert simulator.num_preemptions <= 2
    simulator.run()
    assert simulator.tokens("big") == expected_tokens(request("big", 140), 2)


def test_an_adapter_without_a_slot_gets_that_of_a_share_far_ahead() -> None:
    simulator = Simulator(
        num_pages=400, slots=2, adapter_pages=1, step_tokens=64, max_model_len=1000
    )
    flood = [
        request(
            f"f{i}",
            prompt=4,
            max_tokens=400,
            ref=adapter("ab"[i % 2]),
            flow=FlowKey(tenant="flood"),
        )
        for i in range(6)
    ]
    simulator.submit(*flood)
    simulator.pump(20)
    small = request("small", prompt=4, max_tokens=4, ref=adapter("c"), flow=FlowKey(tenant="new"))
    simulator.submit(small)
    simulator.pump(30)
    assert simulator.last("small").finish_reason == "length"
    simulator.run()
    assert simulator.tokens("small") == expected_tokens(small, 4)
    assert all(simulator.tokens(each.request_id) == expected_tokens(each, 400) for each in flood)


def test_a_load_whose_first_waiter_leaves_is_charged_to_the_next() -> None:
    def service(*, with_first: bool) -> list[float]:
        simulator = Simulator(
            num_pages=100, adapter_pages=20, step_tokens=64, max_running=2, has_prefixes=False
        )
        if with_first:
            simulator.submit(request("first", ref=adapter("x"), flow=FlowKey(tenant="first")))
        simulator.submit(request("next", ref=adapter("x"), flow=FlowKey(tenant="next")))
        simulator.pump()
        simulator.core.abort("first")
        simulator.run()
        tenants = simulator.scheduler.table.service.tenants
        return [tenants[name].service if name in tenants else 0.0 for name in ("first", "next")]

    assert service(with_first=True) == service(with_first=False)


def test_a_load_whose_only_waiter_leaves_when_it_is_done_is_charged_to_that_one() -> None:
    simulator = Simulator(num_pages=100, adapter_pages=20, max_running=1)
    simulator.submit(request("runs", prompt=8, max_tokens=40, flow=FlowKey(tenant="runs")))
    simulator.submit(request("leaves", ref=adapter("x"), flow=FlowKey(tenant="leaves")))
    while simulator.pool.counts()["adapter"] == 0:
        simulator.pump()
        assert simulator.now_s < 30
    simulator.core.abort("leaves")
    assert simulator.scheduler.table.service.tenants["leaves"].service == 20 * Prices().page_load
    simulator.run()


def test_paused_requests_keep_at_most_half_of_the_pages() -> None:
    simulator = Simulator(num_pages=64, max_running=2, step_tokens=128)
    requests = [
        request(f"{tenant}{i}", prompt=50, max_tokens=60, flow=FlowKey(tenant=tenant))
        for tenant in "abcd"
        for i in range(2)
    ]
    simulator.submit(*requests)
    most = 0
    while simulator.core.has_work():
        simulator.pump()
        paused = simulator.scheduler.table.paused
        most = max(most, sum(state.pages.table.num_blocks for state in paused))
    assert 0 < most <= 32
    assert simulator.num_preemptions > 0
    assert all(simulator.tokens(each.request_id) == expected_tokens(each, 60) for each in requests)


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    simulator = Simulator(num_pages=8)
    simulator.know(adapter("a"))
    with pytest.raises(NeverFitsError, match="9 pages for 36 tokens, but the pool has 8 pages"):
        simulator.submit(request("big", prompt=30, max_tokens=7))
    simulator.submit(request("fits", prompt=30, max_tokens=3))
    with pytest.raises(NeverFitsError, match="8 pages for 32 tokens and 2 pages for its adapter"):
        simulator.submit(request("adapter", prompt=30, max_tokens=3, ref=adapter("a")))
    assert len(simulator.scheduler.table.waiting) == 1


def test_a_prompt_longer_than_the_model_takes_is_refused() -> None:
    simulator = Simulator(max_model_len=20)
    with pytest.raises(
        ContextLengthError, match="takes 20 tokens, but 18 in the prompt and 3 to generate are 21"
    ):
        simulator.submit(request("long", prompt=18, max_tokens=3))
    simulator.submit(request("fits", prompt=18, max_tokens=2))


@pytest.mark.parametrize(
    "wrong",
    [
        request("x", prompt=[]),
        request("x", prompt=[1, 1000]),
        request("x", prompt=[-1]),
        request("x", logit_bias={1000: 1.0}),
        request("x", max_tokens=1, generated_token_ids=[1, 2]),
        request("x", flow=FlowKey(weight=0.0)),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: GenerationRequest) -> None:
    simulator = Simulator()
    with pytest.raises(InvalidRequestError):
        simulator.submit(wrong)
    assert not simulator.core.has_work()


def test_an_id_in_use_is_refused() -> None:
    simulator = Simulator()
    simulator.submit(request("one"))
    with pytest.raises(InvalidRequestError):
        simulator.submit(request("one"))


def test_a_full_queue_refuses() -> None:
    simulator = Simulator(max_waiting=2, max_running=1)
    run_all(simulator, [request("a", max_tokens=4), request("b", max_tokens=4)])
    for name in ("c", "d", "e"):  # one of them has the free row in the next plan
        simulator.submit(request(name))
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        simulator.submit(request("f"))
    simulator.pump()
    assert (simulator.scheduler.table.num_rows, len(simulator.scheduler.table.waiting)) == (1, 2)
    with pytest.raises(QueueFullError):
        simulator.submit(request("f"))


@pytest.mark.parametrize(
    ("is_eos", "params", "reason", "count"),
    [
        (True, {"max_tokens": 9}, "stop", 3),
        (True, {"max_tokens": 9, "ignore_eos": True}, "length", 9),
        (False, {"max_tokens": 3, "ignore_eos": True}, "stop", 3),
    ],
    ids=["end of sequence", "end of sequence ignored", "stop token that is the last token allowed"],
)
def test_generation_ends_at_a_token(
    is_eos: bool, params: dict[str, Any], reason: str, count: int
) -> None:
    third = expected_tokens(request("one"), 3)[-1]
    simulator = Simulator(eos=frozenset({third} if is_eos else ()))
    run_all(simulator, [request("one", stop_token_ids=() if is_eos else (third,), **params)])
    assert simulator.last("one").finish_reason == reason
    assert simulator.last("one").stop_token_id == (third if reason == "stop" else None)
    assert len(simulator.tokens("one")) == count


def test_a_request_goes_on_after_tokens_generated_elsewhere() -> None:
    whole = request("one", max_tokens=8)
    first = expected_tokens(whole, 3)
    simulator = Simulator()
    run_all(simulator, [request("one", max_tokens=8, generated_token_ids=first)])
    assert first + simulator.tokens("one") == expected_tokens(whole, 8)
    assert simulator.runner.plans[0].chunks[0].sample is not None
    assert simulator.runner.plans[0].chunks[0].sample.output_index == 3


def test_a_request_that_had_all_its_tokens_ends_at_once() -> None:
    simulator = Simulator()
    run_all(simulator, [request("one", max_tokens=2, generated_token_ids=[1, 2])])
    assert simulator.last("one").finish_reason == "length"
    assert simulator.runner.plans == []


def test_history_is_in_the_plan_only_where_penalties_need_it() -> None:
    simulator = Simulator()
    run_all(
        simulator,
        [request("plain", max_tokens=2), request("rare", max_tokens=2, presence_penalty=1.0)],
    )
    last = {chunk.request_id: chunk.sample for chunk in simulator.runner.plans[-1].chunks}
    assert last["plain"] is not None
    assert last["plain"].prompt_token_ids == []
    assert last["rare"] is not None
    assert last["rare"].output_token_ids == simulator.tokens("rare")[:1]


def test_the_chunk_of_a_token_becomes_that_of_the_next_only_while_its_page_has_room() -> None:
    """A chunk changes only once its step is committed, and a chunk of a prompt never does: runners count its tokens."""
    simulator = Simulator()
    wanted = request("x", prompt=5, max_tokens=8, repetition_penalty=2.0)
    simulator.submit(wanted)
    chunks: list[Chunk] = []
    told: list[tuple[list[int], int, int]] = []
    for _ in range(8):
        plan = simulator.scheduler.plan()
        assert plan is not None
        (chunk,) = plan.chunks
        assert chunk.sample is not None
        assert (
            chunk.sample.output_token_ids
            == simulator.scheduler.table.requests["x"].output_token_ids
        )
        chunks.append(chunk)
        told.append((list(chunk.token_ids), chunk.start, chunk.sample.output_index))
        simulator.scheduler.commit(plan, simulator.runner.execute(plan))
        simulator.scheduler.complete(plan.step)
        assert plan.num_tokens == len(told[-1][0])
    tokens = expected_tokens(wanted, 8)
    assert told == [(wanted.prompt_token_ids, 0, 0)] + [
        ([tokens[i]], 5 + i, 1 + i) for i in range(7)
    ]
    assert [chunk is before for before, chunk in pairwise(chunks)] == [
        len(before.token_ids) == 1 and start % PAGE_TOKENS != 0
        for before, (_, start, _) in zip(chunks, told[1:], strict=False)
    ]


def prefilling(simulator: Simulator) -> None:
    simulator.load_now(adapter("a"))
    simulator.submit(request("x", prompt=40, ref=adapter("a")))
    simulator.pump()


def decoding(simulator: Simulator) -> None:
    simulator.load_now(adapter("a"))
    simulator.submit(request("x", prompt=12, ref=adapter("a")))
    simulator.pump(2)


def preempted(simulator: Simulator) -> None:
    simulator.submit(request("older", prompt=4, max_tokens=60))
    simulator.pump()
    simulator.submit(request("x", prompt=20, max_tokens=30))
    while not simulator.num_preemptions:
        simulator.pump()


@pytest.mark.parametrize("event", ["abort", "fail_adapter", "fail_running", "drop_adapter"])
@pytest.mark.parametrize(
    "into_state", [prefilling, decoding, preempted], ids=lambda state: state.__name__
)
def test_ends_may_come_in_the_middle_of_a_step(
    into_state: Callable[[Simulator], None], event: str
) -> None:
    """Between two steps they come in the simulation."""
    simulator = Simulator(num_pages=16)
    into_state(simulator)
    plan = simulator.scheduler.plan()
    assert plan is not None
    if event == "abort":
        simulator.core.abort("x")
        simulator.core.abort("x")
    elif event == "fail_adapter":
        simulator.scheduler.fail_adapter(adapter("a").digest, NeverFitsError("gone"))
    elif event == "fail_running":
        simulator.scheduler.fail_running()
        assert simulator.pool.num_quarantined > 0
    else:
        simulator.core.residency.forget(adapter("a").digest)
    simulator.scheduler.commit(plan, simulator.runner.execute(plan))
    simulator.pool.complete(plan.step)
    simulator.run()
    counts = simulator.pool.counts()
    assert counts["kv"] == counts["quarantine"] == simulator.swap.num_used == 0
    assert simulator.num_leases == simulator.num_holds == 0
    assert not simulator.core.has_work()
    simulator.core.check()
