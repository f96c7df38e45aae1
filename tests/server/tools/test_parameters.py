from __future__ import annotations

from typing import Any

import pytest

from manylora.server.tools import reading
from manylora.server.tools.parameters import kinds
from manylora.server.tools.reading import AnswerPlan
from tool_models import family, tool


class Counted(dict[str, Any]):
    """Definitions that count how often one is looked up."""

    num_lookups = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)


def test_each_definition_is_followed_once() -> None:
    last = 14
    defs: dict[str, Any] = {
        f"d{level}": {
            "anyOf": [{"$ref": f"#/$defs/d{level + 1}"}, {"$ref": f"#/$defs/d{level + 1}"}]
        }
        for level in range(last)
    }
    root = Counted(
        {"$defs": Counted({**defs, f"d{last}": {"type": ["integer", "string", "null"]}})}
    )
    assert kinds({"$ref": "#/$defs/d0"}, root) == ["integer", "null", "string"]
    assert root["$defs"].num_lookups <= 2 * (last + 1)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": 5}, []),
        ({"oneOf": {"type": "string"}, "allOf": [5, {"type": "null"}]}, ["null", "string"]),
        ({"$ref": "#/$defs/x"}, ["integer"]),
        ({"$ref": "#/$defs/y"}, []),
        ({"$ref": 5, "enum": 5}, []),
        ({"type": {}}, ["{}"]),
        ({"anyOf": [{"type": "array"}, {}]}, ["array", "string"]),
        ({"enum": [None, 1, "a"]}, ["null", "integer", "string"]),
        ({"anyOf": [{"const": 1}] * 5000}, []),
    ],
    ids=str,
)
def test_odd_schemas_say_what_they_can(schema: Any, expected: list[str]) -> None:
    defs = {
        "x": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "integer"}]},
        "y": {"anyOf": [{"$ref": "#/$defs/y"}]},
    }
    assert kinds(schema, {"$defs": defs}) == expected


def test_schemas_are_read_once_a_request_and_only_for_values_in_tags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def typed(tool: Any) -> dict[str, Any]:
        read.append(tool.function.name)
        return {}

    monkeypatch.setattr(reading, "typed_tool", typed)
    for name in ("qwen_xml", "hermes"):
        plan = AnswerPlan(format=family(name), tools=[tool("f")])
        for _ in range(3):
            plan.reader()
    assert read == ["f"]
