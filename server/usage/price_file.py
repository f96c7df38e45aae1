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
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml

from weft.errors import ConfigError
from weft.registry.names import is_name
from weft.registry.usage.prices import UNITS, Price, PriceTable

PER_TOKEN = UNITS // 10**6
MAX_PRICE = 10**6
MAX_ENTRIES = 500
"""Each adds a case to the statements that sum up usage."""
_KINDS = [field.name for field in dataclasses.fields(Price)]


def read_prices(path: Path) -> PriceTable:
    """The prices of a file.

    Raises:
        ConfigError: The file cannot be read, or is not such a table; the message says where.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong(f"{path} is not YAML") from error
    needed = {"currency", "per_million_tokens"}
    if not isinstance(content, dict) or not needed <= set(content) <= {*needed, "batch"}:
        raise _wrong(f"{path} must have currency and per_million_tokens, may have batch, and nothing else")
    currency, entries = content["currency"], content["per_million_tokens"]
    if not isinstance(currency, str) or not 1 <= len(currency) <= 16 or not currency.isalnum():
        raise _wrong("currency must be a short word such as EUR")
    if not isinstance(entries, dict) or "default" not in entries or len(entries) > MAX_ENTRIES:
        raise _wrong(f"per_million_tokens must have default, and at most {MAX_ENTRIES} entries")
    prices = {str(name): _price(str(name), entry) for name, entry in entries.items()}
    batch = Decimal(_units("batch", content.get("batch", 1))) / PER_TOKEN
    if any(units * batch % 1 for price in prices.values() for units in dataclasses.astuple(price)):
        raise _wrong(f"batch {batch} times a price has more than ten decimal places for a token: round one of them")
    default, base = prices.pop("default"), prices.pop("base", None)
    tenants: dict[str, Price] = {}
    adapters: dict[tuple[str, str], Price] = {}
    for name, price in prices.items():
        tenant, slash, adapter = name.partition("/")
        if not slash or not is_name(tenant) or (adapter != "*" and not all(map(is_name, adapter.split("/", 1)))):
            raise _wrong(f"{name!r} must be default, base, TENANT/*, TENANT/ADAPTER or, granted, TENANT/OWNER/ADAPTER")
        if adapter == "*":
            tenants[tenant] = price
        else:
            adapters[tenant, adapter] = price
    return PriceTable(currency=currency, default=default, base=base, tenants=tenants, adapters=adapters, batch=batch)


def _price(name: str, entry: object) -> Price:
    if not isinstance(entry, dict) or set(entry) != set(_KINDS):
        raise _wrong(f"{name!r} must have exactly {', '.join(_KINDS)}")
    return Price(**{kind: _units(f"{name}.{kind}", entry[kind]) for kind in _KINDS})


def _units(name: str, value: Any) -> int:  # noqa: ANN401 - what a file says
    try:
        units = Decimal(str(value)) * PER_TOKEN
        is_price = not isinstance(value, bool) and 0 <= units <= MAX_PRICE * PER_TOKEN and units == int(units)
    except (InvalidOperation, ValueError, OverflowError):
        is_price = False
    if not is_price:
        raise _wrong(f"{name} must be a number from 0 to {MAX_PRICE} with at most four decimal places, got {value!r}")
    return int(units)


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"registry.price_file: {what}.", param="registry.price_file")
