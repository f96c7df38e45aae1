"""Makes a chat of the body of a message: blocks become messages of their own where OpenAI has them so."""

from __future__ import annotations

import json
from typing import Any

from manylora.errors import InvalidRequestError
from manylora.server.generation.chat_schemas import ChatBody
from manylora.server.generation.schemas import SamplingFields
from manylora.server.http.json_body import named, validate
from manylora.server.messages import schemas

_SAME = ("model", *SamplingFields.model_fields)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {
    r"messages(\.\d+)?(\.tool_calls\.\d+\.function)?": "messages",
    "stop": "stop_sequences",
    r"response_format(\.json_schema)?": "output_config.format",
    "reasoning_effort": "output_config.effort",
    r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
    r"tools\.(\d+)\.function": r"tools.\1",
}
"""Fields of a chat, by their names here."""


class MessagesChat(ChatBody):
    """A chat as Anthropic means it: clients send a `max_tokens` that is far above what the context leaves."""

    may_fill_context = True


def chat_of(body: schemas.TokenCountBody, max_model_len: int) -> MessagesChat:
    """The chat that is the same request.

    Raises:
        RequestError: The chat cannot be; its fields have names of this API.
    """
    chat = {name: getattr(body, name) for name in _SAME if name in body.model_fields_set}
    chat["messages"] = [{"role": "system", "content": body.system}] if body.system else []
    for turn in body.messages:
        chat["messages"] += _assistant(turn) if turn.role == "assistant" else _other(turn)
    if body.messages[-1].role == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, schemas.MessagesBody):
        chat |= {
            "max_completion_tokens": min(body.max_tokens, max_model_len),
            "stop": body.stop_sequences,
        }
    if body.tools:
        own = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools]
        functions = [{"parameters": tool.pop("input_schema"), **tool} for tool in own]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if body.tool_choice is not None and (body.tools or body.tool_choice.type in ("any", "tool")):
        chat |= _tool_choice(body.tool_choice)
    with named(NAMES):
        return validate(MessagesChat, chat | _thinking_and_output(body))


def _thinking_and_output(body: schemas.TokenCountBody) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    kind = body.thinking.type if body.thinking is not None else None
    if kind == "disabled":
        chat["reasoning_effort"] = "none"
    elif body.output_config is not None and body.output_config.effort is not None:
        chat["reasoning_effort"] = body.output_config.effort.replace("max", "xhigh")
    elif kind == "enabled":
        chat["chat_template_kwargs"] = {"enable_thinking": True}
    if body.output_config is not None and body.output_config.format is not None:
        form = {"name": "output", **body.output_config.format}
        chat["response_format"] = {"type": form.pop("type", None), "json_schema": form}
    return chat


def _tool_choice(choice: schemas.MessagesToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequestError(
            "tool_choice of type tool needs a name.", param="tool_choice.name"
        )
    chosen = _CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}})
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _assistant(turn: schemas.Turn) -> list[dict[str, Any]]:
    """One message: what was thought, said and called."""
    texts = [block.text for block in turn.content if isinstance(block, schemas.TextBlock)]
    thoughts = [
        block.thinking for block in turn.content if isinstance(block, schemas.ThinkingBlock)
    ]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in turn.content
        if isinstance(block, schemas.ToolUseBlock)
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": schemas.BETWEEN.join(texts),
        "tool_calls": calls,
    }
    return [message | ({"reasoning_content": schemas.BETWEEN.join(thoughts)} if thoughts else {})]


def _other(turn: schemas.Turn) -> list[dict[str, Any]]:
    """A message for each result, and one for the texts between two results."""
    messages: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, schemas.ToolResultBlock):
            messages.append(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
            )
        elif isinstance(block, schemas.TextBlock):
            if messages and messages[-1]["role"] == turn.role:
                messages[-1]["content"] += schemas.BETWEEN + block.text
            else:
                messages.append({"role": turn.role, "content": block.text})
    return messages
