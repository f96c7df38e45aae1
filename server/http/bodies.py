"""Bases of all bodies: those that clients send (`Body`, strict) and those that Manylora sends (`View`).

Strict: no conversions, both bounds on every number, unknown fields refused, and no text that two parsers of JSON could
read differently. The OpenAPI page is made of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema

from manylora import strict_json
from manylora.adapters.base_shape import MODULE_PATHS
from manylora.errors import InvalidRequestError, RequestError, UnsupportedParameterError
from manylora.server.http.wrong_value import wrong_value

_ESCAPED_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def iso(moment: datetime) -> str:
    """UTC in ISO-8601, with milliseconds and a final Z."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Moment = Annotated[
    str, BeforeValidator(lambda value: iso(value) if isinstance(value, datetime) else value)
]
"""A time as text for clients; takes a datetime."""


class View(BaseModel):
    """Base of all response bodies; made of anything with the same attributes."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), from_attributes=True
    )


ViewT = TypeVar("ViewT", bound=View)


class Listing(View, Generic[ViewT]):
    """Rows, and where the next page begins; made of a `Page` too."""

    # pydantic searches all modules for the source of each kind of listing, which has no docstrings of fields.
    model_config = ConfigDict(use_attribute_docstrings=False)

    object: Literal["list"] = "list"
    data: list[ViewT] = Field(validation_alias=AliasChoices("data", "items"))
    next: str | None


class FindingView(View):
    """One thing that is wrong with an adapter."""

    code: str
    message: str
    """The expected value, and the one that came."""
    param: str | None
    """The field of the config, or the first tensor, that is wrong; null if it is a whole file."""
    hint: str
    """The next thing to do."""


class ErrorFields(View):
    """Facts of an error."""

    message: str
    type: str
    param: str | None
    code: str
    findings: list[FindingView] = Field(default_factory=list)
    """Only for a refused adapter: what is wrong with it, at most 20 findings. `message` tells the first."""


class ErrorView(View):
    """Every error, whatever its status."""

    error: ErrorFields


class NamedView(View):
    """The caller's tenant."""

    id: str
    name: str


class HeldView(View):
    """Numbers by the name of a limit, for each holder."""

    tenant: dict[str, int]
    key: dict[str, int]


class UsageSums(View):
    """Fields of every sum of usage."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class AdapterUsageView(UsageSums):
    """An adapter's usage since it was created."""

    last_used_at: Moment | None


INT64 = 1 << 63
ALL_LINEAR = "all-linear"
MODULE_NAMES = tuple(path.rsplit(".", 1)[-1] for path in MODULE_PATHS)
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Scope = Literal["infer", "adapters", "usage"]
Labels = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


def _describe_what_is_let_pass(schema: dict[str, Any], model: type[Any]) -> None:
    """Show in the OpenAPI page that null means the default, and which foreign fields pass."""
    required = schema.get("required", [])
    properties = schema.setdefault("properties", {})
    for name, field in properties.items():
        if name not in required and {"type": "null"} not in field.get("anyOf", []):
            keep = {
                key: field.pop(key) for key in ("title", "description", "default") if key in field
            }
            properties[name] = {"anyOf": [field, {"type": "null"}], **keep}
    for name, values in model.neutral_values.items():
        properties.setdefault(
            name, {"enum": [*values, None], "description": "Accepted only if it changes nothing."}
        )
    for name in sorted(model.ignored):
        properties.setdefault(name, {"description": "Accepted and ignored."})


