from __future__ import annotations

from pathlib import Path

import pytest

from tiny_models import make_tokenizer
from weft.engine.grammar.matcher import PARSER_LIMITS, GrammarTokens
from weft.engine.text.tokenizer import Tokenizer, read_eos_token_ids
from weft.errors import InvalidRequestError

DEMO = Path(__file__).resolve().parents[3] / "weft" / "demo" / "weft-demo"
TOKENS = GrammarTokens(DEMO, read_eos_token_ids(DEMO))


def encode(text: str) -> list[int]:
    return Tokenizer(DEMO).encode(text, add_special_tokens=False)


def test_copies_of_a_matcher_go_their_own_ways() -> None:
    compiled = TOKENS.compile('start: "ab" | "cd"')
    first, second = compiled.copy(), compiled.copy()
    assert first.take(encode("a"))
    assert second.take(encode("cd"))
    assert (first.is_done, second.is_done, compiled.is_done) == (False, True, False)
    assert first.take(encode("b"))
    assert first.is_done


def test_a_token_that_does_not_fit_is_not_taken_and_ends_the_matcher() -> None:
    matcher = TOKENS.compile('start: "ab"').copy()
    assert not matcher.take(encode("x"))
    assert not matcher.is_done


def test_a_long_answer_is_followed_to_its_end_and_wears_the_matcher_out() -> None:
    schema = (
        '{"type": "object", "properties": {"answer": {"type": "string", "maxLength": 8000}}, "required": ["answer"]}'
    )
    compiled = TOKENS.compile(f"start: %json {schema}")
    matcher, other = compiled.copy(), compiled.copy()
    text = '{"answer":"' + "the quick brown fox " * 395 + '"}'
    for token_id in encode(text):
        matcher.parser.compute_bitmask()
        assert matcher.take([token_id])
    assert matcher.is_done
    assert compiled.is_worn
    assert other.take(encode(text))


def test_a_copy_in_error_wears_the_matcher_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSER_LIMITS, "max_lexer_states", 500)
    compiled = TOKENS.compile("start: /[a-z ]{4000}/")
    copy = compiled.copy()
    assert not compiled.is_worn
    assert not copy.take(encode("some words that are too many " * 50))
    assert compiled.is_worn


def test_stop_tokens_may_end_what_is_complete_only() -> None:
    matcher = TOKENS.compile("start: /[0-9]+/").copy([3, 100_000])
    assert matcher.end_tokens() == []
    assert matcher.take(encode("1"))
    assert matcher.end_tokens() == [3]


def test_forced_tokens_are_those_of_the_tokenizer() -> None:
    matcher = TOKENS.compile('start: "{\\"intent\\": \\"" /[a-z]+/ "\\"}"').copy()
    forced = matcher.forced_tokens()
    assert forced == encode('{"intent": "')[: len(forced)]
    assert forced
    assert matcher.take(forced)
    rest = encode('{"intent": "')[len(forced) :]
    assert not rest or matcher.take(rest)
    assert matcher.forced_tokens() == []


def test_what_is_no_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unknown name") as refused:
        TOKENS.compile("start: other")
    assert refused.value.code == "grammar_too_complex"


def test_a_model_without_an_end_or_with_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence") as refused:
        GrammarTokens(make_tokenizer(tmp_path), []).compile('start: "a"')
    assert refused.value.code == "grammar_unsupported"
    with pytest.raises(InvalidRequestError, match="byte-level"):
        GrammarTokens(tmp_path / "none", [1]).compile('start: "a"')
