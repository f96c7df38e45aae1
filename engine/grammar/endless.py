"""Search for schemas that no finite value fits, because each value must contain another value of the same kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manylora.engine.grammar.schema_reader import (
    TYPES,
    Place,
    parts_of,
    place_of,
    refusal,
    replace_part,
)
from manylora.errors import InvalidRequestError

Clause = tuple[Place, frozenset[Place]]
"""A place of which something is true if it is true of all these places."""
_CONDITION: Place = ("", "")
"""Names before the number of a condition of a schema. No part of a schema has such a place."""
_VALUES = frozenset({"const", "enum"})


def drop_endless(schema: Any, param: str) -> None:  # noqa: ANN401 - JSON
    """Replace all parts of a read schema that no finite value fits by `false`.

    Raises:
        InvalidRequestError: No finite value fits the whole schema.
    """
    clauses = list(_clauses(schema, ()))
    finite = true_places(clauses)
    if () not in finite:
        raise _cause(clauses, finite, param)
    _drop_endless(schema, (), finite)


def true_places(clauses: list[Clause]) -> set[Place]:
    """Find all places that follow from the clauses, in linear time."""
    waiting: dict[Place, list[int]] = defaultdict(list)
    missing = [len(needs) for _, needs in clauses]
    for index, (_, needs) in enumerate(clauses):
        for place in needs:
            waiting[place].append(index)
    found: set[Place] = set()
    pending = [place for place, needs in clauses if not needs]
    while pending:
        place = pending.pop()
        if place in found:
            continue
        found.add(place)
        for index in waiting[place]:
            missing[index] -= 1
            if not missing[index]:
                pending.append(clauses[index][0])
    return found


def _clauses(schema: Any, place: Place) -> Iterator[Clause]:  # noqa: ANN401 - JSON
    """Clauses about finite values of a schema and of its parts."""
    if schema is True:
        yield place, frozenset()
    if not isinstance(schema, dict):
        return
    needs = set()
    if "$ref" in schema and not schema.keys() & _VALUES:
        needs.add(place_of(schema["$ref"]))
    for index, options in enumerate(_conditions(schema)):
        condition = (*place, *_CONDITION, str(index))
        needs.add(condition)
        for parts in options:
            yield condition, frozenset((*place, *part) for part in parts)
    yield place, frozenset(needs)
    for part, each in parts_of(schema):
        yield from _clauses(each, (*place, *part))


def _conditions(schema: Mapping[str, Any]) -> Iterator[list[list[Place]]]:
    """Conditions of a finite value: all parts in one of the lists must have one."""
    if schema.keys() & _VALUES:
        return
    for index in range(len(schema.get("allOf", ()))):
        yield [[("allOf", str(index))]]
    for name in schema.keys() & {"anyOf", "oneOf"}:
        yield [[(name, str(index))] for index in range(len(schema[name]))]
    given = schema.get("type", TYPES)
    types = {given} if isinstance(given, str) else set(given)
    required = schema.get("required", ())
    if types <= {"object", "array"}:
        members = {"object": _required(schema), "array": _first_items(schema)}
        yield [list(members[kind]) for kind in types]
    if types == {"object"} and schema.get("minProperties", 0) > len(set(required)):
        more: list[Place] = [
            ("patternProperties", name) for name in schema.get("patternProperties", ())
        ]
        more += [
            ("properties", name) for name in schema.get("properties", ()) if name not in required
        ]
        other: list[Place] = [("additionalProperties",)] if "additionalProperties" in schema else []
        yield [*([place] for place in more), other]


def _required(schema: Mapping[str, Any]) -> Iterator[Place]:
    """Places of the members that every object has."""
    for name in schema.get("required", ()):
        if name in schema.get("properties", {}):
            yield "properties", name
        elif "additionalProperties" in schema and "patternProperties" not in schema:
            yield ("additionalProperties",)


def _first_items(schema: Mapping[str, Any]) -> Iterator[Place]:
    """Places of the members that every array has."""
    is_old = isinstance(schema.get("items"), list)
    first, rest = ("items", "additionalItems") if is_old else ("prefixItems", "items")
    num_first = len(schema.get(first, ()))
    num_needed = schema.get("minItems", 0)
    yield from ((first, str(index)) for index in range(min(num_first, num_needed)))
    if num_needed > num_first and rest in schema:
        yield (rest,)


def _drop_endless(schema: Any, place: Place, finite: set[Place]) -> None:  # noqa: ANN401 - JSON
    """Replace all parts without a finite value by `false`."""
    for part, each in parts_of(schema) if isinstance(schema, dict) else ():
        if (*place, *part) in finite:
            _drop_endless(each, (*place, *part), finite)
        else:
            replace_part(schema, part, False)


def _cause(clauses: Iterable[Clause], finite: set[Place], param: str) -> InvalidRequestError:
    """Make the refusal of a schema, at a place of the endless circle or at a schema that is false."""
    needs_of: dict[Place, frozenset[Place]] = {}
    for place, needs in clauses:
        needs_of.setdefault(place, needs)
    path: list[Place] = [()]
    seen: set[Place] = set()
    while path[-1] in needs_of and path[-1] not in seen:
        seen.add(path[-1])
        path.append(min(needs_of[path[-1]] - finite))
    if path[-1] not in needs_of:
        return refusal("No answer fits a schema that is false.", _written(path[-1], param))
    message = (
        "This schema leads back to itself in every answer, so that no answer ends. Do not require it, or let it be "
        "something else too, as null or an empty list."
    )
    return refusal(message, _written(path[-2], param))


def _written(place: Place, param: str) -> str:
    return ".".join((param, *(place[:-3] if place[-3:-1] == _CONDITION else place)))
