"""Fields that all generations share, those of vLLM among them, and the bodies of completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from manylora.engine.sampling_params import MAX_LENGTH_PENALTY, BeamParams
from manylora.errors import InvalidRequestError
from manylora.server.generation import unsupported_params
from manylora.server.generation.structured_output import (
    ResponseFormat,
    StructuredOutputs,
    WantedGrammar,
)
from manylora.server.http.bodies import INT64, Body, Token, View
from manylora.server.http.wrong_value import shown


class UsageDetails(View):
    """Parts of the prompt tokens."""

    cached_tokens: int


class OutputDetails(View):
    """Parts of the completion tokens."""

    reasoning_tokens: int


class UsageView(View):
    """The tokens that a request is billed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: UsageDetails
    completion_tokens_details: OutputDetails


class PromptLogprobView(View):
    """A token that was possible at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprobView] | None]


class PromptView(View):
    """Facts of the prompt in an answer, where they are asked for."""

    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`."""
    prompt_logprobs: PromptLogprobs | None = None
    """For each token of the prompt the likeliest ones and itself, by id; null for the first token."""


class TokenIdsView(View):
    """The tokens of a choice, where they are asked for."""

    token_ids: list[int] | None = None
    """With `return_token_ids`: of the choice, or of the chunk of a stream."""


class CompletionLogprobsView(View):
    """Parallel lists over the tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoiceView(TokenIdsView, PromptView):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobsView | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | None


class GenerationView(View):
    """Fields that the answers of completions and chat share."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: UsageView


class CompletionView(GenerationView):
    """Answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoiceView]


MAX_STOP_LENGTH = 256
MAX_BIASES = 300
MAX_ALLOWED_TOKENS = 1024
"""Every step writes them, for each row that has some."""
Word = Annotated[str, Field(min_length=1, max_length=256)]


def _prompts(value: object) -> list[str] | list[list[int]]:
    """One or many prompts, as text or token ids, brought to a list."""
    if isinstance(value, str) or (isinstance(value, list) and value and _are_tokens(value)):
        value = [value]
    if isinstance(value, list) and value:
        if all(isinstance(part, str) for part in value):
            return value
        if all(isinstance(part, list) and part and _are_tokens(part) for part in value):
            return value
    message = "prompt must be a string, a list of token ids, or a non-empty list of either."
    raise InvalidRequestError(message, param="prompt")


def _are_tokens(value: list[object]) -> bool:
    return all(type(part) is int and 0 <= part < 1 << 31 for part in value)


def _stops(value: object) -> object:
    """The stop strings as a list."""
    return [value] if isinstance(value, str) else value


def _stopping(value: object) -> object:
    if value is True or value is False or value == "never":
        return value
    raise InvalidRequestError(
        f'early_stopping must be true, false or "never", got {shown(value)}.',
        param="early_stopping",
    )


# The types that clients send, for the OpenAPI page.
_Tokens = list[Annotated[int, Field(ge=0)]]
_Prompt = str | list[str] | _Tokens | list[_Tokens]
_Stop = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
_Stops = Annotated[list[_Stop], BeforeValidator(_stops, json_schema_input_type=_Stop | list[_Stop])]
_Biases = dict[
    Annotated[int, Field(strict=False, ge=0, lt=1 << 31)],  # keys of JSON are texts
    Annotated[float, Field(ge=-100, le=100)],
]

NOT_IN_BEAM_SEARCH = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "echo",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
)
"""Fields that beam search takes only with values that change nothing."""
ONLY_IN_BEAM_SEARCH = ("length_penalty", "early_stopping")


class StreamOptions(Body):
    """Parts of a stream besides text."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    """Send a last chunk with the usage."""
    continuous_usage_stats: bool = False
    """Send the usage so far with every chunk."""


class SamplingFields(Body):
    """Fields that all bodies share by which tokens are generated."""

    takes_nul = True
    ignored = unsupported_params.IGNORED
    neutral_values = unsupported_params.SHARED
    hints = unsupported_params.HINTS

    adapter_id: str | None = Field(None, min_length=1, max_length=512)
    """An adapter, if `model` is the base or absent. The answer has this name as `model`."""
    user: str | None = Field(None, max_length=4096)
    """Id of an end user, not shown to the model. Where an alias splits its requests, one user gets one version."""
    priority: int = Field(0, ge=-100, le=100)
    """Order among the tenant's own waiting requests of one adapter: lower goes first."""
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stream: bool = False
    ignore_eos: bool = False
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)

    @model_validator(mode="before")
    @classmethod
    def _take_whole_floats(cls, body: dict[str, object]) -> dict[str, object]:
        """5.0 as 5: some clients write every number as a float."""
        wholes = {
            name: int(each)
            for name, each in body.items()
            if isinstance(each, float) and each.is_integer()
        }
        return body | wholes


