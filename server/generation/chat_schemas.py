"""Bodies of chats, and the answers to them that are not streamed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from manylora.errors import InvalidRequestError, UnsupportedParameterError
from manylora.server.generation import unsupported_params
from manylora.server.generation.schemas import (
    GenerationBody,
    GenerationView,
    PromptView,
    TokenIdsView,
)
from manylora.server.http.bodies import Body, StoredBody, View
from manylora.server.http.wrong_value import shown
from manylora.server.tools.schemas import (
    MAX_TOOLS,
    Call,
    SentToolChoice,
    Tool,
    ToolChoice,
    parse_tool_choice,
)

TEXT_ONLY = "The model reads and writes text only, and Manylora runs no tools."
MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_KWARGS_LENGTH = 16 * 1024
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class TopLogprobView(View):
    """A token that was possible at this place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobView(TopLogprobView):
    """A token and its alternatives."""

    top_logprobs: list[TopLogprobView]


class ChatLogprobsView(View):
    """Log-probabilities of an answer."""

    content: list[TokenLogprobView]
    refusal: None


class CalledFunctionView(View):
    """The function that is called, and its arguments."""

    name: str
    arguments: str
    """A JSON object, as a string. It is cut off where `finish_reason` is length."""


class CallView(View):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionView


class AnswerView(View):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    """Null where the answer is calls alone."""
    refusal: None
    reasoning: str | None = None
    """Text that the model wrote before its answer; absent where there is none."""
    reasoning_content: str | None = None
    """Equal to `reasoning`; some clients read this name."""
    tool_calls: list[CallView] | None = None
    """Absent where there is none."""


class ChatChoiceView(TokenIdsView):
    """One answer."""

    index: int
    message: AnswerView
    logprobs: ChatLogprobsView | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None


class ChatView(GenerationView, PromptView):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoiceView]


_TEXTS = {"text": "text", "refusal": "refusal"}
"""The field with the text of a part, by its type."""


def kind_of(value: object, known: Collection[str], param: str, default: str = "") -> str:
    """The type of a part, an item or a tool.

    Args:
        value: What a client sent.
        known: The types that are taken.
        param: Where it stands in the body.
        default: The type of an object that has none.

    Raises:
        UnsupportedParameterError: It is another one, which the error names.
    """
    kind = str(value.get("type") or default) if isinstance(value, dict) else shown(value)
    if kind not in known:
        message = f"{param} takes the type {' or '.join(known)}, got {kind[:40]}."
        raise UnsupportedParameterError(f"{message} {TEXT_ONLY}", param=param)
    return kind


def with_kinds(known: Collection[str], param: str, default: str = "") -> BeforeValidator:
    """Checks the type of each entry of a list before all else, as `kind_of` does."""

    def check(value: object) -> object:
        for index, each in enumerate(value if isinstance(value, list) else []):
            kind_of(each, known, f"{param}.{index}", default)
        return value

    return BeforeValidator(check)


