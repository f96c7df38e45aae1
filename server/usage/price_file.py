"""Reads `registry.price_file`: what a million tokens cost, in YAML.

currency: EUR
per_million_tokens:
default: {prompt: 0.20, cached: 0.05, completion: 0.60}
base: {prompt: 0.10, cached: 0.02, completion: 0.30}
acme/*: {prompt: 0.15, cached: 0.05, completion: 0.50}
acme/support: {prompt: 0.30, cached: 0.05, completion: 0.90}
batch: 0.5

`batch` is optional: a line of a batch costs this part of the price.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from manylora.errors import ConfigError
from manylora.registry.names import is_name
from manylora.registry.usage.prices import UNITS, Price, PriceTable
from manylora.server.http.wrong_value import wrong_value
from manylora.server.settings import parse_yaml

SETTING = "registry.price_file"
PER_TOKEN = UNITS // 10**6
MAX_PRICE = 10**6
MAX_ENTRIES = 500
"""Each adds a case to the statements that sum up usage."""
_WORDS = {"missing": "is required", "extra_forbidden": "is not known here"}
Amount = Annotated[Decimal, Field(ge=0, le=MAX_PRICE, decimal_places=4)]


class PriceEntry(BaseModel, extra="forbid"):
    """Price of a million tokens, by their kind."""

    prompt: Amount
    cached: Amount
    completion: Amount


class PriceFile(BaseModel, extra="forbid"):
    """The whole file."""

    currency: str = Field(pattern=r"^[^\W_]{1,16}$")
    per_million_tokens: dict[str, PriceEntry] = Field(max_length=MAX_ENTRIES)
    batch: Amount = Decimal(1)


def read_prices(path: Path) -> PriceTable:
    """The prices of a file.

    Raises:
        ConfigError: The file cannot be read, or is not such a table; the message says where.
    """
    try:
        file = PriceFile.model_validate(parse_yaml(path, "price file", SETTING))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or str(path)
        raise _wrong(f"{place}: {_WORDS.get(first['type']) or wrong_value(first)}") from error
    prices = {
        name: Price(**{kind: int(amount * PER_TOKEN) for kind, amount in entry})
        for name, entry in file.per_million_tokens.items()
    }
    if "default" not in prices:
        raise _wrong("per_million_tokens must have default")
    if any(
        units * file.batch % 1 for price in prices.values() for units in dataclasses.astuple(price)
    ):
        raise _wrong(
            f"batch {file.batch} times a price has more than ten decimal places for a token: round one"
        )
    for name in prices:
        tenant, _, adapter = name.partition("/")
        is_named = adapter == "*" or all(map(is_name, adapter.split("/", 1)))
        if name not in ("default", "base") and not (is_name(tenant) and is_named):
            raise _wrong(
                f"{name!r} must be default, base, TENANT/*, TENANT/ADAPTER or, granted, TENANT/OWNER/ADAPTER"
            )
    return PriceTable(currency=file.currency, prices=prices, batch=file.batch)


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"{SETTING}: {what}.", param=SETTING)
