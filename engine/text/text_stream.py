"""A request's tokens as text: decoded as they come, cut at stop strings. Knows neither engine nor transport.

Tokens are decoded one at a time; the parts add up to the whole text.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from manylora.engine.request import FinishReason, RequestOutput, TokenLogprobs
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.text.tokenizer import Tokenizer

CONTEXT_TOKENS = 6
"""Number of prompt tokens before the first token, because decoders treat the start of a text differently."""
MAX_WINDOW_TOKENS = 64
"""Largest window. Garbage may never reach the end of a character, and must not be decoded again and again."""
NONE_SHOWN: Mapping[int, str] = MappingProxyType({})
_UNFINISHED = "\ufffd"


class Detokenizer:
    """Decodes a window that starts at the last whole piece of text, and returns the new final text in it.

    Two parts at the end are not final: a replacement character, which the next token may complete to a letter, and a
    run of raw byte tokens, which decoders read as a whole.

    Args:
        tokenizer: Decodes the window.
        prompt_ids: Tokens before the first one. Their text is not returned.
        skip_special_tokens: Give special tokens no text.
        shown_ids: Special tokens that have a text in any case, by id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_ids: Mapping[int, str] = NONE_SHOWN,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._shown_ids = shown_ids if skip_special_tokens else NONE_SHOWN
        self._restart(_context_of(tokenizer, prompt_ids))
        self._run = bytearray(_byte_run(tokenizer, self._window))
        """Raw byte tokens at the end of the window."""
        self._num_given = len(self._run.decode(errors="ignore"))
        """Number of whole characters of the run that belong to the prompt."""

    def num_waiting(self, token_id: int) -> int:
        """Number of whole characters before this token that were not returned, because they end a run of raw bytes."""
        if not self._run:
            return 0
        if not self._tokenizer.may_end_text(token_id, skip_special_tokens=False):
            return len(self._run.decode(errors="ignore")) - self._num_given
        return max(len(self._decode(self._window)) - self._emitted, 0)

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that becomes final with it: often that of the token, sometimes none."""
        if self._tokenizer.may_end_text(token_id, skip_special_tokens=False):
            self._run.clear()
            self._num_given = 0
        else:
            self._run += self._tokenizer.token_bytes(token_id)
        shown = self._shown_ids.get(token_id) if self._shown_ids else None
        if shown is not None:
            rest = self.flush()  # the text before it is whole
            self._restart([*self._window, token_id][-CONTEXT_TOKENS:])
            self._emitted = len(self._decode(self._window))
            return rest + shown
        self._window.append(token_id)
        if not self._tokenizer.may_end_text(token_id, skip_special_tokens=self._skips_special):
            return ""
        text = self._decode(self._window)
        final = self._settled(text)
        delta = final[self._emitted :]
        self._emitted += len(delta)
        if delta and final == text:
            self._restart(self._window[self._num_context :])
            self._emitted = len(
                self._decode(self._window)
            )  # the text may begin inside a character of the prompt
        elif len(self._window) > MAX_WINDOW_TOKENS + self._num_context:
            self._restart(self._window[-MAX_WINDOW_TOKENS // 4 :])
        return delta

    def flush(self) -> str:
        """Return the rest of the text after the last token."""
        delta = self._decode(self._window)[self._emitted :]
        self._emitted += len(delta)
        return delta

    def _restart(self, window: list[int]) -> None:
        self._window = window
        self._num_context = len(window)
        self._emitted = len(self._settled(self._decode(window)))

    def _settled(self, text: str) -> str:
        return settled_text(self._tokenizer, self._window, text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)


def settled_text(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> str:
    """Text of tokens without an incomplete character at its end, which the tokens that follow complete.

    Args:
        tokenizer: Tokenizer with the tokens' bytes.
        token_ids: All tokens, or the last ones.
        text: Text of the tokens.
    """
    if not text.endswith(_UNFINISHED):
        return text
    if run := _byte_run(tokenizer, token_ids):  # decoders write _UNFINISHED for each byte of it
        try:
            return text[: -len(run)] + getincrementaldecoder("utf-8")().decode(run)
        except UnicodeDecodeError:  # no further byte makes characters of it
            return text
    is_whole = b"".join(map(tokenizer.token_bytes, token_ids[-CONTEXT_TOKENS:])).endswith(
        _UNFINISHED.encode()
    )
    return text if is_whole else text.removesuffix(_UNFINISHED)


def _byte_run(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """Bytes of the raw byte tokens at the end of some tokens."""
    start = len(token_ids)
    while start and not tokenizer.may_end_text(token_ids[start - 1], skip_special_tokens=False):
        start -= 1
    return b"".join(map(tokenizer.token_bytes, token_ids[start:]))


def _context_of(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """Last tokens of a prompt. They do not begin inside a run of raw byte tokens, unless it is very long."""
    length = CONTEXT_TOKENS
    while length < min(len(prompt_ids), MAX_WINDOW_TOKENS) and not tokenizer.may_end_text(
        prompt_ids[-length], skip_special_tokens=False
    ):
        length += 1
    return list(prompt_ids[-length:])


def prompt_offsets(
    tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool
) -> list[int]:
    """Number of characters of a prompt's text before each of its tokens."""
    pieces = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    offsets = []
    num_characters = 0
    for token_id in token_ids:
        offsets.append(num_characters + pieces.num_waiting(token_id))
        num_characters += len(pieces.push(token_id))
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The addition of one output to a text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Delivered tokens, without those after a stop string."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of each delivered token, if they are asked for."""
    text_offsets: list[int] = field(default_factory=list)
    """Number of characters of output before each token; at the end, of the text that is shown."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """Stop string or stop token that ended it; None for the end-of-sequence token."""


class StopScanner:
    """Lets text through up to the first stop string, and holds back a possible start of one.

    The stop string that is complete first counts. Among those that are complete at the same character, the longest
    counts. So the result does not depend on the cuts of the text into parts.

    Args:
        stops: The stop strings.
        is_shown: Show the found stop string too.
    """

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_shown = is_shown
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text, and return the text to show and the found stop string. `may_stop` allows the text to stop here."""
        if not self._stops:
            return text, None
        num_old = len(self._held)
        self._held += text
        if may_stop and (found := self._found(num_old)):
            end, start, stop = min(found)
            shown, self._held = self._held[: end if self._is_shown else start], ""
            return shown, stop
        cut = len(self._held) - self._num_held()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def flush(self) -> str:
        """Return the text that was held back, after the last text."""
        shown, self._held = self._held, ""
        return shown

    def _found(self, num_old: int) -> list[tuple[int, int, str]]:
        """End and start of each stop string that is completed after the first `num_old` characters."""
        places = (
            (stop, self._held.find(stop, max(0, num_old + 1 - len(stop)))) for stop in self._stops
        )
        return [(start + len(stop), start, stop) for stop, start in places if start >= 0]

    def _num_held(self) -> int:
        """Length of the longest end of the text that is the start of a stop string."""
        longest = max(len(stop) - 1 for stop in self._stops)
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next(
            (
                length
                for length in lengths
                if any(stop.startswith(self._held[-length:]) for stop in self._stops)
            ),
            0,
        )


