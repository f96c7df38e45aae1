"""Limits of the model, and the refusal of requests that it cannot compute. Knows nothing of pages and of the queue."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from manylora.engine.request import GenerationRequest
from manylora.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the model."""

    max_model_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    """Token ids are below this."""
    eos_token_ids: frozenset[int] = frozenset()
    """Tokens that end a generation."""


def kv_tokens(request: GenerationRequest) -> int:
    """Most tokens of a request whose keys and values are stored: the last generated token's never are."""
    return len(request.prompt_token_ids) + max(request.params.max_tokens - 1, 0)


def check_limits(request: GenerationRequest, limits: ModelLimits) -> None:
    """Refuse a request that the model cannot compute.

    Raises:
        InvalidRequestError: The prompt is empty, a token id is unknown, a weight is not positive, or there are more
            generated tokens than wanted.
        ContextLengthError: Prompt plus `max_tokens` exceed the model's length.
    """
    prompt = request.prompt_token_ids
    generated = request.generated_token_ids
    params = request.params
    if not prompt:
        raise InvalidRequestError("prompt must have at least one token, got none.", param="prompt")
    if not request.flow.weight > 0:
        raise InvalidRequestError(
            f"weight must be above 0, got {request.flow.weight}.", param="weight"
        )
    if len(prompt) + params.max_tokens > limits.max_model_len:
        raise ContextLengthError(
            f"This model takes {limits.max_model_len} tokens, but {len(prompt)} in the prompt and "
            f"{params.max_tokens} to generate are {len(prompt) + params.max_tokens}. "
            "Shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    named = (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids))
    for param, token_ids in (("prompt", prompt), ("prompt", generated), *named):
        _check_vocabulary(param, token_ids, limits.vocab_size)
    if len(generated) > params.max_tokens:
        raise InvalidRequestError(
            f"max_tokens must be at least the {len(generated)} tokens generated already, got {params.max_tokens}.",
            param="max_tokens",
        )


def _check_vocabulary(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids:
        return
    lowest = min(token_ids)
    highest = max(token_ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequestError(
            f"{param} must have token ids from 0 to {vocab_size - 1}, got {wrong}.", param=param
        )
