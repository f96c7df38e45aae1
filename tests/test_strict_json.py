"""JSON is read in one way only, wherever it comes from."""

from __future__ import annotations

import pytest

from manylora.strict_json import DuplicateKeyError, JsonRefusedError, TooDeepError, loads, parse

NUMBERS = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1" * 5000,
    "-" + "1" * 400,
    "01",
    "1.",
    "+1",
    "0x1",
)
TEXTS = (r'"\ud800"', r'"\udc00\ud800"', r'"\ud800x"', '"\ud800"', '"\x00"', r'"\x41"', "'a'")
BEYOND = ("", " ", "{", "1 2", "{}x", "[1,]", "\ufeff{}", "nul")


@pytest.mark.parametrize("text", [*NUMBERS, *TEXTS, *BEYOND])
def test_what_readers_take_differently_is_refused(text: str) -> None:
    for document in (text, f'{{"a": [{text}]}}' if text not in ("", " ") else text):
        for raw in (document, document.encode("utf-8", "surrogatepass")):
            with pytest.raises(JsonRefusedError):
                loads(raw)


def test_bytes_that_are_not_utf8_are_refused() -> None:
    for raw in (b'"\xff"', b'"\xed\xa0\x80"', "{}".encode("utf-16"), b"\xef\xbb\xbf{}"):
        with pytest.raises(JsonRefusedError):
            loads(raw)


def test_keys_that_repeat_and_depth_are_refused_by_name() -> None:
    for text in ('{"a": 1, "a": 1}', '[{"x": {"a": 1, "b": 2, "\\u0061": 3}}]'):
        with pytest.raises(DuplicateKeyError, match="'a' is there twice"):
            loads(text)
    assert loads("[" * 128 + "]" * 128)
    for depth in (129, 500, 2000, 100_000):
        for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            with pytest.raises(TooDeepError):
                loads(text)


def test_everything_else_is_read_exactly() -> None:
    big = 2**70 + 1
    assert loads(
        f'{{"n": {big}, "f": 1e308, "z": -0.0, "e": "\\ud83d\\ude00", "": [[], {{}}]}}'
    ) == {
        "n": big,
        "f": 1e308,
        "z": -0.0,
        "e": "\U0001f600",
        "": [[], {}],
    }


def test_a_reader_that_names_fields_gets_numbers_out_of_range() -> None:
    assert parse(b'{"a": 1e999, "b": ' + b"9" * 5000 + b"}", 16) == {"a": float("inf"), "b": 10**20}


@pytest.mark.parametrize(
    "text", ["", "{", "[1,", '{"a" 1}', "{} {}", "[1 2]", '"\\x"', '"\n"', "\ufeff{}", '{"a": nul}']
)
def test_a_refusal_is_in_our_words(text: str) -> None:
    with pytest.raises(
        JsonRefusedError, match=r"^(an early end|unexpected text) at character \d+$"
    ):
        parse(text.encode(), 16)
