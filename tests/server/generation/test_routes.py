from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from api_server import BASE, Api, Client
from fake_engine import BASE_TEXT, demo_tokenizer
from manylora.engine.request import ErrorInfo
from manylora.server.generation.chat_schemas import ChatView
from manylora.server.generation.schemas import CompletionView

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "When are you open?"}]


async def complete(client: Client, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": BASE, "prompt": "x", **fields})


async def chat(client: Client, **fields: Any) -> httpx.Response:
    return await client.post(
        "/v1/chat/completions", json={"model": BASE, "messages": MESSAGES, **fields}
    )


def events(text: str) -> list[Any]:
    found = [
        line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")
    ]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


async def test_a_completion_has_openais_shape(acme: Client) -> None:
    answer = await complete(acme, prompt="hello")
    assert answer.status_code == 200, answer.text
    body = CompletionView.model_validate_json(answer.content)
    assert (body.choices[0].text, body.choices[0].finish_reason, body.model) == (
        BASE_TEXT,
        "stop",
        BASE,
    )
    assert body.usage.prompt_tokens == len(demo_tokenizer().encode("hello"))
    assert (
        body.usage.completion_tokens
        == len(demo_tokenizer().encode(BASE_TEXT, add_special_tokens=False)) + 1
    )
    assert answer.headers["x-request-id"].startswith("req-")
    assert "x-manylora-adapter" not in answer.headers


async def test_the_fingerprint_tells_whether_the_kv_cache_is_int8(api: Api, acme: Client) -> None:
    wide = (await complete(acme, prompt="hello")).json()["system_fingerprint"]
    assert wide.endswith("-float32-bf16")
    geometry = replace(api.services.ready.geometry, is_kv_int8=True)
    services = replace(api.services, ready=replace(api.services.ready, geometry=geometry))
    assert services.fingerprint == f"{wide}-kv-int8"


async def test_a_chat_has_openais_shape(acme: Client) -> None:
    answer = await chat(acme, logprobs=True, top_logprobs=2)
    assert answer.status_code == 200, answer.text
    body = ChatView.model_validate_json(answer.content)
    assert body.choices[0].message.content == BASE_TEXT
    assert body.choices[0].logprobs is not None
    entries = body.choices[0].logprobs.content
    assert len(entries) == body.usage.completion_tokens
    assert len(entries[0].top_logprobs) == 2
    assert bytes(entries[0].bytes or []).decode() == entries[0].token


async def test_a_stream_opens_with_the_role_and_ends_with_done(api: Api, acme: Client) -> None:
    answer = await chat(acme, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(answer.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == BASE_TEXT
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    totals = await api.usage_totals()
    assert {
        name: usage["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    }.items() <= totals.items()
    assert totals["requests"] == 1


async def test_every_prompt_and_choice_has_its_index_and_prompts_count_once(
    api: Api, acme: Client
) -> None:
    prompts = ["one", "two two"]
    answer = await complete(acme, prompt=prompts, n=2, max_tokens=50)
    body = CompletionView.model_validate_json(answer.content)
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in body.choices] == [BASE_TEXT, f"{BASE_TEXT} choice 1"] * 2
    assert body.usage.prompt_tokens == sum(
        len(demo_tokenizer().encode(prompt)) for prompt in prompts
    )
    assert [request.choice_index for request in api.engine.requests] == [0, 1, 0, 1]
    first, _, third, _ = (request.request_id for request in api.engine.requests)
    assert [request.fork_of for request in api.engine.requests] == [None, first, None, third]
    assert (await api.usage_totals())["requests"] == 1


async def test_a_stream_of_many_choices_keeps_them_apart(acme: Client) -> None:
    answer = await complete(acme, n=3, stream=True, max_tokens=60)
    texts = ["", "", ""]
    ends = []
    for event in events(answer.text)[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == [BASE_TEXT, f"{BASE_TEXT} choice 1", f"{BASE_TEXT} choice 2"]
    assert sorted(ends) == [0, 1, 2]


async def test_echo_with_logprobs_is_what_evaluation_harnesses_expect(acme: Client) -> None:
    prompt = demo_tokenizer().encode("we are open")
    answer = await complete(
        acme, prompt=[prompt], echo=True, max_tokens=1, logprobs=1, temperature=0
    )
    choice = CompletionView.model_validate_json(answer.content).choices[0]
    assert choice.logprobs is not None
    assert (choice.logprobs.token_logprobs[0], choice.logprobs.top_logprobs[0]) == (None, None)
    assert len(choice.logprobs.tokens) == len(prompt) + 1
    for token, top in zip(
        choice.logprobs.tokens[1:], choice.logprobs.top_logprobs[1:], strict=True
    ):
        assert top is not None
        assert token in top
    assert (choice.text[:11], choice.finish_reason) == ("we are open", "length")
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)


EMOJI = "a🎉b"


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("text", [EMOJI, "e\u0301 日本", "🎉", "x\ufffd"])
@pytest.mark.parametrize("by_ids", [None, 0, 2])
async def test_offsets_of_an_echo_point_into_the_text(
    api: Api, acme: Client, text: str, by_ids: int | None, is_streamed: bool
) -> None:
    """A prompt as text, as its ids, or without its last ids, which may be a part of a character."""
    tokenizer = demo_tokenizer()
    api.engine.write = lambda _: EMOJI
    ids = tokenizer.encode(text)
    prompt: Any = text if by_ids is None else [ids[: len(ids) - by_ids]]
    fields = {
        "prompt": prompt,
        "echo": True,
        "max_tokens": 20,
        "logprobs": 1,
        "n": 2,
        "stream": is_streamed,
    }
    answer = await complete(acme, **fields)
    assert answer.status_code == 200, answer.text
    choices = (
        [choice for event in events(answer.text)[:-1] for choice in event["choices"]]
        if is_streamed
        else []
    )
    for index in (0, 1):
        parts = [
            choice for choice in choices or answer.json()["choices"] if choice["index"] == index
        ]
        whole = "".join(part["text"] for part in parts)
        offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
        tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
        answered = tokenizer.encode(EMOJI, add_special_tokens=False)
        assert whole == (
            text + EMOJI if by_ids is None else tokenizer.decode([*prompt[0], *answered])
        )
        assert len(tokens) > len(ids) - (by_ids or 0)
        assert offsets == sorted(offsets)
        for token, offset in zip(tokens, offsets, strict=True):
            assert offset <= len(whole)
            if not token.startswith(("bytes:", "<|")):
                assert (
                    whole[offset:].lstrip("\ufffd").startswith(token)
                )  # what a part of a character leaves


async def test_bytes_of_a_chats_tokens_add_up_to_its_text(api: Api, acme: Client) -> None:
    api.engine.write = lambda _: "e\u0301 日本🎉 \ufffd"
    asked = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "logprobs": True}
    (choice,) = (await acme.post("/v1/chat/completions", json=asked)).json()["choices"]
    entries = choice["logprobs"]["content"]
    written = b"".join(
        bytes(entry["bytes"]) for entry in entries if not entry["token"].startswith("<|")
    )
    assert written.decode() == choice["message"]["content"] == "e\u0301 日本🎉 \ufffd"


async def test_offsets_before_a_stop_string_that_is_cut_off_point_into_the_text(
    api: Api, acme: Client
) -> None:
    api.engine.write = lambda _: "yes 🎉🎉 no"
    answer = await complete(acme, stop=["🎉🎉"], logprobs=0)
    choice = answer.json()["choices"][0]
    assert choice["text"] == "yes "
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] == len("yes ")


async def test_a_stop_string_ends_the_text_and_the_engine_request(api: Api, acme: Client) -> None:
    answer = await complete(acme, stop=[" plain"])
    choice = answer.json()["choices"][0]
    assert choice["text"] == "the base speaks"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " plain")
    assert len(api.engine.aborted) == 1
    assert (await api.usage_totals())["completion_tokens"] == answer.json()["usage"][
        "completion_tokens"
    ]


async def test_sampling_fields_reach_the_engine(api: Api, acme: Client) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 1234,
    }
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    fields |= {"ignore_eos": True, "stop_token_ids": [3]}
    answer = await complete(acme, logit_bias={"5": -100}, max_tokens=4, **fields)
    assert answer.status_code == 200, answer.text
    params = api.engine.requests[0].params
    assert {name: getattr(params, name) for name in fields} == {**fields, "stop_token_ids": (3,)}
    assert params.logit_bias == {5: -100.0}


