from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from manylora.engine.grammar.json_schema import json_grammar, with_schemas_read
from manylora.errors import InvalidRequestError

Schema = dict[str, Any]
ODD = 2**53 + 1
INT64 = {"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
ORDER: Schema = {
    "type": "object",
    "properties": {
        "id": INT64,
        "note": {"type": "string"},
        "parent": {"anyOf": [UINT64, {"type": "null"}]},
    },
    "required": ["id"],
    "additionalProperties": False,
}
DERIVED: Schema = {
    "$defs": {"base": {"type": "object", "properties": {"id": INT64}, "required": ["id"]}},
    "allOf": [{"$ref": "#/$defs/base"}],
    "properties": {"b": {"type": "integer"}},
    "required": ["b"],
}
EITHER: Schema = {
    "$defs": {
        "a": {"$ref": "#/$defs/b"},
        "b": {
            "type": "object",
            "properties": {"id": INT64},
            "required": ["id"],
            "additionalProperties": False,
        },
    },
    "type": "object",
    "anyOf": [
        {"$ref": "#/$defs/a"},
        {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
    ],
}
TREE: Schema = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "id": INT64,
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["id", "below"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ENDLESS = "leads back to itself"
NEEDS_A: Schema = {"type": "object", "required": ["a"]}


class Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257)


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return (
        matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        and matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": ODD}, [ODD], [ODD - 1, ODD + 1]),
        ({"const": -(2**64) - 1}, [-(2**64) - 1], [-(2**64)]),
        (
            {"enum": [ODD, "x", {"a": [ODD]}, None, 1e22]},
            [ODD, "x", {"a": [ODD]}, None, 10**22],
            [ODD - 1, 1],
        ),
        ({"type": "integer", "enum": [ODD, "x"]}, [ODD], ["x"]),
        (INT64, [0, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.5, "x"]),
        (UINT64, [0, 10, ODD, 2**64 - 1], [2**64, -1]),
        ({"type": "integer", "minimum": ODD}, [ODD, 10**40], [ODD - 1, 3]),
        ({"type": "integer", "exclusiveMaximum": -ODD}, [-ODD - 1, -(10**40)], [-ODD, 0, 10**17]),
        (
            {"type": ["integer", "null"], "exclusiveMinimum": -(2**63)},
            [None, 1 - 2**63],
            [-(2**63), "x"],
        ),
        ({"minimum": ODD}, [ODD, "x", None, {}, [1]], [ODD - 1, 0.5, -3]),
        (
            {"type": "number", "minimum": -0.5, "maximum": 2**64 - 1},
            [-0.5, 0, 2.25, 2**64 - 1],
            [-0.6, -1, 2**64],
        ),
        ({"type": "number", "maximum": 1e19}, [10**19, -0.5, -(10**30)], [10**19 + 1]),
        (
            ORDER,
            [
                {"id": -(2**63)},
                {"id": 1, "note": "x", "parent": None},
                {"id": 1, "parent": 2**64 - 1},
            ],
            [{}],
        ),
        (
            ORDER,
            [],
            [{"id": 2**63}, {"id": 1, "parent": 2**64}, {"id": 1, "x": 1}, {"note": "x", "id": 1}],
        ),
        (
            {**ORDER, "required": [], "additionalProperties": UINT64},
            [{}, {"x": ODD}, {"note": "", "/": 1}],
            [{"x": -1}],
        ),
        (
            {"type": "array", "items": UINT64, "minItems": 1, "maxItems": 3},
            [[1], [1, 2, ODD]],
            [[], [-1], [1] * 4],
        ),
        ({"type": "array", "items": UINT64}, [[], [1, 2, 3]], [[2**64]]),
        ({"prefixItems": [{"const": ODD}], "items": False}, [[], [ODD], "x"], [[ODD, 1], [1]]),
        (
            {"type": "array", "prefixItems": [{"const": ODD}], "minItems": 3},
            [[ODD, 1, "a"]],
            [[ODD, 1]],
        ),
        (
            TREE,
            [{"id": 1, "below": [{"id": -(2**63), "below": []}]}],
            [{"id": 1, "below": [{"id": 2**63, "below": []}]}],
        ),
        ({"allOf": [{"$ref": "#/$defs/id"}], "$defs": {"id": INT64}}, [2**63 - 1], [2**63]),
        ({"const": "a\0b"}, ["a\0b"], ["ab", "a b"]),
        (EITHER, [{"id": 2**63 - 1}, {"b": None}], [{"id": 2**63}, {}, 1]),
        (
            {"enum": ["\x1f\x7f", {"k\x01": ["\x0b"]}, 1]},
            ["\x1f\x7f", {"k\x01": ["\x0b"]}, 1],
            ["", {"k\x01": [""]}],
        ),
    ],
)
def test_values_that_a_library_would_change_are_held_to_exactly(
    schema: Schema, good: list[object], bad: list[object]
) -> None:
    for grammar in (json_grammar(schema), with_schemas_read(f"start: %json {json.dumps(schema)}")):
        assert [
            value for value in good if not takes(grammar, json.dumps(value, ensure_ascii=False))
        ] == []
        assert [
            value for value in bad if takes(grammar, json.dumps(value, ensure_ascii=False))
        ] == []


def chain(link: Schema, end: object, length: int) -> Schema:
    """Definitions of which each is `link`, which leads to the next one by `$ref` to `#/$defs/next`."""
    text = json.dumps(link)
    links = {
        f"d{index}": json.loads(text.replace("next", f"d{index + 1}")) for index in range(length)
    }
    return {**links, f"d{length}": end}


@pytest.mark.parametrize(
    "link",
    [
        {"$ref": "#/$defs/next"},
        {"anyOf": [{"$ref": "#/$defs/next"}]},
        {"allOf": [{"$ref": "#/$defs/next"}]},
        {"type": "array", "items": {"$ref": "#/$defs/next"}, "maxItems": 1},
    ],
)
def test_a_long_way_to_a_wide_number_is_followed(link: Schema) -> None:
    assert str(ODD) in json_grammar(
        {"$defs": chain(link, {"const": ODD}, 1500), "$ref": "#/$defs/d0"}
    )


def test_a_schema_that_joins_the_same_again_and_again_is_refused_at_once() -> None:
    again = {"allOf": [{"$ref": "#/$defs/next"}, {"$ref": "#/$defs/next"}]}
    shared = {"$defs": chain(again, {"type": "object"}, 60)}
    with pytest.raises(InvalidRequestError, match="cannot be held to all of allOf"):
        json_grammar(
            {**shared, "allOf": [{"$ref": "#/$defs/d0"}, {"properties": {"a": {"const": ODD}}}]}
        )


MANY = [{"$ref": "#/$defs/d0"}] * 3000


@pytest.mark.parametrize(
    ("schema", "end", "written"),
    [
        ({"minimum": ODD, "prefixItems": MANY}, {}, "#/$defs/d3000"),
        ({"anyOf": [{"type": "object", "anyOf": [each]} for each in MANY]}, ORDER, "note"),
    ],
    ids=["items", "unions"],
)
def test_a_long_way_that_many_parts_share_is_followed_once(
    schema: Schema, end: Schema, written: str
) -> None:
    """It takes minutes, if each part follows it."""
    assert written in json_grammar({**schema, "$defs": chain({"$ref": "#/$defs/next"}, end, 3000)})


def test_a_long_way_back_is_followed_once() -> None:
    link = {"type": "object", "properties": {"x": {"$ref": "#/$defs/next"}}, "required": ["x"]}
    schema = {"$defs": chain(link, {"$ref": "#/$defs/d0"}, 9000), "$ref": "#/$defs/d0"}
    with pytest.raises(InvalidRequestError, match=ENDLESS) as refused:
        json_grammar(schema)  # for half a minute, if each place is looked for among all before it
    assert refused.value.param == "schema.$defs.d9000"


def test_a_grammar_that_is_much_longer_than_its_schema_is_not_written() -> None:
    link = {"type": "object", "properties": {"x": {"$ref": "#/$defs/next"}}}
    leaves = {f"p{index}": {"$ref": "#/$defs/d0"} for index in range(600)}
    schema = {
        "$defs": chain(link, {}, 600),
        "type": "object",
        "properties": {"w": {"const": ODD}, **leaves},
    }
    with pytest.raises(
        InvalidRequestError, match="schema makes a grammar of more than 262144 bytes"
    ) as refused:
        json_grammar(schema)
    assert refused.value.code == "grammar_too_large"


def test_every_range_of_whole_numbers_is_exact() -> None:
    ends = [2**53 - 1, ODD, 10**16 - 1, 10**16, 99_999_999_999_999_999, 2**63, 10**19 + 7]
    ends += [-end for end in ends]
    for low in ends:
        for high in (end for end in ends if end >= low and max(abs(end), abs(low)) > 2**53):
            grammar = json_grammar({"type": "integer", "minimum": low, "maximum": high})
            inside = {low, high, (low + high) // 2, min(low + 1, high), max(high - 1, low)}
            assert all(takes(grammar, str(value)) for value in inside)
            near = {low - 1, high + 1, low * 10, high * 10 + 9, low // 10, high // 10, 0}
            assert [
                value for value in near if takes(grammar, str(value)) != (low <= value <= high)
            ] == []


@pytest.mark.parametrize(
    "name", ["password", "byte", "binary", "path", "uri-reference", "regex", "int64", "any thing"]
)
def test_a_format_that_is_not_known_constrains_nothing(name: str) -> None:
    assert json_grammar({"type": "string", "format": name}) == json_grammar({"type": "string"})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-02-28"],
            ["2023-02-29", "1900-02-29", "2023-04-31"],
        ),
        ("time", ["23:59:59.5+01:00"], ["12:00:60Z", "x"]),
        ("date-time", ["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2023-03-01T12:00:60Z"]),
        ("hostname", ["a.b"], [".".join(["a" * 60] * 5)]),
    ],
)
def test_a_format_that_is_known_is_held_to(name: str, good: list[str], bad: list[str]) -> None:
    grammar = json_grammar({"format": name})
    assert all(takes(grammar, json.dumps(value)) for value in [*good, 3, None])
    assert not any(takes(grammar, json.dumps(value)) for value in bad)


