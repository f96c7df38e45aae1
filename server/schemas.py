"""Bodies that clients send. Strict: no conversions, both bounds on every number, unknown fields refused.

Fields that OpenAI or vLLM know and Weft lacks pass with the value that changes nothing; they stand in
`weft.server.generation.unsupported_params`. A null means the default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from weft.adapters.base_shape import MODULE_PATHS
from weft.config import MAX_RANK_LIMIT
from weft.engine.sampling_params import MAX_LENGTH_PENALTY, BeamParams
from weft.errors import InvalidRequestError, UnsupportedParameterError
from weft.registry.limits import KEY_LIMITS, TENANT_LIMITS, WEIGHTS
from weft.registry.names import MAX_DESCRIPTION
from weft.server.generation import unsupported_params as neutral

INT64 = 1 << 63
MAX_STOPS = 4
MAX_STOP_LENGTH = 256
MAX_BIASES = 300
MAX_MESSAGES = 4096
ALL_LINEAR = "all-linear"
MAX_PLANNED = 1 << 20
"""Most adapters to come of one kind, in one question whether they fit."""
MODULE_NAMES = tuple(path.rsplit(".", 1)[-1] for path in MODULE_PATHS)
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Scope = Literal["infer", "adapters", "usage"]


def _describe_what_is_let_pass(schema: dict[str, Any], model: type[Any]) -> None:
    """Show in the OpenAPI page that null means the default, and which foreign fields pass."""
    required = schema.get("required", [])
    properties = schema.setdefault("properties", {})
    for name, field in properties.items():
        if name not in required and {"type": "null"} not in field.get("anyOf", []):
            keep = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            properties[name] = {"anyOf": [field, {"type": "null"}], **keep}
    for name, values in model.neutral_values.items():
        properties.setdefault(name, {"enum": [*values, None], "description": "Not supported; passes when neutral."})
    for name in sorted(model.ignored):
        properties.setdefault(name, {"description": "Accepted and ignored."})


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
    ignored: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, body: Any) -> Any:  # noqa: ANN401 - what a client sent
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.ignored:
                continue
            if name in cls.neutral_values and name not in cls.model_fields:
                if value is not None and value not in cls.neutral_values[name]:
                    raise UnsupportedParameterError(f"Weft does not support {name}.", param=name)
                continue
            if value is not None or name not in cls.model_fields:
                kept[name] = value
        return kept


def _prompts(value: object) -> list[str] | list[list[int]]:
    """One or many prompts, as text or token ids, brought to a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value):
            return value
        if _are_tokens(value):
            return [value]
        if all(isinstance(part, list) and part and _are_tokens(part) for part in value):
            return value
    raise InvalidRequestError(
        "prompt must be a string, a list of token ids, or a non-empty list of either.", param="prompt"
    )


def _are_tokens(value: list[object]) -> bool:
    return all(type(part) is int and 0 <= part < 1 << 31 for part in value)


def _stops(value: object) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequestError("stop must be a string or a list of strings.", param="stop")
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise InvalidRequestError(
            f"stop takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters.", param="stop"
        )
    return stops


def _stopping(value: object) -> object:
    if value is True or value is False or value == "never":
        return value
    raise InvalidRequestError(f'early_stopping must be true, false or "never", got {value!r}.', param="early_stopping")


