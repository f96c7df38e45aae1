"""What every program here shares: where the server is, what is asked, and how a feature is reported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL = os.environ["MANYLORA_URL"]
V1 = f"{URL}/v1"
KEY = os.environ["MANYLORA_KEY"]
BASE = os.environ["MANYLORA_BASE"]
"""The served name of the base, which knows two tools and fills the schema of a card."""
ADAPTER = os.environ["MANYLORA_ADAPTER"]
QUESTION, ANSWER = os.environ["MANYLORA_QUESTION"], os.environ["MANYLORA_ANSWER"]
"""What the adapter is asked, and what it answers at temperature 0."""

CARD_QUESTION = "Tell me about the scarf."
AGENT_QUESTION = "Where is the rug and how much is it?"
PLACE, PRICE = "shelf 8", "44"


class Card(BaseModel):
    """What the shop knows of an item."""

    item: str
    material: str
    price: int
    in_stock: bool


class Pick(BaseModel):
    """What a model without any sense can fill: a choice and a yes or no."""

    model_config = ConfigDict(extra="forbid")

    item: Literal["scarf", "cloak"]
    in_stock: bool


def is_scarf(card: object) -> bool:
    """Whether this is what the base knows of the scarf, as a model, an object or JSON."""
    if isinstance(card, str):
        card = json.loads(card)
    return Card.model_validate(card) == Card(item="scarf", material="silk", price=20, in_stock=True)


def parameters(name: str = "item") -> dict[str, Any]:
    """The JSON schema of one string."""
    properties = {name: {"type": "string", "description": "The name of an item."}}
    return {
        "type": "object",
        "properties": properties,
        "required": [name],
        "additionalProperties": False,
    }


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters()},
    }
    for name, about in (
        ("where_is", "Tells where an item is."),
        ("price_of", "Tells the price of an item."),
    )
]


def where_is(item: str) -> str:
    """Tells where an item is.

    Args:
        item: The name of an item.
    """
    return PLACE


def price_of(item: str) -> str:
    """Tells the price of an item.

    Args:
        item: The name of an item.
    """
    return PRICE


def run_tool(name: str, arguments: str | dict[str, Any]) -> str:
    """The result of a call."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"where_is": where_is, "price_of": price_of}[name](**values)


def has_both(text: str | None) -> bool:
    """Whether an answer tells both results."""
    return text is not None and PLACE in text and PRICE in text


def equal(got: object, expected: object) -> None:
    """Raise where a value is not what was expected."""
    if got != expected:
        raise AssertionError(f"expected {expected!r}, got {got!r}")


def report(name: str, ok: bool, note: str = "") -> None:
    """Print the line of a feature."""
    print(json.dumps({"feature": name, "ok": ok, "note": note}), flush=True)


@contextmanager
def feature(name: str) -> Iterator[None]:
    """Report a feature as ok where the block ends without an error."""
    try:
        yield
    except Exception as error:
        causes = [error, error.__cause__] if error.__cause__ else [error]
        report(name, False, " / ".join(f"{type(each).__name__}: {each}"[:400] for each in causes))
    else:
        report(name, True)
