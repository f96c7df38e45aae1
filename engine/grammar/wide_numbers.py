"""Grammar of JSON schemas with values that llguidance would change.

llguidance rounds numbers that a float cannot tell apart, and drops control characters from `const` and `enum`. A schema
that contains such a value is written as rules of Lark, down to the value; everything beside it stays a schema. The
allowed text is that of llguidance: properties in their order, separators as `json.dumps` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from manylora.engine.grammar.endless import Clause, true_places
from manylora.engine.grammar.schema_reader import TYPES, Place, parts_of, place_of, refusal
from manylora.engine.grammar.string_patterns import WITHOUT_ESCAPE
from manylora.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 256 * 1024
"""Largest grammar. Writing stops there, because a small schema may make a huge grammar."""
LARGEST_EXACT = 2**53 - 1
"""Largest whole number that a float tells apart from its neighbours."""
_SAFE = 10**15
"""Numbers up to this may have decimals; larger ones are whole."""
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"pattern", "format", "minLength", "maxLength"}),
    "number": frozenset({*_LOWER, *_UPPER, "multipleOf"}),
    "integer": frozenset({*_LOWER, *_UPPER, "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "additionalItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "patternProperties", "additionalProperties", "required"})
    | {"minProperties", "maxProperties"},
}
_NUMBERS = (*_LOWER, *_UPPER, "const", "enum")
_ALONE = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
_SHARED = ("$defs", "definitions")
_UNTOLD = frozenset({*_SHARED, "$schema", "$id"})
_NAME = r'"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"'


class WideNumbers:
    """Writes the rules of one schema.

    Args:
        root: The schema as it was read.
        param: Its place in the body.
        rules: Gets the rules by name.
        plain: Makes an expression of a schema without such values.
    """

    def __init__(
        self,
        root: Any,  # noqa: ANN401 - JSON
        param: str,
        rules: dict[str, str],
        plain: Callable[[Any], str],
    ) -> None:
        self._root = root
        self._param = param
        self._rules = rules
        self._write_plain = plain
        self._num_written = 0
        """Number of characters of all expressions without parts."""
        self._schemas = _all_schemas(root)
        """The schema and its parts by place. A place that is not there allows any value."""
        self._wide_places = _wide_places(self._schemas)
        self._rule_of: dict[Place, str] = {}
        """Rules of the places that `$ref` names."""
        self._ends: dict[Place, Any] = {}
        """Schemas at the end of the `$ref`s of a place."""
        self._unwritten: list[Place] = []
        """Places whose rules have names but no text yet."""

    def expression(self) -> str | None:
        """Expression for the whole schema; None if llguidance can read it itself."""
        if () not in self._wide_places:
            return None
        found = self._value(())
        for target in self._unwritten:  # the list grows meanwhile
            self._rules[self._rule_of[target]] = self._value(target)
        return found

    def _refuse(self, what: str, place: Place) -> Exception:
        return self._refusal(
            f"{what}, as it holds a number beyond 2**53 or a control character. Write it in another way.",
            place,
        )

    def _refusal(self, message: str, place: Place) -> Exception:
        return refusal(message, ".".join((self._param, *place)))

    def _plain(self, schema: Any) -> str:  # noqa: ANN401 - JSON
        return self._counted(self._write_plain(schema))

    def _counted(self, text: str) -> str:
        """Count an expression without parts, and return it.

        Raises:
            InvalidRequestError: All expressions together are too long.
        """
        self._num_written += len(text)
        if self._num_written > MAX_GRAMMAR_BYTES:
            message = f"{self._param} makes a grammar of more than {MAX_GRAMMAR_BYTES} bytes. Use fewer parts and $ref."
            raise InvalidRequestError(message, param=self._param, code="grammar_too_large")
        return text

    def _value(self, place: Place) -> str:
        """Expression for a value that fits the schema at a place."""
        schema = self._schemas.get(place, True)
        if place not in self._wide_places:
            return self._leaf(schema, [place])
        keywords = schema.keys() - _UNTOLD
        if keywords & _ALONE:
            joins = len(schema.get("allOf", ())) > 1
            if joins or (len(keywords) > 1 and not self._repeats_type(schema, place, keywords)):
                names = ", ".join(sorted(keywords))
                raise self._refuse(f"Answers cannot be held to all of {names} at once here", place)
            return self._alone(schema, place)
        if "const" in schema or "enum" in schema:
            return self._one_of_values(schema, place, keywords)
        return _any_of([self._of_type(kind, schema, place) for kind in _kinds(schema)])

    def _repeats_type(self, schema: Mapping[str, Any], place: Place, keywords: Set[str]) -> bool:
        """True if the only keyword beside `anyOf` or `oneOf` is a type that each of its schemas has too."""
        name = next(iter(keywords - {"type"}))
        if len(keywords) > 2 or "type" not in keywords or name not in ("anyOf", "oneOf"):
            return False
        options = (self._named_by((*place, name, str(index))) for index in range(len(schema[name])))
        return all(
            each is False or (isinstance(each, dict) and each.get("type") == schema["type"])
            for each in options
        )

    def _named_by(self, place: Place) -> Any:  # noqa: ANN401 - JSON
        """A schema, or the schema at the end of its `$ref`s. Those in circles were refused, so there is an end."""
        way = [place]
        while way[-1] not in self._ends and _is_reference(self._schemas[way[-1]]):
            way.append(place_of(self._schemas[way[-1]]["$ref"]))
        end = self._ends.get(way[-1], self._schemas[way[-1]])
        self._ends |= dict.fromkeys(way, end)
        return end

    def _alone(self, schema: Mapping[str, Any], place: Place) -> str:
        if "$ref" in schema:
            target = place_of(schema["$ref"])
            if target not in self._rule_of:
                self._rule_of[target] = self._new_name()
                self._unwritten.append(target)
            return self._rule_of[target]
        name = next(iter(schema.keys() & _ALONE))
        return _any_of(
            [
                self._value((*place, name, str(index)))
                for index, each in enumerate(schema[name])
                if each is not False or name == "allOf"
            ]
        )

    def _new_name(self) -> str:
        name = f"json_{len(self._rules)}"
        self._rules[name] = '""'
        return name

    def _leaf(self, schema: Any, parts: Sequence[Place]) -> str:  # noqa: ANN401 - JSON
        """Expression for a schema without wide values, with the definitions that these parts of it refer to."""
        if not isinstance(schema, dict):
            return self._plain(schema)
        kept = {name: value for name, value in schema.items() if name not in _UNTOLD}
        for kind, name in self._definitions(parts):
            kept.setdefault(kind, {})[name] = self._root[kind][name]
        return self._plain(kept)

    def _definitions(self, places: Sequence[Place]) -> list[Place]:
        """Definitions that schemas refer to, in order."""
        found: dict[Place, None] = {}
        pending = list(places)
        for each in pending:
            schema = self._schemas[each]
            if not isinstance(schema, dict):
                continue
            pending += [(*each, *part) for part, _ in parts_of(schema) if part[0] not in _SHARED]
            if "$ref" not in schema:
                continue
            target = place_of(schema["$ref"])[:2]
            if not target or target[0] not in _SHARED:
                raise self._refuse("A $ref can name only a place in $defs here", each)
            if target not in found:
                found[target] = None
                pending.append(target)
        return list(found)

    def _one_of_values(self, schema: Mapping[str, Any], place: Place, keywords: Set[str]) -> str:
        if not keywords <= {"const", "enum", "type"} or len(keywords & {"const", "enum"}) > 1:
            names = ", ".join(sorted(keywords))
            raise self._refuse(f"Answers cannot be held to all of {names} at once here", place)
        values = [schema["const"]] if "const" in schema else schema["enum"]
        fitting = [value for value in values if _kind(value) & set(_kinds(schema))]
        if not fitting:
            raise self._refusal("No value in it is of its type.", place)
        return self._counted(_any_of([_quoted(_written(value)) for value in fitting]))

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: Place) -> str:
        own = {name: value for name, value in schema.items() if name in _OF_TYPE.get(kind, ())}
        if kind in ("integer", "number") and any(map(_is_wide, own.values())):
            return self._number(kind, own, place)
        below = [(*place, *part) for part, _ in parts_of(own)]
        if self._wide_places.isdisjoint(below):
            return self._leaf({"type": kind, **own}, below)
        return self._object(own, place) if kind == "object" else self._array(own, place)

    def _number(self, kind: str, own: Mapping[str, Any], place: Place) -> str:
        if "multipleOf" in own:
            raise self._refuse("Answers cannot be held to multipleOf here", place)
        low, high = _whole_range(own)
        ranges = [(low, high)]
        if kind == "number":
            ranges = [(low, min(high, -_SAFE)), (max(low, _SAFE), high)]
        patterns = [_whole_numbers(*each) for each in ranges if each[0] <= each[1]]
        options = [self._counted(f"/{pattern}/") for pattern in patterns]
        if kind == "number" and low <= _SAFE and high >= -_SAFE:
            near = {name: value for name, value in own.items() if abs(value) <= _SAFE}
            options.append(
                self._plain({"type": "number", "minimum": -_SAFE, "maximum": _SAFE, **near})
            )
        if not options:
            raise self._refusal("No number is in its range.", place)
        return _any_of(options)

    def _object(self, own: Mapping[str, Any], place: Place) -> str:
        if own.keys() & {"patternProperties", "minProperties", "maxProperties"}:
            raise self._refuse(
                "Answers cannot be held to patternProperties and counts of properties here", place
            )
        required = own.get("required", ())
        more = (*place, "additionalProperties")
        members = {name: (*place, "properties", name) for name in own.get("properties", ())}
        keys = {
            name: json.dumps(name, ensure_ascii=False)
            for name in dict.fromkeys((*members, *required))
        }
        pairs = []
        for name, key in keys.items():
            member = members.get(name, more)
            if self._schemas.get(member, True) is not False:
                pair = f"{_quoted(key + ': ')} {self._value(member)}"
                pairs.append((pair, name in required))
        further = ""
        if self._schemas.get(more, True) is not False:
            terminal = self._new_name().upper()
            taken = f" & ~/{'|'.join(map(_escaped, keys.values()))}/" if keys else ""
            self._rules[terminal] = f"/{_NAME}/{taken}"
            further = f'{terminal} ": " {self._value(more)}'
        return f'"{{" {in_order(self._rules, self._new_name(), pairs, _quoted(", "), further)} "}}"'

    def _array(self, own: Mapping[str, Any], place: Place) -> str:
        is_old = isinstance(own.get("items"), list)
        first, rest = ("items", "additionalItems") if is_old else ("prefixItems", "items")
        least = own.get("minItems", 0)
        most = own.get("maxItems", math.inf)
        items = [
            self._value((*place, first, str(index))) for index in range(len(own.get(first, ())))
        ]
        more = "" if own.get(rest, True) is False else self._value((*place, rest))
        if not items and more and most:
            items = [more]
        items = items if most >= len(items) else items[: int(most)]
        if least > most or (least > len(items) and not more):
            raise self._refusal("An array cannot have this number of items.", place)
        body = ""
        if more and most > len(items):
            end = "" if math.isinf(most) else int(most) - len(items)
            body = f'(", " {more}){{{max(least - len(items), 0)},{end}}}'
        for index, item in reversed(list(enumerate(items))):
            body = f"{_quoted(', ') if index else ''} {item} {body}"
            body = body if index < least else f"({body})?"
        return f'"[" {body} "]"'


def _all_schemas(root: object) -> dict[Place, Any]:
    """A schema and all its parts by place."""
    found: dict[Place, Any] = {(): root}
    pending: list[Place] = [()]
    for place in pending:
        if isinstance(found[place], dict):
            new = {(*place, *part): each for part, each in parts_of(found[place])}
            found |= new
            pending += new
    return found


def _wide_places(schemas: Mapping[Place, Any]) -> set[Place]:
    """Places of schemas with a wide value, or with a part or reference that leads to one."""
    clauses: list[Clause] = []
    for place, schema in schemas.items():
        if not isinstance(schema, dict):
            continue
        inside = [(*place, *part) for part, _ in parts_of(schema) if part[0] not in _SHARED]
        if "$ref" in schema:
            inside.append(place_of(schema["$ref"]))
        clauses += [(place, frozenset([each])) for each in inside]
        if any(_is_wide(schema[name]) for name in _NUMBERS if name in schema):
            clauses.append((place, frozenset()))
    return true_places(clauses)


def in_order(
    rules: dict[str, str], name: str, pairs: Sequence[tuple[str, bool]], comma: str, more: str = ""
) -> str:
    """Write a rule for all required parts and any of the others, in order.

    Args:
        rules: Gets the rules.
        name: Beginning of their names.
        pairs: Expression of each part, and whether it is required.
        comma: Expression between parts.
        more: Expression for any number of further parts; empty for none.
    """
    rules[f"{name}_first_{len(pairs)}"] = f"({more} ({comma} {more})*)?" if more else '""'
    rules[f"{name}_next_{len(pairs)}"] = f"({comma} {more})*" if more else '""'
    for index, (pair, is_required) in enumerate(pairs):
        skip = "" if is_required else f" | {name}_first_{index + 1}"
        following = f"{comma} {name}_{index}"
        rules[f"{name}_{index}"] = pair
        rules[f"{name}_first_{index}"] = f"{name}_{index} {name}_next_{index + 1}{skip}"
        following = following if is_required else f"({following})?"
        rules[f"{name}_next_{index}"] = f"{following} {name}_next_{index + 1}"
    return f"{name}_first_0"


def _is_reference(schema: object) -> bool:
    """True if a schema only refers to another."""
    return isinstance(schema, dict) and schema.keys() - _UNTOLD == {"$ref"}


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Types that a schema allows; numbers include integers."""
    given = schema.get("type", [kind for kind in TYPES if kind != "integer"])
    return [given] if isinstance(given, str) else list(dict.fromkeys(given))


