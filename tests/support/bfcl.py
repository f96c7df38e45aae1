"""The single-turn items of the Berkeley Function Calling Leaderboard: functions, and calls that answer a question."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from manylora.config import environment
from manylora.server.tools.schemas import Tool, ToolFunction

FOLDER = Path(sys.prefix) / "share" / "bfcl"
"""Where `scripts/bfcl` puts the data."""
PARTS = (
    *(
        "simple_python",
        "multiple",
        "parallel",
        "parallel_multiple",
        "simple_java",
        "simple_javascript",
    ),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
)
_TYPES = {
    **dict.fromkeys(("dict", "HashMap"), "object"),
    **dict.fromkeys(("array", "tuple", "Array", "ArrayList"), "array"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("integer", "long"), "integer"),
    **dict.fromkeys(("boolean", "Boolean"), "boolean"),
    **dict.fromkeys(("string", "String", "char"), "string"),
}
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Item:
    id: str
    tools: list[Tool]
    calls: list[Call]
    """That answer the question, one for each of its parts."""


@cache
def items(step: int = 1) -> Sequence[Item]:
    """Every `step`-th item, to be read only; without the data the test is skipped, and fails where CI is set."""
    if not FOLDER.is_dir():
        why = "BFCL's data is missing: run scripts/bfcl"
        if environment().get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return tuple(_read())[::step]


def _read() -> Iterator[Item]:
    for part in PARTS:
        answers = {
            answer["id"]: answer["ground_truth"]
            for answer in _lines(FOLDER / f"possible_answer/{part}.json")
        }
        for question in _lines(FOLDER / f"{part}.json"):
            yield _item(question["id"], question["function"], answers[question["id"]])


def _lines(path: Path) -> Iterator[Any]:
    return map(json.loads, path.read_text(encoding="utf-8").splitlines())


def name_of(name: str) -> str:
    """A function's name as OpenAI allows it."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64]


def _item(
    number: str, functions: list[dict[str, Any]], truth: list[dict[str, dict[str, list[Any]]]]
) -> Item:
    schemas = {name_of(function["name"]): _schema(function["parameters"]) for function in functions}
    calls = []
    for answer in truth:
        ((name, options),) = answer.items()
        schema = schemas[name_of(name)]
        calls.append((name_of(name), _arguments(schema, options)))
    tools = [
        Tool(type="function", function=ToolFunction(name=name, parameters=schema, strict=True))
        for name, schema in schemas.items()
    ]
    return Item(number, tools, calls)


def _arguments(schema: dict[str, Any], options: dict[str, list[Any]]) -> dict[str, Any]:
    """The first allowed value of each parameter, in the schema's order. A few answers contradict their own schema:
    such a parameter may have any value then."""
    arguments = {}
    for key, own in schema["properties"].items():
        values = [_value(value) for value in options.get(key, []) if value != ""]
        fitting = [value for value in values if jsonschema_rs.is_valid(own, value)]
        if fitting:
            arguments[key] = _ordered(fitting[0], own)
        elif key in schema["required"]:
            schema["properties"][key] = {}
            arguments[key] = values[0] if values else ""
    return arguments


def _ordered(value: Any, schema: dict[str, Any]) -> Any:
    """Keys in the schema's order, in which models write them."""
    own = schema.get("properties", {})
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: list(own).index(key) if key in own else len(own))
        return {key: _ordered(value[key], own.get(key, {})) for key in keys}
    return (
        [_ordered(each, schema.get("items", {})) for each in value]
        if isinstance(value, list)
        else value
    )


def _value(value: Any) -> Any:
    """A value inside an answer: nested objects have lists of allowed values too."""
    if isinstance(value, dict):
        lists = {
            key: options if isinstance(options, list) else [options]
            for key, options in value.items()
        }
        chosen = {key: [each for each in options if each != ""] for key, options in lists.items()}
        return {key: _value(options[0]) for key, options in chosen.items() if options}
    return [_value(each) for each in value] if isinstance(value, list) else value


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema of one with the types of Python, Java and JavaScript."""
    kind = _TYPES.get(schema.get("type", ""))
    kept: dict[str, Any] = {} if kind is None else {"type": kind}
    if kind == "object" and schema.get("properties"):
        kept["properties"] = {key: _schema(each) for key, each in schema["properties"].items()}
        kept["required"] = [key for key in schema.get("required", ()) if key in kept["properties"]]
        kept["additionalProperties"] = False
    elif kind == "object":
        kept |= (
            {"properties": {}, "required": [], "additionalProperties": False}
            if "properties" in schema
            else {}
        )
    if kind == "array" and isinstance(schema.get("items"), dict):
        kept["items"] = _schema(schema["items"])
    allowed = [value for value in schema.get("enum", ()) if jsonschema_rs.is_valid(kept, value)]
    return {**kept, "enum": allowed} if allowed else kept  # a few contradict their own type
