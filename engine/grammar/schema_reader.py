"""Reader of JSON schemas: keeps the rules of a schema without its notes, and refuses rules that cannot be enforced.

llguidance computes with floats and reads some schemas wrongly without an error, so every value is checked here. Each
refusal names the place in the schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from manylora.engine.grammar.string_patterns import ControlCharacterError, held_pattern
from manylora.errors import InvalidRequestError

MAX_SCHEMA_DEPTH = 64
"""Largest depth of nested schemas."""
MAX_VALUE_DEPTH = 64
"""Largest depth of nested lists and objects in `const` and `enum`."""
MAX_REMAINDERS = 10_000
"""Largest product of all `multipleOf` of a schema; beyond it, compiling takes seconds."""
MAX_EXPONENT = 30
LARGEST_BOUND = 10**320
MAX_COUNT = 2**53
"""Largest length or count."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
Place = tuple[str, ...]
"""Names that lead from a schema to one of its parts, as in a JSON pointer."""

_HOLD_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_HOLD_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_HOLD_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = frozenset(
    {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"}
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_TEXTS = frozenset({"pattern", "format", "$ref"})
_RULES = frozenset(
    {
        *_HOLD_ONE,
        *_HOLD_LIST,
        *_HOLD_NAMED,
        *_COUNTS,
        *_BOUNDS,
        *_TEXTS,
        "multipleOf",
        "type",
        "enum",
        "const",
    }
    | {"required"}
)
_NOTES = frozenset(
    {
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "discriminator",
        "contentEncoding",
        "contentMediaType",
    }
)
"""Keywords without effect. All that begin with `x-` have none either."""
_AT_ROOT = frozenset({"$schema", "$id"})

_LEAP_DAY = r"([0-9][0-9](0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
_REAL_DAY = rf"^(?:[0-9]{{4}}-(?:0[13-9]|1|02-(?:[01]|2[0-8]))|{_LEAP_DAY})"
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "date": {"pattern": _REAL_DAY},
    "time": {"pattern": "^.{6}[0-5]"},
    "date-time": {"allOf": [{"pattern": _REAL_DAY}, {"pattern": "^.{17}[0-5]"}]},
    "hostname": {"maxLength": 253},
    **{name: {} for name in ("duration", "email", "ipv4", "ipv6", "uuid", "uri")},
}
"""Formats of strings that llguidance knows, each with the rules that it lacks: leap years, leap seconds, lengths. Any
other format has no effect, as in JSON Schema."""


def read_schema(schema: object, param: str) -> Any:  # noqa: ANN401 - JSON
    """Check a schema and remove its notes.

    Args:
        schema: The schema as a client sent it.
        param: Its place in the body.

    Raises:
        InvalidRequestError: It is no schema, or answers cannot be held to it. `param` of the error has the place.
    """
    reader = _Reader()
    kept = reader.kept(schema, param)
    reader.check_references()
    return kept


def refusal(message: str, path: str) -> InvalidRequestError:
    """The error for a part of a schema."""
    return InvalidRequestError(
        f"{path[:200]}: {message}", param=path[:200], code="invalid_json_schema"
    )


def place_of(reference: str) -> Place:
    """Place that a `$ref` names."""
    names = unquote(reference).split("/")[1:]
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in names)


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Schemas directly inside a read schema, each with its place in it."""
    for name, value in schema.items():
        if name in _HOLD_NAMED:
            yield from (((name, key), each) for key, each in value.items())
        elif isinstance(value, list) and (name in _HOLD_LIST or name == "items"):
            yield from (((name, str(index)), each) for index, each in enumerate(value))
        elif name in _HOLD_ONE:
            yield (name,), value


def replace_part(schema: Any, part: Place, new: object) -> None:  # noqa: ANN401 - JSON
    """Put another schema in the place of one that `parts_of` gives."""
    *outer, key = part
    holder = schema[outer[0]] if outer else schema
    holder[int(key) if isinstance(holder, list) else key] = new


class _Reader:
    """Reads one schema."""

    def __init__(self) -> None:
        self._places: set[Place] = set()
        """Places of the read schemas, which references may name."""
        self._references: list[tuple[str, str]] = []
        """References, each with its path."""
        self._num_remainders = 0

    def check_references(self) -> None:
        """Refuse a reference to a place that was not read as a schema, and so is unchecked."""
        for reference, path in self._references:
            if place_of(reference) not in self._places:
                raise refusal(
                    f"{reference[:100]} names no schema in this schema: it does not exist.", path
                )

    def kept(self, schema: object, path: str, depth: int = 0, place: Place = ()) -> Any:  # noqa: ANN401 - JSON
        """Check a schema and its parts, and remove the notes."""
        self._places.add(place)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refusal("A schema must be an object, true or false.", path)
        if depth >= MAX_SCHEMA_DEPTH:
            raise refusal(
                f"Schemas may be nested {MAX_SCHEMA_DEPTH} deep. Use $defs and $ref for what repeats.",
                path,
            )
        known = _RULES if depth else _RULES | _AT_ROOT
        unknown = [name for name in schema if name not in known and not _is_note(name)]
        if unknown:
            names = ", ".join(repr(name[:40]) for name in unknown[:10])
            raise refusal(
                f"Manylora does not know the keywords {names}, so no answer can be held to them.",
                path,
            )
        kept = {
            name: self._value(name, value, f"{path}.{name}")
            for name, value in schema.items()
            if not _is_note(name)
        }
        for part, each in parts_of(kept):
            inner = self.kept(each, ".".join((path, *part)), depth + 1, (*place, *part))
            replace_part(kept, part, inner)
        _check_range(kept, path)
        _check_min_properties(kept, path)
        return _with_format(kept)

    def _value(self, name: str, value: Any, path: str) -> object:  # noqa: ANN401 - JSON
        """Check the value of a keyword, but not the schemas in it."""
        if name in _EXPECTED and not _EXPECTED[name][0](value):
            raise refusal(f"{name} must be {_EXPECTED[name][1]}.", path)
        if name in _COUNTS:
            return int(value)
        if name == "pattern":
            return _pattern(value, path)
        if name == "patternProperties":
            for key in value:
                _pattern(key, f"{path}.{key}")
        elif name == "multipleOf":
            self._check_multiple(value, path)
        elif name == "$ref":
            self._check_reference(value, path)
        elif name in ("enum", "const"):
            _check_value(value, path)
        return value.copy() if isinstance(value, list | dict) else value

    def _check_reference(self, reference: str, path: str) -> None:
        if reference != "#" and not reference.startswith("#/"):
            raise refusal("$ref must name a place in this schema, as #/$defs/name does.", path)
        self._references.append((reference, path))

    def _check_multiple(self, value: float, path: str) -> None:
        self._num_remainders += num_remainders(value)
        if self._num_remainders > MAX_REMAINDERS:
            message = f"All multipleOf together must be at most {MAX_REMAINDERS}, their decimals counted as whole."
            raise refusal(message, path)
        if not _is_exact_decimal(value):
            raise refusal(
                "Answers cannot be held to multiples of this fraction. Take another, or whole numbers.",
                path,
            )


def _pattern(pattern: str, path: str) -> str:
    try:
        return held_pattern(pattern)
    except ControlCharacterError as error:
        message = (
            "Answers cannot be held to a pattern that asks for a control character other than "
            "\\b, \\f, \\n, \\r and \\t. Leave it out, or list the texts in enum."
        )
        raise refusal(message, path) from error


def num_remainders(value: object) -> int:
    """Number of states that multiples of a number take: 25 for 2.5 and for 25, 2500 for 2500."""
    number = Decimal(str(value))
    if abs(number.adjusted()) > MAX_EXPONENT:
        return MAX_REMAINDERS + 1
    _, digits, exponent = number.normalize().as_tuple()
    return int("".join(map(str, digits)) + "0" * int(exponent))


def _is_exact_decimal(value: object) -> bool:
    """True if a number stays exact when llguidance scales it to a whole number with floats; 0.07 does not."""
    scaled = float(str(value))
    decimals = 0
    while scaled % 1:
        scaled *= 10
        decimals += 1
    return Decimal(scaled) == Decimal(str(value)).scaleb(decimals)


def _is_bound(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < LARGEST_BOUND  # type: ignore[arg-type]


def _is_count(value: Any) -> bool:  # noqa: ANN401 - JSON
    return type(value) in (int, float) and 0 <= value <= MAX_COUNT and not value % 1


def _is_multiple(value: Any) -> bool:  # noqa: ANN401 - JSON
    return type(value) in (int, float) and 0 < value < math.inf


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: object) -> bool:
    given = value if isinstance(value, list) else [value]
    return bool(given) and all(each in TYPES for each in given)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _are_values(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _check_value(value: object, path: str, depth: int = 0) -> None:
    """Refuse a value that JSON cannot write."""
    if isinstance(value, float) and not math.isfinite(value):
        raise refusal("A number must be finite; this one is beyond what a float holds.", path)
    if depth >= MAX_VALUE_DEPTH:
        raise refusal(f"Values may be nested {MAX_VALUE_DEPTH} deep, not nested deeply.", path)
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inner:
        _check_value(each, f"{path}.{key}", depth + 1)


_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (_is_count, "a whole number, 0 or more")),
    **dict.fromkeys(_BOUNDS, (_is_bound, "a finite number of at most 320 digits")),
    **dict.fromkeys(_TEXTS, (_is_text, "a string")),
    **dict.fromkeys(_HOLD_LIST, (_is_list, "a list of schemas")),
    **dict.fromkeys(("anyOf", "oneOf"), (_are_values, "a list of schemas, with at least one")),
    **dict.fromkeys(_HOLD_NAMED, (_is_object, "an object of schemas")),
    "multipleOf": (_is_multiple, "a number above 0, and finite"),
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "required": (_are_texts, "a list of strings"),
    "enum": (_are_values, "a list of at least one value"),
}
"""Check of the value of each keyword, and a text for the message."""


def _check_range(schema: dict[str, Any], path: str) -> None:
    """Refuse the one kind of range that llguidance reads wrongly: it would allow the excluded bound."""
    if (
        not ("exclusiveMinimum" in schema or "exclusiveMaximum" in schema)
        or schema.get("type") == "integer"
    ):
        return
    for name, *others in (
        ("exclusiveMinimum", "maximum", "exclusiveMaximum"),
        ("exclusiveMaximum", "minimum", "exclusiveMinimum"),
    ):
        bound = schema.get(name)
        if bound is None or bound % 1:
            continue
        ends = (schema.get(other) for other in others)
        if any(end is not None and abs(end - bound) < 1 for end in ends):
            raise refusal(f"{name} cannot be a whole number if the range is narrower than 1.", path)


def _check_min_properties(schema: dict[str, Any], path: str) -> None:
    """Refuse a count that an answer could reach by repeating a name."""
    if schema.get("minProperties", 0) > len(set(schema.get("required", ()))) + 1:
        message = "Answers can be held to one property more than required has. Name more of them in required."
        raise refusal(message, f"{path}.minProperties")


def _with_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Add to a schema the rules that llguidance lacks for its format; drop an unknown format."""
    if "format" not in schema:
        return schema
    further = FORMATS.get(schema["format"])
    if further is None:
        return {name: value for name, value in schema.items() if name != "format"}
    if not further:
        return schema
    return {**schema, "allOf": [*schema.get("allOf", ()), further]}


def _is_note(name: str) -> bool:
    return name in _NOTES or name.startswith("x-")
