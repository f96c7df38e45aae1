"""Bodies of chats, and the answers to them that are not streamed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from weft.errors import InvalidRequestError, UnsupportedParameterError
from weft.server.generation import unsupported_params
from weft.server.generation.schemas import GenerationBody, GenerationView
from weft.server.generation.vllm_fields import PromptView, TemplateFields, TokenIdsView
from weft.server.http.bodies import Body, View

MAX_MESSAGES = 4096


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


class AnswerView(View):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoiceView(TokenIdsView):
    """One answer."""

    index: int
    message: AnswerView
    logprobs: ChatLogprobsView | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class ChatView(GenerationView, PromptView):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoiceView]


def _content(value: object) -> str:
    """A message's text, given as a string or as parts of type text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        texts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text":
                message = f"Weft takes message parts of type text only, got {str(kind)[:40]}."
                raise UnsupportedParameterError(message, param="messages")
            if set(part) - unsupported_params.IGNORED_IN_MESSAGES != {"type", "text"} or type(part["text"]) is not str:
                raise InvalidRequestError("A text part holds type and text, a string.", param="messages")
            texts.append(part["text"])
        return "".join(texts)
    raise InvalidRequestError("A message's content must be a string or a list of text parts.", param="messages")


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


_Content = str | list[TextPart]


class Message(Body):
    """One turn of a chat."""

    ignored = unsupported_params.IGNORED_IN_MESSAGES
    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = unsupported_params.MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content, json_schema_input_type=_Content)]
    name: str | None = Field(None, max_length=64)
    """Accepted and not shown to the model."""

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_not_served(cls, message: Any) -> Any:  # noqa: ANN401 - what a client sent
        if not isinstance(message, dict):
            return message
        role = message.get("role")
        if role in ("tool", "function"):
            raise UnsupportedParameterError(
                f"Weft does not serve tools, so it takes no message of role {role}.", param="messages"
            )
        if message.get("content", "") is not None:
            return message
        if role != "assistant":
            raise InvalidRequestError(
                "content is null, which only an assistant's message may have. Send a text.", param="messages"
            )
        return {**message, "content": ""}


class ChatBody(GenerationBody, TemplateFields):
    """Body of POST /v1/chat/completions."""

    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = unsupported_params.CHAT

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=100)
    add_special_tokens: bool = False
    """Begin the prompt with the model's start token, besides what its chat template writes."""
    echo: bool = False
    """Begin the answer with the last message, if that is the assistant's."""

    @model_validator(mode="after")
    def _agree(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ: send one of them.", param="max_completion_tokens"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; None takes what the context leaves."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def echoed_text(self) -> str:
        """What goes before the answer."""
        return self.messages[-1].content if self.echo and self.messages[-1].role == "assistant" else ""

    @property
    def num_characters(self) -> int:
        """About how much there is to tokenize."""
        return sum(len(message.content) for message in self.messages)
