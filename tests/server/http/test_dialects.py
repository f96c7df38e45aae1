"""What the APIs take alike: null is as absent, fields that change nothing pass, and stored messages may hold more."""

from __future__ import annotations

import importlib
import json
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import manylora.server.app  # all bodies
from api_server import BASE, Api, Client
from manylora.errors import UnsupportedParameterError
from manylora.server.generation.structured_output import JsonSchemaFormat, StructuredOutputs
from manylora.server.generation.unsupported_params import IGNORED, SHARED
from manylora.server.http.bodies import Body, parsed
from manylora.server.messages.schemas import ClientTool

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "When are you open?"}
NAMED_TOOL = {"type": "function", "function": {"name": "f"}}
ITEM = {"type": "message", "role": "user", "content": "When are you open?"}
BLOCK = {"type": "text", "text": "x"}
FILE = {"size": 1, "sha256": "0" * 64}
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": BASE, "prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"model": BASE, "messages": [USER], "max_tokens": 2},
    "/v1/responses": {"model": BASE, "input": "x", "max_output_tokens": 2},
    "/v1/messages": {"model": BASE, "messages": [USER], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": BASE, "messages": [USER]},
}
"""The least that each route takes."""
SDK = {
    "/v1/completions": ("openai.types.completion_create_params", "CompletionCreateParamsBase"),
    "/v1/chat/completions": (
        "openai.types.chat.completion_create_params",
        "CompletionCreateParamsBase",
    ),
    "/v1/responses": ("openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
    "/v1/messages": ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
    "/v1/messages/count_tokens": (
        "anthropic.types.message_count_tokens_params",
        "MessageCountTokensParams",
    ),
}
"""What the makers' own clients can send to it; each takes a second to import."""
SAMPLES: dict[str, dict[str, Any]] = {
    "NamedFunction": {"name": "f"},
    "NamedTool": NAMED_TOOL,
    "AllowedTools": {"mode": "auto", "tools": [NAMED_TOOL]},
    "AllowedToolsChoice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [NAMED_TOOL]},
    },
    "CalledFunction": {"name": "f", "arguments": "{}"},
    "Call": {"id": "c", "function": {"name": "f", "arguments": "{}"}},
    "Message": USER,
    "TextBlock": BLOCK,
    "ThinkingBlock": {"type": "thinking", "thinking": "x"},
    "ToolUseBlock": {"type": "tool_use", "id": "c", "name": "f", "input": {}},
    "ToolResultBlock": {"type": "tool_result", "tool_use_id": "c"},
    "Turn": {"role": "user", "content": [BLOCK]},
    "MessageItem": ITEM,
    "CallItem": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    "CallOutputItem": {"type": "function_call_output", "call_id": "c", "output": "x"},
    "ReasoningItem": {"type": "reasoning"},
    "PlannedAdapters": {"rank": 8},
    "AdapterFitBody": {"adapters": ["a"]},
    "UploadFileBody": FILE,
    "VersionBody": {"name": "a"},
    "UploadBody": {
        "name": "a",
        "files": dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), FILE),
    },
    "ImportBody": {"name": "a", "source": "org/repo"},
    "LoadBody": {"lora_name": "a", "lora_path": "org/repo"},
    "UnloadBody": {"lora_name": "a"},
    "BatchBody": {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"},
    "Line": {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}},
    "JsonSchemaFormat": {"name": "f", "schema": {}},
    "ResponseFormat": {"type": "text"},
    "StructuredOutputs": {"regex": "x"},
    "CompletionBody": DIALECTS["/v1/completions"],
    **dict.fromkeys(
        ("ChatBody", "MessagesChat", "ResponsesChat"), DIALECTS["/v1/chat/completions"]
    ),
    "TokenCountBody": DIALECTS["/v1/messages/count_tokens"],
    "MessagesBody": DIALECTS["/v1/messages"],
    "ResponsesBody": DIALECTS["/v1/responses"],
    "ToolFunction": {"name": "f"},
    "FunctionTool": {"name": "f", "type": "function"},
    "Tool": {"type": "function", "function": {"name": "f"}},
    "TokenizeBody": {"prompt": "x"},
    "DetokenizeBody": {"tokens": [1]},
    "ClientTool": {"name": "f", "input_schema": {}},
    "MessagesToolChoice": {"type": "auto"},
    "Thinking": {"type": "enabled"},
    "TenantBody": {"name": "a"},
    "TenantPatchBody": {"weight": 2},
    "GrantBody": {"tenant": "a"},
}
"""A body of each class that has required fields."""


