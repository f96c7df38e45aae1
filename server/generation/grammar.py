"""Grammars that answers are held to: checks of what a client sent, and what the engine gets instead.

Each is a Lark grammar as llguidance reads it, with JSON schemas inside as `%json {...}`. A schema is rebuilt: notes for
people go, and the options of llguidance are ours, whatever the schema says about them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from manylora.engine.request import Grammar
from manylora.errors import InvalidRequestError
from manylora.server.grammar_check import grammar_checker

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
"""Schemas within one another."""
MAX_REMAINDERS = 10_000
"""Of all `multipleOf` of a schema together; with more, it takes seconds to compile."""
MAX_EXPONENT = 30

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Whitespace as `json.dumps` writes it, which models have read most."""
_ALWAYS = {"lenient": False, "coerce_one_of": True}
_HOLD_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_HOLD_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_HOLD_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_RULES = frozenset(
    {
        *(*_HOLD_ONE, *_HOLD_LIST, *_HOLD_NAMED),
        *("type", "enum", "const", "$ref", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("pattern", "format", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
_NOTES = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("discriminator", "contentEncoding", "contentMediaType"),
    }
)
"""Keywords that change nothing; as are all that begin with `x-`."""
_AT_ROOT = frozenset({"$schema", "$id"})


def json_rule(schema: object, param: str = "schema", options: Mapping[str, object] = _OPTIONS) -> str:
    """A JSON schema as an expression for use inside a Lark grammar.

    Args:
        schema: The schema.
        param: Where it stands in the body.
        options: Of llguidance.

    Raises:
        InvalidRequestError: Not a schema, or one that cannot be held to; `param` of the error has the path.
    """
    reader = _Reader()
    kept = reader.kept(schema, param)
    reader.check_references()
    if kept is False:
        raise _refusal("A schema that is false fits no answer.", param)
    chosen = {"x-guidance": {**options, **_ALWAYS}}
    try:
        text = json.dumps(chosen if kept is True else {**kept, **chosen}, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise _refusal("The values in it must be finite and not nested deeply.", param) from error
    return f"%json {text}"


def json_object_rule() -> str:
    """Any JSON object, as `json_rule` has it."""
    return json_rule({"type": "object"}, "json_object", {"whitespace_pattern": r"[ \n]{0,8}"})


def checked_grammar(lark: str, param: str, folder: Path, tenant: str = "") -> Grammar:
    """What the engine is to hold an answer to.

    Args:
        lark: A whole grammar with the rule `start`.
        param: What it was made of, for errors.
        folder: Of the checkpoint.
        tenant: Who sent it.

    Raises:
        InvalidRequestError: It is no grammar, or too large.
        CapacityError: It could not be checked.
    """
    encoded = lark.encode()
    if len(encoded) > MAX_GRAMMAR_BYTES:
        message = f"{param} makes a grammar of {len(encoded)} bytes; at most {MAX_GRAMMAR_BYTES} are taken."
        raise InvalidRequestError(message, param=param, code="grammar_too_large")
    grammar = Grammar.of(lark)
    problem = grammar_checker().problem(lark, grammar.digest, folder, tenant)
    if problem is not None:
        message = f"No answer can be held to {param}: {_reason(problem)}."
        code = "invalid_json_schema" if "%json" in lark else "invalid_grammar"
        raise InvalidRequestError(message, param=param, code=code)
    return grammar


class _Reader:
    """Reads one schema."""

    def __init__(self) -> None:
        self._places: set[tuple[str, ...]] = set()
        """Where schemas were read, which are what references may name."""
        self._references: list[tuple[str, str]] = []
        """Each with its path."""
        self._num_remainders = 0

    def check_references(self) -> None:
        """Refuse a reference to what was not read as a schema, and so is unchecked."""
        for reference, path in self._references:
            names = unquote(reference).split("/")[1:]
            if tuple(name.replace("~1", "/").replace("~0", "~") for name in names) not in self._places:
                raise _refusal(f"{reference[:100]} names no schema in this schema: it does not exist.", path)

    def kept(self, schema: object, path: str, depth: int = 0, place: tuple[str, ...] = ()) -> Any:  # noqa: ANN401 - JSON
        """A schema without its notes."""
        self._places.add(place)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refusal("A schema must be an object, true or false.", path)
        if depth >= MAX_SCHEMA_DEPTH:
            raise _refusal(f"Schemas may be nested {MAX_SCHEMA_DEPTH} deep. Use $defs and $ref for what repeats.", path)
        known = _RULES if depth else _RULES | _AT_ROOT
        unknown = [name for name in schema if name not in known and not _is_note(name)]
        if unknown:
            names = ", ".join(repr(name[:40]) for name in unknown[:10])
            raise _refusal(f"Manylora does not know the keywords {names}, so no answer can be held to them.", path)
        _check_range(schema, path)
        return {
            name: self._value(name, value, f"{path}.{name}", depth + 1, (*place, name))
            for name, value in schema.items()
            if not _is_note(name)
        }

    def _value(self, name: str, value: object, path: str, depth: int, place: tuple[str, ...]) -> object:
        if name == "multipleOf" and type(value) in (int, float):
            self._num_remainders += _num_remainders(value)
            if self._num_remainders > MAX_REMAINDERS:
                message = f"All multipleOf together must be at most {MAX_REMAINDERS}, their decimals counted as whole."
                raise _refusal(message, path)
        if name == "$ref":
            if not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
                raise _refusal("$ref must name a place in this schema, as #/$defs/name does.", path)
            self._references.append((value, path))
        if name in _HOLD_LIST or (name == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise _refusal(f"{name} must be a list of schemas.", path)
            pairs = [(str(index), each) for index, each in enumerate(value)]
            return [self.kept(each, f"{path}.{index}", depth, (*place, index)) for index, each in pairs]
        if name in _HOLD_NAMED:
            if not isinstance(value, dict):
                raise _refusal(f"{name} must be an object of schemas.", path)
            return {key: self.kept(each, f"{path}.{key}", depth, (*place, key)) for key, each in value.items()}
        return self.kept(value, path, depth, place) if name in _HOLD_ONE else value


def _num_remainders(value: object) -> int:
    """States that telling multiples apart takes: 25 for 2.5 and for 25, 2500 for 2500."""
    number = Decimal(str(value))
    if not number.is_finite() or abs(number.adjusted()) > MAX_EXPONENT:
        return MAX_REMAINDERS + 1
    _, digits, exponent = number.normalize().as_tuple()
    return int("".join(map(str, digits)) + "0" * int(exponent))


def _check_range(schema: dict[str, Any], path: str) -> None:
    """Refuse the one kind of range that llguidance gets wrong: it would allow the bound that is excluded."""
    if not ("exclusiveMinimum" in schema or "exclusiveMaximum" in schema) or schema.get("type") == "integer":
        return
    for name, *others in (
        ("exclusiveMinimum", "maximum", "exclusiveMaximum"),
        ("exclusiveMaximum", "minimum", "exclusiveMinimum"),
    ):
        bound = schema.get(name)
        if not isinstance(bound, int | float) or bound % 1:
            continue
        ends = (schema.get(other) for other in others)
        if any(isinstance(end, int | float) and abs(end - bound) < 1 for end in ends):
            raise _refusal(f"{name} cannot be a whole number if the range is narrower than 1.", path)


def _is_note(name: str) -> bool:
    return name in _NOTES or name.startswith("x-")


def _refusal(message: str, path: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path[:200]}: {message}", param=path[:200], code="invalid_json_schema")


def _reason(message: str) -> str:
    """What llguidance says, without the grammar that it quotes."""
    reason = message.partition("\n   1 |")[0].partition("failed to compile JSON schema: ")
    return " ".join((reason[2] or reason[0]).split())[:500]
