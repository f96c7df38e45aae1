"""vLLM's own fields of completions and chats, and what they add to an answer. Knows neither engine nor sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import InvalidRequestError
from manylora.server.http.bodies import Body, Token, View

Word = Annotated[str, Field(min_length=1, max_length=256)]
MAX_ALLOWED_TOKENS = 1024
"""Every step writes them, for each row that has some."""


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


class VllmFields(Body):
    """Fields that completions and chats share."""

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

    @model_validator(mode="before")
    @classmethod
    def _keep_some_of_the_prompt(cls, body: dict[str, object]) -> dict[str, object]:
        if body.get("truncate_prompt_tokens") == 0:
            message = "truncate_prompt_tokens must be -1 or at least 1, got 0."
            raise InvalidRequestError(message, param="truncate_prompt_tokens")
        return body


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences of words, as vLLM has them.

    A word with a space before it counts where it begins with another token then, and has no more of them.

    Raises:
        InvalidRequestError: A word has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
            for space in ("", " ")
        )
        if not bare:
            raise InvalidRequestError(
                "Each of bad_words must have at least one token.", param="bad_words"
            )
        found[bare] = None
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            found[spaced] = None
    return tuple(found)