def _biases(value: object) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise InvalidRequestError(f"logit_bias must be an object of at most {MAX_BIASES} entries.", param="logit_bias")
    biases = {}
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidRequestError("logit_bias must map token ids to numbers.", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise InvalidRequestError("logit_bias takes numbers from -100 to 100.", param="logit_bias")
        biases[int(token)] = float(bias)
    return biases


def _content(value: object) -> str:
    """A message's text, given as a string or as parts of type text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        texts = []
        for part in value:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise UnsupportedParameterError("Weft takes message parts of type text only.", param="messages")
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise InvalidRequestError("A text part holds exactly type and text.", param="messages")
            texts.append(part["text"])
        return "".join(texts)
    raise InvalidRequestError("A message's content must be a string or a list of text parts.", param="messages")


def _targets(value: object) -> list[str]:
    """Names of modules; none means all of them."""
    if value == ALL_LINEAR:
        return []
    if isinstance(value, list) and value and all(isinstance(name, str) and name in MODULE_NAMES for name in value):
        return value
    raise InvalidRequestError(
        f'target_modules must be "{ALL_LINEAR}" or a list of {", ".join(MODULE_NAMES)}.', param="ranks"
    )


_TARGETS_SCHEMA = {
    "anyOf": [{"const": ALL_LINEAR}, {"type": "array", "items": {"enum": list(MODULE_NAMES)}, "minItems": 1}]
}
# What is sent, for the OpenAPI page; the functions above say themselves what is wrong with it.
_Tokens = list[Annotated[int, Field(ge=0)]]
_Prompt = str | list[str] | _Tokens | list[_Tokens]
_Stop = str | Annotated[list[str], Field(max_length=MAX_STOPS)]
_Biases = dict[str, Annotated[float, Field(ge=-100, le=100)]]


def _limits_schema(names: Sequence[str]) -> dict[str, Any]:
    limit = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": INT64 - 1}, {"type": "null"}]}
    return {"type": "object", "properties": dict.fromkeys(names, limit), "additionalProperties": False}


# What they may hold is checked by the registry.
Weight = Annotated[float, Field(ge=WEIGHTS[0], le=WEIGHTS[1])]
TenantLimits = Annotated[dict[str, Any], WithJsonSchema(_limits_schema(TENANT_LIMITS))]
KeyLimits = Annotated[dict[str, Any], WithJsonSchema(_limits_schema(KEY_LIMITS))]
_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}


NOT_IN_BEAM_SEARCH = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "echo"),
)
"""Fields that beam search takes with values that change nothing, and no others."""
ONLY_IN_BEAM_SEARCH = ("length_penalty", "early_stopping")


class StreamOptions(Body):
    """What a stream carries besides text."""

    neutral_values = {"include_obfuscation": (False,)}

    include_usage: bool = False
    """Send a last chunk with the usage."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""


class GenerationBody(Body):
    """Fields that completions and chat share."""

    ignored = neutral.IGNORED
    neutral_values = neutral.SHARED

    model: str | None = Field(None, min_length=1, max_length=512)
    """The base's served name, or an adapter as `name`, `name@3`, `name@prod`, `name@sha256:...`."""
    adapter_id: str | None = Field(None, min_length=1, max_length=512)
    """An adapter, where `model` is the base or absent."""
    user: str | None = Field(None, max_length=4096)
    """Whoever asks, in the caller's own words: decides, unseen by the model, where an alias splits its requests."""
    n: int = Field(1, ge=1, le=4096)
    priority: int = Field(0, ge=-100, le=100)
    """Order among the tenant's own waiting requests of one adapter: lower goes first."""
    best_of: int | None = Field(None, ge=1, le=4096)
    """Candidates to generate for each prompt, `n` if not given: the `n` with the highest log-probability per token are
    returned, all are billed. For beam search the beam width."""
    use_beam_search: bool = False
    """Search instead of sampling: the `n` best of `best_of` beams are returned, best first."""
    length_penalty: float = Field(1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    """For beam search: power of the length that a sequence's sum of log-probabilities is divided by."""
    early_stopping: Annotated[Literal[True, False, "never"], BeforeValidator(_stopping)] = False
    """For beam search: true ends it with the first `best_of` finished sequences, "never" only when no better one is
    possible, and false when none is likely."""
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=_Stop)] = Field(default_factory=list)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=128)
    ignore_eos: bool = False
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases, json_schema_input_type=_Biases)] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true.", param="stream_options")
        return self

    @model_validator(mode="after")
    def _candidates_can_be_compared(self) -> GenerationBody:
        if self.num_candidates < self.n:
            raise InvalidRequestError(f"best_of must be at least n = {self.n}, got {self.best_of}.", param="best_of")
        if self.stream and (self.use_beam_search or self.num_candidates > self.n):
            param = "use_beam_search" if self.use_beam_search else "best_of"
            message = f"{param} compares finished candidates, so it cannot be streamed. Send stream: false."
            raise InvalidRequestError(message, param=param)
        return self

    @model_validator(mode="after")
    def _beam_search_is_not_sampling(self) -> GenerationBody:
        for name in NOT_IN_BEAM_SEARCH if self.use_beam_search else ONLY_IN_BEAM_SEARCH:
            if name not in type(self).model_fields:
                continue
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            value = getattr(self, name)
            # Greedy decoding and "all tokens", as vLLM's clients write them.
            if value != default and (name, value) not in (("temperature", 0), ("top_k", -1)):
                goes = "does not go" if self.use_beam_search else "goes only"
                message = f"{name} {goes} with use_beam_search: true; expected {default}, got {value}."
                raise InvalidRequestError(message, param=name)
        return self

    @property
    def num_candidates(self) -> int:
        """Generations of each prompt, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def beam(self) -> BeamParams | None:
        """The beam search that is asked for."""
        width, penalty, stopping = self.num_candidates, self.length_penalty, self.early_stopping
        search = BeamParams(width=width, length_penalty=penalty, early_stopping=stopping)
        return search if self.use_beam_search else None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    neutral_values = {**neutral.SHARED, **neutral.COMPLETIONS}

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts, json_schema_input_type=_Prompt)]
    max_tokens: int = Field(16, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=100)
    echo: bool = False

    @model_validator(mode="after")
    def _no_tokens_only_with_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1; 0 goes with echo only.", param="max_tokens")
        return self


class Message(Body):
    """One turn of a chat."""

    neutral_values = neutral.MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]
    name: str | None = Field(None, max_length=64)
    """Accepted and not shown to the model."""


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    neutral_values = {**neutral.SHARED, **neutral.CHAT}

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=100)

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


class TokenizeBody(Body):
    """Body of POST /tokenize: a prompt, or a chat."""

    neutral_values = neutral.TOKENIZE

    model: str | None = Field(None, min_length=1, max_length=512)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True
    """For `prompt`; a chat template brings its own special tokens."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("Send either prompt or messages.", param="prompt")
        return self


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, min_length=1, max_length=512)
    tokens: list[Token]