def _is_wide(value: object) -> bool:
    """True if a value is or contains a number that a float may round, or a control character."""
    if isinstance(value, str):
        return WITHOUT_ESCAPE.search(value) is not None
    if isinstance(value, dict | list):
        return any(map(_is_wide, value.values() if isinstance(value, dict) else value))
    return type(value) in (int, float) and abs(value) > LARGEST_EXACT  # type: ignore[arg-type]


def _kind(value: object) -> set[str]:
    """Types of a JSON value."""
    if isinstance(value, bool) or value is None:
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number"} if value % 1 else {"number", "integer"}
    return {
        "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    }


def _written(value: object) -> str:
    return json.dumps(_whole(value), ensure_ascii=False)


def _whole(value: object) -> object:
    """Turn whole floats in a value into integers: 1e22 gets all its digits."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and not value % 1 else value


def _quoted(text: str) -> str:
    """Write a string of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _any_of(options: Sequence[str]) -> str:
    return f"({' | '.join(options)})"


def _escaped(text: str) -> str:
    return "".join(
        char if char.isalnum() or char in '"_ ' else f"\\x{{{ord(char):x}}}" for char in text
    )


def _whole_range(own: Mapping[str, Any]) -> tuple[float, float]:
    """Least and largest whole number that bounds allow; infinite without a bound."""
    low: float = math.ceil(own["minimum"]) if "minimum" in own else -math.inf
    if "exclusiveMinimum" in own:
        low = max(low, math.floor(own["exclusiveMinimum"]) + 1)
    high: float = math.floor(own["maximum"]) if "maximum" in own else math.inf
    if "exclusiveMaximum" in own:
        high = min(high, math.ceil(own["exclusiveMaximum"]) - 1)
    return low, high


def _whole_numbers(low: float, high: float) -> str:
    """Regular expression for the whole numbers of a range that has some."""
    options = []
    if low < 0:
        options.append(f"-({_digits(max(1, -high), -low)})")
    if high >= 0:
        options.append(_digits(max(0, low), high))
    return "|".join(options)


def _digits(low: float, high: float) -> str:
    """Regular expression for the whole numbers from `low`, which is not negative, to `high`."""
    size = len(str(low))
    if high < 10**size:
        return "|".join(_between(str(low), str(high)))
    options = [*_between(str(low), "9" * size)]
    if math.isinf(high):
        options.append(f"[1-9][0-9]{{{size},}}")
    else:
        longest = len(str(high)) - 1
        if longest > size:
            options.append(f"[1-9][0-9]{{{size},{longest - 1}}}")
        options += _between("1" + "0" * longest, str(high))
    return "|".join(options)


def _between(low: str, high: str) -> Iterator[str]:
    """Regular expressions for the numbers of one length from `low` to `high`."""
    size = len(low) - 1
    if low == high:
        yield low
    elif not low.strip("0") and not high.strip("9"):
        yield f"[0-9]{{{len(low)}}}"
    elif low[0] == high[0]:
        yield from (low[0] + rest for rest in _between(low[1:], high[1:]))
    else:
        yield from (low[0] + rest for rest in _between(low[1:], "9" * size))
        if int(low[0]) + 1 < int(high[0]):
            yield f"[{int(low[0]) + 1}-{int(high[0]) - 1}]" + f"[0-9]{{{size}}}" * bool(size)
        yield from (high[0] + rest for rest in _between("0" * size, high[1:]))
