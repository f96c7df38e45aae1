"""Schemas, patterns and grammars that no answer can be held to, through every route: what a client reads of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api_server import BASE, Api, Client
from tool_models import tokenizer_with, use_tokenizer

pytestmark = pytest.mark.anyio
Body = dict[str, Any]
ODD = 2**53 + 1
RAW_WORDS = re.compile(
    r"NoExtension|verbose|lexer|lexeme|llguidance|x-guidance|%json \{|start:|regex parse|error:|panic|backtrace|<state>"
    r"|json-schema:///|Expected|Expecting|Unsatisfiable|SearchRegex|pydantic|serde|Traceback|<class|\bfuel\b|\n",
)
DEEP: Any = {"type": "null"}
for _ in range(62):
    DEEP = {"items": DEEP}
DEEP = {"items": {"anyOf": [DEEP]}}
SCHEMAS: list[Any] = [
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {
        "anyOf": [{"$ref": "#/$defs/a"}],
        "$defs": {"a": {"type": "array", "minItems": 2, "items": {"$ref": "#/$defs/a"}}},
    },
    {"$ref": "#/$defs/no"},
    {"$ref": "http://example.com/schema"},
    {"$ref": 5},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a", "type": "object"}},
        "$defs": {"a": {"$ref": "#"}},
    },
    {"properties": {"a": {"allOf": [{"$ref": "#"}, {"maxProperties": 1}]}}},
    {"properties": {"a": {"pattern": "("}}},
    {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(?<=a)b"}]}}},
    {"properties": {"a": {"pattern": "(a)\\1"}}},
    {"properties": {"a": {"pattern": "[z-a]"}}},
    {"properties": {"a": {"pattern": "a{2,1}"}}},
    {"properties": {"a": {"pattern": "\\p{Nothing}"}}},
    {"properties": {"a": {"pattern": "*"}}},
    {"patternProperties": {"(": {}}},
    {"patternProperties": {"a": {"type": "null"}, "b": {"type": "string"}}},
    {
        "type": "object",
        "properties": {"a": {}, "b": {}, "c": {}},
        "required": ["a"],
        "maxProperties": 3,
        "additionalProperties": True,
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^a$", "maxLength": 0}},
        "required": ["a"],
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string", "format": "date", "pattern": "^x"}},
        "required": ["a"],
    },
    {
        "type": "object",
        "properties": {"a": {"minLength": 5, "maxLength": 1, "type": "string"}},
        "required": ["a"],
    },
    {
        "type": "object",
        "properties": {"a": {"minItems": 5, "maxItems": 1, "type": "array"}},
        "required": ["a"],
    },
    {
        "type": "object",
        "properties": {"a": {"type": "number", "minimum": 5, "maximum": 1}},
        "required": ["a"],
    },
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0.2, "maximum": 0.8}},
        "required": ["a"],
    },
    {
        "type": "object",
        "properties": {"a": {"allOf": [{"type": "string"}, {"type": "null"}]}},
        "required": ["a"],
    },
    {"type": "object", "properties": {"a": {"type": "integer", "const": "x"}}, "required": ["a"]},
    {"properties": {"a": {"type": "integer", "minimum": ODD, "multipleOf": 7}}},
    {"properties": {"a": {"type": "integer", "minimum": ODD, "maximum": ODD - 1}}},
    {"properties": {"a": {"allOf": [{"minimum": ODD}, {"maximum": 2**70}]}}},
    {"properties": {"a": {"const": [ODD]}}, "patternProperties": {"b": {}}},
    {"properties": {"a": {"multipleOf": 0}}},
    {"properties": {"a": {"multipleOf": 1e-300}}},
    {"properties": {"a": {"type": "strange"}}},
    {"properties": {"a": {"enum": 7}}},
    {"properties": {"a": {"not": {}}}},
    {"properties": {"a": 7}},
    {"properties": 7},
    {"required": "a"},
    {"required": [f"r{index}" for index in range(30_000)]},
    {"properties": {f"p{index}": {"type": "string"} for index in range(15_000)}},
    {"properties": {"a": DEEP}},
    {"properties": {"a": {"const": "x" * 300_000}}},
]
PATTERNS = ["(", "[", "*", "a{2,1}", "(?=a)", "(a)\\1", "\\p{Nothing}", "a\\", "(?P<a", "\\q"]
GRAMMARS = [
    *(
        "",
        "root ::= 1",
        "start: other",
        'start: "a',
        "start: /(/",
        "start: start",
        "start: a\na: b\nb: a",
        "\x00",
    ),
    *(
        "start: A\nA: B\nB: A",
        "%import nothing.INT\nstart: INT",
        'start: "a"{5,2}',
        "start: <[99999999]>",
    ),
    *(
        "start: <nothing>",
        "start: @other",
        'start: %regex {"a": 1}',
        'foo: "a"',
        'start: "a"\nstart: "b"',
    ),
    *(
        "start: A & B\nA: /a/\nB: /b/",
        'start: A\nA: "a" & "b"',
        "start: (.)",
        'start[stop="("]: /a/',
        'start: "\\x"',
    ),
    *(
        "%llguidance {\nstart: /a/",
        "start[temperature=x]: /a/",
        "start: %lark {\n}",
        "start: 5",
        "%ignore",
    ),
]


def _tool(schema: object) -> Body:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}


CHAT: Body = {"model": BASE, "messages": [{"role": "user", "content": "Hello"}]}
SCHEMA_ROUTES: dict[str, tuple[str, str, Callable[[Any], Body]]] = {
    "response_format": (
        "/v1/chat/completions",
        "response_format.json_schema.schema",
        lambda schema: {
            **CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            },
        },
    ),
    "structured_outputs": (
        "/v1/completions",
        "structured_outputs.json",
        lambda schema: {
            "model": BASE,
            "prompt": "x",
            "structured_outputs": {"json": json.dumps(schema)},
        },
    ),
    "tools": (
        "/v1/chat/completions",
        "tools.0.function.parameters",
        lambda schema: {**CHAT, "tools": [_tool(schema)]},
    ),
    "responses": (
        "/v1/responses",
        "text.format.schema",
        lambda schema: {
            "model": BASE,
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
        },
    ),
    "messages": (
        "/v1/messages",
        "tools.0.input_schema",
        lambda schema: {
            **CHAT,
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
    ),
}


@pytest.fixture
def hermes(api: Api) -> Api:
    """A model that calls tools."""
    use_tokenizer(api, tokenizer_with())
    return api


@pytest.mark.parametrize("route", SCHEMA_ROUTES)
async def test_a_schema_that_cannot_be_held_to_is_refused_at_its_place(
    hermes: Api, acme: Client, route: str
) -> None:
    path, place, body_of = SCHEMA_ROUTES[route]
    for schema in SCHEMAS:
        answer = await acme.post(path, json=body_of(schema))
        shown = json.dumps(schema)[:200]
        assert answer.status_code == 400, (shown, answer.text)
        error = answer.json()["error"]
        assert not RAW_WORDS.search(error["message"]), (shown, error)
        if (
            "context_length_exceeded" in error["message"]
        ):  # tools stand in the prompt, which is looked at first
            continue
        told = error.get("param") or error["message"]
        is_large = re.search("makes a grammar of|maximum context length", error["message"])
        assert place in told or is_large, (shown, error)
    assert hermes.engine.requests == []


def _of_structured_outputs() -> Iterator[tuple[str, Any]]:
    yield from (("regex", pattern) for pattern in PATTERNS)
    yield from (("grammar", grammar) for grammar in GRAMMARS)
    yield from (("choice", choice) for choice in ([], [""], ["a" * 5000], [1], "a"))


async def test_a_pattern_or_grammar_that_is_none_is_refused_in_our_words(
    api: Api, acme: Client
) -> None:
    for name, value in _of_structured_outputs():
        for path, further in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"model": BASE, "prompt": "x"}),
        ):
            answer = await acme.post(path, json={**further, "structured_outputs": {name: value}})
            assert answer.status_code == 400, (name, value, answer.text)
            error = answer.json()["error"]
            assert not RAW_WORDS.search(error["message"]), (name, value, error)
            assert f"structured_outputs.{name}" in (error["param"] or "") + error["message"], (
                name,
                value,
                error,
            )
    assert api.engine.requests == []


async def test_the_part_that_is_wrong_is_named_among_several(hermes: Api, acme: Client) -> None:
    tools = [_tool({"type": "object"}), _tool({"properties": {"a": {"items": {"pattern": "("}}}})]
    tools[1]["function"]["name"] = "g"
    form = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"properties": {"b": {"pattern": "("}}}},
    }
    for fields, place in (
        ({"tools": tools}, "tools.1.function.parameters.properties.a.items"),
        (
            {"tools": tools[:1], "response_format": form},
            "response_format.json_schema.schema.properties.b",
        ),
        ({"tools": tools[:1], "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ):
        error = (await acme.post("/v1/chat/completions", json={**CHAT, **fields})).json()["error"]
        assert error["param"] == place
        assert place in error["message"]
    assert hermes.engine.requests == []


async def test_numbers_of_a_tool_beyond_floats_are_served(hermes: Api, acme: Client) -> None:
    int64 = {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1}
    tool = _tool(
        {
            "properties": {"id": int64, "secret": {"type": "string", "format": "password"}},
            "required": ["id"],
        }
    )
    asked = {**CHAT, "tools": [tool], "tool_choice": "required"}
    assert (await acme.post("/v1/chat/completions", json=asked)).status_code == 200
    (request,) = hermes.engine.requests
    assert "9223372036854775" in (request.grammar.text if request.grammar else "")
