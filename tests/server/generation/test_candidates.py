"""More candidates than choices: `best_of` and beam search over HTTP, what they return and what they are billed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api_server import BASE, Api, Client, eventually
from fake_engine import BASE_TEXT, demo_tokenizer
from manylora.engine.sampling_params import BeamParams
from manylora.server.generation.chat_schemas import ChatView
from manylora.server.generation.schemas import CompletionView

pytestmark = pytest.mark.anyio
LOGPROBS = [-0.5, -0.1, -0.9, -0.2]
"""Per token, by candidate."""


def said(index: int) -> str:
    return BASE_TEXT if index == 0 else f"{BASE_TEXT} choice {index}"


def num_tokens(index: int) -> int:
    return len(demo_tokenizer().encode(said(index), add_special_tokens=False)) + 1


async def complete(acme: Client, **fields: Any) -> CompletionView:
    answer = await acme.post(
        "/v1/completions", json={"model": BASE, "prompt": "x", "max_tokens": 60, **fields}
    )
    assert answer.status_code == 200, answer.text
    return CompletionView.model_validate_json(answer.content)


async def test_the_best_of_each_prompt_are_returned_and_all_are_billed(
    api: Api, acme: Client
) -> None:
    api.engine.logprob = lambda request: LOGPROBS[request.choice_index]
    body = await complete(acme, prompt=["x", "y"], n=2, best_of=4)
    assert [(choice.index, choice.text) for choice in body.choices] == list(
        enumerate([said(1), said(3)] * 2)
    )
    assert all(choice.logprobs is None for choice in body.choices)
    assert body.usage.completion_tokens == 2 * sum(num_tokens(index) for index in range(4))
    totals = await api.usage_totals()
    assert totals["completion_tokens"] == body.usage.completion_tokens
    assert (
        totals["prompt_tokens"] == body.usage.prompt_tokens == 2 * len(demo_tokenizer().encode("x"))
    )
    assert totals["requests"] == 1
    first = api.engine.requests[0]
    assert [request.fork_of for request in api.engine.requests[:4]] == [None] + [
        first.request_id
    ] * 3
    assert {request.params.logprobs for request in api.engine.requests} == {0}


async def test_the_mean_counts_and_not_the_sum(api: Api, acme: Client) -> None:
    """A long answer of likely tokens goes before a short one of less likely ones."""
    api.engine.write = lambda request: "yes " * (20 if request.choice_index else 1)
    api.engine.logprob = lambda request: -0.2 if request.choice_index else -0.3
    body = await complete(acme, best_of=2)
    assert [choice.text for choice in body.choices] == ["yes " * 20]


async def test_logprobs_are_those_of_the_returned_ones(api: Api, acme: Client) -> None:
    api.engine.logprob = lambda request: LOGPROBS[request.choice_index]
    body = await complete(acme, best_of=3, n=1, logprobs=2)
    assert body.choices[0].logprobs is not None
    assert set(body.choices[0].logprobs.token_logprobs) == {-0.1}
    assert {request.params.logprobs for request in api.engine.requests} == {2}


async def test_as_many_candidates_as_choices_are_returned_as_they_come(
    api: Api, acme: Client
) -> None:
    api.engine.logprob = lambda request: LOGPROBS[request.choice_index]
    body = await complete(acme, n=3, best_of=3)
    assert [choice.text for choice in body.choices] == [said(0), said(1), said(2)]
    assert {request.params.logprobs for request in api.engine.requests} == {None}


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 3}, {"n": 3}])
async def test_a_beam_search_is_one_request_to_the_engine(
    api: Api, acme: Client, fields: dict[str, int]
) -> None:
    api.engine.cached = lambda _: 1
    search = {
        "use_beam_search": True,
        "length_penalty": 0.5,
        "early_stopping": "never",
        "temperature": 0,
        "top_k": -1,
    }
    body = await complete(acme, prompt=["x", "y"], **search, **fields)
    beam = BeamParams(width=3, length_penalty=0.5, early_stopping="never")
    assert [request.beam for request in api.engine.requests] == [beam, beam]
    texts = [said(index) for index in range(fields["n"])] * 2
    assert [(choice.index, choice.text) for choice in body.choices] == list(enumerate(texts))
    assert {choice.finish_reason for choice in body.choices} == {"stop"}
    assert body.usage.completion_tokens == 2 * sum(num_tokens(index) for index in range(3))
    assert body.usage.prompt_tokens_details.cached_tokens == 2
    totals = await api.usage_totals()
    assert (totals["completion_tokens"], totals["requests"]) == (body.usage.completion_tokens, 1)


@pytest.mark.parametrize(
    ("fields", "returned"),
    [
        ({"best_of": 4}, [1]),
        ({"use_beam_search": True, "n": 2, "logprobs": True, "top_logprobs": 1}, [0, 1]),
    ],
)
async def test_chat_takes_both_and_shows_logprobs_if_asked(
    api: Api, acme: Client, fields: dict[str, Any], returned: list[int]
) -> None:
    api.engine.logprob = lambda request: LOGPROBS[request.choice_index]
    chat = {
        "model": BASE,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 60,
        **fields,
    }
    answer = await acme.post("/v1/chat/completions", json=chat)
    choices = ChatView.model_validate_json(answer.content).choices
    assert [choice.message.content for choice in choices] == [said(index) for index in returned]
    lengths = [choice.logprobs and len(choice.logprobs.content) for choice in choices]
    assert lengths == [num_tokens(index) if "logprobs" in fields else None for index in returned]


@pytest.mark.parametrize("fields", [{"best_of": 4}, {"use_beam_search": True, "best_of": 4}])
async def test_limits_reserve_all_candidates_and_settle_what_was_billed(
    api: Api, acme: Client, fields: dict[str, Any]
) -> None:
    await api.admin.patch("/v1/tenants/acme", json={"limits": {"tokens_per_minute": 4 * 60 + 10}})
    refused = await acme.post(
        "/v1/completions", json={"model": BASE, "prompt": "x", "max_tokens": 70, **fields}
    )
    assert refused.status_code == 429
    body = await complete(acme, **fields)
    used = (await acme.get("/v1/me")).json()["used"]["tenant"]["tokens_per_minute"]
    assert used == body.usage.total_tokens


async def test_a_client_that_leaves_ends_the_search(api: Api, acme: Client) -> None:
    api.engine.token_s = 30.0
    asking = asyncio.create_task(complete(acme, use_beam_search=True, n=2))
    await eventually(lambda: len(api.engine.running) == 1)
    asking.cancel()
    await eventually(lambda: not api.engine.running)
    assert len(api.engine.aborted) == 1
