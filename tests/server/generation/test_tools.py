from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from api_server import BASE, Api, Client
from tool_models import tokenizer_with, use_tokenizer
from weft.server.generation.chat_schemas import ChatView

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "Where is the lamp?"}]
WHERE_IS = {
    "type": "function",
    "function": {
        "name": "where_is",
        "description": "Finds an item",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
CALL = '<tool_call>\n{"name": "where_is", "arguments": {"item": "lamp"}}\n</tool_call>'


@pytest.fixture
def hermes(api: Api) -> Api:
    use_tokenizer(api, tokenizer_with())
    return api


async def chat(client: Client, **fields: Any) -> httpx.Response:
    body = {"model": BASE, "messages": MESSAGES, "tools": [WHERE_IS], **fields}
    return await client.post("/v1/chat/completions", json=body)


async def test_a_call_is_told_apart_from_text(hermes: Api, acme: Client) -> None:
    hermes.engine.write = lambda _: f"Let me look.\n{CALL}"
    body = ChatView.model_validate_json((await chat(acme)).content)
    message = body.choices[0].message
    assert (message.content, body.choices[0].finish_reason) == ("Let me look.", "tool_calls")
    assert message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("where_is", '{"item": "lamp"}')
    ]
    assert message.tool_calls[0].id.startswith("call_")
    assert len(message.tool_calls[0].id) == 29


async def test_tools_and_history_are_rendered_by_the_models_template(hermes: Api, acme: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "where_is", "arguments": '{"item": "lamp"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "aisle 3"}]},
    ]
    answer = await chat(acme, messages=history, chat_template_kwargs={"enable_thinking": True})
    assert answer.status_code == 200, answer.text
    tokens = (await acme.post("/tokenize", json={"messages": history, "tools": [WHERE_IS]})).json()["tokens"]
    shown = hermes.services.tokenizer.decode(tokens, skip_special_tokens=False)
    assert shown == (
        f"<|start|><|system|>{json.dumps(WHERE_IS)}\nAnswer as "
        '<tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>'
        f"<|user|>Where is the lamp?<|end|><|assistant|><think>Hm.</think>{CALL}<|end|>"
        "<|user|>call_1=aisle 3<|end|><|assistant|>"
    )
    thinking = hermes.services.tokenizer.encode("<think>\n", add_special_tokens=False)
    assert hermes.engine.requests[0].prompt_token_ids == [*tokens, *thinking]


async def test_reasoning_goes_into_fields_of_its_own_and_is_counted(hermes: Api, acme: Client) -> None:
    hermes.engine.write = lambda _: "The lamp?\n</think>\n\nIn aisle 3."
    answer = await chat(acme, reasoning_effort="high", tool_choice="none")
    body = ChatView.model_validate_json(answer.content)
    message = body.choices[0].message
    assert (message.reasoning, message.reasoning_content) == ("The lamp?", "The lamp?")
    assert (message.content, body.choices[0].finish_reason) == ("In aisle 3.", "stop")
    thought = hermes.services.tokenizer.encode("The lamp?\n</think>", add_special_tokens=False)
    assert body.usage.completion_tokens_details.reasoning_tokens == len(thought)
    hidden = (await chat(acme, reasoning_effort="high", tool_choice="none", include_reasoning=False)).json()
    assert "reasoning" not in hidden["choices"][0]["message"]
    assert hidden["usage"] == answer.json()["usage"]


async def test_a_model_whose_calls_are_unknown_is_sent_no_tools(api: Api, acme: Client) -> None:
    use_tokenizer(api, tokenizer_with("{% for message in messages %}{{ message.content }}{% endfor %}"))
    answer = await chat(acme)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "tools_not_supported_by_model"
