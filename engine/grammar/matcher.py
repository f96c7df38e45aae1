"""Place of an output in its grammar: limits and errors around the matchers of llguidance."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manylora.engine.grammar.problems import grammar_problem, schema_problem
from manylora.engine.request import GRAMMAR_TOO_COMPLEX, INTERNAL, ErrorInfo
from manylora.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,  # an object takes four for each optional property
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 5_000,  # any JSON object takes more than 3,000 if tokens contain several marks
    "max_lexer_states": 250_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
"""Limits of a grammar's cost. A mask then takes at most 5 ms and usually 0.03 ms. All copies of a matcher share the
states of the lexer: an answer of 7,900 characters makes some 75,000."""
MAX_SHARED_TOKENS = 4096
"""Tokens that the copies of a matcher may take before it is worn out."""
BYTES_PER_TOKEN = 8192
"""Usual growth of the shared lexer for a token, in bytes. Hostile patterns make it three times as large."""
SLOW_S = 0.005
"""A mask or a token that takes more CPU seconds is slow."""
MAX_SLOW = 40
"""Largest count of slow masks and tokens. A slow one adds 4, any other takes 1 off. Above it the output ends, because
all other outputs wait for it."""
WORD_BITS = 32
ONLY_SCHEMA = "start: %json "
"""Start of a grammar that is only a JSON schema."""


class GrammarTokens:
    """Tokens of the model for llguidance. They are read at the first use.

    Args:
        folder: Folder of the checkpoint.
        eos_token_ids: Tokens that end an output.
    """

    def __init__(self, folder: Path, eos_token_ids: Collection[int]) -> None:
        self._folder = folder
        self._eos_token_ids = sorted(eos_token_ids)

    @property
    def tokenizer(self) -> LLTokenizer:
        """Tokenizer of llguidance.

        Raises:
            InvalidRequestError: llguidance does not know this kind of tokenizer, or no token ends an output.
        """
        if isinstance(self._made, InvalidRequestError):
            raise self._made.with_traceback(None)
        return self._made

    def prepare(self) -> None:
        """Make the tokenizer, if it is possible. It holds the interpreter's lock, for 1.3 s with 151,000 tokens."""
        _ = self._made

    @cached_property
    def _made(self) -> LLTokenizer | InvalidRequestError:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            return InvalidRequestError(
                "This model cannot be held to a grammar: it names no end-of-sequence token.",
                code="grammar_unsupported",
            )
        try:
            source = json.loads((self._folder / "tokenizer.json").read_text(encoding="utf-8"))
            source["truncation"] = source["padding"] = None
            return LLTokenizer(json.dumps(source), eos_token=self._eos_token_ids)
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("grammars do not know the tokenizer of %s: %s", self._folder, error)
            message = (
                "This model cannot be held to a grammar: grammars know byte-level tokenizers and "
                "byte fallback only."
            )
            return InvalidRequestError(message, code="grammar_unsupported")

    def compile(self, text: str) -> Matcher:
        """Make a matcher at the start of a grammar. Requests get copies of it.

        Raises:
            InvalidRequestError: It is no grammar, or costs too much.
        """
        parser = compiled_parser(self.tokenizer, text)
        if parser.is_error():
            problem = schema_problem if "%json" in text else grammar_problem
            message = (
                f"No answer can be held to this grammar or schema: {problem(parser.get_error())}."
            )
            raise InvalidRequestError(message, code="grammar_too_complex")
        return Matcher(parser, self.tokenizer)


def compiled_parser(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    """Make a parser at the start of a grammar, or in error. It computes the first mask, so its copies start fast."""
    from llguidance import LLMatcher, LLParserLimits

    parser = LLMatcher(
        tokenizer, _source(text), log_level=0, limits=LLParserLimits(**PARSER_LIMITS)
    )
    if not parser.is_error():
        parser.compute_bitmask()
    return parser


def _source(text: str) -> str:
    """Write a grammar for llguidance. A plain schema skips the reader of Lark, which takes 0.5 ms to start."""
    if not text.startswith(ONLY_SCHEMA):
        return text
    schema = text.removeprefix(ONLY_SCHEMA)
    try:
        json.loads(schema)
    except (ValueError, RecursionError):  # the grammar has more than the schema
        return text
    return f'{{"grammars": [{{"json_schema": {schema}}}]}}'


@dataclass(slots=True)
class Wear:
    """Use of the lexer that all copies of a matcher share."""

    num_tokens: int = 0
    is_broken: bool = False
    """True if a copy is in error. If the lexer is full, all copies soon are."""


class Matcher:
    """Tells the tokens that may come next, and takes the chosen one. Not thread-safe.

    Args:
        parser: Parser of llguidance at its place in the grammar.
        tokenizer: Tokenizer of llguidance.
        stop_token_ids: Tokens that may end the output besides those of the model.
        wear: Wear of the matcher that it is a copy of.
    """

    def __init__(
        self,
        parser: LLMatcher,
        tokenizer: LLTokenizer,
        stop_token_ids: Sequence[int] = (),
        wear: Wear | None = None,
    ) -> None:
        self.parser = parser
        self.wear = wear or Wear()
        self._error: ErrorInfo | None = None
        self._num_slow = 0
        self._tokenizer = tokenizer
        self._stop_token_ids = [
            token_id for token_id in stop_token_ids if token_id < tokenizer.vocab_size
        ]

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in a mask."""
        return -(-self._tokenizer.vocab_size // WORD_BITS)

    @property
    def is_done(self) -> bool:
        """True if the output is complete and nothing can follow."""
        return self.error() is None and self.parser.is_stopped()

    @property
    def is_worn(self) -> bool:
        """True if no more copies may be made, because the shared lexer is broken or has grown too much."""
        return self.wear.is_broken or self.wear.num_tokens >= MAX_SHARED_TOKENS

    def error(self) -> ErrorInfo | None:
        """Reason why it cannot go on; None if it can. Copies with the same lexer share it."""
        if self._error is None and self.parser.is_error():
            self._error = GRAMMAR_TOO_COMPLEX
        self.wear.is_broken |= self._error is not None
        return self._error

    def fill(self, address: int) -> None:
        """Write the mask to this address; see `error`."""
        self._run(self.parser.unsafe_compute_mask_ptr, address, self.num_words * WORD_BITS // 8)

    def copy(self, stop_token_ids: Sequence[int] = ()) -> Matcher:
        """Make another matcher at the same place."""
        return Matcher(self.parser.deep_copy(), self._tokenizer, stop_token_ids, self.wear)

    def take(self, token_ids: Sequence[int]) -> bool:
        """Take these tokens; False if the grammar does not allow them. The matcher is useless then, see `error`."""
        self.wear.num_tokens += len(token_ids)
        self._run(self.parser.consume_tokens, list(token_ids))
        return self.error() is None

    def _run(self, work: Callable[..., object], *arguments: object) -> None:
        started_s = time.thread_time()
        try:
            work(*arguments)
        except (KeyboardInterrupt, SystemExit):
            raise
        except (
            BaseException
        ):  # a panic of llguidance is no Exception, and must end only this output
            logger.exception("following a grammar failed")
            self._error = INTERNAL
        self._num_slow = max(
            self._num_slow + (4 if time.thread_time() - started_s > SLOW_S else -1), 0
        )
        if self._num_slow > MAX_SLOW:
            self._error = GRAMMAR_TOO_COMPLEX

    def end_tokens(self) -> list[int]:
        """Tokens that may end the output here, besides those of the model."""
        return self._stop_token_ids if self._stop_token_ids and self.parser.is_accepting() else []
