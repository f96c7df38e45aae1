"""Sharing between requests: cached prefixes, and the prompt of the request that they are forks of."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from manylora.engine.request import FlowKey, GenerationRequest
from manylora.engine.scheduling import kv_pages
from manylora.engine.scheduling.preemption import GROWTH_DIVISOR
from manylora.memory.prefix_cache import TokenChain
from simulation.driven import PAGE_TOKENS, RECOMPUTES, Simulator, expected_tokens, request

PROMPT = list(range(100, 114))
"""Three full blocks and two tokens."""


def serve(simulator: Simulator, *requests: GenerationRequest) -> None:
    """Run requests one after another, and see that each gets its own tokens."""
    for each in requests:
        simulator.submit(each)
        simulator.run()
    check_tokens(simulator, requests)


def check_tokens(simulator: Simulator, requests: Sequence[GenerationRequest]) -> None:
    for each in requests:
        assert simulator.last(each.request_id).finish_reason == "length"
        assert simulator.tokens(each.request_id) == expected_tokens(each, each.params.max_tokens)


def computed(simulator: Simulator, request_id: str) -> list[int]:
    """Positions computed for a request."""
    return [
        position
        for plan in simulator.runner.plans
        for chunk in plan.chunks
        if chunk.request_id == request_id
        for position in range(chunk.start, chunk.start + len(chunk.token_ids))
    ]


@pytest.mark.parametrize(("num_tokens", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_the_last_token_is_computed(num_tokens: int, found: int) -> None:
    simulator = Simulator()
    prompt = PROMPT[:num_tokens]
    serve(simulator, request("one", prompt, 1), request("two", prompt, 1))
    assert simulator.last("two").cached_tokens == found
    assert computed(simulator, "two") == list(range(found, num_tokens))


def test_what_was_generated_is_found_as_a_prompt() -> None:
    simulator = Simulator()
    serve(
        simulator, request("one", PROMPT, 7)
    )  # the keys and values of the last token are never stored
    longer = PROMPT + simulator.tokens("one") + [7, 8]
    serve(simulator, request("two", longer, 2))
    assert simulator.last("two").cached_tokens == 0  # it comes with the first output alone
    assert simulator.outputs["two"][0].cached_tokens == 20


def test_prompt_logprobs_are_those_of_a_prompt_that_is_computed() -> None:
    simulator = Simulator()
    serve(simulator, request("one", PROMPT, 2), request("two", PROMPT, 2, prompt_logprobs=0))
    assert computed(simulator, "two")[: len(PROMPT)] == list(range(len(PROMPT)))
    (logprobs,) = [
        o.prompt_logprobs for o in simulator.outputs["two"] if o.prompt_logprobs is not None
    ]
    assert [entry and entry.token_id for entry in logprobs] == [None, *PROMPT[1:]]
    assert (simulator.core.status().prefix_queries, simulator.core.status().prefix_hits) == (14, 0)


def test_blocks_that_two_requests_computed_are_kept_once() -> None:
    simulator = Simulator(step_tokens=64)
    requests = [request(name, PROMPT, 3) for name in ("one", "two", "three")]
    simulator.submit(*requests)
    simulator.pump()
    counts = simulator.pool.counts()
    assert (counts["prefix"], counts["kv"]) == (3, 3)  # all three computed all blocks in that step
    simulator.run()
    check_tokens(simulator, requests)
    assert simulator.pool.counts()["prefix"] == 4  # and the one that the output filled


def test_cached_tokens_are_of_the_first_start_alone() -> None:
    simulator = Simulator(num_pages=12, step_tokens=64)
    serve(simulator, request("warm", PROMPT, 1))
    simulator.submit(request("old", prompt=14, max_tokens=24))
    simulator.pump()
    simulator.submit(request("new", PROMPT, 20))
    simulator.run()
    assert simulator.num_preemptions > 0
    assert [output.cached_tokens for output in simulator.outputs["new"]] == [12] + [0] * 19
    status = simulator.core.status()
    assert (status.prefix_queries, status.prefix_hits) == (14 + 14 + 14, 12)


def test_a_request_recovers_what_is_still_cached_after_a_preemption() -> None:
    simulator = Simulator(num_pages=12, step_tokens=64, costs=RECOMPUTES)
    requests = [request("old", prompt=20, max_tokens=20), request("new", prompt=19, max_tokens=12)]
    simulator.submit(*requests)
    simulator.run()
    check_tokens(simulator, requests)
    assert simulator.scheduler.table.preemptions == {"swap": 0, "recompute": 1}
    again = computed(simulator, "new")
    assert (
        again.count(0) == 1
    )  # its first blocks were not needed by the other, and were found again


def test_idle_prefixes_make_way_for_running_requests_before_anybody_is_preempted() -> None:
    simulator = Simulator(num_pages=10, step_tokens=64)
    serve(simulator, request("one", PROMPT, 2))
    assert simulator.pool.counts()["prefix"] == 3
    serve(simulator, request("big", prompt=32, max_tokens=8))
    assert simulator.num_preemptions == 0
    assert simulator.evictor.evictions == {"prefix": 3}


def test_an_admission_that_does_not_fit_evicts_nothing() -> None:
    simulator = Simulator(num_pages=12, step_tokens=64)
    serve(simulator, request("cached", PROMPT, 2))
    simulator.submit(request("old", prompt=24, max_tokens=6))
    simulator.pump()
    simulator.submit(request("large", prompt=30, max_tokens=2))
    simulator.pump(3)
    assert simulator.core.status().waiting_reasons == {"NO_PAGES": 1}
    assert simulator.evictor.evictions == {}


def test_a_plan_names_the_blocks_of_few_long_prompts_and_those_behind_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_pages, "MAX_NAMED_TOKENS", 30)
    simulator = Simulator(num_pages=20)
    simulator.submit(request("first", 70, 10))  # leaves too few pages for those that follow
    while not simulator.outputs.get("first"):
        simulator.pump()
    waiting = [request(str(number), 30, 20) for number in range(4)]
    named = count_named_tokens(monkeypatch)
    simulator.submit(*waiting)
    per_plan = []
    for _ in waiting:
        named.clear()
        simulator.pump()
        per_plan.append(named.count(28))
    assert per_plan == [1, 1, 1, 1]
    simulator.run()
    check_tokens(simulator, waiting)


def count_named_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each extension of a chain from now on."""
    named: list[int] = []
    extend = TokenChain.extend

    def counting(chain: TokenChain, token_ids: Sequence[int]) -> None:
        before = chain.num_tokens
        extend(chain, token_ids)
        named.append(chain.num_tokens - before)

    monkeypatch.setattr(TokenChain, "extend", counting)
    return named


