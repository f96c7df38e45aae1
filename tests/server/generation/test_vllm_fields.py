"""vLLM's own fields of completions and chats: what reaches the engine, and what the answers have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_server import BASE, Api, Client
from fake_engine import BASE_TEXT, DEMO_MODEL, demo_tokenizer
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.errors import InvalidRequestError
from manylora.server.generation.chat_schemas import ChatView
from manylora.server.generation.prompts import bad_word_tokens
from manylora.server.generation.schemas import CompletionView

pytestmark = pytest.mark.anyio
CHAT = {"messages": [{"role": "user", "content": "When are you open?"}]}
OPEN_CHAT = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "We are"}]}


async def post(client: Client, route: str, **fields: Any) -> Any:
    answer = await client.post(f"/v1/{route}", json={"model": BASE, **fields})
    assert answer.status_code == 200, answer.text
    return answer


async def streamed(client: Client, route: str, **fields: Any) -> list[dict[str, Any]]:
    text = (await post(client, route, stream=True, **fields)).text
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


async def engine_request(api: Api, client: Client, route: str, **fields: Any) -> GenerationRequest:
    await post(client, route, **fields)
    return api.engine.requests[-1]


def said() -> list[int]:
    """Tokens of what the engine writes, and its end."""
    return [
        *demo_tokenizer().encode(BASE_TEXT, add_special_tokens=False),
        min(demo_tokenizer().eos_token_ids),
    ]


async def test_fields_of_sampling_reach_the_engine(api: Api, acme: Client) -> None:
    same: dict[str, Any] = {
        "min_tokens": 4,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    for route, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
        sent = same | {"allowed_token_ids": [5, 7, 9], "bad_words": ["open"]}
        params = (await engine_request(api, acme, route, **body, **sent, max_tokens=40)).params
        assert {name: getattr(params, name) for name in same} == same
        assert (params.allowed_token_ids, params.bad_words) == (
            (5, 7, 9),
            bad_word_tokens(["open"], demo_tokenizer()),
        )
        plain = (await engine_request(api, acme, route, **body, max_tokens=40)).params
        assert plain == SamplingParams(max_tokens=40, temperature=1.0)


def test_bad_words_count_at_the_start_and_after_a_space() -> None:
    tokenizer = demo_tokenizer()

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    open_ids, spaced = ids("open"), ids(" open")
    expected = (
        (open_ids, spaced)
        if len(spaced) == len(open_ids) and spaced[0] != open_ids[0]
        else (open_ids,)
    )
    assert (
        bad_word_tokens(["open"], tokenizer)
        == bad_word_tokens([" open", "open"], tokenizer)
        == expected
    )
    marks = [mark for mark in '"{([' if len(ids(mark)) == len(ids(f" {mark}")) == 1]
    assert marks  # of these both forms count
    assert bad_word_tokens(marks[:1], tokenizer) == (ids(marks[0]), ids(f" {marks[0]}"))
    with pytest.raises(InvalidRequestError, match="bad_words"):
        bad_word_tokens(["  "], tokenizer)


async def test_token_ids_of_completions_stand_in_each_choice(acme: Client) -> None:
    prompts = ["one", "two two"]
    answer = await post(
        acme, "completions", prompt=prompts, n=2, max_tokens=50, return_token_ids=True
    )
    body = CompletionView.model_validate_json(answer.content)
    asked = [demo_tokenizer().encode(prompt) for prompt in prompts for _ in range(2)]
    assert [choice.prompt_token_ids for choice in body.choices] == asked
    assert body.choices[0].token_ids == body.choices[2].token_ids == said()
    assert (
        sum(len(choice.token_ids or ()) for choice in body.choices) == body.usage.completion_tokens
    )
    plain = (await post(acme, "completions", prompt=prompts)).json()
    assert set(plain["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


async def test_token_ids_of_a_stopped_answer_are_those_that_are_billed(acme: Client) -> None:
    body = (
        await post(acme, "completions", prompt="x", stop=[" plain"], return_token_ids=True)
    ).json()
    assert len(body["choices"][0]["token_ids"]) == body["usage"]["completion_tokens"] < len(said())


async def test_the_best_of_several_candidates_keeps_its_own_token_ids(
    api: Api, acme: Client
) -> None:
    api.engine.logprob = lambda request: -0.1 if request.choice_index == 2 else -0.9
    body = (
        await post(acme, "completions", prompt="x", best_of=3, max_tokens=60, return_token_ids=True)
    ).json()
    (choice,) = body["choices"]
    assert choice["text"] == f"{BASE_TEXT} choice 2"
    assert demo_tokenizer().decode(choice["token_ids"]) == choice["text"]


async def test_a_stream_of_completions_has_the_prompts_ids_in_each_choices_first_chunk(
    acme: Client,
) -> None:
    chunks = await streamed(
        acme, "completions", prompt=["one", "two"], n=2, max_tokens=50, return_token_ids=True
    )
    firsts: dict[int, Any] = {}
    tokens: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        is_first = choice["index"] not in firsts
        assert ("prompt_token_ids" in choice) == is_first
        if is_first:
            firsts[choice["index"]] = choice["prompt_token_ids"]
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert firsts == {
        index: demo_tokenizer().encode(["one", "two"][index // 2]) for index in range(4)
    }
    assert tokens[0] == tokens[2] == said()


async def test_a_chat_has_the_prompts_ids_beside_its_choices(api: Api, acme: Client) -> None:
    answer = await post(acme, "chat/completions", **CHAT, n=2, return_token_ids=True)
    body = ChatView.model_validate_json(answer.content)
    assert body.prompt_token_ids == api.engine.requests[-1].prompt_token_ids
    assert body.choices[0].token_ids == said()
    chunks = await streamed(acme, "chat/completions", **CHAT, return_token_ids=True)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        body.prompt_token_ids,
        *[None] * (len(chunks) - 1),
    ]
    assert [
        token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())
    ] == said()
    assert "prompt_token_ids" not in (await post(acme, "chat/completions", **CHAT)).json()


@pytest.mark.parametrize("num_top", [0, 1, 3])
async def test_prompt_logprobs_are_by_id_and_the_first_is_null(acme: Client, num_top: int) -> None:
    prompt = demo_tokenizer().encode("we are open")
    answer = await post(acme, "completions", prompt=prompt, n=2, prompt_logprobs=num_top)
    body = CompletionView.model_validate_json(answer.content)
    for choice in body.choices:
        assert choice.prompt_logprobs is not None
        first, *others = choice.prompt_logprobs
        assert first is None
        assert choice.logprobs is None
        for token, place in zip(prompt[1:], others, strict=True):
            assert place is not None
            assert len(place) == max(1, num_top)
            assert next(iter(place)) == str(token)
            own = place[str(token)]
            assert (own.rank, own.decoded_token) == (1, demo_tokenizer().token_text(token))
            assert own.logprob == -0.25
            assert {entry.logprob for entry in place.values()} <= {-0.25, -9999.0}
    chat = ChatView.model_validate_json(
        (await post(acme, "chat/completions", **CHAT, prompt_logprobs=num_top)).content
    )
    assert chat.prompt_logprobs is not None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


async def test_prompt_logprobs_and_echo_each_show_what_they_were_asked_for(
    api: Api, acme: Client
) -> None:
    fields: dict[str, Any] = {
        "prompt": "we are open",
        "echo": True,
        "logprobs": 1,
        "prompt_logprobs": 3,
    }
    choice = (await post(acme, "completions", **fields)).json()["choices"][0]
    assert api.engine.requests[-1].params.prompt_logprobs == 3
    assert {len(place) for place in choice["prompt_logprobs"][1:]} == {3}
    assert {len(top) for top in choice["logprobs"]["top_logprobs"] if top} == {1}
    without = (await post(acme, "completions", **fields | {"echo": False})).json()["choices"][0]
    assert len(without["logprobs"]["tokens"]) == len(said())
    assert without["prompt_logprobs"] == choice["prompt_logprobs"]


async def test_tokens_can_be_written_as_ids(acme: Client) -> None:
    shown = [f"token_id:{token}" for token in said()]
    logprobs = (
        await post(acme, "completions", prompt="x", logprobs=1, return_tokens_as_token_ids=True)
    ).json()
    assert logprobs["choices"][0]["logprobs"]["tokens"] == shown
    assert [list(top) for top in logprobs["choices"][0]["logprobs"]["top_logprobs"]] == [
        [label] for label in shown
    ]
    chat = await post(
        acme,
        "chat/completions",
        **CHAT,
        logprobs=True,
        top_logprobs=1,
        return_tokens_as_token_ids=True,
    )
    content = chat.json()["choices"][0]["logprobs"]["content"]
    assert (
        [entry["token"] for entry in content]
        == [entry["top_logprobs"][0]["token"] for entry in content]
        == shown
    )
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == BASE_TEXT


async def test_the_end_of_a_long_prompt_is_kept(api: Api, acme: Client) -> None:
    tokenizer, context = demo_tokenizer(), api.services.ready.max_model_len
    text = " ".join(["we are open"] * 100)
    whole = tokenizer.encode(text)
    assert len(whole) > context
    for route, fields in (("completions", {"prompt": text}), ("completions", {"prompt": whole})):
        for wanted, num_kept in ((-1, context - 20), (7, 7), (1, 1), (context - 20, context - 20)):
            sent = fields | {"truncate_prompt_tokens": wanted, "max_tokens": 20}
            request = await engine_request(api, acme, route, **sent)
            assert request.prompt_token_ids == whole[-num_kept:]
    chat = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": -1}
    assert (
        len((await engine_request(api, acme, "chat/completions", **chat)).prompt_token_ids)
        == context - 1
    )
    short = await engine_request(api, acme, "completions", prompt="x", truncate_prompt_tokens=50)
    assert short.prompt_token_ids == tokenizer.encode("x")
    echoed = await post(
        acme, "completions", prompt=text, truncate_prompt_tokens=3, echo=True, max_tokens=0
    )
    assert echoed.json()["choices"][0]["text"] == tokenizer.decode(whole[-3:])


async def test_the_start_token_is_added_where_it_is_asked_for(api: Api, acme: Client) -> None:
    tokenizer = demo_tokenizer()
    bare, started = tokenizer.encode("x", add_special_tokens=False), tokenizer.encode("x")
    assert started != bare
    for asked, expected in ((True, started), (False, bare)):
        request = await engine_request(
            api, acme, "completions", prompt="x", add_special_tokens=asked
        )
        assert request.prompt_token_ids == expected
        body = {"model": BASE, "prompt": "x", "add_special_tokens": asked}
        assert (await acme.post("/tokenize", json=body)).json()["tokens"] == expected
    plain = (await engine_request(api, acme, "chat/completions", **CHAT)).prompt_token_ids
    added = started[: len(started) - len(bare)]
    request = await engine_request(api, acme, "chat/completions", **CHAT, add_special_tokens=True)
    assert request.prompt_token_ids == [*added, *plain]


@pytest.mark.parametrize(
    ("fields", "begins", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
    ids=str,
)
async def test_a_chat_ends_where_it_is_asked_to(
    api: Api, acme: Client, fields: dict[str, Any], begins: bool, continues: bool
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(DEMO_MODEL)
    options: dict[str, Any] = {"add_generation_prompt": begins, "continue_final_message": continues}
    text = str(reference.apply_chat_template(OPEN_CHAT["messages"], tokenize=False, **options))
    expected = reference.encode(text, add_special_tokens=False)
    assert text.endswith("We are") == continues
    request = await engine_request(api, acme, "chat/completions", **OPEN_CHAT, **fields)
    assert request.prompt_token_ids == expected
    tokenized = await acme.post("/tokenize", json={"model": BASE, **OPEN_CHAT, **fields})
    assert tokenized.json()["tokens"] == expected


async def test_an_echoed_message_begins_the_answer(acme: Client) -> None:
    fields = {**OPEN_CHAT, "continue_final_message": True, "echo": True}
    message = (await post(acme, "chat/completions", **fields)).json()["choices"][0]["message"]
    assert message["content"] == f"We are{BASE_TEXT}"
    chunks = await streamed(acme, "chat/completions", **fields)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "We are"}
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        == f"We are{BASE_TEXT}"
    )
    of_user = (await post(acme, "chat/completions", **CHAT, echo=True)).json()["choices"][0][
        "message"
    ]
    assert of_user["content"] == BASE_TEXT


async def test_what_is_shown_of_the_end_is_asked_for(acme: Client) -> None:
    fields: dict[str, Any] = {"prompt": "x", "stop": [" plain"], "include_stop_str_in_output": True}
    choice = (await post(acme, "completions", **fields)).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("the base speaks plain", " plain")
    eos = demo_tokenizer().token_text(said()[-1])
    fields = {"prompt": "x", "skip_special_tokens": False, "include_stop_str_in_output": True}
    assert (await post(acme, "completions", **fields)).json()["choices"][0][
        "text"
    ] == BASE_TEXT + eos