def bodies(base: type[Body] = Body) -> Iterator[type[Body]]:
    """All classes of bodies of the product."""
    for each in base.__subclasses__():
        if each.__module__.startswith(manylora.server.__name__):
            yield each
        yield from bodies(each)


@pytest.mark.parametrize("model", sorted(set(bodies()), key=str))
def test_null_is_as_absent_in_every_body(model: type[Body]) -> None:
    sample = SAMPLES.get(model.__name__, {})
    optional = {
        field.alias or name for name, field in model.model_fields.items() if not field.is_required()
    }
    nulls = dict.fromkeys((optional | model.ignored | set(model.neutral_values)) - set(sample))
    assert model.model_validate({**sample, **nulls}) == model.model_validate(sample)


@pytest.mark.parametrize("model", [JsonSchemaFormat, ClientTool, StructuredOutputs])
def test_a_strange_field_is_told_also_beside_one_that_has_another_name_here(
    model: type[Body],
) -> None:
    field = {"ClientTool": "input_schema", "StructuredOutputs": "json"}.get(
        model.__name__, "schema"
    )
    sample = {**SAMPLES[model.__name__], "nonsense": 1} | {field: {}}
    for fields in (sample, dict(reversed(sample.items()))):
        with pytest.raises(UnsupportedParameterError, match="nonsense"):
            parsed(model, json.dumps(fields).encode())


@pytest.mark.parametrize("route", DIALECTS)
async def test_null_and_what_changes_nothing_pass_everywhere(
    api: Api, acme: Client, route: str
) -> None:
    minimal = DIALECTS[route]
    sdk = typing.get_type_hints(getattr(importlib.import_module(SDK[route][0]), SDK[route][1]))
    nulls = dict.fromkeys({*IGNORED, *SHARED, *sdk} - set(minimal))
    neutral = {name: values[0] for name, values in SHARED.items() if values}
    ignored = {name: {"a": "b"} for name in IGNORED}
    answers = [
        await acme.post(route, json={**fields, **minimal})
        for fields in ({}, nulls, neutral | ignored)
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200], [
        answer.text[:300] for answer in answers
    ]
    assert len({tuple(request.prompt_token_ids) for request in api.engine.requests}) <= 1
    assert all(request.params == api.engine.requests[0].params for request in api.engine.requests)


@pytest.mark.parametrize("route", DIALECTS)
async def test_what_would_change_the_answer_is_refused_everywhere(acme: Client, route: str) -> None:
    refused: list[dict[str, Any]] = [
        {"moderation": {"model": "omni-moderation-latest"}},
        {"verbosity": "low"},
        {"web_search_options": {}},
        {"background": True},
        {"truncation": "auto"},
        {"guided_json": {}},
        {"mcp_servers": [{}]},
        {"nonsense": 1},
    ]
    for fields in refused:
        answer = await acme.post(route, json={**DIALECTS[route], **fields})
        assert answer.status_code == 400, (fields, answer.text)
        error = answer.json()["error"]
        assert next(iter(fields)) in f"{error['message']} {error.get('param')}"


STORED: dict[str, Any] = {
    "id": "m1",
    "opts": {"a": [1]},
    "timestamp": 1.5,
    "index": 0,
    "annotations": [{}],
    "usage": {"x": 1},
    "cache_control": {"type": "ephemeral"},
    "prompt_cache_breakpoint": {"mode": "x"},
    "stop_reason": "end_turn",
    "citations": None,
    "model": "gpt",
    "a later field": None,
}
"""What programs keep with a message or a part of one."""


def stored_chat(extra: dict[str, Any]) -> list[dict[str, Any]]:
    part = {"type": "text", "text": "Hi", **extra}
    return [
        {"role": "system", "content": [part], **extra},
        {"role": "user", "content": [part, part], **extra},
        {
            "role": "assistant",
            "content": "Yes",
            "audio": None,
            "refusal": None,
            "function_call": None,
            **extra,
        },
        {"role": "user", "content": "Bye", **extra},
    ]


def stored_items(extra: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi", **extra}], **extra},
        {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None, **extra},
        *([{"type": "web_search_call", "action": {"query": "x"}, **extra}] if extra else []),
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes", **extra}],
            **extra,
        },
        {"role": "user", "content": "Bye", **extra},
    ]


def stored_turns(extra: dict[str, Any]) -> list[dict[str, Any]]:
    said = {"type": "text", "text": "Yes", **extra}
    redacted = [{"type": "redacted_thinking", "data": "x", **extra}] if extra else []
    return [
        {"role": "user", "content": [{"type": "text", "text": "Hi", **extra}], **extra},
        {"role": "assistant", "content": [*redacted, said, *redacted], **extra},
        {"role": "user", "content": "Bye", **extra},
    ]


