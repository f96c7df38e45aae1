"""POST /v1/messages and POST /v1/messages/count_tokens: makes a chat of the body.

Blocks become messages of their own where OpenAI has them so.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request

from manylora.errors import InvalidRequestError
from manylora.server.auth.admission import TokenizingCaller
from manylora.server.core_services import Core
from manylora.server.generation.chat_schemas import ChatBody
from manylora.server.generation.prompts import chat_job, check_text
from manylora.server.generation.routes import post
from manylora.server.generation.run import GenerationRun
from manylora.server.generation.schemas import SamplingFields
from manylora.server.generation.tokens import rendered_chat, unbilled
from manylora.server.http.bodies import named, validate
from manylora.server.http.openapi import takes
from manylora.server.messages import MESSAGES
from manylora.server.messages.schemas import (
    BETWEEN,
    MessagesBody,
    MessagesToolChoice,
    MessageView,
    TextBlock,
    ThinkingBlock,
    TokenCountBody,
    TokenCountView,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from manylora.server.messages.writer import MessageWriter
from manylora.server.tools.schemas import as_tools

router = APIRouter()
_SAME = {"model", *SamplingFields.model_fields}
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


@post(router, MESSAGES, MessagesBody, MessageView)
async def message(run: GenerationRun, body: MessagesBody) -> None:
    """Answer a conversation, as Anthropic's clients ask."""
    max_model_len = run.services.ready.max_model_len
    chat = await run.work(lambda: chat_of(body, max_model_len), run.num_bytes)
    with named(NAMES):
        await run.prepare(chat, MessageWriter)


@router.post("/v1/messages/count_tokens", openapi_extra=takes(TokenCountBody), tags=["tokens"])
async def count_tokens(
    request: Request, services: Core, caller: TokenizingCaller
) -> TokenCountView:
    """Count the tokens of a conversation as the model reads it."""
    body = await services.bodies.json(request, TokenCountBody)
    await services.models.resolve(caller.tenant_id, body.model)

    max_model_len = services.ready.max_model_len
    rendered = await rendered_chat(
        request, caller, lambda: chat_job(chat_of(body, max_model_len), services)
    )

    def count() -> tuple[int, TokenCountView]:
        check_text(rendered, services)
        tokens = len(services.tokenizer.encode(rendered, add_special_tokens=False))
        return tokens, TokenCountView(input_tokens=tokens)

    return await unbilled(request, caller, count)


def chat_of(body: TokenCountBody, max_model_len: int) -> MessagesChat:
    """The chat that is the same request.

    Raises:
        RequestError: The chat cannot be; its fields have names of this API.
    """
    chat = body.model_dump(include=_SAME, exclude_unset=True)
    chat["messages"] = [{"role": "system", "content": body.system}] if body.system else []
    for turn in body.messages:
        chat["messages"] += _assistant(turn) if turn.role == "assistant" else _other(turn)
    if body.messages[-1].role == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        chat |= {
            "max_completion_tokens": min(body.max_tokens, max_model_len),
            "stop": body.stop_sequences,
        }
    if body.tools:
        chat["tools"] = as_tools(body.tools, "type")
    if body.tool_choice is not None and (body.tools or body.tool_choice.type in ("any", "tool")):
        chat |= _tool_choice(body.tool_choice)
    with named(NAMES):
        return validate(MessagesChat, chat | _thinking_and_output(body))


def _thinking_and_output(body: TokenCountBody) -> dict[str, Any]:
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


def _tool_choice(choice: MessagesToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise InvalidRequestError(
            "tool_choice of type tool needs a name.", param="tool_choice.name"
        )
    chosen = _CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}})
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _assistant(turn: Turn) -> list[dict[str, Any]]:
    """One message: what was thought, said and called."""
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": BETWEEN.join(texts),
        "tool_calls": calls,
    }
    return [message | ({"reasoning_content": BETWEEN.join(thoughts)} if thoughts else {})]


def _other(turn: Turn) -> list[dict[str, Any]]:
    """A message for each result, and one for the texts between two results."""
    messages: list[dict[str, Any]] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            messages.append(
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.content}
            )
        elif isinstance(block, TextBlock):
            if messages and messages[-1]["role"] == turn.role:
                messages[-1]["content"] += BETWEEN + block.text
            else:
                messages.append({"role": turn.role, "content": block.text})
    return messages