def _fail_fast(schema: Any) -> None:  # noqa: ANN401 - a core schema, whose parts are of many types
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "set", "frozenset", "tuple", "dict"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in schema:
            _fail_fast(part)


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
        json_schema_extra=_describe_what_is_let_pass,
    )
    neutral_values: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    hints: ClassVar[Mapping[str, str]] = {}
    """Advice, by field, for fields of which only neutral values pass."""
    ignored: ClassVar[frozenset[str]] = frozenset()
    takes_nul: ClassVar[bool] = False
    """True if texts may hold NUL: prompts may, but not texts that the database stores."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Lists and objects are refused at their first wrong item: of a million wrong ones, only the first is told."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, body: Any) -> Any:  # noqa: ANN401 - what a client sent
        if not isinstance(body, dict):
            return body
        known = _names(cls)
        kept: dict[str, Any] = {}
        is_strange = False
        for name, value in body.items():
            if name in known:
                if value is not None:
                    kept[name] = value
            elif name in cls.neutral_values:
                if value is not None and value not in cls.neutral_values[name]:
                    hint = cls.hints.get(name, f"Manylora does not support {name}.")
                    raise UnsupportedParameterError(hint, param=name)
            elif name not in cls.ignored and not is_strange:
                kept[name] = value  # of a hundred thousand strange names, only the first is told
                is_strange = True
        return kept


@cache
def _names(model: type[Body]) -> frozenset[str]:
    """Names of the fields as clients write them."""
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class StoredBody(Body):
    """Base of what a conversation is made of. Programs send back what they stored with it, so unknown fields pass."""

    model_config = ConfigDict(extra="ignore")


BodyT = TypeVar("BodyT", bound=Body)


def parsed(model: type[BodyT], raw: bytes) -> BodyT:
    """Parse and validate a body.

    Raises:
        InvalidRequestError: Not JSON, ambiguous JSON, or a value that the model refuses; `param` names the field.
        UnsupportedParameterError: A field that the model does not have.
    """
    return validate(model, parse_json(raw, takes_nul=model.takes_nul))


def parse_json(raw: bytes, *, takes_nul: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Refused are: anything but one object, what `strict_json.loads` refuses, and NUL characters unless `takes_nul`.

    Raises:
        InvalidRequestError: With code `invalid_json`.
    """
    try:
        body = strict_json.loads(raw)
    except strict_json.DuplicateKeyError as error:
        raise _invalid("The body repeats a key within one object.") from error
    except strict_json.TooDeepError as error:
        raise _invalid(f"The body is {error}.") from error
    except strict_json.JsonRefusedError as error:
        raise _invalid(f"The body is not valid JSON: {error}.") from error
    if not takes_nul and _ESCAPED_NUL.search(raw):
        raise _invalid("A string holds a NUL character.")
    if not isinstance(body, dict):
        raise _invalid("The body must be a JSON object.")
    return body


def validate(model: type[BodyT], body: dict[str, Any]) -> BodyT:
    """Check a parsed body against its model; raises like `parsed`."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False)[0]) from error


@contextmanager
def named(own: Mapping[str, str]) -> Iterator[None]:
    """Let errors about a body name the fields of another one, which it was made of.

    Args:
        own: Names of the other's fields, by patterns of the body's. Of two that fit, the first one counts.
    """
    try:
        yield
    except RequestError as error:
        given = error.param or ""
        for pattern, name in own.items():
            found = re.match(rf"{pattern}(?=\.|$)", given)
            if found:
                error.param = found.expand(name) + given[found.end() :]
                if error.message.startswith(given):
                    error.message = error.param + error.message.removeprefix(given)
                break
        raise


def refusal_of(first: Mapping[str, Any]) -> RequestError:
    """The refusal of a value, by one of the errors that pydantic found."""
    param = ".".join(str(part) for part in first["loc"] if part != "[key]")[:200]
    if first["type"] == "extra_forbidden":
        return UnsupportedParameterError(f"{param} is not a parameter of this route.", param=param)
    if first["type"] == "missing":
        return InvalidRequestError(
            f"{param} is required.", param=param, code="missing_required_parameter"
        )
    code = "invalid_json" if first["type"] == "invalid_json" else "invalid_value"
    return InvalidRequestError(
        f"{param or 'The body'}: {wrong_value(first)}.", param=param or None, code=code
    )


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="invalid_json")
