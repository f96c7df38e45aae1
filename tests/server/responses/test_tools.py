"""Calls and reasoning through both APIs: what the model writes, and what clients send back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from api_server import BASE, Api, Client
from tool_models import tokenizer_with, use_tokenizer

pytestmark = pytest.mark.anyio
QUESTION = "Where is the lamp?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"item": {"type": "string"}},
    "required": ["item"],
}
WHERE_IS: dict[str, Any] = {
    "type": "function",
    "name": "where_is",
    "description": "Finds an item",
    "parameters": SCHEMA,
}
CALL = '<tool_call>\n{"name": "where_is", "arguments": {"item": "lamp"}}\n</tool_call>'
WRITTEN = f"The lamp?\n</think>\n\nLet me look.\n{CALL}"


@pytest.fixture
def hermes(api: Api) -> Api:
    """A model that thinks where `enable_thinking` is set, and calls tools."""
    use_tokenizer(api, tokenizer_with())
    api.engine.write = lambda _: WRITTEN
    return api


def shown(api: Api) -> str:
    """What the model read last."""
    return api.services.tokenizer.decode(
        api.engine.requests[-1].prompt_token_ids, skip_special_tokens=False
    )


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_agents_two_turns_by_responses(
    hermes: Api, client: openai.AsyncOpenAI, is_streamed: bool
) -> None:
    asked: dict[str, Any] = {
        "model": BASE,
        "tools": [WHERE_IS],
        "reasoning": {"effort": "high", "summary": "auto"},
    }
    asked["include"] = ["reasoning.encrypted_content"]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    if is_streamed:
        async with client.responses.stream(input=history, **asked) as stream:
            first: Any = await stream.get_final_response()
    else:
        first = await client.responses.create(input=history, **asked)
    reasoning, message, call = first.output
    assert reasoning.content[0].text == "The lamp?"
    assert message.content[0].text == "Let me look."
    assert (call.name, call.arguments) == ("where_is", '{"item": "lamp"}')
    assert call.call_id.startswith("call_")
    assert first.status == "completed"
    assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
    hermes.engine.write = lambda _: "</think>In aisle 3."
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "aisle 3"}
    back = [item.to_dict() for item in first.output]
    second = await client.responses.create(input=[*history, *back, output], **asked)
    assert second.output_text == "In aisle 3."
    told = {
        "type": "function",
        "function": {name: WHERE_IS[name] for name in ("name", "description", "parameters")},
    }
    assert shown(hermes) == (
        f"<|start|><|system|>{json.dumps(told)}\nAnswer as "
        '<tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>'
        f"<|user|>{QUESTION}<|end|><|assistant|><think>The lamp?</think>Let me look.{CALL}<|end|>"
        f"<|user|>{call.call_id}=aisle 3<|end|><|assistant|><think>\n"
    )


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_logprobs_are_those_of_the_text(
    hermes: Api, client: openai.AsyncOpenAI, is_streamed: bool
) -> None:
    hermes.engine.write = lambda _: f"{WRITTEN}\nIt is < here."
    asked: dict[str, Any] = {
        "model": BASE,
        "input": QUESTION,
        "tools": [WHERE_IS],
        "reasoning": {"effort": "high"},
    }
    asked["include"] = ["message.output_text.logprobs"]
    if is_streamed:
        async with client.responses.stream(**asked) as stream:
            got: Any = await stream.get_final_response()
    else:
        got = await client.responses.create(**asked)
    texts = [part for item in got.output if item.type == "message" for part in item.content]
    assert len(texts) == 1 + is_streamed
    assert " ".join("".join(part.text for part in texts).split()) == "Let me look. It is < here."
    for part in texts:
        said = "".join(entry.token for entry in part.logprobs).replace("<|end|>", "")
        assert said.split() == part.text.split()


async def test_a_chat_and_a_response_are_billed_alike(hermes: Api, acme: Client) -> None:
    nested = {
        "type": "function",
        "function": {name: WHERE_IS[name] for name in ("name", "description", "parameters")},
    }
    messages = [{"role": "user", "content": QUESTION}]
    chat = {"model": BASE, "messages": messages, "tools": [nested], "reasoning_effort": "high"}
    response = {
        "model": BASE,
        "input": QUESTION,
        "tools": [WHERE_IS],
        "reasoning": {"effort": "high"},
    }
    block = {"name": "where_is", "description": "Finds an item", "input_schema": SCHEMA}
    message = {
        "model": BASE,
        "messages": messages,
        "max_tokens": 999,
        "tools": [block],
        "thinking": {"type": "enabled"},
    }
    for path, body in (("chat/completions", chat), ("responses", response), ("messages", message)):
        answer = await acme.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
    events = (await hermes.admin.get("/v1/usage/events")).json()["data"]
    assert len(events) == 3
    assert (
        len(
            {
                (event["prompt_tokens"], event["completion_tokens"], event["status"])
                for event in events
            }
        )
        == 1
    )


async def test_calls_without_a_text_before_them_are_one_turn(hermes: Api, acme: Client) -> None:
    call = {"type": "function_call", "name": "where_is", "arguments": '{"item": "lamp"}'}
    outputs = [
        {"type": "function_call_output", "call_id": each, "output": f"{each} done"} for each in "ab"
    ]
    items = [
        {"role": "user", "content": QUESTION},
        {**call, "call_id": "a"},
        {**call, "call_id": "b"},
        *outputs,
    ]
    answer = await acme.post(
        "/v1/responses", json={"model": BASE, "input": items, "tools": [WHERE_IS]}
    )
    assert answer.status_code == 200, answer.text
    assert shown(hermes).endswith(
        f"<|assistant|>{CALL}{CALL}<|end|><|user|>a=a done<|end|><|user|>b=b done<|end|><|assistant|>"
    )


async def test_tools_may_be_kept_from_the_model(hermes: Api, acme: Client) -> None:
    body = {"model": BASE, "input": QUESTION, "tools": [WHERE_IS], "tool_choice": "none"}
    answer = await acme.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert "where_is" not in shown(hermes)
    assert [item["type"] for item in answer.json()["output"]] == ["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{**WHERE_IS, "name": "where is"}]}, "tools.0.name"),
        ({"tools": [WHERE_IS, WHERE_IS]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [WHERE_IS], "tool_choice": {"type": "function", "name": "other"}},
            "tool_choice",
        ),
        ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "a", "name": "where_is", "arguments": "{"}
                ]
            },
            "input.0.function_call.arguments",
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "a", "name": "a b", "arguments": "{}"}
                ]
            },
            "input.name",
        ),
    ],
)
async def test_wrong_tools_are_named_as_the_client_knows_them(
    hermes: Api, acme: Client, fields: Any, param: str
) -> None:
    answer = await acme.post("/v1/responses", json={"model": BASE, "input": QUESTION, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text


async def test_a_model_without_calls_refuses_tools(api: Api, acme: Client) -> None:
    use_tokenizer(
        api, tokenizer_with("{% for message in messages %}{{ message.content }}{% endfor %}")
    )
    answer = await acme.post(
        "/v1/responses", json={"model": BASE, "input": QUESTION, "tools": [WHERE_IS]}
    )
    assert answer.json()["error"]["code"] == "tools_not_supported_by_model"


async def test_all_three_hold_an_answer_to_the_same_grammar(api: Api, acme: Client) -> None:
    form = {"name": "item", "schema": SCHEMA}
    messages = [{"role": "user", "content": QUESTION}]
    chat = {"messages": messages, "response_format": {"type": "json_schema", "json_schema": form}}
    response = {"input": QUESTION, "text": {"format": {"type": "json_schema", **form}}}
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = {"messages": messages, "max_tokens": 50, "output_config": output}
    for path, body in (("chat/completions", chat), ("responses", response), ("messages", message)):
        answer = await acme.post(f"/v1/{path}", json={"model": BASE, **body})
        assert answer.status_code == 200, answer.text
    first, *others = [request.grammar for request in api.engine.requests]
    assert first is not None
    assert others == [first, first]
    wrong = {
        "type": "json_schema",
        "name": "item",
        "schema": {"type": "object", "properties": {"x": {"$ref": "y"}}},
    }
    answer = await acme.post(
        "/v1/responses", json={"model": BASE, "input": "x", "text": {"format": wrong}}
    )
    assert answer.json()["error"]["param"].startswith("text.format.schema.properties.x")


SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "description": "The command to execute",
            },
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


def codex(items: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """What Codex sends to a provider that it knows by `wire_api = "responses"`."""
    return {
        "model": BASE,
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": [SHELL],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": [],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        **fields,
    }


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def events_of(answer: Any) -> list[dict[str, Any]]:
    lines = (line for line in answer.text.split("\n") if line.startswith("data: {"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_codex_runs_a_command_and_tells_of_it(hermes: Api, acme: Client) -> None:
    called = {"command": ["bash", "-lc", "ls"], "workdir": "/work"}
    hermes.engine.write = lambda _: (
        f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': called})}\n</tool_call>"
    )
    history = [
        said("developer", "<permissions>read only</permissions>"),
        said("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
        said("user", "What is here?"),
    ]
    answer = await acme.post("/v1/responses", json=codex(history))
    assert answer.status_code == 200, answer.text
    events = events_of(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    (call,) = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "shell",
        called,
    )
    pieces = [
        event["delta"]
        for event in events
        if event["type"] == "response.function_call_arguments.delta"
    ]
    assert "".join(pieces) == call["arguments"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["output_tokens"] > 0

    given = json.dumps(
        {"output": "README.md\n", "metadata": {"exit_code": 0, "duration_seconds": 0.1}}
    )
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": given}
    thought: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": None}
    sent_back = {name: call[name] for name in ("type", "name", "arguments", "call_id")}
    more = {
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
    }
    hermes.engine.write = lambda _: "It lists.</think>One file."
    answer = await acme.post(
        "/v1/responses", json=codex([*history, thought, sent_back, output], **more)
    )
    assert answer.status_code == 200, answer.text
    done = [
        event["item"] for event in events_of(answer) if event["type"] == "response.output_item.done"
    ]
    assert [item["content"][0]["text"] for item in done] == ["It lists.", "One file."]
    assert "README.md" in shown(hermes)


@pytest.mark.parametrize("kind", ["custom", "local_shell", "web_search"])
async def test_tools_of_codex_that_only_openai_runs_are_refused_by_name(
    acme: Client, kind: str
) -> None:
    answer = await acme.post(
        "/v1/responses", json=codex([said("user", "x")], tools=[SHELL, {"type": kind, "name": "a"}])
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools.1"
    assert kind in answer.json()["error"]["message"]
