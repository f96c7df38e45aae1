from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from manylora.engine.grammar.json_schema import json_grammar, json_object_grammar
from manylora.engine.grammar.masks import Masks
from manylora.engine.grammar.matcher import (
    MAX_SLOW,
    PARSER_LIMITS,
    SLOW_S,
    GrammarTokens,
    Matcher,
    compiled_parser,
)
from manylora.engine.request import GRAMMAR_DEAD_END, GRAMMAR_TOO_COMPLEX, INTERNAL
from manylora.engine.text.tokenizer import Tokenizer, read_eos_token_ids
from manylora.errors import InvalidRequestError
from tiny_models import make_tokenizer

DEMO = Path(__file__).resolve().parents[3] / "manylora" / "demo" / "manylora-demo"
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


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 2]}}, "required": ["b"]},
        {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "string", "format": "date-time"}],
         "$defs": {"tree": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3}}},
        {"type": "string", "maxLength": 12, "pattern": "^[a-f]+$"},
        True,
    ],
)  # fmt: skip
def test_a_schema_that_goes_past_the_reader_of_lark_allows_what_it_allows_there(
    schema: object,
) -> None:
    text = json_grammar(schema)
    past = compiled_parser(TOKENS.tokenizer, text)
    through = compiled_parser(TOKENS.tokenizer, text.replace("start:", "start :"))
    rng = random.Random(0)
    for _ in range(60):
        mask = past.compute_bitmask()
        assert mask == through.compute_bitmask()
        assert past.is_accepting() == through.is_accepting()
        bits = int.from_bytes(mask, "little")
        allowed = [
            token_id for token_id in range(TOKENS.tokenizer.vocab_size) if bits >> token_id & 1
        ]
        if past.is_stopped() or not allowed:
            break
        token_id = rng.choice(allowed)
        past.consume_tokens([token_id])
        through.consume_tokens([token_id])
    assert not past.is_error()


def test_only_lark_tells_where_in_it_a_schema_is_wrong() -> None:
    wrong = '%json {"type": "string", "pattern": "["}'
    found = [
        compiled_parser(TOKENS.tokenizer, text).get_error()
        for text in (f"start: {wrong}", f"start : {wrong}")
    ]
    assert [error.startswith("at 1(") for error in found] == [False, True]


def test_a_rule_after_a_schema_is_read_as_lark() -> None:
    matcher = TOKENS.compile('start: %json {"const": 1}\n| "b"').copy()
    assert matcher.take(encode("b"))


def test_a_long_answer_is_followed_to_its_end_and_wears_the_matcher_out() -> None:
    answer = '{"type": "string", "maxLength": 8000}'
    schema = f'{{"type": "object", "properties": {{"answer": {answer}}}, "required": ["answer"]}}'
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


class Panic(BaseException):
    """What a fault of llguidance raises."""


class Parser:
    """One that does not return in order.

    Args:
        work: What it does instead of making a mask or taking tokens.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def consume_tokens(self, token_ids: list[int]) -> bool:  # noqa: ARG002
        self._work()
        return True

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:  # noqa: ARG002
        self._work()


def panic() -> None:
    raise Panic("the parser gave up")


def idle() -> None:
    pass


def busy() -> None:
    end_s = time.thread_time() + 2 * SLOW_S
    while time.thread_time() < end_s:
        pass


def matcher_with(work: Callable[[], None]) -> Matcher:
    return Matcher(Parser(work), TOKENS.tokenizer)  # type: ignore[arg-type]


def test_a_panic_ends_its_own_output_alone() -> None:
    broken, sound = matcher_with(panic), TOKENS.compile('start: "ab"').copy()
    assert not broken.take([1])
    assert broken.error() == INTERNAL
    assert not broken.is_done
    masks = Masks()
    filled = masks.begin([(0, sound), (1, matcher_with(panic))]).result()
    assert filled.failures == {1: INTERNAL}
    assert filled.bits[0].any()
    assert not filled.bits[1].any()
    masks.close()


def test_what_is_slow_again_and_again_ends_and_its_neighbour_goes_on() -> None:
    slow, sound = matcher_with(busy), TOKENS.compile('start: "ab"').copy()
    masks = Masks()
    failures = [
        masks.begin([(4, slow), (7, sound)]).result().failures for _ in range(MAX_SLOW // 4 + 1)
    ]
    assert failures == [{4: GRAMMAR_DEAD_END}] * (MAX_SLOW // 4) + [
        {4: GRAMMAR_TOO_COMPLEX}
    ]  # it writes no mask
    masks.close()


def test_a_slow_token_now_and_then_is_no_fault() -> None:
    turns = cycle([busy, *[idle] * 4])
    matcher = matcher_with(lambda: next(turns)())
    assert all(matcher.take([1]) for _ in range(100))


class Marks:
    """Every three marks of JSON are a token, as in large vocabularies."""

    tokens = (
        *(bytes([byte]) for byte in range(256)),
        *("".join(marks).encode() for marks in product('{}[]":,\\ \n0123-.eE', repeat=3)),
        b"\xff<eos>",
    )
    eos_token_id = len(tokens) - 1
    bos_token_id = None
    special_token_ids = (eos_token_id,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def test_any_json_object_can_be_followed_with_a_large_vocabulary() -> None:
    rng = random.Random(0)
    tokenizer = LLTokenizer(TokenizerWrapper(Marks()), n_vocab=len(Marks.tokens))
    parser = compiled_parser(tokenizer, json_object_grammar())
    for _ in range(25):
        matcher = Matcher(parser.deep_copy(), tokenizer)
        for _ in range(150):
            bits = np.unpackbits(
                np.frombuffer(matcher.parser.compute_bitmask(), np.uint8), bitorder="little"
            )
            assert matcher.error() is None
            allowed = np.flatnonzero(bits[: Marks.eos_token_id])
            if not len(allowed):
                break
            assert matcher.take([int(rng.choice(allowed))])


def test_stop_tokens_may_end_what_is_complete_only() -> None:
    matcher = TOKENS.compile("start: /[0-9]+/").copy([3, 100_000])
    assert matcher.end_tokens() == []
    assert matcher.take(encode("1"))
    assert matcher.end_tokens() == [3]


def test_what_is_no_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no rule or terminal has this name") as refused:
        TOKENS.compile("start: other")
    assert refused.value.code == "grammar_too_complex"


def test_a_model_without_an_end_or_with_another_kind_of_tokenizer_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidRequestError, match="end-of-sequence") as refused:
        GrammarTokens(make_tokenizer(tmp_path), []).compile('start: "a"')
    assert refused.value.code == "grammar_unsupported"
    with pytest.raises(InvalidRequestError, match="byte-level"):
        GrammarTokens(tmp_path / "none", [1]).compile('start: "a"')


def test_a_tokenizer_that_grammars_do_not_know_is_read_once(tmp_path: Path) -> None:
    tokens = GrammarTokens(tmp_path / "later", [1])
    tokens.prepare()
    make_tokenizer(tmp_path / "later")  # what would do, had it been there
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="byte-level"):
            tokens.compile('start: "a"')
