"""The body of POST /v1/responses, and the answer to it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from manylora.errors import InvalidRequestError, UnsupportedParameterError
from manylora.server.generation.chat_schemas import MAX_MESSAGES, kind_of, text_of, with_kinds
from manylora.server.generation.schemas import SamplingFields
from manylora.server.generation.unsupported_params import HINTS, IGNORED, SHARED, Neutral
from manylora.server.http.bodies import Body, Labels, StoredBody, View
from manylora.server.tools.schemas import ToolFunction, parse_arguments

NOT_STORED = "Manylora stores no responses: send all items of the conversation in input."
UNSUPPORTED = {
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
    "prompt": "Manylora stores no prompts: send the text in instructions and input.",
    "background": "Manylora runs a response while its client waits. For work that may take hours use POST /v1/batches.",
}
"""Fields that need a store, and what to do instead."""
LOGPROBS = "message.output_text.logprobs"
_TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
}


class TextPart(BaseModel):
    """A part of a content."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str


Text = Annotated[
    str,
    BeforeValidator(
        partial(text_of, kinds=_TEXTS, param="input"), json_schema_input_type=str | list[TextPart]
    ),
]


def _checked_arguments(text: str) -> str:
    parse_arguments(text)
    return text


class MessageItem(StoredBody):
    """A message of one of the speakers."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class CallItem(StoredBody):
    """A call that the model made."""

    neutral_values: ClassVar[Neutral] = {
        "namespace": (),
        "async": (False,),
    }

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Annotated[str, AfterValidator(_checked_arguments)]
    """JSON."""


class CallOutputItem(StoredBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


class ReasoningItem(StoredBody):
    """Reasoning of the model. Summaries and encrypted reasoning of other servers are not shown to the model."""

    type: Literal["reasoning"]
    content: Text = ""


InputItem = Annotated[
    MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")
]
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_WITHOUT_CONTENT = ("web_search_call",)
"""Items of other servers that tell the model nothing: what was found is in the text after it."""


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidRequestError("input must be a string or a list of items.", param="input")
    if any(isinstance(item, dict) and item.get("type") == "item_reference" for item in value):
        raise UnsupportedParameterError(NOT_STORED, param="input")
    known = (*_ITEMS, *_WITHOUT_CONTENT)
    kinds = [kind_of(item, known, f"input.{index}", "message") for index, item in enumerate(value)]
    return [
        {**item, "type": kind} for item, kind in zip(value, kinds, strict=True) if kind in _ITEMS
    ]


Items = Annotated[
    list[InputItem], BeforeValidator(_items, json_schema_input_type=str | list[InputItem])
]


class FunctionTool(ToolFunction):
    """A function that the client runs when the model calls it."""

    neutral_values: ClassVar[Neutral] = {
        "defer_loading": (False,),
        "async": (False,),
    }

    type: Literal["function"]


class TextOptions(Body):
    """The form of the text."""

    neutral_values: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    """An object of type text, json_object or json_schema, the last with `name`, `schema` and `strict`."""


class ReasoningOptions(Body):
    """Effort of the model's reasoning, which is always shown as it is; summaries are not made."""

    ignored = frozenset({"summary", "generate_summary"})

    effort: str | None = Field(default=None, max_length=32)


class ResponsesBody(SamplingFields):
    """Body of POST /v1/responses."""

    hints = HINTS | UNSUPPORTED
    ignored = IGNORED | {"stream_options"}
    neutral_values: ClassVar[Neutral] = {
        **SHARED,
        **dict.fromkeys(UNSUPPORTED, ()),
        "background": (False,),
    }

    model: str = Field(min_length=1, max_length=512)
    """As in a chat: the base's served name, or an adapter."""
    input: Items = Field(min_length=1, max_length=MAX_MESSAGES)
    instructions: str | None = None
    """The first message to the model, as its system."""
    tools: Annotated[list[FunctionTool], with_kinds(("function",), "tools")] = Field(
        default_factory=list
    )
    tool_choice: str | dict[str, Any] = "auto"
    """auto, none, required, `{"type": "function", "name": ...}`, or some of the tools:
    `{"type": "allowed_tools", "mode": ..., "tools": [...]}`."""
    parallel_tool_calls: bool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = Field(
        default_factory=list
    )
    metadata: Labels = Field(default_factory=dict)
    """The answer has it too."""
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    """Most tokens to generate, those of reasoning and calls too."""
    top_logprobs: int | None = Field(None, ge=0, le=100)


class OutputPartView(View):
    """A text of an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class OutputItemView(View):
    """A text, reasoning, or a call of the model."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputPartView] = Field(default_factory=list)
    """Texts of a message, or of reasoning."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    """JSON."""
    summary: list[Any] = Field(default_factory=list)
    encrypted_content: None = None


class ResponseView(View):
    """Answer of POST /v1/responses. With it go the fields of the request, and some that need a store, all null."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItemView]
    usage: dict[str, Any]
    """`input_tokens`, `output_tokens` and `total_tokens`, with `cached_tokens` and `reasoning_tokens` in details."""
    store: Literal[False]
