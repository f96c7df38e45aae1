"""Token ids to text, one at a time, such that the parts add up to the text of the whole. Knows no stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CONTEXT_TOKENS = 6
"""Tokens of the prompt that stand before the first token: decoders treat the start of a text differently."""
MAX_WINDOW_TOKENS = 64
"""Garbage may never come to the end of a character; more tokens than this are not decoded again and again."""
_UNFINISHED = "\ufffd"


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Text of token ids."""

    def may_end_text(self, token_id: int, /) -> bool:
        """False for tokens after which no text is final: raw bytes, and special tokens, which have none."""


class Detokenizer:
    """Decodes a window that starts at the last whole piece of text, and hands out what is new and final in it.

    Final is all but a replacement character at the end, which the next token may turn into a letter, and a run of raw
    byte tokens, which decoders read as a whole.

    Args:
        tokenizer: Decodes the window.
        prompt_ids: Tokens before the first one; their text is not handed out.
    """

    def __init__(self, tokenizer: Decodes, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        self._num_context = len(self._window)
        self._emitted = len(_final(tokenizer.decode(self._window))) if self._window else 0

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that is final with it, often that of the token, sometimes none."""
        self._window.append(token_id)
        if not self._tokenizer.may_end_text(token_id):
            return ""
        text = self._tokenizer.decode(self._window)
        final = _final(text)
        delta = final[self._emitted :]
        self._emitted += len(delta)
        if delta and final == text:
            self._restart(self._window[self._num_context :])
        elif len(self._window) > MAX_WINDOW_TOKENS + self._num_context:
            self._restart(self._window[-MAX_WINDOW_TOKENS // 4 :])
        return delta

    def flush(self) -> str:
        """The rest, when no more tokens come."""
        delta = self._tokenizer.decode(self._window)[self._emitted :] if self._window else ""
        self._emitted += len(delta)
        return delta

    def _restart(self, window: list[int]) -> None:
        self._window = window
        self._num_context = len(window)
        self._emitted = len(_final(self._tokenizer.decode(window)))


def _final(text: str) -> str:
    return text.removesuffix(_UNFINISHED)