class GenerationBody(SamplingFields):
    """Fields that completions and chat share."""

    model: str | None = Field(None, min_length=1, max_length=512)
    """The base's served name, or an adapter as `name`, `name@3`, `name@prod`, `name@sha256:...`, each also
    behind a name of the base and a colon."""
    n: int = Field(1, ge=1, le=4096)
    best_of: int | None = Field(None, ge=1, le=4096)
    """Candidates to generate for each prompt, `n` if not given: the `n` with the highest log-probability per token are
    returned, all are billed. For beam search the beam width."""
    use_beam_search: bool = False
    """Beam search instead of sampling: the `n` best of `best_of` beams are returned, best first."""
    length_penalty: float = Field(1.0, ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)
    """For beam search: a sequence's score is its sum of log-probabilities divided by its length to this power."""
    early_stopping: Annotated[Literal[True, False, "never"], BeforeValidator(_stopping)] = False
    """For beam search: true ends it with the first `best_of` finished sequences, "never" only when no better one is
    possible, and false when none is likely."""
    stream_options: StreamOptions | None = None
    stop: _Stops = Field(default_factory=list)
    stop_token_ids: list[Token] = Field(default_factory=list, max_length=128)
    logit_bias: _Biases = Field(default_factory=dict, max_length=MAX_BIASES)
    min_tokens: int = Field(0, ge=0, lt=1 << 31)
    """Until there are this many, no end-of-sequence token or stop token is chosen, and stop strings do not count."""
    bad_words: list[Word] = Field(default_factory=list, max_length=128)
    """Texts not to generate, each as it is tokenized at the start of a text and after a space. Other tokens that make
    up the same text are not ruled out."""
    allowed_token_ids: list[Token] = Field(
        default_factory=list, min_length=1, max_length=MAX_ALLOWED_TOKENS
    )
    """Choose among these tokens only; leave it out to allow all."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Have what ended the answer in its text: the stop string, or the text of the stop token."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=1 << 31)
    """Keep only this number of tokens at the end of each prompt; -1 keeps as many as fit."""
    prompt_logprobs: int | None = Field(None, ge=0, le=100)
    """Log-probabilities of the prompt's tokens, each with this number of the likeliest; not in a stream."""
    return_token_ids: bool = False
    """Answer with the ids of the prompt's tokens and of the generated ones."""
    return_tokens_as_token_ids: bool = False
    """In `logprobs`, write tokens as `token_id:ID`."""
    response_format: ResponseFormat | None = None
    """Hold the answer to JSON, or to a JSON schema."""
    structured_outputs: StructuredOutputs | None = None
    """Hold the answer to a schema, a pattern, one of some texts, or a grammar."""

    @model_validator(mode="after")
    def _fit_together(self) -> GenerationBody:
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens must be -1 or at least 1, got 0."
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true.", param="stream_options")
        if self.num_candidates < self.n:
            raise InvalidRequestError(
                f"best_of must be at least n = {self.n}, got {self.best_of}.", param="best_of"
            )
        if self.stream and (self.use_beam_search or self.num_candidates > self.n):
            param = "use_beam_search" if self.use_beam_search else "best_of"
            message = f"{param} compares finished candidates, so it cannot be streamed. Send stream: false."
            raise InvalidRequestError(message, param=param)
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs cannot be streamed. Send stream: false."
            raise InvalidRequestError(message, param="prompt_logprobs")
        self._check_beam_search()
        self._check_grammar()
        return self

    def _check_grammar(self) -> None:
        """Refuse what cannot be used together with a grammar."""
        params = self.grammar_params
        for name in (*params[1:], "use_beam_search", "ignore_eos"):
            if params and getattr(self, name):
                raise InvalidRequestError(f"{name} cannot be used with {params[0]}.", param=name)

    def _check_beam_search(self) -> None:
        for name in NOT_IN_BEAM_SEARCH if self.use_beam_search else ONLY_IN_BEAM_SEARCH:
            if name not in type(self).model_fields:
                continue
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            value = getattr(self, name)
            # Greedy decoding and "all tokens", as vLLM's clients write them.
            if value != default and (name, value) not in (("temperature", 0), ("top_k", -1)):
                goes = "cannot be used" if self.use_beam_search else "can only be used"
                message = f"{name} {goes} with use_beam_search: true; expected {shown(default)}, got {shown(value)}."
                raise InvalidRequestError(message, param=name)

    @property
    def grammar_params(self) -> list[str]:
        """The fields that hold answers to something, of which there may be one. Their grammar takes a while to make."""
        is_text = self.response_format is None or self.response_format.type == "text"
        fields = {"structured_outputs": self.structured_outputs, "response_format": not is_text}
        return [name for name, given in fields.items() if given]

    @property
    def has_own_grammar(self) -> bool:
        """True if the grammar is the client's, and holds the whole output."""
        return self.structured_outputs is not None and self.structured_outputs.grammar is not None

    def wanted_grammar(self) -> WantedGrammar | None:
        """The grammar that answers are held to, with the rule `start`; None if they are free.

        Raises:
            InvalidRequestError: A schema is wrong.
        """
        if self.structured_outputs is not None:
            return self.structured_outputs.wanted()
        return self.response_format.wanted() if self.response_format is not None else None

    @property
    def num_candidates(self) -> int:
        """Generations of each prompt, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def beam(self) -> BeamParams | None:
        """The beam search that is asked for."""
        if not self.use_beam_search:
            return None
        return BeamParams(
            width=self.num_candidates,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    neutral_values = unsupported_params.COMPLETIONS

    prompt: Annotated[
        list[str] | list[list[int]], BeforeValidator(_prompts, json_schema_input_type=_Prompt)
    ]
    max_tokens: int = Field(16, ge=0, lt=1 << 31)
    logprobs: int | None = Field(None, ge=0, le=100)
    echo: bool = False
    add_special_tokens: bool = True
    """For prompts that are texts: begin them with the model's start token, if it has one."""

    @model_validator(mode="after")
    def _no_tokens_only_with_echo(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1; 0 is for echo: true only.", param="max_tokens"
            )
        return self

    @property
    def token_limit(self) -> int:
        """Most tokens to generate for each choice."""
        return self.max_tokens