def test_a_further_property_cannot_repeat_the_name_of_another() -> None:
    grammar = json_grammar({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert takes(grammar, '{"a": 1, "b": "x"}')
    assert not takes(grammar, '{"a": 1, "\\u0061": "x"}')


ONE_MORE: Schema = {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"$ref": "#"}, "schema", ENDLESS),
        ({**NEEDS_A, "properties": {"a": {"$ref": "#"}}}, "schema.properties.a", ENDLESS),
        (
            {
                **NEEDS_A,
                "properties": {"type": {}, "a": {**NEEDS_A, "properties": {"a": {"$ref": "#"}}}},
            },
            None,
            ENDLESS,
        ),
        (
            {**NEEDS_A, "additionalProperties": {"$ref": "#"}},
            "schema.additionalProperties",
            ENDLESS,
        ),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/0"}]}, "schema.anyOf.0", ENDLESS),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "schema.items", ENDLESS),
        ({"allOf": [{"$ref": "#"}], "type": "object"}, "schema.allOf.0", ENDLESS),
        (ONE_MORE, "schema.additionalProperties", ENDLESS),
        (
            {**ONE_MORE, "additionalProperties": False, "properties": {"a": {"$ref": "#"}}},
            "schema.properties.a",
            ENDLESS,
        ),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            None,
            ENDLESS,
        ),
        (
            {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2},
            "schema.prefixItems.1",
            ENDLESS,
        ),
        ({**NEEDS_A, "properties": {"a": False}}, "schema.properties.a", "false"),
        ({**NEEDS_A, "additionalProperties": False}, "schema.additionalProperties", "false"),
        ({"const": [1, {"a": 1e999}]}, "schema.const.1.a", "finite"),
        ({"enum": [float("nan")]}, "schema.enum.0", "finite"),
        ({"maximum": float("inf")}, "schema.maximum", "finite"),
        ({"minimum": 10**400}, "schema.minimum", "finite"),
        ({"minimum": "5"}, "schema.minimum", "number"),
        ({"items": {"type": "text"}}, "schema.items.type", "must be one of null"),
        ({"minLength": -1}, "schema.minLength", "whole number"),
        ({"enum": []}, "schema.enum", "at least one"),
        ({"anyOf": []}, "schema.anyOf", "at least one"),
        ({"required": [1]}, "schema.required", "strings"),
        ({"pattern": 5}, "schema.pattern", "string"),
        *(
            ({"items": {"pattern": f"^a{control}b$"}}, "schema.items.pattern", "control character")
            for control in (
                *("\x01", "\x7f", r"\x01", r"\u001F", r"\U0000000b", r"\x{7f}", r"\a", r"\v"),
                *(
                    "[\x01]",
                    r"[\x01&&[^\x1f]]",
                    r"[\x01-\x07]",
                    "[[\x01]]",
                    "[\x01a&&\x01]",
                    r"(c|\x01?)",
                ),
            )
        ),
        (
            {"patternProperties": {"^a\x01b$": {}}},
            "schema.patternProperties.^a\x01b$",
            "control character",
        ),
        ({"multipleOf": -2}, "schema.multipleOf", "above 0"),
        ({"multipleOf": 0.07}, "schema.multipleOf", "fraction"),
        (
            {"items": {"type": "integer", "maximum": 2**63, "multipleOf": 2}},
            "schema.items",
            "2**53",
        ),
        ({"items": {"allOf": [{"type": "integer"}, {"maximum": 2**63}]}}, "schema.items", "2**53"),
        (
            {"allOf": [{"properties": {"a": INT64}}, {"type": "object", "properties": {"a": {}}}]},
            "schema",
            "2**53",
        ),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**63 - 1}, "schema", "in its range"),
        ({"type": "string", "const": ODD}, "schema", "of its type"),
        ({"anyOf": [INT64], "minimum": 0}, "schema", "2**53"),
        (DERIVED, "schema", "2**53"),
        ({"allOf": [INT64, {"type": "integer"}]}, "schema", "2**53"),
        ({"minimum": 0, "oneOf": [INT64]}, "schema", "2**53"),
        ({"type": "object", "minProperties": 2}, "schema.minProperties", "required"),
    ],
)
def test_what_cannot_be_held_to_is_refused_at_its_place(
    schema: Schema, place: str | None, reason: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        json_grammar(schema)
    assert place in (None, refused.value.param)
    assert reason in refused.value.message


CHARACTERS = [chr(code) for code in range(0x100)] + ["\u2028", "\U0001f600"]


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]",
        '[^"]',
        r"[^\\]",
        "[^ -~]",
        "[]a]",
        "[^]a]",
        "[-a]",
        "[^a-]",
        ".",
        r"[^\x00-\x1f]",
        "[^\x00-\x1f]",
        "[\x00-\x1fa]",
        r"[\x{0}-\u{20}]",
        r"[^\s\d]",
        "[[:cntrl:]]",
        r"\p{Cc}",
        r"[\p{Cc}]",
        r"\P{L}",
        r"\D",
        "[a-z&&[^b]]",
        r'[a-z"[^\n]]',
        "(?:[\x00-z]|[^b])",
    ],
)
def test_a_pattern_of_one_character_allows_what_the_regular_expression_does(pattern: str) -> None:
    held = json_grammar({"type": "string", "pattern": f"^{pattern}$"})
    quoted, plain = (
        LLMatcher(TOKENIZER, grammar, log_level=0) for grammar in (held, f"start: /{pattern}/")
    )
    assert not quoted.is_error(), quoted.get_error()
    assert with_schemas_read(held) == held, "also when it is read again"
    for character in CHARACTERS:
        written = json.dumps(character, ensure_ascii=False)
        can_be_written = "\\u" not in written and character != "\x7f"
        assert _takes(quoted, written) == (can_be_written and _takes(plain, character)), character


