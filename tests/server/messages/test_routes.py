"""POST /v1/messages, by Anthropic's own client where it can send what is tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from api_server import ADMIN_KEY, BASE, Api, Client, eventually
from fake_engine import BASE_TEXT, demo_tokenizer
from manylora.engine.request import ErrorInfo
from manylora.server.messages.schemas import MessageView
from manylora.server.versions.names import ModelNames

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.anyio
QUESTION = "When are you open?"
ASKED: dict[str, Any] = {
    "model": BASE,
    "max_tokens": 60,
    "messages": [{"role": "user", "content": QUESTION}],
}


def prompt_of(*messages: tuple[str, str]) -> list[int]:
    """Token ids of a chat."""
    return demo_tokenizer().chat_prompt(
        [{"role": role, "content": content} for role, content in messages]
    )


async def send(client: Client, **fields: Any) -> Any:
    return await client.post("/v1/messages", json={**ASKED, **fields})


async def error_of(client: Client, **fields: Any) -> tuple[str, str]:
    answer = await send(client, **fields)
    body = answer.json()
    assert (answer.status_code, body["type"], set(body["error"])) == (
        400,
        "error",
        {"type", "message"},
    ), answer.text
    return body["error"]["type"], body["error"]["message"]


async def test_a_message_is_the_answer_of_the_same_chat(api: Api, acme: Client) -> None:
    answer = await send(acme)
    assert answer.status_code == 200, answer.text
    body = MessageView.model_validate_json(answer.content)
    assert (body.stop_reason, body.model) == ("end_turn", BASE)
    assert answer.json()["content"] == [{"type": "text", "text": BASE_TEXT}]
    chat = {"model": BASE, "max_tokens": 60, "messages": ASKED["messages"]}
    assert (await acme.post("/v1/chat/completions", json=chat)).status_code == 200
    first, second = api.engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids == prompt_of(("user", QUESTION))
    assert first.params == second.params
    events = (await api.admin.get("/v1/usage/events")).json()["data"]
    assert sorted(event["endpoint"] for event in events) == ["/v1/chat/completions", "/v1/messages"]
    assert len({(event["prompt_tokens"], event["completion_tokens"]) for event in events}) == 1


async def test_what_claude_code_sends_is_taken(api: Api, client: anthropic.AsyncAnthropic) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "<note/>"}, {"type": "text", "text": "Hi", **cached}]
    asked: dict[str, Any] = {
        "system": [
            {"type": "text", "text": "You are kind."},
            {"type": "text", "text": "Be brief.", **cached},
        ],
        "messages": [
            {"role": "user", "content": blocks},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
            {"role": "user", "content": QUESTION},
        ],
        "metadata": {"user_id": "user_1"},
        "extra_query": {"beta": "true"},
        "extra_headers": {"anthropic-beta": "claude-code-20250219"},
        "extra_body": {
            "temperature": 1,
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        },
    }
    text = ""
    async with client.messages.stream(model=BASE, max_tokens=60, **asked) as stream:
        async for piece in stream.text_stream:
            text += piece
        final = await stream.get_final_message()
    said = [("user", "<note/>\n\nHi"), ("assistant", "Hello"), ("user", QUESTION)]
    told = prompt_of(("system", "You are kind.\n\nBe brief."), *said)
    assert api.engine.requests[0].prompt_token_ids == told
    assert text == BASE_TEXT
    assert [block.type for block in final.content] == ["text"]
    assert final.usage.input_tokens == len(told)
    assert final.usage.output_tokens == (await api.usage_totals())["completion_tokens"]


async def test_the_prefix_cache_is_told_apart_in_the_usage(
    api: Api, client: anthropic.AsyncAnthropic
) -> None:
    api.engine.cached = lambda _: 3
    got = await client.messages.create(**ASKED)
    assert got.usage.cache_read_input_tokens == 3
    assert got.usage.input_tokens == len(prompt_of(("user", QUESTION))) - 3


async def test_it_stops_by_limit_or_sequence(client: anthropic.AsyncAnthropic) -> None:
    cut = await client.messages.create(**{**ASKED, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"
    stopped = await client.messages.create(**ASKED, stop_sequences=["speaks"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "speaks")
    assert stopped.content[0].to_dict()["text"] == BASE_TEXT.partition("speaks")[0]


async def test_sampling_parameters_reach_the_engine(api: Api, acme: Client) -> None:
    given = {"temperature": 0.5, "top_p": 0.75, "top_k": 7}
    assert (await send(acme, **given)).status_code == 200
    assert {name: getattr(api.engine.requests[0].params, name) for name in given} == given


async def test_tokens_are_counted_and_not_billed(
    api: Api, client: anthropic.AsyncAnthropic
) -> None:
    import anthropic  # takes a second

    messages: Any = ASKED["messages"]
    counted = await client.messages.count_tokens(model=BASE, messages=messages, system="Be kind.")
    assert counted.input_tokens == len(prompt_of(("system", "Be kind."), ("user", QUESTION)))
    assert (await api.usage_totals())["requests"] == 0
    assert api.engine.requests == []
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="nobody", messages=messages)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "got image",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "got document"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]},
            "tool_use or redacted_thinking, got",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": []}, "messages"),
        ({"system": [{"type": "image"}]}, "system takes the type text, got image"),
        ({"max_tokens": None}, "max_tokens is required"),
        ({"model": None}, "model is required"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "got web_search_20250305",
        ),
        ({"mcp_servers": [{"url": "x"}]}, "does not support mcp_servers"),
        ({"container": "c"}, "does not support container"),
        ({"n": 2}, "n is not a parameter of this route"),
        ({"stop_sequences": ["x" * 300]}, "stop_sequences.0: must be at most 256 characters long"),
        ({"messages": [{"role": "user", "content": "x " * 300}]}, "prompt is too long: "),
    ],
)
async def test_what_is_wrong_or_not_served_is_told_by_name(
    acme: Client, fields: Any, says: str
) -> None:
    kind, message = await error_of(acme, **fields)
    assert kind == "invalid_request_error"
    assert says in message


async def test_errors_are_the_clients_own_exception_types(
    api: Api, client: anthropic.AsyncAnthropic, url: str
) -> None:
    import anthropic  # takes a second

    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**{**ASKED, "model": "nobody"})
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key="no-such-key", max_retries=0
    ) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await stranger.messages.create(**ASKED)
    assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="Anthropic's batches"):
        await client.messages.batches.retrieve("msgbatch_1")
    api.services.drain.is_draining = True
    with pytest.raises(anthropic.InternalServerError) as draining:
        await client.messages.create(**ASKED)
    assert draining.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


async def test_other_methods_and_a_crash_are_told_in_the_same_shape(
    api: Api, acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await acme.get("/v1/messages")).json()["error"]["type"] == "invalid_request_error"
    monkeypatch.setattr(ModelNames, "resolve", lambda *_, **__: 1 / 0)
    answer = await send(acme)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (
        500,
        "error",
        "api_error",
    )


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/models"])
async def test_a_key_may_come_as_x_api_key(api: Api, path: str) -> None:
    key = await api.key("acme")
    keys = [
        ([("x-api-key", key)], True),
        ([("x-api-key", "wrong")], False),
        ([("x-api-key", key), ("x-api-key", key)], False),
        ([("authorization", f"Bearer {key}"), ("x-api-key", "wrong")], True),
        ([("authorization", "Bearer wrong"), ("x-api-key", key)], False),
    ]
    for headers, is_fine in keys:
        answer = await api.client().request(
            "POST" if path == "/v1/messages" else "GET", path, json=ASKED, headers=headers
        )
        assert answer.status_code == (200 if is_fine else 401), (headers, answer.text)
        assert ("x-api-key header" in answer.text) == (
            len(headers) == 2 and headers[0][0] == "x-api-key"
        )
    assert (
        await api.client().get("/v1/tenants", headers={"x-api-key": ADMIN_KEY})
    ).status_code == 200


async def test_an_error_before_the_first_token_is_a_status_and_later_an_event(
    api: Api, client: anthropic.AsyncAnthropic, acme: Client
) -> None:
    import anthropic  # takes a second

    api.engine.refusal = ErrorInfo(kind="capacity", code="overloaded", message="No room.")
    assert (await send(acme, stream=True)).status_code == 503
    api.engine.refusal_after = 2
    answer = await send(acme, stream=True)
    assert answer.text.endswith(
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"No room."}}\n\n'
    )
    with pytest.raises(anthropic.APIStatusError, match="No room"):
        async for _ in await client.messages.create(**ASKED, stream=True):
            pass


async def test_a_client_that_leaves_a_stream_pays_for_what_was_computed(
    api: Api, client: anthropic.AsyncAnthropic
) -> None:
    api.engine.token_s = 0.005
    api.engine.write = lambda _: BASE_TEXT * 20
    stream = await client.messages.create(**{**ASKED, "max_tokens": 150}, stream=True)
    seen = 0
    async for event in stream:
        seen += event.type == "content_block_delta"
        if seen == 3:
            break
    await stream.close()
    await eventually(lambda: not api.engine.running and not api.services.drain.num_running)
    (event,) = (await api.admin.get("/v1/usage/events")).json()["data"]
    (work,) = api.engine.work.values()
    assert (event["status"], event["endpoint"]) == ("aborted", "/v1/messages")
    assert 3 <= event["completion_tokens"] == work.output_tokens < 150
