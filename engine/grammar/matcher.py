"""One output's place in its grammar. llguidance knows grammars; here are its limits and what can go wrong."""

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
from manylora.engine.request import GRAMMAR_TOO_COMPLEX, INTERNAL, RequestError
from manylora.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,  # an object takes four for each property that may be left out
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 5_000,  # any JSON object takes more than 3,000 where tokens hold several marks
    "max_lexer_states": 250_000,
    "max_grammar_size": 50_000,
    "verbose_errors": False,
}
"""What a grammar may cost. A mask then takes 5 ms at worst and usually 0.03 ms. The lexer's states are counted over
all copies of a matcher, which share them: an answer of 7,900 characters makes some 75,000."""
MAX_SHARED_TOKENS = 4096
"""Tokens that the copies of one matcher take before it is worn out."""
BYTES_PER_TOKEN = 8192
"""What the lexer that copies share grows by for a token, mostly; hostile patterns make it three times as much."""
SLOW_S = 0.005
"""CPU seconds of a mask or a token above which it counts against the output."""
MAX_SLOW = 40
"""A slow one counts 4, any other takes 1 off; above this an output ends, because all others wait for it."""
WORD_BITS = 32
ONLY_SCHEMA = "start: %json "
"""How a grammar begins that is nothing but a JSON schema."""


class GrammarTokens:
    """The model's tokens as grammars see them; read when they are first asked for.

    Args:
        folder: Of the checkpoint.
        eos_token_ids: Tokens that end an output.
    """

    def __init__(self, folder: Path, eos_token_ids: Collection[int]) -> None:
        self._folder = folder
        self._eos_token_ids = sorted(eos_token_ids)

    @property
    def tokenizer(self) -> LLTokenizer:
        """Of llguidance.

        Raises:
            InvalidRequestError: Grammars do not know this kind of tokenizer, or nothing ends an output.
        """
        if isinstance(self._made, InvalidRequestError):
            raise self._made.with_traceback(None)
        return self._made

    def prepare(self) -> None:
        """Make the tokenizer, if there can be one. Holds the interpreter's lock: 1.3 s with 151,000 tokens."""
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
        """A matcher at the start of a grammar; others are copied from it.

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
    """At the start of a grammar, or in error; what the first mask takes to find out is known to its copies."""
    from llguidance import LLMatcher, LLParserLimits

    parser = LLMatcher(
        tokenizer, _source(text), log_level=0, limits=LLParserLimits(**PARSER_LIMITS)
    )
    if not parser.is_error():
        parser.compute_bitmask()
    return parser


def _source(text: str) -> str:
    """A grammar for llguidance. Its reader of Lark takes 0.5 ms to start, like a small schema: it is passed by."""
    if not text.startswith(ONLY_SCHEMA):
        return text
    schema = text.removeprefix(ONLY_SCHEMA)
    try:
        json.loads(schema)
    except (ValueError, RecursionError):  # more stands after it
        return text
    return f'{{"grammars": [{{"json_schema": {schema}}}]}}'


@dataclass(slots=True)
class Wear:
    """What copies of one matcher did to the lexer that they share."""

    num_tokens: int = 0
    is_broken: bool = False
    """One of them is in error. If the lexer is full, all are soon."""


class Matcher:
    """Says which tokens may come next, and takes the one that did. Not thread-safe.

    Args:
        parser: At its place in the grammar.
        tokenizer: What its tokens are.
        stop_token_ids: Tokens that may end the output besides those of the model.
        wear: Of the matcher that it is a copy of.
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
        self._error: RequestError | None = None
        self._num_slow = 0
        self._tokenizer = tokenizer
        self._stop_token_ids = [
            token_id for token_id in stop_token_ids if token_id < tokenizer.vocab_size
        ]

    @property
    def num_words(self) -> int:
        """Words of 32 bits that a mask has."""
        return -(-self._tokenizer.vocab_size // WORD_BITS)

    @property
    def is_done(self) -> bool:
        """Whether the output is complete, and nothing can be added."""
        return self.error() is None and self.parser.is_stopped()

    @property
    def is_worn(self) -> bool:
        """Whether no more copies are to be made: the lexer that they share is broken, or has grown enough."""
        return self.wear.is_broken or self.wear.num_tokens >= MAX_SHARED_TOKENS

    def error(self) -> RequestError | None:
        """Why it cannot go on, or None. Copies that share its lexer learn of it."""
        if self._error is None and self.parser.is_error():
            self._error = GRAMMAR_TOO_COMPLEX
        self.wear.is_broken |= self._error is not None
        return self._error

    def fill(self, address: int) -> None:
        """Write the mask there; see `error`."""
        self._run(self.parser.unsafe_compute_mask_ptr, address, self.num_words * WORD_BITS // 8)

    def copy(self, stop_token_ids: Sequence[int] = ()) -> Matcher:
        """Another matcher at the same place."""
        return Matcher(self.parser.deep_copy(), self._tokenizer, stop_token_ids, self.wear)

    def take(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens; False if they cannot be, after which the matcher is of no use: see `error`."""
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
        ):  # a panic of llguidance is no Exception, and must end no more than this output
            logger.exception("following a grammar failed")
            self._error = INTERNAL
        self._num_slow = max(
            self._num_slow + (4 if time.thread_time() - started_s > SLOW_S else -1), 0
        )
        if self._num_slow > MAX_SLOW:
            self._error = GRAMMAR_TOO_COMPLEX

    def end_tokens(self) -> list[int]:
        """Tokens that may end the output here besides those of the model."""
        return self._stop_token_ids if self._stop_token_ids and self.parser.is_accepting() else []
