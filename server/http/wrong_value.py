"""The words for values that a schema refuses, in requests and settings: what is expected, and what came."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_SHOWN = 60
_EXPECTED = {
    **dict.fromkeys(
        ("int_type", "int_from_float", "int_parsing", "int_parsing_size"), "a whole number"
    ),
    **dict.fromkeys(("float_type", "float_parsing", "decimal_type", "decimal_parsing"), "a number"),
    "decimal_max_places": "a number of at most {decimal_places} decimal places",
    "finite_number": "a number that is finite",
    **dict.fromkeys(("string_type", "string_sub_type", "string_unicode"), "a string"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "iterable_type"), "a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type"), "an object"
    ),
    "none_required": "null",
    "path_type": "a path",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "at least {min_length} characters long",
    "string_too_long": "at most {max_length} characters long",
    "string_pattern_mismatch": "a string that matches {pattern}",
    "too_short": "at least {min_length} entries long",
    "too_long": "at most {max_length} entries long",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "union_tag_invalid": "an object whose {discriminator} is one of {expected_tags}",
    "union_tag_not_found": "an object with {discriminator}",
    **dict.fromkeys(
        ("datetime_type", "datetime_parsing", "datetime_from_date_parsing", "timezone_aware"),
        "a time like 2026-01-31T12:00:00Z",
    ),
}
"""The expected value by pydantic's type of error; names in braces are of its context."""


def wrong_value(error: Mapping[str, Any]) -> str:
    """Why a value is refused, for behind its name.

    Args:
        error: One of `ValidationError.errors()`.
    """
    context = error.get("ctx") or {}
    if error["type"] in ("value_error", "assertion_error"):
        return str(context["error"]).rstrip(".")  # our own words
    if error["type"] == "invalid_json":
        return str(error["msg"])  # ours too
    expected = _EXPECTED.get(error["type"])
    if expected is None:
        return f"this route does not take {shown(error.get('input'))} here; see /openapi.json"
    return f"must be {expected.format(**context)}, got {shown(error.get('input'))}"


def shown(value: object) -> str:
    """A value that a client sent, for a message: in JSON, on one line and not in length."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    try:
        text = json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())
    except (TypeError, ValueError):
        return "another value"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
