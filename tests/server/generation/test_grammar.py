import json
from urllib.parse import quote

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from fake_engine import DEMO_MODEL
from grammar_checks import checked_grammar
from manylora.engine.grammar.json_schema import json_grammar, json_rule
from manylora.engine.grammar.schema_reader import MAX_SCHEMA_DEPTH
from manylora.engine.grammar.wide_numbers import MAX_GRAMMAR_BYTES
from manylora.errors import InvalidRequestError

ANSWER = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"type": "integer"}},
        "name": {"type": "string"},
    },
    "required": ["items", "name"],
    "additionalProperties": False,
}


class Bytes:
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def takes(schema: object, text: str) -> bool:
    grammar = checked_grammar(json_grammar(schema), "schema", DEMO_MODEL)
    matcher = LLMatcher(
        LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257), grammar.text, log_level=0
    )
    return (
        matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        and matcher.is_accepting()
    )


def test_an_answer_is_written_as_python_writes_json() -> None:
    assert takes(ANSWER, '{"items": [1, 2], "name": "x"}')
    assert not takes(ANSWER, '{"items":[1,2],"name":"x"}')
    assert not takes(ANSWER, '{"items": [1, 2], "name": 3}')


@pytest.mark.parametrize("where", ["root", "property", "definition"])
def test_the_options_of_the_grammar_engine_are_never_the_tenants(where: str) -> None:
    options = {
        "x-guidance": {
            "whitespace_flexible": True,
            "item_separator": ",",
            "key_separator": ":",
            "lenient": True,
        }
    }
    inner = {**ANSWER, **(options if where != "root" else {})}
    schemas = {
        "root": {**ANSWER, **options},
        "property": {"type": "object", "properties": {"a": inner}, "required": ["a"], **options},
        "definition": {"$ref": "#/$defs/a", "$defs": {"a": inner}},
    }
    text = '{"items":[1,2],"name":"x"}'
    assert not takes(schemas[where], f'{{"a":{text}}}' if where == "property" else text)


def test_a_property_may_have_the_name_of_the_options() -> None:
    schema = {
        "type": "object",
        "properties": {"x-guidance": {"const": 1}},
        "required": ["x-guidance"],
    }
    assert takes(schema, '{"x-guidance": 1}')
    assert not takes(schema, "{}")


def test_notes_for_people_change_nothing() -> None:
    noted = {"title": "Answer", "description": "d", "x-order": [1], **ANSWER}
    assert json_rule(noted) == json_rule(ANSWER)


def test_properties_keep_their_order() -> None:
    assert takes(
        {"type": "object", "properties": {"b": {}, "a": {}}, "required": ["b", "a"]},
        '{"b": 1, "a": 2}',
    )


@pytest.mark.parametrize("name", ["a/b", "a~b", "a b", "é", "a%25"])
def test_a_reference_names_a_place_as_json_pointers_do(name: str) -> None:
    pointer = quote(name.replace("~", "~0").replace("/", "~1"))
    assert takes({"anyOf": [{"$ref": f"#/$defs/{pointer}"}], "$defs": {name: {"const": 3}}}, "3")
    assert takes(
        {"prefixItems": [{"const": 4}, {"$ref": "#/prefixItems/0"}], "minItems": 2, "maxItems": 2},
        "[4, 4]",
    )


def test_one_of_several_is_held_to_any_of_them() -> None:
    assert takes({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "3")


@pytest.mark.parametrize(
    ("schema", "param", "word"),
    [
        ([], "schema", "object, true or false"),
        (False, "schema", "false"),
        (
            {"properties": {"a": {"unique": True, "uniqueItems": True}}},
            "schema.properties.a",
            "'unique', 'uniqueItems'",
        ),
        ({"items": {"$ref": "http://example.com/a"}}, "schema.items.$ref", "#/$defs/name"),
        ({"items": {"$id": "#a"}}, "schema.items", "'$id'"),
        ({"$ref": "#/$defs/none"}, "schema.$ref", "does not exist"),
        (
            {"anyOf": [{"$ref": "#/anyOf/1/const"}, {"const": {"not": {}}}]},
            "schema.anyOf.0.$ref",
            "names no schema",
        ),
        (
            {"items": {"$ref": "#/enum/0"}, "enum": [{"not": {}}]},
            "schema.items.$ref",
            "names no schema",
        ),
        (
            {"properties": {"a": {"$ref": "#/%63onst"}}, "const": {}},
            "schema.properties.a.$ref",
            "names no schema",
        ),
        ({"items": {"$ref": "#/required"}, "required": []}, "schema.items.$ref", "names no schema"),
        (
            {"items": {"$ref": "#/properties"}, "properties": {}},
            "schema.items.$ref",
            "names no schema",
        ),
        (
            {"allOf": [{"multipleOf": 6_000}, {"multipleOf": 6_000}]},
            "schema.allOf.1.multipleOf",
            "together must be at most 10000",
        ),
        ({"anyOf": {}}, "schema.anyOf", "list of schemas"),
        ({"items": {"exclusiveMinimum": 0, "maximum": 0.5}}, "schema.items", "narrower than 1"),
        (
            {"items": {"exclusiveMaximum": -85.0, "minimum": -85.5}},
            "schema.items",
            "narrower than 1",
        ),
        ({"properties": []}, "schema.properties", "object of schemas"),
        ({"const": float("inf")}, "schema.const", "finite"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: object, param: str, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word.replace("$", r"\$")) as refused:
        json_rule(schema)
    assert (refused.value.param, refused.value.code) == (param, "invalid_json_schema")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"pattern": "("}, "parenthesis"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "minimum in it is above its maximum"),
    ],
)
def test_what_no_answer_can_be_held_to_is_refused_without_a_word_of_the_grammar(
    schema: object, word: str
) -> None:
    with pytest.raises(InvalidRequestError, match=word) as refused:
        checked_grammar(json_grammar(schema), "response_format", DEMO_MODEL)
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_json_schema")
    assert "start:" not in refused.value.message


def test_a_schema_is_bounded_in_depth_and_size() -> None:
    schema: object = True
    for _ in range(MAX_SCHEMA_DEPTH):
        schema = {"items": schema}
    assert json_rule(schema)
    with pytest.raises(InvalidRequestError, match="nested 64 deep"):
        json_rule({"items": schema})
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_GRAMMAR_BYTES}"):
        checked_grammar(json_grammar({"const": "x" * MAX_GRAMMAR_BYTES}), "schema", DEMO_MODEL)
    deep: object = 0
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="not nested deeply"):
        json_rule({"const": deep})


def test_equal_grammars_have_one_digest() -> None:
    first, second = (checked_grammar(json_grammar(ANSWER), "schema", DEMO_MODEL) for _ in range(2))
    assert first == second
    assert first.digest != checked_grammar('start: "a"', "schema", DEMO_MODEL).digest
    assert json.loads(first.text.partition("%json ")[2])["type"] == "object"


def test_a_wrong_grammar_says_what_is_wrong() -> None:
    with pytest.raises(InvalidRequestError, match="other is used, but no rule") as refused:
        checked_grammar("start: other", "structured_outputs.grammar", DEMO_MODEL)
    assert refused.value.code == "invalid_grammar"