def test_what_a_waiting_request_could_share_is_not_evicted_for_it() -> None:
    simulator = Simulator(num_pages=9, step_tokens=64)
    serve(simulator, request("cached", [1] * 16, 1), request("other", [2] * 16, 1))
    assert simulator.pool.counts()["prefix"] == 8
    simulator.submit(
        request("again", [1] * 16 + [3] * 12, 1)
    )  # 4 blocks are there, 3 are lacking, 1 is free
    simulator.run()
    assert simulator.last("again").cached_tokens == 16
    assert simulator.evictor.evictions == {"prefix": 2}


def test_admissions_and_adapters_leave_room_for_those_that_run() -> None:
    simulator = Simulator(
        num_pages=4 * GROWTH_DIVISOR, max_running=8, step_tokens=512, max_model_len=512
    )
    for index in range(3):
        simulator.submit(request(f"r{index}", prompt=5 * PAGE_TOKENS, max_tokens=60))
    simulator.pump()
    simulator.pump()  # now each has a new page that will do for four tokens
    assert simulator.residency.transfers.reserve_pages == 3
    free = simulator.pool.num_free
    simulator.submit(request("large", prompt=(free - 3) * PAGE_TOKENS + 1, max_tokens=2))
    simulator.pump()
    assert simulator.core.status().waiting_reasons == {"NO_PAGES": 1}
    simulator.submit(request("fits", prompt=(free - 3) * PAGE_TOKENS, max_tokens=2))
    simulator.pump()
    assert simulator.core.status().waiting_reasons == {"NO_PAGES": 1}
    assert len(simulator.scheduler.table.running) == 4


def test_a_collision_of_names_shares_nothing_and_stops_publishing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulator = Simulator()
    serve(simulator, request("one", PROMPT, 6))
    digests = [block.digest for block in simulator.prefixes.blocks]
    same = SimpleNamespace(update=lambda _content: None, digest=lambda: digests[0])
    monkeypatch.setattr("manylora.memory.prefix_cache.hashlib.sha256", lambda _content=b"": same)
    serve(simulator, request("two", PROMPT[::-1], 6), request("three", PROMPT[::-1], 6))
    assert simulator.outputs["three"][0].cached_tokens == 0


