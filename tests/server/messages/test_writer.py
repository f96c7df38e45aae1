"""Events and bodies of messages, each checked by the types of Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import orjson
import pytest
from pydantic import TypeAdapter

from answer_parts import choice_of, meter_of, step_of
from manylora.errors import EngineError, EngineUnavailableError, ManyloraError
from manylora.server.generation.openai_format import AnswerPart
from manylora.server.messages.writer import MessageWriter
from manylora.server.tools.reading import CallPiece

TEXT = [AnswerPart(text="Arr"), AnswerPart(text=""), AnswerPart(text="!", finish_reason="stop")]
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
WHOLE = AnswerPart(
    text="One moment.",
    reasoning="Look it up.",
    calls=(
        CallPiece(index=0, id="call_1", name="find", arguments='{"x": 1}'),
        CallPiece(index=1, id="call_2", name="find", arguments="{}"),
    ),
    finish_reason="tool_calls",
)
USAGE = {
    "input_tokens": 3,
    "cache_read_input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "output_tokens": 3,
}


@cache
def event_type() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent  # takes a second

    return TypeAdapter(RawMessageStreamEvent)


def writer() -> MessageWriter:
    return MessageWriter(meter_of(), {"created": 1_800_000_000, "model": "demo"})


def events(parts: Sequence[AnswerPart], error: ManyloraError | None = None) -> list[dict[str, Any]]:
    """All events of a stream; each that Anthropic has a type for is checked."""
    writing = writer()
    raw = b"".join(writing.events(step_of(), part) for part in parts)
    raw += writing.failure(error) if error else writing.closing()
    told = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            event_type().validate_json(data.removeprefix("data: "), strict=True)
        told.append(event)
    return told


def whole(part: AnswerPart) -> dict[str, Any]:
    """The body of a whole answer."""
    body: dict[str, Any] = json.loads(orjson.dumps(writer().whole([(choice_of(), part)])))
    return body


def test_a_text_is_one_block() -> None:
    start, ping, opened, *deltas, closed, delta, stop = events(TEXT)
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    assert start["message"]["content"] == []
    assert start["message"]["stop_reason"] is None
    assert USAGE.items() <= start["message"]["usage"].items()
    assert (opened["index"], opened["content_block"]["text"]) == (0, "")
    assert [each["delta"] for each in deltas] == [
        {"type": "text_delta", "text": text} for text in ("Arr", "!")
    ]
    assert (closed["type"], closed["index"]) == ("content_block_stop", 0)
    assert (delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]) == ("end_turn", None)
    assert USAGE.items() <= delta["usage"].items()


def test_thinking_text_and_calls_are_blocks_in_order() -> None:
    told = events(CALLS)
    opened = [event["content_block"] for event in told if event["type"] == "content_block_start"]
    assert [block["type"] for block in opened] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block["id"], block["name"], block["input"]) for block in opened[2:]] == [
        ("call_1", "find", {}),
        ("call_2", "find", {}),
    ]
    indices = [event["index"] for event in told if "index" in event]
    assert indices == sorted(indices)
    pieces = [event["delta"] for event in told if event["type"] == "content_block_delta"]
    assert [next(iter(piece.values())) for piece in pieces] == [
        *("thinking_delta", "thinking_delta", "text_delta"),
        *("input_json_delta", "input_json_delta", "input_json_delta"),
    ]
    assert "".join(piece["partial_json"] for piece in pieces[3:5]) == '{"x": 1}'
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_whole_message_has_the_same_blocks() -> None:
    from anthropic.types import Message  # takes a second

    body = whole(WHOLE)
    Message.model_validate(body, strict=True)
    assert [block["type"] for block in body["content"]] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert [block.get("input") for block in body["content"][2:]] == [{"x": 1}, {}]
    assert body["stop_reason"] == "tool_use"
    assert USAGE.items() <= body["usage"].items()


@pytest.mark.parametrize(
    "arguments",
    ['{"x": ', "[1]", "{", '{"x": NaN}', '{"x": ' + "[" * 200_000 + "]" * 200_000 + "}"],
)
def test_a_call_that_was_cut_is_not_in_a_whole_message(arguments: str) -> None:
    cut = CallPiece(index=0, id="call_1", name="find", arguments=arguments)
    parts = [
        replace(WHOLE, calls=(cut,), finish_reason=reason) for reason in ("length", "tool_calls")
    ]
    for part, stop_reason in zip(parts, ("max_tokens", "end_turn"), strict=True):
        body = whole(part)
        assert [block["type"] for block in body["content"]] == ["thinking", "text"]
        assert body["stop_reason"] == events([part])[-2]["delta"]["stop_reason"] == stop_reason


@pytest.mark.parametrize(
    "number", ["1e400", "123456789012345678901234567890", "1" * 5000, '"\\ud800"']
)
def test_arguments_are_sent_as_the_model_wrote_them(number: str) -> None:
    call = CallPiece(index=0, id="call_1", name="find", arguments=f'{{"x": {number}}}')
    answer = writer().whole([(choice_of(), replace(WHOLE, calls=(call,)))])
    assert f'"input":{{"x": {number}}}' in orjson.dumps(answer).decode()
    assert answer["stop_reason"] == "tool_use"


def test_a_stop_sequence_is_named_and_a_stop_token_is_not() -> None:
    for stop_reason, expected in (
        ("END", ("stop_sequence", "END")),
        (7, ("end_turn", None)),
        (None, ("end_turn", None)),
    ):
        delta = events([AnswerPart(text="x", finish_reason="stop", stop_reason=stop_reason)])[-2][
            "delta"
        ]
        assert (delta["stop_reason"], delta["stop_sequence"]) == expected
    inside_a_call = whole(AnswerPart(text="x", finish_reason="length", stop_reason="END"))
    assert (inside_a_call["stop_reason"], inside_a_call["stop_sequence"]) == (
        "stop_sequence",
        "END",
    )


def test_an_answer_without_a_text_has_an_empty_one_and_one_that_was_cut_has_none() -> None:
    told = events([AnswerPart(text="", finish_reason="stop")])
    assert [event["type"] for event in told[2:]] == [
        *("content_block_start", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert whole(AnswerPart(text="", finish_reason="stop"))["content"] == [
        {"type": "text", "text": ""}
    ]
    told = events([AnswerPart(text=""), AnswerPart(text="", finish_reason="length")])
    assert [event["type"] for event in told[2:]] == ["message_delta", "message_stop"]
    body = whole(AnswerPart(text="", finish_reason="length"))
    assert (body["content"], body["stop_reason"]) == ([], "max_tokens")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineUnavailableError("The engine died."), "overloaded_error"),
        (EngineError("secret"), "api_error"),
    ],
)
def test_an_error_ends_the_stream_in_anthropics_shape(error: ManyloraError, kind: str) -> None:
    last = events(CALLS[:3], error)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    assert set(last["error"]) == {"type", "message"}
    assert "secret" not in last["error"]["message"]
