"""Grammar of JSON schemas with values that llguidance would change.

llguidance rounds numbers that a float cannot tell apart, and drops control characters from `const` and `enum`. A schema
that contains such a value is written as rules of Lark, down to the value; everything beside it stays a schema. The
allowed text is that of llguidance: properties in their order, separators as `json.dumps` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

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
        self._of_places: dict[Place, str] = {}
        """Rules of the places that `$ref` names."""
        self._ends: dict[Place, Any] = {}
        """Schemas at the end of the `$ref`s of a place."""
        self._unwritten: list[Place] = []
        """Places whose rules have names but no text yet."""

    def expression(self) -> str | None:
        """Expression for the whole schema; None if llguidance can read it itself."""
        if () not in self._wide_places:
            return None
        found = self._value(self._root, ())
        for target in self._unwritten:  # the list grows meanwhile
            self._rules[self._of_places[target]] = self._value(self._schemas[target], target)
        return found

    @cached_property
    def _schemas(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {(): self._root}
        pending: list[Place] = [()]
        for place in pending:
            if isinstance(found[place], dict):
                new = {(*place, *part): each for part, each in parts_of(found[place])}
                found |= new
                pending += new
        return found

    @cached_property
    def _wide_places(self) -> set[Place]:
        """Places of schemas with a wide value, or with a part or reference that leads to one."""
        above: dict[Place, list[Place]] = {}
        found: set[Place] = set()
        pending: list[Place] = []
        for place, schema in self._schemas.items():
            if not isinstance(schema, dict):
                continue
            for part, _ in parts_of(schema):
                if part[0] not in _SHARED:
                    above.setdefault((*place, *part), []).append(place)
            if "$ref" in schema:
                above.setdefault(place_of(schema["$ref"]), []).append(place)
            if any(map(_is_wide, (schema[name] for name in _NUMBERS if name in schema))):
                pending.append(place)
        while pending:
            place = pending.pop()
            if place not in found:
                found.add(place)
                pending += above.get(place, ())
        return found

    def _refuse(self, what: str, place: Place) -> Exception:
        message = f"{what}, as it holds a number beyond 2**53 or a control character. Write it in another way."
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

    def _value(self, schema: Any, place: Place) -> str:  # noqa: ANN401 - JSON
        """Expression for a value that fits a schema."""
        if place not in self._wide_places:
            return self._leaf(schema, place)
        keywords = schema.keys() - _UNTOLD
        if "allOf" in keywords and (len(keywords) > 1 or len(schema["allOf"]) > 1):
            return self._joined_objects(place)
        if keywords & _ALONE:
            if len(keywords) > 1 and not self._repeats_type(schema, place, keywords):
                names = ", ".join(sorted(keywords))
                raise self._refuse(f"Answers cannot be held to all of {names} at once here", place)
            return self._alone(schema, place)
        if "const" in schema or "enum" in schema:
            return self._one_of_values(schema, place, keywords)
        kinds = self._kinds(schema)
        return _any_of([self._of_type(kind, schema, place) for kind in kinds])

    def _repeats_type(self, schema: Mapping[str, Any], place: Place, keywords: Set[str]) -> bool:
        """True if the only keyword beside `anyOf` or `oneOf` is a type that each of its schemas has too."""
        name = next(iter(keywords - {"type"}))
        if len(keywords) > 2 or "type" not in keywords or name not in ("anyOf", "oneOf"):
            return False
        options = [self._named_by((*place, name, str(index))) for index in range(len(schema[name]))]
        return all(
            each is False or (_is_object(each) and each.get("type") == schema["type"])
            for each in options
        )

    def _named_by(self, place: Place) -> Any:  # noqa: ANN401 - JSON
        """A schema, or the schema at the end of its `$ref`s."""
        way = [place]
        while way[-1] not in self._ends:
            schema = self._schemas[way[-1]]
            if not _is_object(schema) or schema.keys() - _UNTOLD != {"$ref"}:
                self._ends[way[-1]] = schema
                break
            way.append(
                place_of(schema["$ref"])
            )  # references in circles were refused, so there is an end
        self._ends |= dict.fromkeys(way, self._ends[way[-1]])
        return self._ends[place]

    def _alone(self, schema: Mapping[str, Any], place: Place) -> str:
        if "$ref" in schema:
            return self._named(place_of(schema["$ref"]))
        name = next(iter(schema.keys() & _ALONE))
        options = [
            self._value(each, (*place, name, str(index)))
            for index, each in enumerate(schema[name])
            if each is not False or name == "allOf"
        ]
        return _any_of(options)

    def _named(self, target: Place) -> str:
        if target not in self._of_places:
            self._of_places[target] = self._new_name()
            self._unwritten.append(target)
        return self._of_places[target]

    def _new_name(self) -> str:
        name = f"json_{len(self._rules)}"
        self._rules[name] = '""'
        return name

    def _leaf(self, schema: Any, place: Place) -> str:  # noqa: ANN401 - JSON
        """Expression for a schema without wide values, with the definitions that it needs."""
        if not isinstance(schema, dict):
            return self._plain(schema)
        own = {name: value for name, value in schema.items() if name not in _UNTOLD}
        needed = self._definitions([place])
        shared = {
            kind: {name: self._root[kind][name] for each, name in needed if each == kind}
            for kind in dict.fromkeys(kind for kind, _ in needed)
        }
        return self._plain({**own, **shared})

    def _definitions(self, places: Sequence[Place]) -> list[tuple[str, str]]:
        """Definitions that schemas refer to, in order."""
        found: dict[tuple[str, str], None] = {}
        pending = list(places)
        for each in pending:
            below = (
                [(*each, *part) for part, _ in parts_of(self._schemas[each])]
                if _is_object(self._schemas[each])
                else []
            )
            pending += [inner for inner in below if inner[len(each)] not in _SHARED]
            if not _is_object(self._schemas[each]) or "$ref" not in self._schemas[each]:
                continue
            target = place_of(self._schemas[each]["$ref"])
            if not target or target[0] not in _SHARED:
                raise self._refuse("A $ref can name only a place in $defs here", each)
            if target[:2] not in found:
                found[target[0], target[1]] = None
                pending.append(target[:2])
        return list(found)

    @staticmethod
    def _kinds(schema: Mapping[str, Any]) -> list[str]:
        given = schema.get("type", [kind for kind in TYPES if kind != "integer"])
        return [given] if isinstance(given, str) else list(dict.fromkeys(given))

    def _one_of_values(self, schema: Mapping[str, Any], place: Place, keywords: Set[str]) -> str:
        if not keywords <= {"const", "enum", "type"} or len(keywords & {"const", "enum"}) > 1:
            raise self._refuse(
                f"Answers cannot be held to all of {', '.join(sorted(keywords))} at once here",
                place,
            )
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds = self._kinds(schema)
        fitting = [value for value in values if _kind(value) & set(kinds)]
        if not fitting:
            raise refusal("No value in it is of its type.", ".".join((self._param, *place)))
        return self._counted(_any_of([_quoted(_written(value)) for value in fitting]))

    def _of_type(self, kind: str, schema: Mapping[str, Any], place: Place) -> str:
        own = {name: value for name, value in schema.items() if name in _OF_TYPE.get(kind, ())}
        if kind in ("integer", "number") and any(_is_wide(value) for value in own.values()):
            return self._number(kind, own, place)
        below = [(*place, *part) for part, _ in parts_of(own)]
        if kind == "object" and self._wide_places.intersection(below):
            return self._object(own, place)
        if kind == "array" and self._wide_places.intersection(below):
            return self._array(own, place)
        return self._leaf_of_type(kind, own, below)

    def _leaf_of_type(self, kind: str, own: Mapping[str, Any], below: Sequence[Place]) -> str:
        shared: dict[str, Any] = {}
        for each, name in self._definitions(below):
            shared.setdefault(each, {})[name] = self._root[each][name]
        return self._plain({"type": kind, **own, **shared})

    def _number(self, kind: str, own: Mapping[str, Any], place: Place) -> str:
        if "multipleOf" in own:
            raise self._refuse("Answers cannot be held to multipleOf here", place)
        low, high = _whole_range(own)
        if kind == "integer":
            patterns = [_whole_numbers(low, high)]
        else:
            below = (
                ""
                if low is not None and low >= -_SAFE
                else _whole_numbers(low, _least(high, -_SAFE))
            )
            above = (
                ""
                if high is not None and high <= _SAFE
                else _whole_numbers(_most(low, _SAFE), high)
            )
            patterns = [below, above]
        options = [self._counted(f"/{pattern}/") for pattern in patterns if pattern]
        if kind == "number" and (low is None or low <= _SAFE) and (high is None or high >= -_SAFE):
            near = {name: value for name, value in own.items() if abs(value) <= _SAFE}
            near.setdefault("minimum", -_SAFE)
            near.setdefault("maximum", _SAFE)
            options.append(self._plain({"type": "number", **near}))
        if not options:
            raise refusal("No number is in its range.", ".".join((self._param, *place)))
        return _any_of(options)

    def _object(self, own: Mapping[str, Any], place: Place) -> str:
        if own.keys() & {"patternProperties", "minProperties", "maxProperties"}:
            raise self._refuse(
                "Answers cannot be held to patternProperties and counts of properties here", place
            )
        members = {
            name: (each, (*place, "properties", name))
            for name, each in own.get("properties", {}).items()
        }
        further = own.get("additionalProperties", True), (*place, "additionalProperties")
        return self._members(members, own.get("required", ()), further)

    def _joined_objects(self, place: Place) -> str:
        """Expression for an object that several schemas describe, each with properties of its own."""
        members: dict[str, tuple[Any, Place]] = {}
        required: list[str] = []
        kinds = set()
        for each, part in self._joined(place):
            own = {
                name: (value, (*part, "properties", name))
                for name, value in each.get("properties", {}).items()
            }
            keywords = each.keys() - _UNTOLD - {"allOf", "type", "properties", "required"}
            keywords -= (
                {"additionalProperties"} if each.get("additionalProperties") is True else set()
            )
            if keywords or each.get("type", "object") != "object" or own.keys() & members.keys():
                break
            kinds.add(each.get("type"))
            members |= own
            required += each.get("required", ())
        else:
            if "object" in kinds:
                return self._members(members, required, (True, (*place, "additionalProperties")))
        raise self._refuse(
            "Answers can be held in allOf here only to objects with properties of their own, without limits on others",
            place,
        )

    def _joined(self, place: Place) -> Iterator[tuple[Mapping[str, Any], Place]]:
        """A schema and those that `allOf` and `$ref` join it with, each once."""
        seen: set[Place] = set()
        pending = [place]
        while pending:
            place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            schema = self._schemas[place]
            if not isinstance(schema, dict):
                yield {"type": "boolean"}, place
            elif "$ref" in schema and not schema.keys() - _UNTOLD - {"$ref"}:
                pending.append(place_of(schema["$ref"]))
            else:
                yield schema, place
                pending += (
                    (*place, "allOf", str(index))
                    for index in reversed(range(len(schema.get("allOf", ()))))
                )

    def _members(
        self,
        members: Mapping[str, tuple[Any, Place]],
        required: Sequence[str],
        further: tuple[Any, Place],
    ) -> str:
        """Expression for an object with these members, each with its place, and further ones."""
        pairs = []
        for name in dict.fromkeys((*members, *required)):
            each, place = members.get(name, further)
            if each is not False:
                value = self._value_at(each, place)
                pairs.append(
                    (
                        f"{_quoted(json.dumps(name, ensure_ascii=False) + ': ')} {value}",
                        name in required,
                    )
                )
        more = ""
        if further[0] is not False:
            names = [
                json.dumps(name, ensure_ascii=False)
                for name in dict.fromkeys((*members, *required))
            ]
            key = self._new_name().upper()
            taken = f" & ~/{'|'.join(map(_escaped, names))}/" if names else ""
            self._rules[key] = f"/{_NAME}/{taken}"
            more = f'{key} ": " {self._value_at(*further)}'
        return f'"{{" {in_order(self._rules, self._new_name(), pairs, _quoted(", "), more)} "}}"'

    def _value_at(self, schema: Any, place: Place) -> str:  # noqa: ANN401 - JSON
        return self._value(schema, place) if place in self._schemas else self._plain(schema)

    def _array(self, own: Mapping[str, Any], place: Place) -> str:
        is_old = isinstance(own.get("items"), list)
        first, rest = ("items", "additionalItems") if is_old else ("prefixItems", "items")
        least = own.get("minItems", 0)
        most = own.get("maxItems", math.inf)
        items = [
            self._value(each, (*place, first, str(index)))
            for index, each in enumerate(own.get(first, ()))
        ]
        further = own.get(rest, True)
        more = "" if further is False else self._value_at(further, (*place, rest))
        if not items and more and most:
            items = [more]
        items = items if most >= len(items) else items[: int(most)]
        if least > most or (least > len(items) and not more):
            raise refusal(
                "An array cannot have this number of items.", ".".join((self._param, *place))
            )
        body = ""
        if more and most > len(items):
            bounds = (
                max(least - len(items), 0),
                "" if math.isinf(most) else int(most) - len(items),
            )
            body = f'(", " {more}){{{bounds[0]},{bounds[1]}}}'
        for index, item in reversed(list(enumerate(items))):
            body = f"{_quoted(', ') if index else ''} {item} {body}"
            body = body if index < least else f"({body})?"
        return f'"[" {body} "]"'


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


def _is_object(schema: object) -> bool:
    return isinstance(schema, dict)


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


def _most(value: int | None, other: int) -> int:
    return other if value is None else max(value, other)


def _least(value: int | None, other: int) -> int:
    return other if value is None else min(value, other)


def _whole_range(own: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Least and largest whole number that bounds allow."""
    lows = [math.ceil(own["minimum"])] if "minimum" in own else []
    lows += [math.floor(own["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in own else []
    highs = [math.floor(own["maximum"])] if "maximum" in own else []
    highs += [math.ceil(own["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in own else []
    return max(lows, default=None), min(highs, default=None)


def _whole_numbers(low: int | None, high: int | None) -> str:
    """Regular expression for the whole numbers of a range; empty if there is none."""
    if low is not None and high is not None and low > high:
        return ""
    options = []
    if low is None or low < 0:
        options.append(
            f"-({_digits(1 if high is None or high >= 0 else -high, None if low is None else -low)})"
        )
    if high is None or high >= 0:
        options.append(_digits(0 if low is None or low < 0 else low, high))
    return "|".join(options)


def _digits(low: int, high: int | None) -> str:
    """Regular expression for the whole numbers from `low`, which is not negative, to `high`."""
    first = str(low)
    last = "" if high is None else str(high)
    if len(first) == len(last):
        return "|".join(_between(first, last))
    longer = [] if high is None else list(_between("1" + "0" * (len(last) - 1), last))
    shortest = len(first) + 1
    longest = "" if high is None else len(last) - 1
    if high is None or shortest <= int(longest):
        longer.append(f"[1-9][0-9]{{{shortest - 1},{'' if high is None else int(longest) - 1}}}")
    return "|".join([*_between(first, "9" * len(first)), *longer])


def _between(low: str, high: str) -> Iterator[str]:
    """Regular expressions for the numbers of one length from `low` to `high`."""
    if not low or low == high:
        yield low
        return
    if low[0] == high[0]:
        yield from (low[0] + rest for rest in _between(low[1:], high[1:]))
        return
    size = len(low) - 1
    is_low_whole = low[1:] == "0" * size
    is_high_whole = high[1:] == "9" * size
    if not is_low_whole:
        yield from (low[0] + rest for rest in _between(low[1:], "9" * size))
    start = int(low[0]) + (not is_low_whole)
    end = int(high[0]) - (not is_high_whole)
    if start <= end:
        yield f"[{start}-{end}]" + (f"[0-9]{{{size}}}" if size else "")
    if not is_high_whole:
        yield from (high[0] + rest for rest in _between("0" * size, high[1:]))