def text_of(value: object, kinds: Mapping[str, str], param: str, between: str = "") -> str:
    """The text of a content: a string, or a list of parts.

    Args:
        value: What a client sent.
        kinds: The field with the text, by the type of a part.
        param: Where it stands in the body.
        between: What stands between the texts of two parts.

    Raises:
        InvalidRequestError: Not such a content.
        UnsupportedParameterError: A part of another type.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        message = f"{param}: a content must be a string or a list of parts, got {shown(value)}."
        raise InvalidRequestError(message, param=param)
    kinds_given = [kind_of(part, kinds, param) for part in value]
    texts = [part.get(kinds[kind]) for part, kind in zip(value, kinds_given, strict=True)]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"Each part of {param} must have its text.", param=param)
    return between.join(texts)


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


_Text = BeforeValidator(
    partial(text_of, kinds=_TEXTS, param="messages"), json_schema_input_type=str | list[TextPart]
)


class Message(StoredBody):
    """One turn of a chat."""

    neutral_values = unsupported_params.MESSAGE
    hints = unsupported_params.MESSAGE_HINTS

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, _Text] = ""
    """Null, or absent, in messages of the assistant only."""
    refusal: str | None = None
    """Follows the content, as a part of type refusal does."""
    name: str | None = Field(None, max_length=64)
    """The model sees it in messages of role tool only."""
    tool_calls: list[Call] = Field(default_factory=list, max_length=MAX_TOOLS)
    """Calls of an earlier answer."""
    tool_call_id: str | None = Field(None, max_length=256)
    """For role tool: the call that this is the result of."""
    reasoning: str | None = None
    """Text that the model wrote before an earlier answer."""
    reasoning_content: str | None = None
    """Another name of `reasoning`, which some clients use."""

    @property
    def texts(self) -> list[str]:
        """Texts of it that the model may see."""
        calls = [json.dumps(call.function.arguments) for call in self.tool_calls]
        return [self.content, self.reasoning or "", self.reasoning_content or "", *calls]

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError(
                "tool_calls belong to messages of role assistant.", param="messages"
            )
        if "content" not in self.model_fields_set and self.role != "assistant":
            reason = "A message has no content, or null, as only the assistant's may. Send a text."
            raise InvalidRequestError(reason, param="messages")
        self.content += self.refusal or ""
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise InvalidRequestError(
                "A message of role tool, and no other, has a tool_call_id.", param="messages"
            )
        return self


class ToolsBody(Body):
    """Fields of chats that change what the chat template writes."""

    add_generation_prompt: bool | None = None
    """True ends the prompt where the assistant begins to speak. Default: the opposite of `continue_final_message`."""
    continue_final_message: bool = False
    """True ends the prompt inside the last message, which the answer continues."""
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template, for example `{"enable_thinking": false}`."""

    @model_validator(mode="after")
    def _can_be_rendered(self) -> ToolsBody:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt cannot both be true: send one of them."
            raise InvalidRequestError(message, param="continue_final_message")
        kwargs = self.chat_template_kwargs
        if (
            len(kwargs) > MAX_TEMPLATE_KWARGS
            or len(json.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_LENGTH
        ):
            bounds = (
                f"{MAX_TEMPLATE_KWARGS} entries and {MAX_TEMPLATE_KWARGS_LENGTH} characters of JSON"
            )
            raise InvalidRequestError(
                f"chat_template_kwargs may have {bounds}.", param="chat_template_kwargs"
            )
        names = [tool.function.name for tool in self.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidRequestError(
                f"tools must have different names; {twice[0]} is there twice.", param="tools"
            )
        return self

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the chat template shows."""
        return self.tools

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return self.chat_template_kwargs

    @property
    def template_options(self) -> dict[str, bool]:
        """For `ChatTemplate.render`."""
        is_continued = self.continue_final_message
        is_begun = self.add_generation_prompt
        if is_begun is None:
            is_begun = not is_continued
        return {"add_generation_prompt": is_begun, "continue_final_message": is_continued}


class ChatBody(GenerationBody, ToolsBody):
    """Body of POST /v1/chat/completions."""

    neutral_values = unsupported_params.CHAT
    may_fill_context: ClassVar[bool] = False
    """True of an API whose clients may send a limit above what the context leaves; the context counts then."""

    has_logprobs_of_text_alone: ClassVar[bool] = False
    """True of an API whose answers have no log-probabilities of reasoning and calls."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=100)
    add_special_tokens: bool = False
    """Begin the prompt with the model's start token, besides what its chat template writes."""
    echo: bool = False
    """Begin the answer with the last message, if that is the assistant's."""
    tool_choice: Annotated[
        ToolChoice | None,
        BeforeValidator(parse_tool_choice, json_schema_input_type=SentToolChoice),
    ] = None
    """The tools that may or must be called: auto where there are tools."""
    parallel_tool_calls: bool = True
    """True lets one answer hold several calls."""
    reasoning_effort: Effort | None = None
    """For models whose chat template knows `reasoning_effort` or `enable_thinking`."""
    include_reasoning: bool = True
    """False leaves the reasoning out of the answer; it is generated and billed all the same."""

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        choice = self.tool_choice
        names = {tool.function.name for tool in self.tools}
        if self.has_own_grammar and self.offered:
            message = "structured_outputs.grammar cannot be used with tools. Send json, regex or choice, or no tools."
            raise UnsupportedParameterError(message, param="structured_outputs")
        for name in ("use_beam_search", "ignore_eos"):
            if self.offered and getattr(self, name):
                message = f"{name} cannot be used with tools. Send tool_choice none, or no tools."
                raise InvalidRequestError(message, param=name)
        if choice is not None and choice.mode != "none":
            if not names:
                raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
            missing = sorted((choice.names or set()) - names)
            if missing:
                message = f"tool_choice names {missing[0]}, which is not in tools."
                raise InvalidRequestError(message, param="tool_choice")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            message = "max_tokens and max_completion_tokens differ: send one of them."
            raise InvalidRequestError(message, param="max_completion_tokens")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None takes what the context leaves."""
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )

    @property
    def echoed_text(self) -> str:
        """Text that goes before the answer."""
        return (
            self.messages[-1].content if self.echo and self.messages[-1].role == "assistant" else ""
        )

    @property
    def texts(self) -> list[str]:
        """All texts that the model may see."""
        tools = [json.dumps(tool.function.model_dump(exclude_none=True)) for tool in self.tools]
        return [text for message in self.messages for text in message.texts] + tools

    @property
    def offered(self) -> list[Tool]:
        """The tools that an answer may call."""
        names = self.tool_choice.names if self.tool_choice is not None else None
        return [tool for tool in self.shown_tools if names is None or tool.function.name in names]

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the chat template shows."""
        return (
            [] if self.tool_choice is not None and self.tool_choice.mode == "none" else self.tools
        )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = self.reasoning_effort
        thinking = (
            {}
            if effort is None
            else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        )
        return {**thinking, **self.chat_template_kwargs}
