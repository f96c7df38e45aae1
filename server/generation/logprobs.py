"""Log-probabilities in OpenAI's two shapes: parallel lists for completions, entries for chat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from weft.engine.request import TokenLogprobs
from weft.engine.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


class CompletionLogprobs:
    """Makes pieces of a completions choice's `logprobs`.

    Args:
        tokenizer: Gives the text of a token.
        num_top: Alternatives per position.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top

    def piece(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, list[object]]:
        """Lists for the next tokens.

        Args:
            token_ids: The tokens.
            logprobs: One per token; None where nothing is known (a prompt's first token).
            offsets: Characters of the choice's text before each token.
        """
        return {
            "tokens": [token_label(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in logprobs],
            "text_offset": list(offsets),
        }

    def prompt_piece(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[object]]:
        """Lists for the tokens of an echoed prompt."""
        lengths = [self._length(token_id) for token_id in token_ids]
        return self.piece(token_ids, logprobs, [0, *accumulate(lengths)][: len(lengths)])

    def _length(self, token_id: int) -> int:
        """Characters that a token adds to an echoed prompt, which shows no special tokens."""
        return len(self._tokenizer.token_text(token_id)) if self._tokenizer.decode([token_id]) else 0

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        pairs = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._num_top]
        top = {token_label(self._tokenizer, token_id): _finite(logprob) for token_id, logprob in pairs}
        top.setdefault(token_label(self._tokenizer, entry.token_id), _finite(entry.logprob))
        return top


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], num_top: int) -> dict[str, list[object]]:
    """The `content` entries of a chat choice's `logprobs`."""
    return {
        "content": [
            {
                **_chat_entry(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [
                    _chat_entry(tokenizer, token_id, logprob)
                    for token_id, logprob in list(zip(entry.top_ids, entry.top_logprobs, strict=True))[:num_top]
                ],
            }
            for entry in logprobs
        ]
    }


def merge(pieces: Sequence[dict[str, list[object]] | None]) -> dict[str, list[object]] | None:
    """Append the lists of several pieces, key by key; None when there is no piece."""
    found = [piece for piece in pieces if piece is not None]
    return {key: [value for piece in found for value in piece[key]] for key in found[0]} if found else None


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; `bytes:` and hex for one that is only part of a character, so that labels stay distinct."""
    text = tokenizer.token_text(token_id)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in tokenizer.token_bytes(token_id))


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": token_label(tokenizer, token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
