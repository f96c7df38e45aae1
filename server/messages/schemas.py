"""The bodies of POST /v1/messages and of its count of tokens, and the answers to them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from manylora.errors import InvalidRequestError
from manylora.server.generation.chat_schemas import (
    MAX_MESSAGES,
    TextPart,
    kind_of,
    text_of,
    with_kinds,
)
from manylora.server.generation.schemas import SamplingFields
from manylora.server.generation.unsupported_params import Neutral
from manylora.server.http.bodies import Body, StoredBody, View
from manylora.server.tools.schemas import ToolFunction

BETWEEN = "\n\n"
"""Stands between two blocks of text."""
_REDACTED = "redacted_thinking"
"""A thought of a model of Anthropic's, encrypted."""
_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use", _REDACTED),
    "system": ("text",),
}


def _text(param: str) -> BeforeValidator:
    text = partial(text_of, kinds={"text": "text"}, param=param, between=BETWEEN)
    return BeforeValidator(text, json_schema_input_type=str | list[TextPart])


class TextBlock(StoredBody):
    """Something said."""

    type: Literal["text"]
    text: str


class ThinkingBlock(StoredBody):
    """Reasoning of the model."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(StoredBody):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(StoredBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str, _text("content")] = ""


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


def _turns(value: object) -> object:
    """The turns, each with a list of blocks that its role may have."""
    if not isinstance(value, list):
        raise InvalidRequestError("messages must be a list.", param="messages")
    turns = []
    for index, turn in enumerate(value):
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if isinstance(content, list):
            for block in content:
                kind_of(
                    block,
                    _BLOCKS.get(str(turn.get("role")), _BLOCKS["user"]),
                    f"messages.{index}.content",
                )
            turn = {**turn, "content": [block for block in content if block["type"] != _REDACTED]}
        turns.append(turn)
    return turns


class Turn(StoredBody):
    """A message of one side."""

    role: Literal["user", "assistant", "system"]
    content: list[AnyBlock]


Turns = Annotated[list[Turn], BeforeValidator(_turns, json_schema_input_type=list[Turn])]


class ClientTool(ToolFunction):
    """A function that the client runs when the model calls it."""

    ignored = frozenset(
        {"cache_control", "eager_input_streaming", "input_examples", "allowed_callers"}
    )
    neutral_values: ClassVar[Neutral] = {"defer_loading": (False,)}

    type: Literal["custom"] = "custom"
    parameters: dict[str, Any] = Field(alias="input_schema")
    """A JSON schema."""


class MessagesToolChoice(Body):
    """Which of the tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool, for type tool."""
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """Thinking before the answer, on or off. The model decides its length: `max_tokens` bounds both together."""

    ignored = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(Body):
    """Effort and form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None
    """An object of type json_schema, with `schema`."""


class TokenCountBody(SamplingFields):
    """Body of POST /v1/messages/count_tokens."""

    model: str = Field(min_length=1, max_length=512)
    """As in a chat: the base's served name, or an adapter."""
    messages: Turns = Field(min_length=1, max_length=MAX_MESSAGES)
    """An answer goes on with the last one if that is the assistant's."""
    system: Annotated[str, _text("system")] = ""
    tools: Annotated[list[ClientTool], with_kinds(("custom",), "tools", "custom")] = Field(
        default_factory=list
    )
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(TokenCountBody):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(ge=1, lt=1 << 31)
    """Most tokens to generate; what the context leaves, if that is less."""
    stop_sequences: list[str] = Field(default_factory=list)


class TokenCountView(View):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class BlockView(View):
    """A text, a thought, or a call of the model."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    """Empty: Manylora does not sign."""
    id: str = ""
    """Id of a call, which has `name` and `input` too."""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)


class MessageView(View):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockView]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: dict[str, Any]
    """`input_tokens` and `cache_read_input_tokens` are those of the prompt, `output_tokens` those of the answer."""
