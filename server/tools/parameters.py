"""Arguments that are not JSON: in tags, as Python's keywords, and in Gemma's notation. Their grammar, by the schema.

Parameters come in the order of the schema. Strings are held to `enum` and `const`; what else a schema says of a string
holds only where the notation writes JSON.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from weft.errors import InvalidRequestError

if TYPE_CHECKING:
    from weft.server.tools.schemas import Tool

ANY_TEXT = r"(.|\n)*"
JsonRule = Callable[[object, str], str]
"""A JSON schema and its place in the body to an expression for a Lark grammar."""
Schema = Mapping[str, Any]
MAX_DEPTH = 8
"""Objects within one another that are held to their schema where the notation has its own quotes."""
MAX_STEPS = 4096
"""Through the options and values of one parameter."""
_UNIONS = ("anyOf", "oneOf", "allOf")
_JSON_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
_LITERALS = {"boolean": '("True" | "False")', "null": '"None"'}
"""As Python writes them."""
_IS_KEY: dict[str, Callable[[str], object]] = {
    "python": lambda key: key.isidentifier() and not keyword.iskeyword(key),
    "gemma": re.compile(r"\w+").fullmatch,
}
"""Whether a parser takes this for a key, by the style of calls."""


def resolved(schema: object, root: Schema) -> Schema:
    """A schema, with its `$ref` replaced by what it names; whatever is no object allows everything."""
    for _ in range(16):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        target: object = root
        for key in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            target = target.get(key) if isinstance(target, dict) and key else target
        schema = {**(target if isinstance(target, dict) else {}), **{k: v for k, v in schema.items() if k != "$ref"}}
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
    types = {key: {"type": kinds(each, root)} for key, each in own.items()} if isinstance(own, dict) else {}
    return {"type": "function", "function": {"name": tool.function.name, "parameters": {"properties": types}}}


class ArgumentGrammar:
    """Writes rules for the arguments of calls in the notation of a format.

    Args:
        strings: The format's `calls`. `parameter` has what stands before, within and after a key and its value.
        rules: Where the rules go, by name.
        json_rule: Makes rules of schemas.
        literal: Writes a text, special tokens by their id.
    """

    def __init__(
        self, strings: Schema, rules: dict[str, str], json_rule: JsonRule, literal: Callable[[str], str]
    ) -> None:
        self._before, self._within, self._after = strings.get("parameter", ("", "", ""))
        self._comma = strings.get("comma", "")
        self._quote = strings.get("quote")
        self._is_raw = strings["style"] == "xml"
        # What would end a value, or the call, where it stands.
        self._marks = (self._before, self._after.strip(), strings["each"].split()[-1])
        self._is_key = _IS_KEY.get(strings["style"])
        self._rules = rules
        self._json_rule = json_rule
        self._literal = literal

    def any_arguments(self) -> str:
        """The rule for arguments that no schema describes."""
        if "any_args" not in self._rules:
            value = self._raw() if self._is_raw else self._any_value()
            pair = f"{self._literal(self._before)} {self._key()} {self._literal(self._within)} {value}"
            more = f"({self._literal(self._comma)} {pair})*"
            self._rules["any_args"] = f"({pair} {more})?"
        return "any_args"

    def arguments(self, name: str, schema: Schema, root: Schema, param: str, depth: int = 0) -> str:
        """A rule for arguments that fit the schema of an object.

        Args:
            name: Of the rule.
            schema: Of the arguments.
            root: What its `$ref` point into.
            param: Where the schema stands in the body.
            depth: Objects around it.
        """
        own, required = schema.get("properties"), schema.get("required", ())
        if not isinstance(own, dict) or not own:
            return self.any_arguments() if schema.get("additionalProperties") is not False else ""
        pairs = []
        for index, (key, each) in enumerate(own.items()):
            if self._is_key is not None and not self._is_key(key):
                if key not in required:
                    continue  # it may be left out, and always is
                message = "This model cannot write a parameter of this name. Take letters, digits and underscores."
                raise InvalidRequestError(message, param=f"{param}.properties.{key}"[:200], code="invalid_json_schema")
            value = self._value(f"{name}_{index}", each, root, f"{param}.properties.{key}", depth)
            self._rules[f"{name}_{index}"] = f"{self._literal(self._before + key + self._within)} {value}"
            pairs.append((f"{name}_{index}", key in required))
        if not pairs:
            return ""
        self._in_order(name, pairs)
        return name

    def _in_order(self, name: str, pairs: list[tuple[str, bool]]) -> None:
        """All that are required and any of the others, with commas between them."""
        rest, start = "", ""
        for index, (pair, is_required) in reversed(list(enumerate(pairs))):
            first = f"{pair} {rest}"
            start = first if is_required or not start else f"({first} | {name}_from_{index + 1})"
            start = start if is_required or index + 1 < len(pairs) else f"({first})?"
            self._rules[f"{name}_from_{index}"] = start
            following = f"{self._literal(self._comma)} {pair}"
            self._rules[f"{name}_rest_{index}"] = f"{following if is_required else f'({following})?'} {rest}"
            rest = f"{name}_rest_{index}"
        self._rules[name] = f"{name}_from_0"

    def _value(self, name: str, schema: object, root: Schema, param: str, depth: int) -> str:
        """An expression for a value and what stands after it."""
        after = self._literal(self._after)
        schema = resolved(schema, root)
        types = kinds(schema, root)
        if self._quote is not None:
            return f"{self._quoted_value(name, schema, root, param, depth)} {after}"
        if self._is_raw and (not types or "string" in types):
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            if types == ["string"] and isinstance(values, list):
                return f"({' | '.join(self._literal(f'{value}{self._after}') for value in values)})"
            return self._raw()
        options = [self._json(schema, root, param), *(_LITERALS[kind] for kind in types if kind in _LITERALS)]
        return f"({' | '.join(options)}) {after}"

    def _raw(self) -> str:
        """Text up to the end of a value."""
        marks = "|".join(re.escape(mark).replace("/", r"\/") for mark in self._marks)
        self._rules["VALUE"] = f"/{ANY_TEXT}/ & ~/{ANY_TEXT}({marks}){ANY_TEXT}/"
        self._rules["raw[lazy]"] = f"VALUE {self._literal(self._after)}"
        return "raw"

    def _json(self, schema: Schema, root: Schema, param: str) -> str:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return self._json_rule({**schema, **shared}, param)

    def _any_value(self) -> str:
        if self._quote is None:
            return self._json_rule({}, "")
        if "any_value" not in self._rules:
            pair = f"{self._key()} {self._literal(self._within)} any_value"
            self._rules["any_object"] = f'"{{" ({pair} ("," {pair})*)? "}}"'
            self._rules["any_list"] = '"[" (any_value ("," any_value)*)? "]"'
            plain = self._json_rule({"type": ["number", "boolean", "null"]}, "")
            self._rules["any_value"] = f"{self._text()} | any_object | any_list | {plain}"
        return "any_value"

    def _key(self) -> str:
        self._rules["KEY"] = "/[A-Za-z_][A-Za-z0-9_]*/" if self._is_key else "/[A-Za-z_][A-Za-z0-9_.-]*/"
        return "KEY"

    def _text(self) -> str:
        quote = self._literal(self._quote or "")
        self._rules["quoted"] = f"{quote} TEXT {quote}"
        return "quoted"

    def _quoted_value(self, name: str, schema: Schema, root: Schema, param: str, depth: int) -> str:
        """A value where strings have their own quotes."""
        types = kinds(schema, root)
        if len(types) != 1 or depth >= MAX_DEPTH:
            return self._any_value()
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        match types[0]:
            case "string" if isinstance(values, list):
                texts = (self._literal(f"{self._quote}{value}{self._quote}") for value in values)
                return f"({' | '.join(texts)})"
            case "string":
                return self._text()
            case "object":
                inner = self.arguments(f"{name}_in", schema, root, param, depth + 1)
                return f'"{{" {inner} "}}"'
            case "array":
                item = self._value(f"{name}_item", schema.get("items"), root, f"{param}.items", depth + 1)
                return f'"[" ({item} ("," {item})*)? "]"'
        return self._json(schema, root, param)