def forks(
    count: int, prompt: list[int] = PROMPT, max_tokens: int = 6, **fields: object
) -> list[GenerationRequest]:
    leader = request("lead", prompt, max_tokens, **fields)  # type: ignore[arg-type]
    followers = [
        request(f"fork{i}", prompt, max_tokens, choice_index=i, fork_of="lead", **fields)  # type: ignore[arg-type]
        for i in range(1, count)
    ]
    return [leader, *followers]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 8, 14, 40])
def test_forks_wait_for_the_prompt_of_their_leader_and_share_it(
    length: int, num_groups: int
) -> None:
    simulator = Simulator(num_groups=num_groups, num_pages=128)
    prompt = [100 + i for i in range(length)]
    requests = forks(4, prompt)
    simulator.submit(*requests)
    while "lead" not in simulator.outputs:
        simulator.pump()
        assert simulator.core.status().waiting_reasons in ({}, {"FORK": 3})
    simulator.pump()
    plan = simulator.runner.plans[-1]
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [1, 1, 1, 1]
    num_copied = (
        3 * num_groups if (length - 1) % PAGE_TOKENS else 0
    )  # nothing of a page that only ends in the last token
    assert len(plan.copies) == num_copied
    assert len({copy.target for copy in plan.copies}) == num_copied
    assert not set(plan.zero_pages) & {copy.target for copy in plan.copies}
    simulator.run()
    check_tokens(simulator, requests)
    assert [simulator.outputs[each.request_id][0].cached_tokens for each in requests[1:]] == [
        length - 1
    ] * 3
    simulator.core.check()


def test_forks_take_their_full_blocks_from_their_leader_without_pages_of_their_own() -> None:
    simulator = Simulator(num_pages=64, step_tokens=64)
    simulator.submit(*forks(4, [100 + i for i in range(41)]))
    simulator.pump(2)
    counts = simulator.pool.counts()
    assert (counts["prefix"], counts["kv"]) == (10, 4)


def waits_for(simulator: Simulator, leader: GenerationRequest, fork: GenerationRequest) -> bool:
    simulator.submit(leader)
    simulator.submit(fork)
    simulator.pump()
    return "FORK" in simulator.core.status().waiting_reasons


@pytest.mark.parametrize(
    ("fork", "waits"),
    [
        (request("fork", PROMPT, fork_of="lead"), True),
        (request("fork", PROMPT, fork_of="nobody"), False),
        (request("fork", PROMPT, fork_of="fork"), False),
        (request("fork", PROMPT[:-1], fork_of="lead"), False),
        (request("fork", PROMPT, fork_of="lead", flow=FlowKey(tenant="another")), False),
        (request("fork", PROMPT, fork_of="lead", flow=FlowKey(lane=1)), False),
        (request("fork", PROMPT, fork_of="lead", prompt_logprobs=0), False),
        (request("fork", PROMPT, fork_of="lead", generated_token_ids=[1]), False),
    ],
)
def test_only_what_is_the_same_waits_for_its_leader(fork: GenerationRequest, waits: bool) -> None:
    simulator = Simulator(step_tokens=9)
    assert waits_for(simulator, request("lead", PROMPT), fork) is waits
    simulator.run()
    rest = expected_tokens(fork, fork.params.max_tokens - len(fork.generated_token_ids))
    assert simulator.tokens("fork") == rest


def test_a_leader_that_ends_with_its_first_token_leaves_its_full_blocks_to_its_forks() -> None:
    simulator = Simulator()
    requests = forks(3, max_tokens=1)
    simulator.submit(*requests)
    simulator.run()
    check_tokens(simulator, requests)
    assert [simulator.last(each.request_id).cached_tokens for each in requests[1:]] == [12, 12]


def test_a_page_that_forks_copy_is_kept_until_the_step_is_over_though_the_leader_is_gone() -> None:
    simulator = Simulator(step_tokens=64)
    requests = forks(2)
    simulator.submit(*requests)
    simulator.pump()
    plan = simulator.scheduler.plan()
    assert plan is not None
    assert plan.copies
    simulator.core.abort("lead")
    simulator.scheduler.commit(plan, simulator.runner.execute(plan))
    simulator.scheduler.complete(plan.step)
    simulator.run()
    assert simulator.pool.counts()["kv"] == 0
