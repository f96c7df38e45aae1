"""Writes a message: its blocks whole, or as they grow in a stream."""

from __future__ import annotations

import json
import secrets

import orjson

from manylora.errors import ManyloraError
from manylora.server.errors import error_body
from manylora.server.generation.item_writer import Item, ItemWriter
from manylora.server.generation.meter import Meter
from manylora.server.generation.openai_format import JsonObject
from manylora.server.http import sse
from manylora.server.messages.errors import ANTHROPIC

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageWriter(ItemWriter):
    """One message.

    Args:
        meter: The tokens delivered so far.
        head: `model`.
    """

    def __init__(self, meter: Meter, head: JsonObject) -> None:
        super().__init__(meter)
        self._id = f"msg_{secrets.token_hex(16)}"
        self._model = head["model"]

    def answer(self) -> JsonObject:
        """The message. A call that was cut is not in it: nobody could make it."""
        blocks = [
            _block(item) for item in self.items if item.kind != "call" or _input(item) is not None
        ]
        return self._message(blocks, **self._stop())

    def begun(self) -> bytes:
        """The message as it is before its first block; then a ping, as Anthropic sends it."""
        message = self._message([], stop_reason=None, stop_sequence=None)
        return _event("message_start", message=message) + _event("ping")

    def opened(self, item: Item) -> bytes:
        """The new block, empty."""
        return _event("content_block_start", index=item.index, content_block=_block(item))

    def grown(self, item: Item, text: str, logprobs: list[object]) -> bytes:
        """The next characters."""
        del logprobs  # no part of this API
        kind, name = _DELTAS[item.kind]
        return _event("content_block_delta", index=item.index, delta={"type": kind, name: text})

    def closed(self, item: Item) -> bytes:
        """The end of a block."""
        return _event("content_block_stop", index=item.index)

    def ended(self) -> bytes:
        """Why it ended, and what is billed."""
        delta = {**self._stop(), "stop_details": None, "container": None}
        return _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def failure(self, error: ManyloraError) -> bytes:
        """An event like the body of an error."""
        return ANTHROPIC.event(error_body(error))

    def _message(self, blocks: list[JsonObject], **stop: object) -> JsonObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            **stop,
            "stop_details": None,
            "container": None,
            "usage": {
                **self._usage(),
                "cache_creation": None,
                "service_tier": "standard",
                "inference_geo": None,
            },
        }

    def _stop(self) -> JsonObject:
        end = self.end
        if end.finish_reason == "tool_calls":
            can_call = any(item.kind == "call" and _input(item) is not None for item in self.items)
            return {"stop_reason": "tool_use" if can_call else "end_turn", "stop_sequence": None}
        if isinstance(end.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        return {
            "stop_reason": "max_tokens" if end.finish_reason == "length" else "end_turn",
            "stop_sequence": None,
        }

    def _usage(self) -> JsonObject:
        usage = self.meter.usage
        num_cached = usage.prompt_tokens_details.cached_tokens
        return {
            "input_tokens": usage.prompt_tokens - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {
                "thinking_tokens": usage.completion_tokens_details.reasoning_tokens
            },
            "server_tool_use": None,
        }


def _event(kind: str, **fields: object) -> bytes:
    return sse.event({"type": kind, **fields}, kind)


def _block(item: Item) -> JsonObject:
    if item.call is not None:
        return {
            "type": "tool_use",
            "id": item.call.id,
            "name": item.call.name,
            "input": _input(item),
        }
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    return {"type": "text", "text": item.text}


def _input(item: Item) -> orjson.Fragment | None:
    """The arguments of a call as the model wrote them, numbers of any size too; None if they were cut."""
    text = item.text or "{}"
    try:
        given = json.loads(
            text, parse_int=str, parse_float=str, parse_constant=orjson.loads
        )  # which refuses NaN
    except (ValueError, RecursionError):
        return None
    return orjson.Fragment(text) if isinstance(given, dict) else None
