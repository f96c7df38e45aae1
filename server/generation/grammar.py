"""Grammars that answers are held to: checks of what a client sent, and what the engine gets instead.

Each is a Lark grammar as llguidance reads it, with JSON schemas inside as `%json {...}`. A schema is rebuilt: notes for
people go, and the options of llguidance are ours, whatever the schema says about them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from weft.engine.request import Grammar
from weft.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
"""Schemas within one another."""

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Whitespace as `json.dumps` writes it, which models have read most."""
_ALWAYS = {"lenient": False, "coerce_one_of": True}
_HOLD_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_HOLD_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_HOLD_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_RULES = frozenset(
    {
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


def json_rule(schema: object, param: str = "schema") -> str:
    """A JSON schema as an expression for use inside a Lark grammar.

    Args:
        schema: The schema.
        param: Where it stands in the body.

    Raises:
        InvalidRequestError: Not a schema, or one that cannot be held to; `param` of the error has the path.
    """
    return _expression(schema, param, _OPTIONS)


def checked_grammar(lark: str, param: str) -> Grammar:
    """What the engine is to hold an answer to.

    Args:
        lark: A whole grammar with the rule `start`.
        param: What it was made of, for errors.

    Raises:
        InvalidRequestError: It is no grammar, or too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    encoded = lark.encode()
    if len(encoded) > MAX_GRAMMAR_BYTES:
        message = f"{param} makes a grammar of {len(encoded)} bytes; at most {MAX_GRAMMAR_BYTES} are taken."
        raise InvalidRequestError(message, param=param, code="grammar_too_large")
    limits = LLParserLimits(verbose_errors=False)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(lark, limits=limits)
    if is_error:
        raise InvalidRequestError(f"{param} cannot be held to: {_reason(messages[0])}", param=param, code=_code(lark))
    return Grammar(text=lark, digest=hashlib.sha256(encoded).hexdigest())


def _expression(schema: object, param: str, options: dict[str, Any]) -> str:
    kept = _kept(schema, param, 0)
    if kept is False:
        raise _refusal("A schema that is false fits no answer.", param)
    chosen = {"x-guidance": {**options, **_ALWAYS}}
    try:
        text = json.dumps(chosen if kept is True else {**kept, **chosen}, separators=(",", ":"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise _refusal("The values in it must be finite and not nested deeply.", param) from error
    return f"%json {text}"


def _kept(schema: object, path: str, depth: int) -> Any:  # noqa: ANN401 - JSON
    """A schema without its notes."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _refusal("A schema must be an object, true or false.", path)
    if depth >= MAX_SCHEMA_DEPTH:
        raise _refusal(f"Schemas may be nested {MAX_SCHEMA_DEPTH} deep. Use $defs and $ref for what repeats.", path)
    unknown = [name for name in schema if not (_is_rule(name, depth) or _is_note(name))]
    if unknown:
        names = ", ".join(repr(name[:40]) for name in unknown[:10])
        raise _refusal(f"Weft does not know the keywords {names}, so no answer can be held to them.", path)
    return {name: _value(name, value, f"{path}.{name}", depth) for name, value in schema.items() if not _is_note(name)}


def _value(name: str, value: object, path: str, depth: int) -> object:
    if name == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        raise _refusal("$ref must name a place in this schema, as #/$defs/name does.", path)
    if name in _HOLD_LIST or (name == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise _refusal(f"{name} must be a list of schemas.", path)
        return [_kept(each, f"{path}.{index}", depth + 1) for index, each in enumerate(value)]
    if name in _HOLD_NAMED:
        if not isinstance(value, dict):
            raise _refusal(f"{name} must be an object of schemas.", path)
        return {key: _kept(each, f"{path}.{key}", depth + 1) for key, each in value.items()}
    return _kept(value, path, depth + 1) if name in _HOLD_ONE else value


def _is_rule(name: str, depth: int) -> bool:
    return name in _RULES | _HOLD_ONE | _HOLD_LIST | _HOLD_NAMED or (not depth and name in _AT_ROOT)


def _is_note(name: str) -> bool:
    return name in _NOTES or name.startswith("x-")


def _refusal(message: str, path: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path[:200]}: {message}", param=path[:200], code="invalid_json_schema")


def _code(lark: str) -> str:
    return "invalid_json_schema" if "%json" in lark else "invalid_grammar"


def _reason(message: str) -> str:
    """What llguidance says, without the grammar that it quotes."""
    reason = message.partition("\n   1 |")[0].partition("failed to compile JSON schema: ")
    return " ".join((reason[2] or reason[0]).split())[:500]