async def test_a_chat_without_a_limit_may_fill_the_context(api: Api, acme: Client) -> None:
    await chat(acme)
    request = api.engine.requests[0]
    assert request.params.max_tokens == 256 - len(request.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (
            ErrorInfo(code="request_too_large", message="too many pages", kind="request"),
            400,
            "request_too_large",
        ),
        (
            ErrorInfo(code="context_length_exceeded", message="long"),
            400,
            "context_length_exceeded",
        ),
        (
            ErrorInfo(code="adapter_blob_corrupt", message="corrupt", kind="adapter"),
            503,
            "adapter_blob_corrupt",
        ),
        (
            ErrorInfo(code="engine_overloaded", message="full", kind="capacity"),
            503,
            "engine_overloaded",
        ),
        (
            ErrorInfo(code="page_accounting", message="secret path", kind="internal"),
            500,
            "internal_error",
        ),
    ],
)
async def test_a_refusal_is_a_real_status_also_for_a_stream(
    api: Api, acme: Client, error: ErrorInfo, status: int, code: str, stream: bool
) -> None:
    api.engine.refusal = error
    answer = await complete(acme, stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert "secret" not in answer.text
    assert ("retry-after" in answer.headers) == (status == 503)
    totals = await api.usage_totals()
    assert (totals["prompt_tokens"], totals["completion_tokens"]) == (0, 0)


async def test_an_engine_death_in_the_middle_is_an_error_event_without_done(
    api: Api, acme: Client
) -> None:
    api.engine.failure_after = 3
    answer = await complete(acme, stream=True)
    assert answer.status_code == 200
    *chunks, last = events(answer.text)
    assert last["error"]["code"] == "engine_restarted"
    assert len(chunks) == 3
    totals = await api.usage_totals()
    assert totals["completion_tokens"] == 3
    assert totals["prompt_tokens"] == len(demo_tokenizer().encode("x"))


async def test_an_engine_that_dies_or_restarts_is_503_and_free(api: Api, acme: Client) -> None:
    api.engine.failure_after = 3
    died = await complete(acme)
    api.engine.ready = None
    restarting = await complete(acme)
    told = [(answer.status_code, answer.headers["retry-after"]) for answer in (died, restarting)]
    assert told == [(503, "1"), (503, "2")]
    assert (await api.usage_totals())["completion_tokens"] == 0
    assert (await acme.get("/ready")).status_code == 503
    assert (await acme.get("/health")).status_code == 200


async def test_a_plain_request_id_is_echoed_and_billed_each_time_it_comes(
    api: Api, acme: Client
) -> None:
    for given in ("abc-1", "abc-1", "a" * 300, "sp ace", "semi;colon"):
        acme.headers["x-request-id"] = given
        echoed = (await complete(acme)).headers["x-request-id"]
        assert echoed == given if given == "abc-1" else echoed.startswith("req-")
    assert (await api.usage_totals())["requests"] == 5
