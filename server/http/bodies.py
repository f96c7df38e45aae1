"""Bases of all bodies: those that clients send (`Body`, strict) and those that Manylora sends (`View`).

Strict: no conversions, both bounds on every number, unknown fields refused. The OpenAPI page is made of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema

from manylora.adapters.base_shape import MODULE_PATHS
from manylora.errors import UnsupportedParameterError


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
        kept: dict[str, Any] = {}
        is_strange = False
        for name, value in body.items():
            if name in cls.ignored and name not in cls.model_fields:
                continue
            if name in cls.neutral_values and name not in cls.model_fields:
                if value is not None and value not in cls.neutral_values[name]:
                    raise UnsupportedParameterError(
                        cls.hints.get(name, f"Manylora does not support {name}."), param=name
                    )
                continue
            if name not in cls.model_fields:
                if not is_strange:  # of a hundred thousand strange names, only the first is told
                    kept[name] = value
                is_strange = True
            elif value is not None:
                kept[name] = value
        return kept


class StoredBody(Body):
    """Base of what a conversation is made of. Programs send back what they stored with it, so unknown fields pass."""

    model_config = ConfigDict(extra="ignore")
