from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from api_server import BASE, Api, Client
from tool_models import tokenizer_with, use_tokenizer

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.anyio
QUESTION = "Where is the lamp?"
WHERE_IS: dict[str, Any] = {
    "name": "where_is",
    "description": "Finds an item",
    "input_schema": {"type": "object", "properties": {"item": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}
CALL = '<tool_call>\n{"name": "where_is", "arguments": {"item": "lamp"}}\n</tool_call>'
ASKED: dict[str, Any] = {
    "model": BASE,
    "max_tokens": 900,
    "messages": [{"role": "user", "content": QUESTION}],
}


@pytest.fixture
def hermes(api: Api) -> Api:
    """A model that thinks where `enable_thinking` is set, and calls tools."""
    use_tokenizer(api, tokenizer_with())
    api.engine.write = lambda _: f"The lamp?\n</think>\n\nLet me look.\n{CALL}"
    return api


def shown(api: Api) -> str:
    """What the model read last."""
    return api.services.tokenizer.decode(
        api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False
    )


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_agents_two_turns(
    hermes: Api, client: anthropic.AsyncAnthropic, is_streamed: bool
) -> None:
    asked = {**ASKED, "tools": [WHERE_IS], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    if is_streamed:
        async with client.messages.stream(**asked) as stream:
            first: Any = await stream.get_final_message()
    else:
        first = await client.messages.create(**asked)
    thinking, text, call = first.content
    assert (thinking.thinking, text.text) == ("The lamp?", "Let me look.")
    assert (call.name, call.input, first.stop_reason) == ("where_is", {"item": "lamp"}, "tool_use")
    assert 0 < first.usage.output_tokens_details.thinking_tokens < first.usage.output_tokens
    hermes.engine.write = lambda _: "</think>In aisle 3."
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "aisle 3"}],
    }
    back = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    turns = [
        *asked["messages"],
        back,
        {"role": "user", "content": [result, {"type": "text", "text": "Quick!"}]},
    ]
    second = await client.messages.create(**{**asked, "messages": turns})
    assert [block.to_dict().get("text") for block in second.content] == ["In aisle 3."]
    assert second.stop_reason == "end_turn"
    assert shown(hermes).endswith(
        f"<|user|>{QUESTION}<|end|><|assistant|><think>The lamp?</think>Let me look.{CALL}<|end|>"
        f"<|user|>{call.id}=aisle 3<|end|><|user|>Quick!<|end|><|assistant|><think>\n"
    )
    counting: Any = {name: value for name, value in asked.items() if name != "max_tokens"}
    counted = await client.messages.count_tokens(**{**counting, "messages": turns})
    assert counted.input_tokens == len(hermes.engine.requests[-1].prompt_token_ids)


async def test_a_call_ends_before_the_text_that_comes_in_one_step_with_its_end(
    hermes: Api, client: anthropic.AsyncAnthropic
) -> None:
    hermes.engine.write = lambda _: f"{CALL}\nbar baz"
    held = "}\n</tool_call>\nbaQ"  # up to its last letter this may be the stop sequence
    asked: dict[str, Any] = {**ASKED, "tools": [WHERE_IS], "stop_sequences": [held]}
    async with client.messages.stream(**asked) as stream:
        got = await stream.get_final_message()
    call, text = (block.to_dict() for block in got.content)
    assert (call["name"], call["input"], text["text"]) == ("where_is", {"item": "lamp"}, "bar baz")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"thinking": {"type": "adaptive"}}, False),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, True),
    ],
)
async def test_thinking_is_for_the_chat_template_to_begin(
    hermes: Api, acme: Client, fields: Any, thinks: bool
) -> None:
    answer = await acme.post("/v1/messages", json={**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    assert shown(hermes).endswith("<think>\n") == thinks


async def test_an_answer_goes_on_with_the_assistants_last_message(
    hermes: Api, acme: Client
) -> None:
    hermes.engine.write = lambda _: "aisle 3."
    turns = [*ASKED["messages"], {"role": "assistant", "content": "It is in"}]
    answer = await acme.post("/v1/messages", json={**ASKED, "messages": turns})
    assert shown(hermes).endswith("<|assistant|>It is in")
    assert answer.json()["content"][0]["text"] == "aisle 3."


async def test_a_limit_far_above_the_context_is_what_the_context_leaves(
    hermes: Api, acme: Client
) -> None:
    assert (
        await acme.post("/v1/messages", json={**ASKED, "max_tokens": 32_000})
    ).status_code == 200
    (request,) = hermes.engine.requests
    assert request.params.max_tokens == 4096 - len(request.prompt_token_ids)
    long = [{"role": "user", "content": "x " * 5000}]
    answer = await acme.post("/v1/messages", json={**ASKED, "messages": long})
    assert (answer.status_code, answer.json()["error"]["message"][:20]) == (
        400,
        "prompt is too long: ",
    )


async def test_a_choice_among_tools(hermes: Api, acme: Client) -> None:
    answer = await acme.post(
        "/v1/messages", json={**ASKED, "tools": [WHERE_IS], "tool_choice": {"type": "none"}}
    )
    assert "where_is" not in shown(hermes)
    assert [block["type"] for block in answer.json()["content"]] == ["text"]
    for choice, says in (
        ({"type": "tool"}, "tool_choice of type tool needs a name"),
        ({"type": "tool", "name": "other"}, "tool_choice"),
        ({"type": "some"}, "tool_choice.type"),
    ):
        answer = await acme.post(
            "/v1/messages", json={**ASKED, "tools": [WHERE_IS], "tool_choice": choice}
        )
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


async def test_a_wrong_name_of_a_tool_is_told_where_it_stands(hermes: Api, acme: Client) -> None:
    answer = await acme.post(
        "/v1/messages", json={**ASKED, "tools": [{**WHERE_IS, "name": "where is"}]}
    )
    assert (answer.status_code, answer.json()["error"]["message"][:12]) == (400, "tools.0.name")
    call = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "a", "name": "where is", "input": {}}],
    }
    answer = await acme.post(
        "/v1/messages", json={**ASKED, "system": "x", "messages": [*ASKED["messages"], call]}
    )
    assert (answer.status_code, answer.json()["error"]["message"][:14]) == (400, "messages.name:")