class KeyFields(Body):
    """What a key has beside its tenant."""

    name: str | None = Field(None, max_length=512)
    limits: KeyLimits | None = None
    scopes: list[Scope] | None = Field(None, min_length=1, max_length=3)
    expires_at: Annotated[datetime | None, Field(strict=False)] = None
    """ISO-8601 with an offset."""

    @model_validator(mode="after")
    def _expiry_has_an_offset(self) -> KeyFields:
        if self.expires_at is not None and self.expires_at.tzinfo is None:
            raise InvalidRequestError("expires_at needs a UTC offset, for example a final Z.", param="expires_at")
        try:
            _ = self.expires_at and self.expires_at.astimezone(UTC)
        except OverflowError as error:
            raise InvalidRequestError(
                "expires_at must lie before the year 10000 in UTC.", param="expires_at"
            ) from error
        return self


class TenantBody(Body):
    """Body of POST /v1/tenants."""

    name: str = Field(max_length=512)
    limits: TenantLimits = Field(default_factory=dict)
    """What is not named is as in the settings `tenant_defaults.*`; null is no limit."""
    weight: Weight = 1.0
    """Its part of the engine, beside those of the other tenants with requests."""


class TenantPatchBody(Body):
    """Body of PATCH /v1/tenants/{name}."""

    limits: TenantLimits | None = None
    """All of them: what is not named does not limit any more. Null leaves them."""
    weight: Weight | None = None
    """Null leaves it."""

    @model_validator(mode="after")
    def _says_something(self) -> TenantPatchBody:
        if self.limits is None and self.weight is None:
            raise InvalidRequestError("Give limits, weight or both.", param="limits")
        return self


class KeyBody(KeyFields):
    """Body of POST /v1/tenants/{name}/keys; without scopes it grants all, without a time it never expires."""


class KeyPatchBody(KeyFields):
    """Body of PATCH /v1/keys/{id}: what is given changes; `limits` replaces all of the key's."""


