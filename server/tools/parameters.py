"""Arguments that are not JSON: in tags, as Python's keywords, and in Gemma's notation. Their grammar, by the schema.

Parameters come in the order of the schema. Strings are held to `enum` and `const`; what else a schema says of a string
holds only where the notation writes JSON.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from manylora.engine.grammar.wide_numbers import in_order
from manylora.errors import InvalidRequestError
from manylora.server.tools.schemas import Tool

ANY_TEXT = r"(.|\n)*"
JsonRule = Callable[[object, str, dict[str, str]], str]
"""A JSON schema, its place in the body and the rules of a Lark grammar to an expression, which may need more rules."""
Schema = Mapping[str, Any]
MAX_DEPTH = 8
"""Objects within one another that are held to their schema where the notation has its own quotes."""
MAX_STEPS = 4096
"""Through the options and values of one parameter."""
_UNIONS = ("anyOf", "oneOf", "allOf")
_JSON_TYPES = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
}
_LITERALS = {"boolean": '("True" | "False")', "null": '"None"'}
"""As Python writes them."""


def resolved(schema: object, root: Schema) -> Schema:
    """A schema, with its `$ref` replaced by what it names; whatever is no object allows everything."""
    for _ in range(16):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        target: object = root
        for key in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            target = target.get(key) if isinstance(target, dict) and key else target
        schema = {
            **(target if isinstance(target, dict) else {}),
            **{k: v for k, v in schema.items() if k != "$ref"},
        }
    return schema if isinstance(schema, dict) else {}


def kinds(schema: object, root: Schema) -> list[str]:
    """The JSON types that a value may have, `string` last; empty where the schema does not say, or is too large."""
    pending: list[object] = [schema]
    found: list[object] = []
    seen: set[int] = set()
    num_steps = 0
    for index, option in enumerate(pending):
        each = resolved(option, root)
        given = each.get("type", [])
        types = given if isinstance(given, list) else [given]
        values = [each["const"]] if "const" in each else each.get("enum")
        if "type" not in each and isinstance(values, list):
            types = [_JSON_TYPES.get(type(value), "null") for value in values]
        elif "type" not in each:
            unions = [some for name in _UNIONS if isinstance(some := each.get(name), list)]
            # What a `$ref` leads back to adds nothing.
            pending += [each for some in unions if id(some) not in seen for each in some]
            seen.update(map(id, unions))
            types = ["string"] if index and not any(unions) else []
        found += types
        num_steps += 1 + len(types)
        if num_steps + len(pending) > MAX_STEPS:
            return []
    return sorted(dict.fromkeys(map(str, found)), key=lambda kind: kind == "string")


def typed_tool(tool: Tool) -> dict[str, Any]:
    """A tool as transformers' parser needs it to give values in tags their type."""
    root = tool.function.parameters or {}
    own = root.get("properties")
    types = (
        {key: {"type": kinds(each, root)} for key, each in own.items()}
        if isinstance(own, dict)
        else {}
    )
    return {
        "type": "function",
        "function": {"name": tool.function.name, "parameters": {"properties": types}},
    }