@pytest.mark.parametrize(
    ("route", "field", "history"),
    [
        ("/v1/chat/completions", "messages", stored_chat),
        ("/v1/responses", "input", stored_items),
        ("/v1/messages", "messages", stored_turns),
        ("/tokenize", "messages", stored_chat),
        ("/v1/messages/count_tokens", "messages", stored_turns),
    ],
)
async def test_what_programs_keep_with_messages_is_ignored(
    api: Api, acme: Client, route: str, field: str, history: Any
) -> None:
    minimal = DIALECTS.get(route, {"model": BASE})
    answers = [
        await acme.post(route, json={**minimal, field: history(extra)}) for extra in ({}, STORED)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    if api.engine.requests:
        plain, stored = api.engine.requests
        assert plain.prompt_token_ids == stored.prompt_token_ids
    else:
        assert answers[0].json() == answers[1].json()


async def test_a_refusal_is_what_the_assistant_said(api: Api, acme: Client) -> None:
    said = [
        {"role": "assistant", "content": "I cannot."},
        {"role": "assistant", "content": None, "refusal": "I cannot."},
        {"role": "assistant", "content": "I ", "refusal": "cannot."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}]},
    ]
    for message in said:
        fields: dict[str, Any] = {
            **DIALECTS["/v1/chat/completions"],
            "messages": [USER, message, USER],
        }
        assert (await acme.post("/v1/chat/completions", json=fields)).status_code == 200
    assert len({tuple(request.prompt_token_ids) for request in api.engine.requests}) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "audio": {"id": "audio_1"}},
        {"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "user", "content": "x", "images": ["AAAA"]},
        {"role": "assistant", "content": "x", "prefix": True},
    ],
)
async def test_content_of_a_message_that_cannot_be_shown_is_refused(
    acme: Client, message: dict[str, Any]
) -> None:
    fields = {**DIALECTS["/v1/chat/completions"], "messages": [message]}
    answer = await acme.post("/v1/chat/completions", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(message)[-1])


@pytest.mark.parametrize(
    "kind", ["server_tool_use", "web_search_tool_result", "document", "image", "search_result"]
)
async def test_blocks_that_cannot_be_shown_are_refused_by_name(acme: Client, kind: str) -> None:
    for role in ("user", "assistant"):
        answer = await acme.post(
            "/v1/messages",
            json={
                **DIALECTS["/v1/messages"],
                "messages": [{"role": role, "content": [{"type": kind}]}],
            },
        )
        assert answer.status_code == 400
        assert f"got {kind}" in answer.json()["error"]["message"]


BAD_ARGUMENTS = [
    *(
        r'{"a": "\ud800"}',
        r'{"\udc00": 1}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": 1, "a": 2}',
    ),
    *(
        '{"a": ' + "1" * 5000 + "}",
        "[1]",
        '"a"',
        "{} x",
        "\ufeff{}",
        "{",
        "[" * 2000,
        '{"a":' * 200 + "1" + "}" * 200,
    ),
]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
async def test_arguments_of_calls_are_read_as_strictly_as_bodies(
    api: Api, acme: Client, route: str
) -> None:
    for arguments in BAD_ARGUMENTS:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        fields: dict[str, Any] = {
            "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        }
        if route == "/v1/responses":
            called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            fields = {"input": [ITEM, called]}
        answer = await acme.post(route, json={"model": BASE, **fields})
        place = (
            "input.1.function_call.arguments"
            if "input" in fields
            else "messages.1.tool_calls.0.function.arguments"
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, place), arguments[:40]
    assert api.engine.requests == []


async def test_the_schema_in_a_string_is_read_as_strictly(acme: Client) -> None:
    for schema in (
        r'{"const": "\ud800"}',
        '{"const": NaN}',
        '{"type": "string", "type": "number"}',
        '{"const": 1e999}',
    ):
        fields = {**DIALECTS["/v1/completions"], "structured_outputs": {"json": schema}}
        answer = await acme.post("/v1/completions", json=fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            400,
            "structured_outputs.json",
        ), schema


async def test_integers_of_any_size_in_schemas_are_no_error(api: Api, acme: Client) -> None:
    """The answer repeats them."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x"], "title": 2**70}},
        "required": ["a"],
    }
    form = {"type": "json_schema", "name": "f", "schema": schema}
    for is_streamed in (False, True):
        fields = {**DIALECTS["/v1/responses"], "text": {"format": form}, "stream": is_streamed}
        answer = await acme.post("/v1/responses", json=fields)
        assert answer.status_code == 200, answer.text
        assert f'"title": {2**70}' in answer.text
