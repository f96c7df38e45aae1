"""From a validated body to prompts in token ids and sampling parameters. Knows the tokenizer, not the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.engine.sampling_params import SamplingParams
from weft.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from weft.engine.text.tokenizer import Tokenizer
    from weft.server.generation.schemas import ChatBody, CompletionBody, GenerationBody, Message

LEAST_TOP_P = 1e-9
"""Stands for 0, which OpenAI takes: only the most likely token is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt."""

    token_ids: list[int]
    text: str | None = None
    """As the client sent it; None for token ids and chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_choices: int
    max_stops: int


def completion_prompts(body: CompletionBody, tokenizer: Tokenizer, limits: Limits) -> list[Prompt]:
    """The prompts of a completions body, in order.

    Raises:
        InvalidRequestError: Too many prompts times candidates, an empty prompt, or a token id beyond the vocabulary.
        ContextLengthError: A prompt and `max_tokens` exceed the context.
    """
    _check_candidates(body, len(body.prompt), limits)
    prompts = []
    for given in body.prompt:
        if isinstance(given, str):
            _check_text_length(given, limits)
            prompt = Prompt(token_ids=tokenizer.encode(given, add_special_tokens=True), text=given)
        else:
            prompt = Prompt(token_ids=given)
        _check_prompt(prompt, limits, "prompt")
        _check_context(len(prompt.token_ids), body.max_tokens, limits, "prompt")
        prompts.append(prompt)
    return prompts


def chat_prompt(body: ChatBody, tokenizer: Tokenizer, limits: Limits) -> Prompt:
    """The prompt of a chat body, by the model's chat template.

    Raises:
        InvalidRequestError: n or best_of is too large, or the template refuses the messages.
        ContextLengthError: Prompt and requested tokens exceed the context, or nothing is left to generate.
    """
    _check_candidates(body, 1, limits)
    for message in body.messages:
        _check_text_length(message.content, limits)
    prompt = Prompt(token_ids=tokenizer.chat_prompt(as_turns(body.messages)))
    _check_prompt(prompt, limits, "messages")
    _check_context(len(prompt.token_ids), max(1, body.token_limit or 1), limits, "messages")
    return prompt


def as_turns(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as chat templates expect them; `developer` is the newer name of `system`."""
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content}
        for message in messages
    ]


def completion_params(body: CompletionBody, limits: Limits) -> SamplingParams:
    """Sampling of a completions body; raises InvalidRequestError for what is out of range."""
    _check_logprobs(body.logprobs, "logprobs", limits)
    prompt_logprobs = body.logprobs if body.echo else None
    return _params(body, limits, max_tokens=body.max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)


def chat_params(body: ChatBody, prompt: Prompt, limits: Limits) -> SamplingParams:
    """Sampling of a chat body; without a token limit the answer may fill the context."""
    _check_logprobs(body.top_logprobs, "top_logprobs", limits)
    room = limits.max_model_len - len(prompt.token_ids)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, limits, max_tokens=body.token_limit or room, logprobs=logprobs, prompt_logprobs=None)


def _params(
    body: GenerationBody, limits: Limits, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    _check_vocabulary(list(body.logit_bias), "logit_bias", limits)
    _check_vocabulary(body.stop_token_ids, "stop_token_ids", limits)
    if len(body.stop) > limits.max_stops:
        raise InvalidRequestError(
            f"stop may have {limits.max_stops} strings (server.max_stops), got {len(body.stop)}.", param="stop"
        )
    if logprobs is None and body.num_candidates > body.n:
        logprobs = 0  # candidates are compared by them, whether they are shown or not
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=max(body.top_p, LEAST_TOP_P),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
    )


def _check_candidates(body: GenerationBody, num_prompts: int, limits: Limits) -> None:
    count, name = body.num_candidates, "n" if body.best_of is None else "best_of"
    if num_prompts * count > limits.max_choices:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        raise InvalidRequestError(
            f"{prompts} times {name} = {count} exceed the limit of {limits.max_choices} choices (server.max_choices).",
            param=name if count > limits.max_choices else "prompt",
        )


def _check_prompt(prompt: Prompt, limits: Limits, param: str) -> None:
    if not prompt.token_ids:
        raise InvalidRequestError("The prompt has no tokens; send at least one character.", param=param)
    _check_vocabulary(prompt.token_ids, param, limits)


def _check_vocabulary(token_ids: list[int], param: str, limits: Limits) -> None:
    largest = max(token_ids, default=0)
    if largest >= limits.vocab_size:
        raise InvalidRequestError(
            f"{param} holds the token id {largest}, but the vocabulary ends at {limits.vocab_size - 1}.", param=param
        )


def _check_logprobs(wanted: int | None, param: str, limits: Limits) -> None:
    if wanted is not None and wanted > limits.max_logprobs:
        raise InvalidRequestError(f"{param} must be at most {limits.max_logprobs}, got {wanted}.", param=param)


def _check_text_length(text: str, limits: Limits) -> None:
    """Refuse what no tokenizer could fit, before tokenizing it."""
    if len(text) > 128 * limits.max_model_len:
        raise _too_long(f"a text has {len(text)} characters, which do not fit. Shorten it", limits, None)


def _check_context(num_prompt: int, num_output: int, limits: Limits, param: str) -> None:
    total = num_prompt + num_output
    if total > limits.max_model_len:
        parts = f"{num_prompt} in the {param}, {num_output} in the completion"
        raise _too_long(f"you requested {total} tokens ({parts}). Shorten one of them", limits, param)


def _too_long(reason: str, limits: Limits, param: str | None) -> ContextLengthError:
    """LiteLLM knows an overflow by the first words, and LangChain by the code where it stands in the message."""
    start, code = f"This model's maximum context length is {limits.max_model_len} tokens.", ContextLengthError.code
    return ContextLengthError(f"{start} However, {reason} ({code}).", param=param)