def _takes(matcher: LLMatcher, text: str) -> bool:
    own = matcher.deep_copy()
    token_ids = list(text.encode())
    return own.try_consume_tokens(token_ids) == len(token_ids) and own.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}},
            {"b": 1},
            {"a": 1},
        ),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, None, 1),
        ({"type": "array", "items": {"$ref": "#"}}, [[], [[]]], [1]),
        (
            {"type": "object", "additionalProperties": {"anyOf": [ONE_MORE, {"$ref": "#"}]}},
            {},
            {"a": 1},
        ),
        (
            {"anyOf": [{**NEEDS_A, "properties": {"a": {"$ref": "#"}}}, {"type": "null"}]},
            {"a": {"a": None}},
            {"a": 1},
        ),
        (
            {
                "type": "array",
                "items": {"type": "array", "items": {"$ref": "#/items"}, "minItems": 1},
            },
            [],
            [[1]],
        ),
    ],
)
def test_an_endless_part_that_is_not_needed_is_left_out(
    schema: Schema, good: object, bad: object
) -> None:
    grammar = json_grammar(schema)
    assert takes(grammar, json.dumps(good))
    assert not takes(grammar, json.dumps(bad))


def test_a_schema_in_lark_is_read_wherever_it_stands() -> None:
    lark = 'start: "a" b | %json {"const": "%json {"}\nb: %json {"const": 9007199254740993}'
    assert takes(with_schemas_read(lark), "a9007199254740993")
    assert takes(with_schemas_read(lark), '"%json {"')
    with pytest.raises(InvalidRequestError) as refused:
        with_schemas_read('start: %json {"type": "string"} | %json {"$ref": "#"}')
    assert refused.value.param == "grammar.1"
    with pytest.raises(InvalidRequestError, match="must be followed by a JSON schema"):
        with_schemas_read("start: %json {]")
