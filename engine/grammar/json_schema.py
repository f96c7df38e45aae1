"""JSON schemas as expressions of Lark grammars. A schema is rebuilt, so it cannot set options of llguidance.

llguidance reads a schema as `%json {...}`; see `wide_numbers` for schemas that it would read wrongly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from manylora.engine.grammar.endless import drop_endless
from manylora.engine.grammar.schema_reader import read_schema, refusal
from manylora.engine.grammar.wide_numbers import WideNumbers

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options for the whitespace of `json.dumps`, which models know best."""
_ALWAYS = {"lenient": False, "coerce_one_of": True, "json_allowed_escapes": 'nrbtf\\"'}
"""Options for every schema. Without `\\u` no further property can repeat the name of one in the schema."""
_IN_LARK = re.compile(r"%json\s*(?=[{tf])")


def json_rule(
    schema: object,
    param: str = "schema",
    rules: dict[str, str] | None = None,
    options: Mapping[str, object] = _OPTIONS,
) -> str:
    """Write a JSON schema as an expression inside a Lark grammar.

    Args:
        schema: The schema.
        param: Its place in the body.
        rules: The other rules of the grammar by name. Rules that the expression needs are added.
        options: Options of llguidance.

    Raises:
        InvalidRequestError: It is no schema, or answers cannot be held to it. `param` of the error has the path.
    """
    kept = read_schema(schema, param)
    drop_endless(kept, param)

    def plain(part: Any) -> str:  # noqa: ANN401 - JSON
        chosen = {"x-guidance": {**options, **_ALWAYS}}
        return "%json " + json.dumps(
            chosen if part is True else {**part, **chosen}, separators=(",", ":")
        )

    return WideNumbers(kept, param, {} if rules is None else rules, plain).expression() or plain(
        kept
    )


def json_grammar(
    schema: object, param: str = "schema", options: Mapping[str, object] = _OPTIONS
) -> str:
    """Write a JSON schema as a whole grammar. Raises the same errors as `json_rule`."""
    rules: dict[str, str] = {}
    start = json_rule(schema, param, rules, options)
    return "\n".join((f"start: {start}", *(f"{name}: {rule}" for name, rule in rules.items())))


def json_object_grammar() -> str:
    """Grammar of any JSON object, in the form of `json_grammar`."""
    return json_grammar({"type": "object"}, "json_object", {"whitespace_pattern": r"[ \n]{0,8}"})


def with_schemas_read(lark: str) -> str:
    """Rewrite the schemas in a Lark grammar, `%json {...}`, as `json_rule` writes them.

    Raises:
        InvalidRequestError: One of them is no schema, or answers cannot be held to it.
    """
    rules: dict[str, str] = {}
    parts = []
    end = 0
    for index, found in enumerate(_IN_LARK.finditer(lark)):
        if found.start() < end:
            continue  # inside a schema
        try:
            schema, length = json.JSONDecoder().raw_decode(lark[found.end() :])
        except (ValueError, RecursionError) as error:
            raise refusal("%json must be followed by a JSON schema.", f"grammar.{index}") from error
        parts += [lark[end : found.start()], json_rule(schema, f"grammar.{index}", rules)]
        end = found.end() + length
    return "\n".join(
        ("".join(parts) + lark[end:], *(f"{name}: {rule}" for name, rule in rules.items()))
    )