class PlannedAdapters(Body):
    """Adapters that do not exist yet: of one rank, on the same modules of every layer."""

    rank: int = Field(ge=1, le=MAX_RANK_LIMIT)
    target_modules: Annotated[list[str], BeforeValidator(_targets), WithJsonSchema(_TARGETS_SCHEMA)] = Field(
        default_factory=list
    )
    """`all-linear`, or names of modules."""
    count: int = Field(1, ge=1, le=MAX_PLANNED)


class AdapterFitBody(Body):
    """Body of POST /v1/adapters:fit."""

    adapters: list[Annotated[str, Field(min_length=1, max_length=512)]] = Field(default_factory=list, max_length=1000)
    """Each as in `model`: `name`, `name@3`, `name@prod`, `name@sha256:...`."""
    ranks: list[PlannedAdapters] = Field(default_factory=list, max_length=32)

    @model_validator(mode="after")
    def _asks_for_something(self) -> AdapterFitBody:
        if not self.adapters and not self.ranks:
            raise InvalidRequestError(
                "Name adapters, or ranks of adapters to come.", param="adapters", code="missing_required_parameter"
            )
        return self


class GrantBody(Body):
    """Body of POST /v1/adapters/{name}/grants."""

    tenant: str = Field(min_length=1, max_length=512)
    """The other tenant's id; admins may give its name."""
    version: int | None = Field(None, ge=1, lt=1 << 31)
    """None grants every version, those to come too."""


class RotateBody(Body):
    """Body of POST /v1/keys/{id}/rotate."""

    grace_s: int = Field(0, ge=0, le=30 * 86_400)
    """Seconds for which the old key goes on working."""


def _aliases(value: object) -> dict[str, dict[int, int] | int | None]:
    if not isinstance(value, dict):
        raise InvalidRequestError("aliases must map names to versions.", param="aliases")
    return {alias: _meaning(meaning) for alias, meaning in value.items()}


def _meaning(value: object) -> dict[int, int] | int | None:
    """A version, versions by weight, or nothing."""
    if value is None or type(value) is int:
        return value
    if isinstance(value, dict) and all(_VERSION.fullmatch(key) and type(value[key]) is int for key in value):
        return {int(version): weight for version, weight in value.items()}
    raise InvalidRequestError(
        'An alias means a version, such as 2, or versions by weight, such as {"2": 90, "3": 10}.', param="aliases"
    )


_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_VersionNumber = Annotated[int, Field(ge=1)]
_Shares = Annotated[dict[str, Annotated[int, Field(ge=1, le=10_000)]], Field(min_length=1, max_length=8)]
_Aliases = Annotated[dict[str, _VersionNumber | _Shares | None], Field(max_length=64)]


class AdapterPatchBody(Body):
    """Body of PATCH /v1/adapters/{name}."""

    description: str | None = Field(None, max_length=4096)
    pinned: bool | None = None
    aliases: Annotated[
        dict[str, dict[int, int] | int | None], BeforeValidator(_aliases, json_schema_input_type=_Aliases)
    ] = Field(default_factory=dict, max_length=64)
    """Merged into what is there: a version, versions by weight (a canary), or null to remove the alias."""


class UploadFileBody(Body):
    """A file that is going to be sent."""

    size: int = Field(ge=1, lt=1 << 53)
    """Bytes."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class UploadBody(Body):
    """Body of POST /v1/uploads."""

    name: str = Field(max_length=512)
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    activate: bool = True
    """Let the plain name mean the version once it is there."""
    files: dict[Literal["adapter_config.json", "adapter_model.safetensors"], UploadFileBody] = Field(min_length=2)
    tenant: str | None = Field(None, max_length=512)
    """For admins."""


class ImportBody(Body):
    """Body of POST /v1/adapters:import."""

    name: str = Field(max_length=512)
    description: str | None = Field(None, max_length=MAX_DESCRIPTION)
    activate: bool = True
    source: str = Field(max_length=2048)
    """`hf://organization/repository[@revision]` or `s3://bucket/prefix`."""
    tenant: str | None = Field(None, max_length=512)