@dataclass(kw_only=True)
class ArgumentGrammar:
    """Writes rules for the arguments of calls in the notation of a format.

    Args:
        strings: The format's `calls`. `parameter` has what stands before, within and after a key and its value, `quote`
            what stands around a string: where it is absent, values are JSON.
        rules: Where the rules go, by name.
        json_rule: Makes rules of schemas.
        literal: Writes a text, special tokens by their id.
    """

    strings: Schema
    rules: dict[str, str]
    json_rule: JsonRule
    literal: Callable[[str], str]

    def __post_init__(self) -> None:
        self._before, self._within, self._after = self.strings["parameter"]
        self._comma = self.literal(self.strings.get("comma", ""))
        self._quote: str | None = self.strings.get("quote")

    def arguments(self, name: str, schema: Schema, root: Schema, param: str, depth: int = 0) -> str:
        """A rule for arguments that fit the schema of an object.

        Args:
            name: Of the rule.
            schema: Of the arguments.
            root: What its `$ref` point into.
            param: Where the schema stands in the body.
            depth: Objects around it.
        """
        own = schema.get("properties")
        required = schema.get("required", ())
        if not isinstance(own, dict) or not own:
            return self._any_arguments() if schema.get("additionalProperties") is not False else ""
        pairs = []
        for index, (key, each) in enumerate(own.items()):
            place = f"{param}.properties.{key}"
            if self._is_key(key):
                value = self._value(f"{name}_{index}", each, root, place, depth)
                pairs.append(
                    (f"{self.literal(self._before + key + self._within)} {value}", key in required)
                )
            elif key in required:
                message = "This model cannot write a parameter of this name. Take letters, digits and underscores."
                raise InvalidRequestError(message, param=place[:200], code="invalid_json_schema")
        return in_order(self.rules, name, pairs, self._comma)

    def _is_key(self, key: str) -> bool:
        """True if the parser takes this for a key."""
        is_python = self.strings["style"] == "python"
        return bool(re.fullmatch(self.strings.get("key", ".*"), key)) and not (
            is_python and keyword.iskeyword(key)
        )

    def _any_arguments(self) -> str:
        """The rule for arguments that no schema describes."""
        self.rules["KEY"] = (
            "/[A-Za-z_][A-Za-z0-9_]*/" if "key" in self.strings else "/[A-Za-z_][A-Za-z0-9_.-]*/"
        )
        pair = f"{self.literal(self._before)} KEY {self.literal(self._within)} {self._value('any', {}, {}, '', 0)}"
        self.rules["any_args"] = f"({pair} ({self._comma} {pair})*)?"
        return "any_args"

    def _value(self, name: str, schema: object, root: Schema, param: str, depth: int) -> str:
        """An expression for a value and what stands after it."""
        quote, types, schema = self._quote, kinds(schema, root), resolved(schema, root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if quote is not None and types == ["string"] and isinstance(values, list):
            return f"({' | '.join(self.literal(f'{quote}{value}{quote}{self._after}') for value in values)})"
        if quote == "" and (not types or "string" in types):
            return self._raw()
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        options = [self.json_rule({**schema, **shared}, param, self.rules)]
        if not quote:
            options += [_LITERALS[kind] for kind in types if kind in _LITERALS]
            return f"({' | '.join(options)}) {self.literal(self._after)}"
        match types if depth < MAX_DEPTH else ():
            case ["string"]:
                return self._quoted()
            case ["object"]:
                return f'"{{" {self.arguments(f"{name}_in", schema, root, param, depth + 1)} "}}"'
            case ["array"]:
                item = self._value(
                    f"{name}_item", schema.get("items"), root, f"{param}.items", depth + 1
                )
                return f'"[" ({item} ("," {item})*)? "]"'
            case [_]:
                return options[0]
        return self._any_value()

    def _raw(self) -> str:
        """Text up to the end of a value: it holds nothing that would end the value, or the call, where it stands."""
        ends = (self._before, self._after.strip(), self.strings["each"].split()[-1])
        self.rules["VALUE"] = without(f"{ANY_TEXT}({'|'.join(map(escaped, ends))})")
        self.rules["raw[lazy]"] = f"VALUE {self.literal(self._after)}"
        return "raw"

    def _quoted(self) -> str:
        quote = self.literal(self._quote or "")
        self.rules["quoted"] = f"{quote} TEXT {quote}"
        return "quoted"

    def _any_value(self) -> str:
        """The rule for any value where strings have their own quotes."""
        if "any_value" not in self.rules:
            plain = self.json_rule({"type": ["number", "boolean", "null"]}, "", self.rules)
            self.rules["any_value"] = f"{self._quoted()} | any_object | any_list | {plain}"
            self.rules["any_object"] = f'"{{" {self._any_arguments()} "}}"'
            self.rules["any_list"] = '"[" (any_value ("," any_value)*)? "]"'
        return "any_value"


def escaped(text: str) -> str:
    """A text inside a regex of a Lark grammar."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def without(beginning: str) -> str:
    """An expression for all texts that do not begin with what a regex matches."""
    return f"/{ANY_TEXT}/ & ~/{beginning}{ANY_TEXT}/"