class TextStream:
    """Turns the outputs of one request into text.

    The stream has ended when a delta has `finish_reason`. If the output had none, the caller aborts the request.

    Args:
        tokenizer: Decodes tokens.
        params: Rules for the end of the text.
        prompt_ids: The prompt, so that the first token is spaced as its continuation.
        shown_ids: Special tokens that are part of the text, by id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        shown_ids: Mapping[int, str] = NONE_SHOWN,
    ) -> None:
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown_ids=shown_ids,
        )
        self._scanner = StopScanner(params.stop, is_shown=params.include_stop_str_in_output)
        self._num_characters = 0
        self._num_shown = 0
        self.num_tokens = 0
        """Number of delivered tokens, up to and with the one that completed a stop string. They are billed."""
        self.is_finished = False

    def push(self, output: RequestOutput) -> TextDelta:
        """Add an output. There must be none after the end."""
        if self.is_finished:
            return TextDelta()
        shown: list[str] = []
        offsets: list[int] = []
        stop: str | None = None
        for token_id in output.token_ids:
            offsets.append(self._num_characters + self._detokenizer.num_waiting(token_id))
            # A token that ends the generation counts, but its text is not part of the answer.
            is_hidden = (
                token_id == output.stop_token_id and not self._params.include_stop_str_in_output
            )
            text = "" if is_hidden else self._detokenizer.push(token_id)
            self._num_characters += len(text)
            part, stop = self._scanner.push(
                text, may_stop=self.num_tokens + len(offsets) > self._params.min_tokens
            )
            shown.append(part)
            if stop is not None:
                break
        if stop is None and output.finish_reason is not None:
            part, stop = self._scanner.push(self._detokenizer.flush())
            shown += [part, self._scanner.flush()]
        self.num_tokens += len(offsets)
        self.is_finished = stop is not None or output.finish_reason is not None
        self._num_shown += sum(map(len, shown))
        if self.is_finished:  # a cut stop string has no places in the text
            offsets = [min(offset, self._num_shown) for offset in offsets]
        stop_token = (
            output.stop_token_id if output.stop_token_id in self._params.stop_token_ids else None
        )
        return TextDelta(
            text="".join(shown),
            token_ids=output.token_ids[: len(offsets)],
            logprobs=output.logprobs[: len(offsets)] if output.logprobs is not None else None,
            text_offsets=offsets,
            finish_reason="stop" if stop is not None else output.finish_reason,
            stop_reason=stop if stop is not None else stop_token,
        )
