"""POST /v1/responses: makes a chat of the body, whose items become messages."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter

from manylora.server.generation.chat_schemas import ChatBody
from manylora.server.generation.routes import post
from manylora.server.generation.run import GenerationRun
from manylora.server.generation.schemas import SamplingFields
from manylora.server.http.bodies import named, validate
from manylora.server.responses import RESPONSES
from manylora.server.responses.schemas import (
    LOGPROBS,
    CallItem,
    CallOutputItem,
    InputItem,
    MessageItem,
    ResponsesBody,
    ResponseView,
)
from manylora.server.responses.writer import ResponseWriter
from manylora.server.tools.schemas import as_tools

router = APIRouter()
_SAME = {"model", "parallel_tool_calls", *SamplingFields.model_fields}
NAMES = {
    r"messages(\.\d+)?(\.tool_calls\.\d+\.function)?": "input",
    r"response_format(\.json_schema)?": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
}
"""Fields of a chat, by their names here."""


class ResponsesChat(ChatBody):
    """A chat whose log-probabilities go with its texts."""

    has_logprobs_of_text_alone = True


@post(router, RESPONSES, ResponsesBody, ResponseView)
async def respond(run: GenerationRun, body: ResponsesBody) -> None:
    """Answer a conversation item by item; nothing is stored."""
    with named(NAMES):
        chat = await run.work(lambda: validate(ResponsesChat, chat_of(body)), run.num_bytes)
        await run.prepare(chat, partial(ResponseWriter, body))


def chat_of(body: ResponsesBody) -> dict[str, Any]:
    """The body of the chat that is the same request."""
    chat = body.model_dump(include=_SAME, exclude_unset=True)
    chat["messages"] = (
        [{"role": "system", "content": body.instructions}] if body.instructions else []
    )
    for item in body.input:
        _add(chat["messages"], item)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["reasoning_effort"] = body.reasoning.effort
    if body.top_logprobs is not None or LOGPROBS in body.include:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    form = {name: value for name, value in body.text.format.items() if value is not None}
    schema = {
        name: form.pop(name) for name in ("name", "description", "schema", "strict") if name in form
    }
    chat["response_format"] = {**form, "json_schema": schema} if schema else form
    if body.tools:
        chat["tools"] = as_tools(body.tools, "type")
    if body.tools or body.tool_choice not in ("none", "auto"):
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    return chat


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """Tools are nested in a chat. Whether the choice is sound, the chat says."""
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            named = [{"type": "function", "function": tool} for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return choice


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add an item. Reasoning, text and calls that follow each other are one message of the assistant."""
    last = messages[-1] if messages else {}
    is_open = last.get("role") == "assistant"
    if isinstance(item, CallOutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
    elif isinstance(item, MessageItem):
        if (
            item.role == "assistant"
            and is_open
            and last["content"] is None
            and "tool_calls" not in last
        ):
            last["content"] = item.content
        else:
            messages.append({"role": item.role, "content": item.content})
    elif isinstance(item, CallItem):
        if not is_open:
            last = {"role": "assistant", "content": None}
            messages.append(last)
        function = {"name": item.name, "arguments": item.arguments}
        last.setdefault("tool_calls", []).append(
            {"id": item.call_id, "type": "function", "function": function}
        )
    elif item.content:
        messages.append({"role": "assistant", "content": None, "reasoning_content": item.content})
