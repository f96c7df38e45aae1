"""Events and bodies of responses, each checked by the types of OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from answer_parts import choice_of, meter_of, step_of
from manylora.errors import EngineUnavailableError, ManyloraError, RateLimitError, RequestError
from manylora.server.generation.openai_format import AnswerPart, joined
from manylora.server.responses.schemas import ResponsesBody
from manylora.server.responses.writer import ResponseWriter
from manylora.server.tools.reading import CallPiece

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = [AnswerPart(text="Arr"), AnswerPart(text=""), AnswerPart(text="!", finish_reason="stop")]
LOGPROB = {"token": "Arr", "bytes": [65, 114, 114], "logprob": -0.5, "top_logprobs": []}
CALLS = [
    AnswerPart(text="", reasoning="Look "),
    AnswerPart(text="", reasoning="it up."),
    AnswerPart(text="One moment."),
    AnswerPart(text="", calls=(CallPiece(index=0, id="call_1", name="find", arguments=""),)),
    AnswerPart(text="", calls=(CallPiece(index=0, id=None, name=None, arguments='{"x":'),)),
    AnswerPart(
        text="",
        calls=(
            CallPiece(index=0, id=None, name=None, arguments=" 1}"),
            CallPiece(index=1, id="call_2", name="find", arguments="{}"),
        ),
        finish_reason="tool_calls",
    ),
]


def writer(**fields: Any) -> ResponseWriter:
    tool = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True}
    body = ResponsesBody.model_validate({"model": "demo", "input": "x", "tools": [tool], **fields})
    return ResponseWriter(body, meter_of(), {"created": 1_800_000_000, "model": "demo"})


def events(
    parts: Sequence[AnswerPart], error: ManyloraError | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """All events of a stream; each is checked."""
    writing = writer(**fields)
    raw = b"".join(writing.events(step_of(), part) for part in parts)
    raw += writing.failure(error) if error else writing.closing()
    told = []
    for number, block in enumerate(raw.decode().removesuffix("\n\n").split("\n\n")):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        told.append(event)
    return told


def kinds(told: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in told]


def test_a_text_is_one_item_with_one_part() -> None:
    told = events(TEXT)
    assert kinds(told) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert [event["delta"] for event in told if "delta" in event] == ["Arr", "!"]
    assert told[2]["item"]["content"] == []
    assert told[3]["part"]["text"] == ""
    (item,) = told[-1]["response"]["output"]
    assert (item["content"][0]["text"], item["status"]) == ("Arr!", "completed")
    assert item == told[-2]["item"]
    assert {event["item_id"] for event in told if "item_id" in event} == {item["id"]}


def test_reasoning_text_and_calls_are_items_in_order() -> None:
    told = events(CALLS)
    assert kinds(told)[2:] == [
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
        ),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *(
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ),
        "completed",
    ]
    output = told[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [event["output_index"] for event in told if event["type"].endswith("item.added")] == [
        0,
        1,
        2,
        3,
    ]
    assert output[0]["content"][0]["text"] == "Look it up."
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]] == [
        ("call_1", "find", '{"x": 1}'),
        ("call_2", "find", "{}"),
    ]
    assert [
        item for event in told if (item := event.get("item")) and item["status"] == "completed"
    ] == output


@pytest.mark.parametrize("parts", [TEXT, CALLS, [AnswerPart(text="", finish_reason="stop")]])
def test_a_whole_answer_has_the_items_of_the_stream(parts: list[AnswerPart]) -> None:
    calls = [
        CallPiece(index=0, id="call_1", name="find", arguments='{"x": 1}'),
        CallPiece(index=1, id="call_2", name="find", arguments="{}"),
    ]
    reasoning = "".join(part.reasoning for part in parts)
    whole = replace(
        joined(parts), reasoning=reasoning, calls=tuple(calls if parts is CALLS else [])
    )
    body: dict[str, Any] = orjson.loads(orjson.dumps(writer().whole([(choice_of(), whole)])))
    Response.model_validate(body, strict=True)
    streamed = events(parts)[-1]["response"]
    for answer in (body, streamed):
        for item in answer["output"]:
            item.pop("id")
        answer.pop("id")
        answer.pop("completed_at")
    assert body == streamed


def test_an_answer_without_a_text_has_an_empty_one() -> None:
    told = events([AnswerPart(text=""), AnswerPart(text="", finish_reason="stop")])
    (item,) = told[-1]["response"]["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
    assert kinds(told)[2:] == [
        *(
            "output_item.added",
            "content_part.added",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ),
        "completed",
    ]


@pytest.mark.parametrize("index", [1, 5])
def test_an_answer_that_is_cut_is_incomplete_as_is_its_last_item(index: int) -> None:
    cut = [*CALLS[:index], replace(CALLS[index], finish_reason="length")]
    told = events(cut)
    response = told[-1]["response"]
    assert (told[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    *others, last = [item["status"] for item in response["output"]]
    assert last == told[-2]["item"]["status"] == "incomplete"
    assert set(others) <= {"completed"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineUnavailableError("The engine died under this request."), "server_error"),
        (RateLimitError("Too many tokens."), "rate_limit_exceeded"),
        (RequestError("No token fits.", code="grammar_dead_end"), "invalid_prompt"),
    ],
)
def test_an_error_ends_the_stream_with_what_there_is(error: ManyloraError, code: str) -> None:
    told = events(CALLS[:3], error)
    response = told[-1]["response"]
    assert (told[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {
        "code": code,
        "message": error.message,
        "param": None,
        "type": error.code,
    }
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["usage"] is None


def test_log_probabilities_stand_with_the_text_that_they_made() -> None:
    parts = [
        AnswerPart(text="", logprobs={"content": [LOGPROB]}),
        AnswerPart(text="Arr", logprobs={"content": [LOGPROB, LOGPROB]}),
        AnswerPart(text="", finish_reason="stop", logprobs={"content": [LOGPROB]}),
    ]
    told = events(parts, include=["message.output_text.logprobs"])
    assert [
        len(event["logprobs"]) for event in told if event["type"] == "response.output_text.delta"
    ] == [3]
    assert told[-1]["response"]["output"][0]["content"][0]["logprobs"] == [LOGPROB] * 4


def test_what_was_asked_is_repeated_and_nothing_is_stored() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"job": "1"},
        "user": "ann",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_logprobs": 2,
        "parallel_tool_calls": False,
        "tool_choice": {"type": "function", "name": "find"},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    given = {
        "store": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "service_tier": "flex",
        **asked,
    }
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    response = events(TEXT, text={"format": schema}, **given)[-1]["response"]
    assert {name: response[name] for name in asked} == asked
    assert response["text"] == {"format": schema}
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert (response["store"], response["background"], response["truncation"]) == (
        False,
        False,
        "disabled",
    )
    assert response["tools"][0]["name"] == "find"
