"""What bodies may say: strict JSON, strict fields, and errors that name the field."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from starlette.requests import Request

from api_server import BASE, Api, Client
from manylora.errors import InvalidRequestError
from manylora.server.generation.prompts import LEAST_TOP_P
from manylora.server.http.bodies import parse_json
from manylora.server.http.body import content_length

pytestmark = pytest.mark.anyio
GOOD = {"model": BASE, "prompt": "x", "max_tokens": 2}
DEEP_CURSOR = base64.urlsafe_b64encode(b"[" * 3000).decode()
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b"",
            b"{",
            b"[]",
            b'"text"',
            b"null",
            b"{}x",
            b"{'a': 1}",
            b'{"a": 1,}',
            b"\xef\xbb\xbf{}",
        ),
        *(
            b'{"a": 1, "a": 2}',
            b'{"x": {"a": 1, "a": 2}}',
            b'{"a": NaN}',
            b'{"a": Infinity}',
            b'{"a": 01}',
        ),
        *(
            b'{"a": "\\ud800"}',
            b'{"a": "\\udc00\\ud800"}',
            b'{"a": "\\u0000"}',
            b'{"a": "\\\\\\u0000"}',
        ),
        *(b'{"a": "\x00"}', b'{"a": "\xff"}', b'{"a": "\xed\xa0\x80"}'),
        *(
            b'{"a": ' + b"1" * 5000 + b"}",
            b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
            b"[" * 100_000,
        ),
    ],
)
async def test_ambiguous_or_broken_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_json(raw)
    assert refused.value.code == "invalid_json"


async def test_levels_within_one_another_are_limited() -> None:
    assert parse_json(b'{"a":' * 127 + b'"[[["' + b"}" * 127)
    assert parse_json(b'{"a": [' + b"[]," * 500 + b"[]]}")
    for many in (129, 600, 2000):
        with pytest.raises(
            InvalidRequestError, match="nested more than 128 levels deep"
        ) as refused:
            parse_json(b'{"a":' * many + b"1" + b"}" * many)
        assert refused.value.code == "invalid_json"


async def test_text_that_only_looks_like_an_escape_passes() -> None:
    assert parse_json(b'{"a": "\\\\u0000", "b": "\\ud83d\\ude00"}') == {
        "a": "\\u0000",
        "b": "\U0001f600",
    }


WRONG: dict[str, list[Any]] = {
    "n": [True, "5", 5.5, 0, 10**30, 129],
    "best_of": [0, 129, 2.5],
    "use_beam_search": [1],
    "length_penalty": [2],
    "early_stopping": [True, "never"],
    "max_tokens": [0, -1],
    "temperature": [-0.1, "hot", True],
    "top_p": [-0.1, 1.1],
    "top_k": [-2, 10**30],
    "min_p": [1.5],
    "presence_penalty": [2.5],
    "repetition_penalty": [0],
    "logprobs": [21, -1, True],
    "seed": [1 << 63, 1.5],
    "stop": [["a"] * 33, 5, {"a": 1}],
    "stop_token_ids": [[10**6]],
    "logit_bias": [
        [1],
        {"1000000": 1},
        {str(token): 1 for token in range(301)},
    ],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "prompt": [[], [[]], ["a", [1]], [1, "a"], [True], [-1], [10**6], 5, {"a": 1}, ["x"] * 129],
    "model": ["", 5],
    "min_tokens": [-1, 3, 1 << 31, True],
    "bad_words": ["x", ["   "], ["x"] * 129],
    "allowed_token_ids": [[], [10**6], list(range(300)) * 4],
    "skip_special_tokens": [0],
    "include_stop_str_in_output": ["yes"],
    "truncate_prompt_tokens": [0, -2, 10**6, True],
    "prompt_logprobs": [21, -1, True],
    "return_token_ids": [1],
    "return_tokens_as_token_ids": ["no"],
    "add_special_tokens": [0],
}
"""Values that a field may not have, alone."""
WRONG_IN_BEAM_SEARCH: dict[str, list[Any]] = {
    "stream": [True],
    "n": [129],
    "temperature": [0.5],
    "top_p": [0.9],
    "top_k": [5],
    "min_p": [0.1],
    "presence_penalty": [1],
    "frequency_penalty": [1],
    "repetition_penalty": [1.5],
    "logit_bias": [{"5": 1}],
    "stop": ["x"],
    "echo": [True],
    "min_tokens": [1],
    "bad_words": [["x"]],
    "allowed_token_ids": [[5]],
    "prompt_logprobs": [0],
    "length_penalty": [11],
    "early_stopping": ["always", 1],
}
BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    *(({field: value}, field) for field, values in WRONG.items() for value in values),
    *(
        ({"use_beam_search": True, field: value}, "use_beam_search" if field == "stream" else field)
        for field, values in WRONG_IN_BEAM_SEARCH.items()
        for value in values
    ),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 65, "prompt": ["a", "b"]}, "prompt"),
    ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    *(({"stop": stop}, "stop.0") for stop in ([1], "x" * 257)),
    *(({"logit_bias": {"5": bias}}, "logit_bias.5") for bias in (101, "1", True)),
    *(({"logit_bias": {token: 1}}, f"logit_bias.{token}") for token in ("x", "-1", "1.5")),
    *(({"bad_words": [word]}, "bad_words.0") for word in ("", 1, "x" * 257)),
    *(({"allowed_token_ids": [token]}, "allowed_token_ids.0") for token in (-1, True, 1 << 31)),
    ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]
LACKING: dict[str, Any] = {
    "nonsense": 1,
    "suffix": "x",
    "spaces_between_special_tokens": False,
    "cache_salt": "s",
}
LACKING |= {"guided_json": {"type": "object"}, "lora_path": "/etc"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    *(({field: value}, field) for field, value in LACKING.items()),
    ({"nonsense": None}, "nonsense"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"continue_final_message": 1}, "continue_final_message"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"min_tokens": 300, "max_tokens": None}, "min_tokens"),
    ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search"),
    ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    *(
        ({"tool_choice": value}, "tool_choice")
        for value in ("required", "x", {"type": "function"}, 5)
    ),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"reasoning_effort": "some"}, "reasoning_effort"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 20000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": dict.fromkeys(map(str, range(33)), 1)}, "chat_template_kwargs"),
]


async def test_wrong_fields_are_400_and_named(api: Api, acme: Client) -> None:
    wrong = []
    for route, base, cases in (
        ("/v1/completions", GOOD, BAD_FIELDS),
        ("/v1/completions", GOOD, UNSUPPORTED),
        ("/v1/chat/completions", CHAT, BAD_CHATS),
    ):
        for fields, param in cases:
            answer = await acme.post(route, json={**base, **fields})
            error = answer.json().get("error", {})
            if (answer.status_code, error.get("param")) != (400, param):
                wrong.append((fields, answer.status_code, answer.json()))
            if cases is UNSUPPORTED and error.get("code") != "unsupported_parameter":
                wrong.append((fields, answer.status_code, answer.json()))
    assert wrong == []
    assert api.engine.requests == []
    answer = await acme.post("/v1/completions", json=GOOD)
    assert answer.status_code == 200


NEUTRAL: list[dict[str, Any]] = [
    {
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1,
        "early_stopping": False,
        "suffix": None,
    },
    {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
    },
    {"stop": None, "seed": None, "temperature": None, "logprobs": None, "stream": None, "n": None},
    {
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    },
    {"stream": True, "stream_options": {"include_obfuscation": True}},
    {
        "max_tokens": 2.0,
        "n": 1.0,
        "seed": 7.0,
        "top_k": 5.0,
        "logprobs": 1.0,
        "best_of": 1.0,
        "priority": 0.0,
    },
    {"top_p": 0},
    {"stop": ""},
    {"stop": ["", *(f"stop {number}" for number in range(32))]},
    {"prompt": ["x"] * 128, "max_tokens": 1},
    {"prompt": "a\0b"},
]
NEUTRAL_MESSAGES: list[dict[str, Any]] = [
    {
        "role": "developer",
        "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " kind"}],
    },
    {
        "role": "user",
        "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
    },
    {
        "role": "assistant",
        "content": "yes",
        "tool_calls": None,
        "refusal": None,
        "annotations": [{}],
    },
    {"role": "assistant", "content": None, "audio": None, "reasoning_content": None, "id": "m1"},
    {"role": "user", "content": "a\0b", "name": "joe", "provider_specific_fields": {"x": 1}},
]
NEUTRAL_CHATS: list[dict[str, Any]] = [
    {"tools": None, "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]},
    {
        "functions": [],
        "function_call": "auto",
        "chat_template_kwargs": {},
        "include_reasoning": True,
    },
    {
        "messages": [{"role": "assistant", "content": "x", "reasoning_content": "y"}],
        "reasoning_effort": "low",
    },
    {"max_tokens": None, "max_completion_tokens": 2.0},
    *({"messages": [message]} for message in NEUTRAL_MESSAGES),
]


async def test_what_changes_nothing_passes(api: Api, acme: Client) -> None:
    for route, base, cases in (
        ("completions", GOOD, NEUTRAL),
        ("chat/completions", CHAT, NEUTRAL_CHATS),
    ):
        for fields in cases:
            answer = await acme.post(f"/v1/{route}", json={**base, **fields})
            assert answer.status_code == 200, (fields, answer.text)
    params = {request.params.top_p for request in api.engine.requests}
    assert params == {1.0, LEAST_TOP_P}


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "tool", "content": "4"}, "messages", "and no other, has a tool_call_id"),
        (
            {"role": "user", "content": "4", "tool_call_id": "c1"},
            "messages",
            "and no other, has a tool_call_id",
        ),
        (
            {"role": "user", "content": "4", "tool_calls": [CALL]},
            "messages",
            "belong to messages of role assistant",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}],
            },
            "messages.0.tool_calls.0.function.arguments",
            "must be a JSON object in a string",
        ),
        (
            {"role": "user", "content": None},
            "messages",
            "no content, or null, as only the assistant's may",
        ),
        (
            {"role": "user", "content": 5},
            "messages",
            "a content must be a string or a list of parts, got 5",
        ),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages",
            "messages takes the type text or refusal, got image_url",
        ),
    ],
)
async def test_messages_are_refused_by_what_is_wrong_with_them(
    acme: Client, message: dict[str, Any], param: str, says: str
) -> None:
    answer = await acme.post("/v1/chat/completions", json={**CHAT, "messages": [message]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert says in answer.json()["error"]["message"]


async def test_a_nul_reaches_the_tokenizer_and_no_name(api: Api, acme: Client) -> None:
    answer = await acme.post(
        "/v1/completions", json={**GOOD, "prompt": "a\0b", "echo": True, "max_tokens": 0}
    )
    assert answer.json()["choices"][0]["text"] == "a\0b"
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert (await acme.post("/tokenize", json={"prompt": "a\0b"})).status_code == 200
    answer = await acme.post("/v1/completions", json={**GOOD, "model": "de\0mo", "user": "\0"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = await api.admin.post("/v1/tenants", json={"name": "a\0b"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        400,
        "A string holds a NUL character.",
    )


async def test_a_prompt_beyond_the_context_is_400_with_the_numbers(acme: Client) -> None:
    for fields in (
        {"prompt": [5] * 255, "max_tokens": 2},
        {"max_tokens": 300},
        {"prompt": "x" * 40_000},
    ):
        answer = await acme.post("/v1/completions", json={**GOOD, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["message"].startswith(
            "This model's maximum context length is 256 tokens. How"
        )
    long_chat = [{"role": "user", "content": "open " * 300}]
    answer = await acme.post("/v1/chat/completions", json={"model": BASE, "messages": long_chat})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("content", "headers", "status", "code", "says"),
    [
        (
            b"{}",
            {"content-type": "text/plain"},
            400,
            "invalid_json",
            "send Content-Type application/json",
        ),
        (b"{broken", {}, 400, "invalid_json", "not valid JSON"),
        (
            b" " * (1 << 20) + b"{}",
            {},
            413,
            "payload_too_large",
            "exceeds the limit of 1048576 bytes",
        ),
        (
            b"\x1f\x8b",
            {"content-encoding": "gzip"},
            415,
            "unsupported_encoding",
            "without Content-Encoding: gzip",
        ),
    ],
)
async def test_bodies_that_are_not_parsed(
    acme: Client, content: bytes, headers: dict[str, str], status: int, code: str, says: str
) -> None:
    answer = await acme.post("/v1/completions", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert says in answer.json()["error"]["message"]


async def test_the_tokenizer_answers_over_http(acme: Client) -> None:
    asked = {"model": BASE, "prompt": "we are open", "return_token_strs": True}
    made = (await acme.post("/tokenize", json=asked)).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    bare = (
        await acme.post("/tokenize", json={"prompt": "we are open", "add_special_tokens": False})
    ).json()
    back = await acme.post("/detokenize", json={"tokens": bare["tokens"]})
    assert back.json() == {"prompt": "we are open"}
    chat = await acme.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
    assert chat.json()["count"] > 1
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        assert (await acme.post("/tokenize", json=body)).status_code == 400
    assert (await acme.post("/detokenize", json={"tokens": [10**6]})).status_code == 400
    assert (await acme.post("/tokenize", json={"model": "nope", "prompt": "x"})).status_code == 404


WRONG_KEYS: list[dict[str, Any]] = [
    *({"scopes": ["root"]}, {"scopes": []}, {"role": "admin"}, {"expires_at": 5}),
    *(
        {"expires_at": at}
        for at in ("2001-01-01T00:00:00Z", "2101-01-01T00:00:00", "9999-12-31T23:59:59-23:00")
    ),
]
WRONG_QUERIES = (
    *(
        "gruop_by=tenant",
        "group_by=model",
        "start=yesterday",
        "start=2026-01-02&end=2026-01-01",
        "bucket=2h",
    ),
    *(
        "end=0001-01-01",
        "start=0001-01-01T00:00:00%2B05:00",
        "end=9999-12-31T23:59:59-05:00",
        f"after={DEEP_CURSOR}",
    ),
)


async def test_admin_bodies_are_checked_too(api: Api) -> None:
    await api.key("acme")
    async with api.admin as admin:
        for method, path, body, status in (
            ("POST", "/v1/tenants", {"name": "Bad Name"}, 400),
            ("POST", "/v1/tenants", {"name": "a..b"}, 400),
            ("POST", "/v1/tenants", {"name": "x", "id": "t"}, 400),
            ("POST", "/v1/tenants", {}, 400),
            ("POST", "/v1/tenants", {"name": "acme"}, 409),
            ("GET", "/v1/tenants/none", None, 404),
            ("GET", "/v1/tenants?limit=0", None, 400),
            ("POST", "/v1/tenants/none/keys", {}, 404),
            *(("POST", "/v1/tenants/acme/keys", body, 400) for body in WRONG_KEYS),
            ("POST", "/v1/tenants/acme/keys", {"expires_at": "2101-01-01T00:00:00Z"}, 201),
            ("POST", "/v1/tenants/acme/keys", {"expires_at": "9999-12-31T23:59:59Z"}, 201),
            *(("GET", f"/v1/usage?{query}", None, 400) for query in WRONG_QUERIES),
            ("GET", "/v1/usage?end=0001-01-03", None, 200),
        ):
            answer = await admin.request(method, path, json=body)
            assert answer.status_code == status, (path, body, answer.text)


@pytest.mark.parametrize(
    ("header", "length"), [("0" * 18 + "1999", 1999), ("9" * 30, int("9" * 19)), ("00", 0)]
)
def test_a_content_length_is_read_whole_or_as_too_large(header: str, length: int) -> None:
    assert (
        content_length(Request({"type": "http", "headers": [(b"content-length", header.encode())]}))
        == length
    )
