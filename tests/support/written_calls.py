"""Calls as the models of each family write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tool_models import tool_format

Call = tuple[str, dict[str, Any]]


def written(family: str, calls: Sequence[Call]) -> str:
    """The text of an answer that is these calls."""
    strings = tool_format(family)
    each = [
        strings["each"]
        .replace("{name}", name)
        .replace("{arguments}", _arguments(strings["style"], arguments))
        for name, arguments in calls
    ]
    return str(
        strings.get("before", "") + strings.get("between", "").join(each) + strings.get("after", "")
    )


def _arguments(style: str, arguments: dict[str, Any]) -> str:
    if style == "xml":
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in arguments.items()
        }
        return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    if style == "gemma":
        return ",".join(f"{key}:{_gemma(value)}" for key, value in arguments.items())
    if style == "python":
        return ", ".join(
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
        )
    return json.dumps(arguments, ensure_ascii=False)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + _arguments("gemma", value) + "}"
    return (
        "[" + ",".join(map(_gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)
    )
