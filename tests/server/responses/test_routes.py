"""POST /v1/responses, by OpenAI's own client where it can send what is tested."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from api_server import BASE, Api, Client, eventually
from fake_engine import BASE_TEXT, demo_tokenizer
from manylora.engine.request import ErrorInfo
from manylora.server.responses.schemas import ResponseView

pytestmark = pytest.mark.anyio
QUESTION = "When are you open?"


def prompt_of(*messages: tuple[str, str]) -> list[int]:
    """Token ids of a chat."""
    return demo_tokenizer().chat_prompt(
        [{"role": role, "content": content} for role, content in messages]
    )


async def respond(client: Client, **fields: Any) -> Any:
    return await client.post("/v1/responses", json={"model": BASE, "input": QUESTION, **fields})


async def error_of(client: Client, **fields: Any) -> tuple[str, str, str]:
    answer = await respond(client, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["param"], error["message"]


async def test_a_response_is_the_answer_of_the_same_chat(api: Api, acme: Client) -> None:
    answer = await respond(acme)
    assert answer.status_code == 200, answer.text
    body = ResponseView.model_validate_json(answer.content)
    (message,) = body.output
    assert message.type == "message"
    assert (body.status, body.model) == ("completed", BASE)
    assert body.usage["input_tokens"] == len(prompt_of(("user", QUESTION)))
    assert api.engine.requests[0].prompt_token_ids == prompt_of(("user", QUESTION))
    chat = await acme.post(
        "/v1/chat/completions",
        json={"model": BASE, "messages": [{"role": "user", "content": QUESTION}]},
    )
    assert chat.json()["choices"][0]["message"]["content"] == message.content[0].text == BASE_TEXT
    assert api.engine.requests[0].params == api.engine.requests[1].params
    events = (await api.admin.get("/v1/usage/events")).json()["data"]
    assert sorted(event["endpoint"] for event in events) == [
        "/v1/chat/completions",
        "/v1/responses",
    ]
    assert len({(event["prompt_tokens"], event["completion_tokens"]) for event in events}) == 1


async def test_items_become_messages(api: Api, acme: Client) -> None:
    items = [
        {
            "role": "developer",
            "content": [
                {"type": "input_text", "text": "Be "},
                {"type": "input_text", "text": "kind."},
            ],
        },
        {"type": "message", "role": "user", "content": "Hi", "status": "completed", "id": "msg_0"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "phase": "final_answer",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}
            ],
        },
        {"role": "user", "content": QUESTION},
    ]
    assert (await respond(acme, input=items, instructions="Answer.")).status_code == 200
    told = [
        ("system", "Answer."),
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", QUESTION),
    ]
    assert api.engine.requests[0].prompt_token_ids == prompt_of(*told)


async def test_what_the_client_gets_can_be_sent_back(api: Api, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=BASE, input=QUESTION)
    assert first.output_text == BASE_TEXT
    history: list[Any] = [
        {"role": "user", "content": QUESTION},
        *first.output,
        {"role": "user", "content": "And?"},
    ]
    second = await client.responses.create(
        model=BASE, input=history, store=True, include=["reasoning.encrypted_content"]
    )
    assert second.to_dict()["store"] is False
    told = prompt_of(("user", QUESTION), ("assistant", BASE_TEXT), ("user", "And?"))
    assert api.engine.requests[1].prompt_token_ids == told


async def test_a_stream_gives_the_client_the_same_response(
    api: Api, client: openai.AsyncOpenAI
) -> None:
    text = ""
    async with client.responses.stream(model=BASE, input=QUESTION, top_logprobs=2) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
        final = await stream.get_final_response()
    assert final.output_text == text == BASE_TEXT
    assert final.usage is not None
    (message,) = final.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert (
        len(part.logprobs)
        == final.usage.output_tokens
        == (await api.usage_totals())["completion_tokens"]
    )
    assert len(part.logprobs[0].top_logprobs) == 2


async def test_an_answer_that_its_limit_cuts_is_incomplete(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model=BASE, input=QUESTION, max_output_tokens=2)
    assert whole.incomplete_details is not None
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    kinds = [
        event.type
        async for event in await client.responses.create(
            model=BASE, input=QUESTION, max_output_tokens=2, stream=True
        )
    ]
    assert kinds[-1] == "response.incomplete"


async def test_sampling_parameters_reach_the_engine(api: Api, acme: Client) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "seed": 3,
        "presence_penalty": 1,
        "ignore_eos": True,
    }
    assert (await respond(acme, **given, max_output_tokens=9)).status_code == 200
    params = api.engine.requests[0].params
    assert {name: getattr(params, name) for name in given} == given
    assert params.max_tokens == 9


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send all items"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "send all items"),
        ({"background": True}, "background", "POST /v1/batches"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "send the text in instructions"),
        ({"truncation": "auto"}, "truncation", "does not support truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "got web_search. The model"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools.0", "got custom"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "send all items"),
        ({"input": [{"type": "local_shell_call"}]}, "input.0", "got local_shell_call"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            *("input", "got input_image. The model reads and writes text only"),
        ),
        ({"text": {"verbosity": "low"}}, "verbosity", "does not support verbosity"),
        ({"n": 2}, "n", "n is not a parameter"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    acme: Client, fields: Any, param: str, says: str
) -> None:
    code, named, message = await error_of(acme, **fields)
    assert (code, named) == ("unsupported_parameter", param)
    assert says in message


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": []}, "invalid_value", "input"),
        ({"input": 5}, "invalid_value", "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "invalid_value",
            "input",
        ),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input.0.message.role"),
        ({"include": ["file_search_call.results"]}, "invalid_value", "include.0"),
        ({"tool_choice": {"type": "mcp"}}, "invalid_value", "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        ({"model": None}, "missing_required_parameter", "model"),
        ({"input": "x " * 300}, "context_length_exceeded", "input"),
        ({"max_output_tokens": 1000}, "context_length_exceeded", "input"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"top_logprobs": 99}, "invalid_value", "top_logprobs"),
    ],
)
async def test_what_is_wrong_is_named_as_the_client_knows_it(
    acme: Client, fields: Any, code: str, param: str
) -> None:
    assert (await error_of(acme, **fields))[:2] == (code, param)


async def test_an_unknown_model_is_the_clients_own_exception(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.responses.create(model="nobody", input="x")
    assert missing.value.code == "model_not_found"


async def test_stored_responses_are_not_served(client: openai.AsyncOpenAI) -> None:
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.BadRequestError, match="stored responses"):
            await call("resp_1")


async def test_an_error_before_the_first_token_is_a_status_and_later_an_event(
    api: Api, acme: Client
) -> None:
    api.engine.refusal = ErrorInfo(kind="capacity", code="overloaded", message="No room.")
    assert (await respond(acme, stream=True)).status_code == 503
    api.engine.refusal_after = 2
    answer = await respond(acme, stream=True)
    assert answer.status_code == 200
    assert 'event: response.failed\ndata: {"type":"response.failed"' in answer.text
    assert '"message":"No room."' in answer.text
    assert (await api.usage_totals())["completion_tokens"] == answer.text.count(
        '"response.output_text.delta",'
    )


async def test_a_client_that_leaves_a_stream_pays_for_what_was_computed(
    api: Api, client: openai.AsyncOpenAI
) -> None:
    api.engine.token_s = 0.005
    asked: dict[str, Any] = {"model": BASE, "input": QUESTION, "max_output_tokens": 150}
    stream = await client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True})
    seen = 0
    async for event in stream:
        seen += event.type == "response.output_text.delta"
        if seen == 3:
            break
    await stream.close()
    await eventually(lambda: not api.engine.running and not api.services.drain.num_running)
    (event,) = (await api.admin.get("/v1/usage/events")).json()["data"]
    (work,) = api.engine.work.values()
    assert (event["status"], event["endpoint"]) == ("aborted", "/v1/responses")
    assert 3 <= event["completion_tokens"] == work.output_tokens < 150


async def test_a_long_input_is_translated_in_a_thread_and_in_order(api: Api, acme: Client) -> None:
    items = [{"role": "user", "content": ""} for _ in range(600)]
    asked = [respond(acme, input=[*items, {"role": "user", "content": "x"}]) for _ in range(2)]
    answers = await asyncio.gather(*asked)
    assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
