"""The program that checks grammars in a process with limits: `python -P -m manylora.server.sandbox.grammar_worker`.

It does what the engine will do: it compiles a grammar for the model's tokenizer, and computes the first masks.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from manylora.engine.grammar.matcher import PARSER_LIMITS, GrammarTokens, compiled_parser
from manylora.engine.grammar.problems import TOO_COMPLEX
from manylora.engine.text.tokenizer import read_eos_token_ids
from manylora.errors import ManyloraError
from manylora.server.sandbox.worker import answer_jobs, read_setup

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NUM_WALKED = 8
"""Tokens of an answer that are tried: some grammars are found too complex only where an answer is under way."""
MEMORY_BYTES = 256 << 20
NICENESS = 10
"""Added to the server's: where steps use all cores, this process gets a tenth of one."""


def tokenizer_of(folder: Path) -> LLTokenizer | None:
    """The tokenizer of a checkpoint; None where grammars do not know it: the engine then refuses the request."""
    try:
        return GrammarTokens(folder, read_eos_token_ids(folder)).tokenizer
    except ManyloraError:
        return None


def problem(tokenizer: LLTokenizer | None, text: str) -> str | None:
    """The fault of a grammar; None if it is sound."""
    from llguidance import LLMatcher, LLParserLimits

    if tokenizer is None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            text, limits=LLParserLimits(**PARSER_LIMITS)
        )
        return messages[0] if is_error else None
    try:
        parser = compiled_parser(tokenizer, text)
        for _ in range(NUM_WALKED):
            allowed = int.from_bytes(parser.compute_bitmask(), "little")
            token_id = (allowed & -allowed).bit_length() - 1
            if parser.is_error() or parser.is_accepting() or token_id < 0:
                break
            parser.consume_tokens([token_id])
        return parser.get_error() or None
    except BaseException:  # noqa: BLE001 - a panic of llguidance is no Exception
        return TOO_COMPLEX


if __name__ == "__main__":
    os.nice(NICENESS)
    checking = partial(problem, tokenizer_of(Path(read_setup())))
    answer_jobs(lambda: checking, MEMORY_BYTES)
