"""The parts of a request about tools: definitions, the choice among them, and calls in the history of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from manylora import strict_json
from manylora.errors import InvalidRequestError
from manylora.server.http.bodies import Body, StoredBody

MAX_TOOLS = 128
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class ToolFunction(Body):
    """A function that the model may call. transformers' `get_json_schema` also writes what it returns."""

    ignored = frozenset({"return"})

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object. Absent: any arguments."""
    strict: bool | None = None
    """True holds the arguments of a call to the schema, also where `tool_choice` is auto."""


def as_tools(functions: Iterable[ToolFunction], without: str) -> list[dict[str, Any]]:
    """Tools as chats and their templates have them: functions with all their fields but one."""
    dumps = [each.model_dump(exclude_none=True, exclude={without}) for each in functions]
    return [{"type": "function", "function": function} for function in dumps]


class Tool(Body):
    """An entry of `tools`."""

    ignored = frozenset({"cache_control"})

    type: Literal["function"]
    function: ToolFunction


def parse_arguments(text: object) -> dict[str, Any]:
    """The arguments of a call as templates want them. Functions without parameters are called with an empty string.

    Raises:
        PydanticCustomError: Not a JSON object in a string.
    """
    why = "send back what the answer held"
    try:
        value = strict_json.loads(text or "{}") if isinstance(text, str) else None
    except strict_json.JsonRefusedError as error:
        value = None
        why = str(error)
    if not isinstance(value, dict):
        raise PydanticCustomError(
            "invalid_json", "must be a JSON object in a string: {why}", {"why": why}
        )
    return value


class CalledFunction(StoredBody):
    """The function that an earlier answer called."""

    name: ToolName
    arguments: Annotated[
        dict[str, Any], BeforeValidator(parse_arguments, json_schema_input_type=str)
    ]
    """A JSON object, as a string."""


class Call(StoredBody):
    """An entry of `tool_calls` of an earlier answer."""

    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """The tools that an answer may call."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    """Only these; None for all tools of the request."""
    is_single: bool = False
    """True if there is exactly one call: the client has named the function."""


class NamedFunction(StoredBody):
    """The name of a function."""

    name: str


class NamedTool(StoredBody):
    """A tool by its name: the one to call, or one that may be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StoredBody):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedToolsChoice(StoredBody):
    """The choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


SentToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice
_sent = TypeAdapter[SentToolChoice](SentToolChoice)


def parse_tool_choice(value: object) -> ToolChoice:
    """The field `tool_choice`.

    Raises:
        InvalidRequestError: It has none of the forms that OpenAI knows.
    """
    if isinstance(value, ToolChoice):
        return value
    try:
        sent = _sent.validate_python(value)
    except ValidationError as error:
        raise InvalidRequestError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}.',
            param="tool_choice",
        ) from error
    if isinstance(sent, NamedTool):
        names = frozenset({sent.function.name})
        return ToolChoice(mode="required", names=names, is_single=True)
    if isinstance(sent, AllowedToolsChoice):
        allowed = sent.allowed_tools
        names = frozenset(tool.function.name for tool in allowed.tools)
        return ToolChoice(mode=allowed.mode, names=names)
    return ToolChoice(mode=sent)
