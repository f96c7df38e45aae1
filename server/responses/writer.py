"""Writes a response: its items whole, or as they grow in a stream of numbered events."""

from __future__ import annotations

import json
import secrets
import time

import orjson

from manylora.errors import ManyloraError, RateLimitError, RequestError
from manylora.server.errors import error_body
from manylora.server.generation.item_writer import Item, ItemWriter
from manylora.server.generation.meter import Meter
from manylora.server.generation.openai_format import JsonObject
from manylora.server.http import sse
from manylora.server.responses.schemas import ResponsesBody

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_TEXT_EVENTS = {"reasoning": "response.reasoning_text", "text": "response.output_text"}
_FIXED: JsonObject = {
    **dict.fromkeys(
        (
            "error",
            "incomplete_details",
            "usage",
            "previous_response_id",
            "max_tool_calls",
            "safety_identifier",
            "prompt_cache_key",
        )
    ),
    "store": False,
    "background": False,
    "service_tier": "default",
    "truncation": "disabled",
}
"""Fields of every response, unless it says otherwise."""
_REPEATED = (
    "instructions",
    "parallel_tool_calls",
    "metadata",
    "user",
    "max_output_tokens",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields of the request that a response repeats as they are."""
_ARGUMENTS = "response.function_call_arguments"


class ResponseWriter(ItemWriter):
    """One response.

    Args:
        body: The request, of which the response repeats much.
        meter: The tokens delivered so far.
        head: `created` and `model`.
    """

    def __init__(self, body: ResponsesBody, meter: Meter, head: JsonObject) -> None:
        super().__init__(meter)
        self._body = body
        self._head = head
        self._id = f"resp_{secrets.token_hex(16)}"
        self._number = 0
        tools = [tool.model_dump() for tool in body.tools]
        repeated = {
            "tools": tools,
            "tool_choice": body.tool_choice,
            "text": {"format": body.text.format},
        }
        self._schemas = {
            name: orjson.Fragment(json.dumps(value)) for name, value in repeated.items()
        }
        """They may hold integers of any size, which orjson does not write."""

    def answer(self) -> JsonObject:
        """The response, `completed` or `incomplete`."""
        status = self._status()
        last = len(self.items) - 1
        items = [_item(item, status if item.index == last else "completed") for item in self.items]
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, items, incomplete_details=details, usage=self._usage())

    def begun(self) -> bytes:
        """Events with the response as it is before its first item."""
        response = self._response("in_progress", [])
        kinds = "response.created", "response.in_progress"
        return b"".join(self._event(kind, response=response) for kind in kinds)

    def opened(self, item: Item) -> bytes:
        """The new item, and its only part where it has parts."""
        added = self._event(
            "response.output_item.added", output_index=item.index, item=_item(item, "in_progress")
        )
        if item.kind == "call":
            return added
        return added + self._event("response.content_part.added", **_place(item), part=_part(item))

    def grown(self, item: Item, text: str, logprobs: list[object]) -> bytes:
        """The next characters."""
        if item.kind == "call":
            return self._event(f"{_ARGUMENTS}.delta", **_place(item), delta=text)
        extra = {"logprobs": logprobs} if item.kind == "text" else {}
        return self._event(f"{_TEXT_EVENTS[item.kind]}.delta", **_place(item), delta=text, **extra)

    def closed(self, item: Item) -> bytes:
        """The whole text, and the whole item."""
        if item.call is not None:
            payload = self._event(
                f"{_ARGUMENTS}.done", **_place(item), name=item.call.name, arguments=item.text
            )
        else:
            extra = {"logprobs": item.logprobs} if item.kind == "text" else {}
            payload = self._event(
                f"{_TEXT_EVENTS[item.kind]}.done", **_place(item), text=item.text, **extra
            )
            payload += self._event("response.content_part.done", **_place(item), part=_part(item))
        done = _item(item, self._status())
        return payload + self._event(
            "response.output_item.done", output_index=item.index, item=done
        )

    def ended(self) -> bytes:
        """The whole response."""
        return self._event(f"response.{self._status()}", response=self.answer())

    def failure(self, error: ManyloraError) -> bytes:
        """The response as far as it came, `failed`."""
        reported = error_body(error)["error"]
        code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
        if isinstance(error, RateLimitError):
            code = "rate_limit_exceeded"
        items = [
            _item(item, "incomplete" if item is self.open_item else "completed")
            for item in self.items
        ]
        reason = {
            "code": code,
            "message": reported["message"],
            "param": reported["param"],
            "type": reported["code"],
        }
        return self._event(
            "response.failed", response=self._response("failed", items, error=reason)
        )

    def _status(self) -> str:
        return "incomplete" if self.end.finish_reason == "length" else "completed"

    def _event(self, kind: str, **fields: object) -> bytes:
        number = self._number
        self._number += 1
        return sse.event({"type": kind, "sequence_number": number, **fields}, kind)

    def _response(self, status: str, items: list[JsonObject], **fields: object) -> JsonObject:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "model": self._head["model"],
            "output": items,
            **_FIXED,
            **{name: getattr(body, name) for name in _REPEATED},
            **self._schemas,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "top_logprobs": body.top_logprobs or 0,
            **fields,
        }

    def _usage(self) -> JsonObject:
        usage = self.meter.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                **usage.prompt_tokens_details.model_dump(),
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": usage.completion_tokens_details.model_dump(),
            "total_tokens": usage.total_tokens,
        }


def _id(item: Item) -> str:
    return _PREFIXES[item.kind] + item.id


def _place(item: Item) -> JsonObject:
    parts = {} if item.kind == "call" else {"content_index": 0}
    return {"item_id": _id(item), "output_index": item.index, **parts}


def _part(item: Item) -> JsonObject:
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": item.logprobs}


def _item(item: Item, status: str) -> JsonObject:
    head: JsonObject = {"id": _id(item), "status": status}
    if item.call is not None:
        call = {"call_id": item.call.id, "name": item.call.name, "arguments": item.text}
        return {**head, "type": "function_call", **call}
    content = [_part(item)] if item.pieces else []
    if item.kind == "reasoning":
        return {
            **head,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": None,
        }
    return {**head, "type": "message", "role": "assistant", "content": content}
